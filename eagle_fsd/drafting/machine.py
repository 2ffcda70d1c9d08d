"""What was measured on this machine, kept in the user's cache directory."""

from __future__ import annotations

import functools
import json
import logging
import math
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from ..data.files import cache_directory, save_atomically
from ..engine.compiled import is_compiled
from ..engine.graphs import GraphCycles
from ..heads.eagle import DraftHead
from ..models.flash import find_flash
from ..models.implementations import IMPLEMENTATIONS
from ..models.parallel import is_first, of_first
from ..models.placement import is_packed, weights_digest
from ..models.target import TargetModel
from .latency import Latency
from .measuring import CONTEXT, LONG, MEASURED_NODES, measure, measure_attention, share_of

log = logging.getLogger(__name__)

DISTURBED = 0.6  # cycles that take less than this share of what is kept show that it was measured beside other work


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """As the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def circumstances(target: TargetModel, head: DraftHead | None, graphs: GraphCycles | None = None) -> str:
    """What a latency depends on, as one string."""
    device = target.output_device
    threads = f"{device}, {processor_name()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    processes = [] if target.group is None else [f"{target.group.size()} processes"]
    return "; ".join([
        *(["compiled"] if is_compiled(target) else []), *(["packed"] if is_packed(target.model) else []),
        *(["graphs"] if graphs else []),
        target.digest(), "no head" if head is None else weights_digest(head), str(target.dtype), name, *processes,
        target.config._attn_implementation, f"torch {torch.__version__}", f"transformers {transformers.__version__}",
    ])


def known_latency(target: TargetModel, head: DraftHead, graphs: GraphCycles | None = None) -> Latency:
    """From the cache on disk, else measured and kept there.

    Args:
        graphs: of single prompts, where they serve the measured text; else it is that of ordinary cycles.
    """
    if graphs is not None and not graphs.serve(CONTEXT + max(MEASURED_NODES) + LONG, []):
        graphs = None
    key, path = circumstances(target, head, graphs), cache_directory() / "latency.json"
    key, kept = of_first(target.group, lambda: (key, _latency_of(path, key)))
    if kept is not None:
        share = share_of(kept, target, head, graphs)
        if graphs is not None:
            graphs.cycles.clear()
            if graphs.failed is not None:
                return known_latency(target, head)
        if of_first(target.group, lambda: share) >= DISTURBED:
            return kept
        log.warning("cycles take %.0f%% of what was measured here before, when other work slowed the machine: "
                    "measuring again", 100 * share)
    log.warning("measuring once how long drafting and checking take on this machine, to choose how much to draft: up "
                "to a minute; kept in %s", path)
    measured = measure(target, head, graphs)
    if graphs is not None:
        graphs.cycles.clear()  # those of the measured trees
        if graphs.failed is not None:
            return known_latency(target, head)
    latency = of_first(target.group, lambda: measured)
    if is_first(target.group):
        _keep(path, key, asdict(latency))
    return latency


def _latency_of(path: Path, key: str) -> Latency | None:
    """A kept latency; None where there is none, or what is kept is none: another version's, or damaged."""
    entry = _kept(path).get(key)
    if entry is None:
        return None
    try:
        kept = Latency(*({int(at): float(value) for at, value in entry[name].items()} for name in ("base", "level")),
                       *(float(entry[name]) for name in ("plain", "row", "plain_row")))
        times = [*kept.base.values(), *kept.level.values(), kept.plain, kept.row, kept.plain_row]
        if len(entry) == 5 and 1 in kept.base and kept.level and all(0 <= time < math.inf for time in times) \
                and min(*kept.base.values(), kept.plain) > 0:
            return kept
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        pass
    log.warning("%s holds something else than a latency: measuring again", path)
    return None


def _kept(path: Path) -> dict:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _keep(path: Path, key: str, value: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_kept(path), key: value}, indent=1)
        save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("%s cannot be written (%s): latencies are measured again next time", path, error)


def use_fastest_attention(target: TargetModel) -> None:
    """Switch to the attention implementation that verifies a tree fastest, of those that agree with the present one.

    The choice is kept on disk like the latencies; that it agrees is checked at every load.
    """
    flash = find_flash(target.device)
    key, path = f"{circumstances(target, None)}; {flash and flash[0]}", cache_directory() / "attention.json"
    chosen = of_first(target.group, lambda: _kept(path).get(key))
    if chosen not in IMPLEMENTATIONS:  # nothing, or what a damaged file holds
        seconds = measure_attention(target)
        chosen = of_first(target.group, lambda: min(seconds, key=seconds.__getitem__))
        log.info("attention %s is the fastest: %s", chosen, seconds)
        if is_first(target.group):
            _keep(path, key, chosen)
    try:
        target.use_attention(chosen)
    except ValueError as error:
        log.warning("%s", error)
