"""Memory of an engine: how many positions its caches may have, and the size that they need for given requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..drafting.growth import extend_draft
from ..pair import EagleModel

# Caches that grow stand beside those that they grow from, and prefixes and prompts in parts take some as well.
SHARE = 1 / 4
STEP = 256  # positions that the room of a row is rounded up to


@dataclass(frozen=True)
class Room:
    """How large caches may become.

    Args:
        rows: requests at once. tokens: positions of all rows together, each as long as the longest.
        nodes: positions that a cycle needs behind the text.
    """

    rows: int
    tokens: int
    nodes: int

    def of(self, positions: Sequence[int]) -> tuple[int, int] | None:
        """Rows and positions of caches for requests of so many positions, with some to spare; None: they do not fit."""
        needed, rows = max(positions) + self.nodes, len(positions)
        if rows > self.rows or rows * needed > self.tokens:
            return None
        each = min(-(-needed // STEP) * STEP, self.tokens // rows)
        return min(1 << (rows - 1).bit_length(), self.rows, self.tokens // each), each

    def require(self, prompt: int, new: int) -> None:
        """Raise where such a request would never fit.

        Raises:
            ValueError: prompt and answer together have more positions than there is room for.
        """
        most = self.tokens - self.nodes
        if prompt + new > most:
            raise ValueError(f"a prompt of {prompt} tokens and max_new_tokens={new} need {prompt + new} positions, and "
                             f"the engine has room for {most}")


@torch.inference_mode()
def positions_that_fit(model: EagleModel, rows: int, nodes: int) -> int:
    """How many positions of caches a quarter of the free memory holds; no more than can be used."""
    target, head = model.target, model.draft
    cache, token = target.new_cache(1), torch.zeros(1, 1, dtype=torch.long, device=target.device)
    features = target.prefill(token, cache).to(target.output_device)
    size = cache.nbytes
    if head is not None:
        draft_cache = head.new_cache(1)
        extend_draft(head, [features[0]], [token[0].to(features.device)], draft_cache)
        size += draft_cache.nbytes
    fitting = int(SHARE * free_bytes(target.output_device) / size)
    return fitting if target.max_positions is None else min(fitting, rows * (target.max_positions + nodes))


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now; on a host that does not say, half of what it has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if known.exists():
        sizes = dict(line.split(":") for line in known.read_text().splitlines())
        free = int(sizes["MemAvailable"].split()[0]) * 1024
        if limit.exists() and limit.read_text().strip() != "max":  # a container's
            free = min(free, int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
        return max(0, free)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
