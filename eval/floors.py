"""The least time that a forward can take on a machine, from what it must move and compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eagle_fsd.drafting.measuring import now

# Bytes that are copied, and the side of the matrices that are multiplied, to measure the rates.
RATE_SIZES = {"cuda": (2**30, 8192), "cpu": (2**28, 1024)}


@dataclass(frozen=True)
class Rates:
    """What a machine does per second: bytes that a large copy reads and writes, operations of a large product."""

    copy: float
    matrix: float

    def floor(self, moved: float, operations: float) -> tuple[float, float]:
        """Milliseconds that so many bytes and so many operations take."""
        return 1000 * moved / self.copy, 1000 * operations / self.matrix


def fastest_run(work: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """Seconds of the fastest of several runs, after one unmeasured."""
    work()
    taken = []
    for _ in range(times):
        started = now(device)
        work()
        taken.append(now(device) - started)
    return min(taken)


def measure_rates(dtype: torch.dtype, device: torch.device) -> Rates:
    """Both rates, with tensors much larger than a CPU's caches and products large enough for a GPU."""
    size, side = RATE_SIZES.get(device.type, RATE_SIZES["cuda"])
    copied = torch.empty(2, size, dtype=torch.uint8, device=device).fill_(1)
    copy = 2 * size / fastest_run(lambda: copied[0].copy_(copied[1]), device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Rates(copy, 2 * side**3 / fastest_run(lambda: left @ right, device))


@dataclass(frozen=True)
class Work:
    """What a forward must move and compute: weights in bytes and number, keys and values in bytes per position."""

    weight_bytes: int
    weights: int
    key_bytes: int  # keys and values of one position, all layers
    attention: int  # operations per query and key, all layers

    @classmethod
    def of(cls, modules: Sequence[nn.Module], config, layers: int, width: int) -> Work:
        """Of modules that take part in full; `width`: bytes of a number in the cache."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameters = [p for module in modules for p in module.parameters()]
        return cls(
            sum(p.numel() * p.element_size() for p in parameters), sum(p.numel() for p in parameters),
            2 * layers * config.num_key_value_heads * size * width, 4 * layers * config.num_attention_heads * size)

    def floor(self, rates: Rates, nodes: int, context: int) -> tuple[float, float]:
        """Milliseconds of memory and of matrix units for `nodes` queries behind `context` keys."""
        return rates.floor(self.weight_bytes + context * self.key_bytes,
                           nodes * (2 * self.weights + (context + nodes) * self.attention))
