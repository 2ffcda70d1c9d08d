"""What a decode cycle costs on this machine, by the size of its tree."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from .acceptance import make_rule
from .attention import GROUPED, SPLIT, find_flash
from .compiled import is_compiled
from .config import TreeConfig
from .draft import DraftHead
from .files import save_atomically
from .generation import Decoder, Settings
from .graphs import GraphCycles
from .parallel import is_first, of_first
from .target import TargetModel, weights_digest

log = logging.getLogger(__name__)

NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOP_K = (1, 2, 3, 4)
SHORT, LONG, WIDE = 6, 14, 4  # levels, and top_k, of the measured trees
CONTEXT = 256  # tokens before the measured cycles
LONG_CONTEXT = 1024  # tokens before the tree that attention implementations are compared with
ROUNDS = 9
ENOUGH = 20.0  # seconds, after which no further round is begun


@dataclass(frozen=True)
class Latency:
    """Seconds of a decode cycle; linear between what was measured.

    Args:
        base: of a cycle that drafts one level, by nodes verified. level: of each further level, by top_k.
        plain: of a cycle without drafting.
    """

    base: Mapping[int, float]
    level: Mapping[int, float]
    plain: float

    def cycle(self, nodes: float, levels: float, top_k: int, rows: int = 1) -> float:
        """Seconds of a cycle that drafts so many levels (at least 1) and verifies so many nodes for each of the rows.

        Rows count like nodes: what they do not share, keys and values of their prefixes, is little beside the weights.
        """
        return between(self.base, nodes * rows) + (levels - 1) * between(self.level, top_k * rows)

    def plain_cycle(self, rows: int = 1) -> float:
        """Seconds of a cycle without drafting."""
        return self.plain + between(self.base, rows) - between(self.base, 1)


def between(measured: Mapping[int, float], at: float) -> float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    if at <= points[0] or len(points) == 1:
        return measured[points[0]]
    right = min(max(1, bisect_left(points, at)), len(points) - 1)
    low, high = points[right - 1], points[right]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]


@torch.inference_mode()
def measure(target: TargetModel, head: DraftHead, graphs: GraphCycles | None = None) -> Latency:
    """Run whole cycles behind a context of random tokens: some seconds for a small model.

    Whole ones, because a part that is repeated alone finds its weights in the processor's cache and looks too cheap.
    """
    room = max(NODES) + LONG
    context = min(CONTEXT, (target.max_positions or CONTEXT + room) - room)
    if context < 4:
        raise ValueError(f"a target with {target.max_positions} positions has no room to measure its latency in")
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()

    def cycle(tree: TreeConfig | None) -> Callable[[], object]:
        settings = Settings(make_rule("exact"), tree, transformers.LogitsProcessorList(), True, 0, room)
        return same_cycle(Decoder(target, head if tree else None, [prompt], [settings], graphs=graphs))

    widths = [top_k for top_k in TOP_K if top_k <= head.draft_vocab_size]
    wide = max(width for width in widths if width <= WIDE)
    nodes = [count for count in NODES if count <= TreeConfig(count, SHORT, wide).nodes]
    parts = {
        ("plain", 1): cycle(None),  # first: with graphs all share their caches, and this one leaves the draft's empty
        **{("nodes", count): cycle(TreeConfig(count, SHORT, wide)) for count in nodes},
        **{("short", top_k): cycle(TreeConfig(SHORT, SHORT, top_k)) for top_k in widths},
        **{("long", top_k): cycle(TreeConfig(SHORT, LONG, top_k)) for top_k in widths},
    }
    if graphs is None:  # with graphs nothing stops at the root
        parts["root", 1] = cycle(TreeConfig(2, 1, 1, least_reach=2.0))
    seconds = _fastest(parts, target)
    steps = (max(0.0, seconds["long", k] - seconds["short", k]) / (LONG - SHORT) for k in widths)
    level = dict(zip(widths, itertools.accumulate(steps, max), strict=True))
    further = (SHORT - 1) * level[wide]
    sizes = itertools.accumulate((seconds["nodes", count] - further for count in nodes), max,
                                 initial=seconds["plain" if graphs else "root", 1])
    return Latency(dict(zip([1, *nodes], sizes, strict=True)), level, seconds["plain", 1])


def same_cycle(decoder: Decoder) -> Callable[[], object]:
    """A cycle from the same state each time, behind three tokens that the draft has yet to read."""
    decoder.prefill()
    (row,), length = decoder.rows, decoder.cache.length
    features, said = row.features[-1:].expand(3, -1), list(row.tokens)  # what they hold takes no time

    def once() -> None:
        if decoder.head is not None:
            decoder.draft_cache.truncate(length - 3)
        row.features, row.tokens = features, list(said)
        decoder.step()
        decoder.cache.truncate(length)

    return once


def _fastest(parts: Mapping[Hashable, Callable[[], object]], target: TargetModel) -> dict[Hashable, float]:
    """Seconds of each part: the shortest of several rounds, since other work on the machine only ever adds to it.

    The first round warms up; with a slow model there are fewer.
    """
    found, begun = dict.fromkeys(parts, math.inf), time.perf_counter()
    for number in tqdm(range(ROUNDS + 1), desc="measuring cycles", unit="round", leave=False, disable=None):
        for name, work in parts.items():
            started = now(target.device)
            work()
            taken = now(target.device) - started
            if number:
                found[name] = min(found[name], taken)
        if number and of_first(target.group, lambda: time.perf_counter() - begun > ENOUGH):
            break
    return found


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# On disk -----------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """EAGLE_FSD_CACHE, else eagle_fsd in the user's cache directory."""
    given = os.environ.get("EAGLE_FSD_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"


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
        *(["compiled"] if is_compiled(target) else []), *(["graphs"] if graphs else []),
        target.digest(), "no head" if head is None else weights_digest(head), str(target.dtype), name, *processes,
        target.config._attn_implementation, f"torch {torch.__version__}", f"transformers {transformers.__version__}",
    ])


def known_latency(target: TargetModel, head: DraftHead, graphs: GraphCycles | None = None) -> Latency:
    """From the cache on disk, else measured and kept there.

    Args:
        graphs: of single prompts, where they serve the measured text; else it is that of ordinary cycles.
    """
    if graphs is not None and not graphs.serve(CONTEXT + max(NODES) + LONG, []):
        graphs = None
    key, path = circumstances(target, head, graphs), cache_directory() / "latency.json"
    key, stored = of_first(target.group, lambda: (key, _kept(path)))
    if key in stored:
        entry = stored[key]
        numbers = {name: {int(at): value for at, value in entry[name].items()} for name in ("base", "level")}
        return Latency(**{**entry, **numbers})
    log.info("measuring how long cycles take with trees of several sizes")
    measured = measure(target, head, graphs)
    if graphs is not None:
        graphs.cycles.clear()  # those of the measured trees
        if graphs.failed is not None:
            return known_latency(target, head)
    latency = of_first(target.group, lambda: measured)
    if is_first(target.group):
        _keep(path, key, asdict(latency))
    return latency


def _kept(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _keep(path: Path, key: str, value: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_kept(path), key: value}, indent=1)
        save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("%s cannot be written (%s): latencies are measured again next time", path, error)


# Attention ---------------------------------------------------------------------------------------------------


def use_fastest_attention(target: TargetModel) -> None:
    """Switch to the attention implementation that verifies a tree fastest, of those that agree with the present one.

    The choice is kept on disk like the latencies; that it agrees is checked at every load.
    """
    flash = find_flash(target.device)
    key, path = f"{circumstances(target, None)}; {flash and flash[0]}", cache_directory() / "attention.json"
    chosen = of_first(target.group, lambda: _kept(path).get(key))
    if chosen is None:
        seconds = measure_attention(target)
        chosen = of_first(target.group, lambda: min(seconds, key=seconds.__getitem__))
        log.info("attention %s is the fastest: %s", chosen, seconds)
        if is_first(target.group):
            _keep(path, key, chosen)
    try:
        target.use_attention(chosen)
    except ValueError as error:
        log.warning("%s", error)


@torch.inference_mode()
def measure_attention(target: TargetModel) -> dict[str, float]:
    """Seconds that verifying a tree takes with the present implementation and with those of ours that agree with it."""
    present, nodes = target.config._attn_implementation, 32
    context = min(LONG_CONTEXT, (target.max_positions or LONG_CONTEXT + nodes) - nodes)
    tokens = torch.randint(target.vocab_size, (1, context + nodes), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(target.device)
    cache = target.new_cache(context + nodes)
    target.prefill(tokens[:, :context], cache)
    ancestors = torch.eye(nodes, dtype=torch.bool, device=target.device)[None].clone()
    ancestors[:, :, 0] = True
    positions = context + ancestors.sum(-1) - 1

    def verify(implementation: str) -> Callable[[], object]:
        def once() -> None:
            target.model.set_attn_implementation(implementation)
            target.verify(tokens[:, context:], positions, ancestors, cache)
            cache.truncate(context)

        return once

    parts = {present: verify(present)}
    for implementation in (GROUPED, SPLIT) if target.device.type == "cpu" else (SPLIT,):
        refused = None
        try:
            target.use_attention(implementation)
        except ValueError as error:
            refused = str(error)
        refused = of_first(target.group, lambda said=refused: said)  # all processes time the same ones
        if refused is None:
            parts[implementation] = verify(implementation)
        else:
            log.info("%s", refused)
    try:
        return _fastest(parts, target)
    finally:
        target.model.set_attn_implementation(present)
