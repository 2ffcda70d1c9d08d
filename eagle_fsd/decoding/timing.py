"""What decode cycles cost on this machine: measured on whole cycles, kept in the user's cache directory."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from ..data.files import cache_directory, save_atomically
from ..drafting.config import TreeConfig
from ..drafting.latency import Latency
from ..drafting.sizing import Choice, Drafting
from ..drafting.text import Copies, TextDrafts, TextSource
from ..heads.eagle import DraftHead
from ..models.digest import weights_digest
from ..models.linear import packed_form
from ..models.target import TargetModel
from .decoder import Decoder
from .request import Request, RequestParams

log = logging.getLogger(__name__)
MEASURED_NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOP_K = (1, 2, 3, 4)
SHORT, LONG, WIDEST = 6, 14, 4  # levels, and top_k, of the measured trees
ROWS, ROW_TREE = 4, TreeConfig(4, 2, 1)  # of the measured batch
CONTEXT = 256  # tokens before the measured cycles
SHORT_CONTEXT = 32  # before those that only check what was measured: to read more takes seconds of every start
ROUNDS = 20
ENOUGH = 40.0  # seconds, after which no further round is begun
DISTURBED = 0.6  # cycles that take less than this share of what is kept show that it was measured beside other work


def greedy_decoder(
    target: TargetModel, head: DraftHead | None, prompts: Sequence[Sequence[int]], tree: TreeConfig | Choice | None,
    max_new_tokens: int,
) -> Decoder:
    """Greedy, lossless decoding of prompts, with always the same tree, or as chosen; None: without drafting."""
    requests = [Request(prompt, RequestParams(max_new_tokens=max_new_tokens)) for prompt in prompts]
    choice = tree if isinstance(tree, Choice) else Choice(tree)
    return Decoder(target, head if tree else None, requests, Drafting(choice))


def same_cycle(decoder: Decoder) -> Callable[[], object]:
    """A cycle from the same state each time, after three tokens that the draft has yet to read."""
    decoder.prefill()
    forwards, length = decoder.forwards, decoder.forwards.cache.length
    before = [(request, list(request.tokens), request.features[-1:].expand(3, -1) if decoder.reads_features else None)
              for request in decoder.requests]  # what features hold takes no time

    def once() -> None:
        if decoder.drafter is not None:
            forwards.draft_cache.truncate(length - 3)
        for request, tokens, features in before:
            request.features, request.tokens = features, list(tokens)
        decoder.step()
        forwards.cache.truncate(length)

    return once


def fastest(parts: Mapping[Hashable, Callable[[], object]], device: torch.device) -> dict[Hashable, float]:
    """Seconds of each part: the shortest of several rounds, since other work on the machine only ever adds to it.

    The first round warms up; with a slow model, or beside other work, there are fewer.
    """
    found, begun = dict.fromkeys(parts, math.inf), time.perf_counter()
    for number in tqdm(range(ROUNDS + 1), desc="measuring the machine", unit="round", leave=False, disable=None):
        for name, work in parts.items():
            found[name] = min(seconds_of(work, device), found[name] if number > 1 else math.inf)
        if time.perf_counter() - begun > ENOUGH:
            break
    return found


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What it takes, until the device has done it."""
    started = now(device)
    work()
    return now(device) - started


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def measure(target: TargetModel, head: DraftHead | None) -> Latency:
    """Run whole cycles after a context of random tokens: some seconds for a small model.

    Whole ones, because a part that is repeated alone finds its weights in the processor's cache and looks too cheap.
    Without a head those nodes are verified that a text would offer, and no level is drafted.
    """
    cycle = functools.partial(_measured_cycle, target, head)
    if head is None:
        seconds = fastest({
            "plain": cycle(None), "plain rows": cycle(None, ROWS),
            **{count: cycle(None, copied=count) for count in MEASURED_NODES}}, target.device)
        sizes = {1: seconds["plain"], **{count: seconds[count] for count in MEASURED_NODES}}
        shared = Latency(_ascending(sizes, seconds["plain"]), {1: 0.0}, seconds["plain"])
        return with_rows(shared, seconds["plain rows"], seconds["plain rows"])
    widths = [top_k for top_k in TOP_K if top_k <= head.draft_vocab_size]
    wide = max(width for width in widths if width <= WIDEST)
    nodes = [count for count in MEASURED_NODES if count <= TreeConfig(count, SHORT, wide).nodes]
    seconds = fastest({
        "plain": cycle(None),
        "root": cycle(Choice(TreeConfig(2, 1, 1), cost=lambda nodes, levels: 0.5 if nodes == 1 else 9.0)),
        **{("nodes", count): cycle(TreeConfig(count, SHORT, wide)) for count in nodes},
        **{("short", top_k): cycle(TreeConfig(SHORT, SHORT, top_k)) for top_k in widths},
        **{("long", top_k): cycle(TreeConfig(SHORT, LONG, top_k)) for top_k in widths},
        "plain rows": cycle(None, ROWS), "drafted rows": cycle(ROW_TREE, ROWS),
    }, target.device)
    steps = (max(0.0, seconds["long", k] - seconds["short", k]) / (LONG - SHORT) for k in widths)
    level = dict(zip(widths, itertools.accumulate(steps, max), strict=True))
    further = (SHORT - 1) * level[wide]
    sizes = {1: seconds["root"], **{count: seconds["nodes", count] - further for count in nodes}}
    shared = Latency(_ascending(sizes, seconds["plain"]), level, seconds["plain"])
    return with_rows(shared, seconds["drafted rows"], seconds["plain rows"])


def _ascending(sizes: Mapping[int, float], plain: float) -> dict[int, float]:
    """Seconds by nodes, of which none is more than that of more nodes, nor less than that of a cycle without drafting:
    where it seems so, it was disturbed."""
    least = [max(plain, size) for size in itertools.accumulate(reversed(sizes.values()), min)]
    return dict(zip(sizes, reversed(least), strict=True))


def with_rows(shared: Latency, drafted: float, plain: float) -> Latency:
    """With what the rows of a batch add, from the seconds of its two cycles: no less where they are drafted."""
    tree = ROW_TREE
    plain_row = max(0.0, (plain - shared.plain_cycle(ROWS)) / (ROWS - 1))
    row = (drafted - float(shared.cycle(tree.nodes, tree.depth, tree.top_k, ROWS))) / (ROWS - 1)
    return replace(shared, row=max(plain_row, row), plain_row=plain_row)


def _measured_cycle(
    target: TargetModel, head: DraftHead | None, tree: TreeConfig | Choice | None, rows: int = 1, copied: int = 0,
    before: int = CONTEXT,
) -> Callable[[], object]:
    """A cycle with this tree, or with so many copied nodes, after the context that all measurements have in common, for
    so many rows."""
    room = max(MEASURED_NODES) + LONG
    context = min(before, (target.max_positions or before + room) - room)
    if context < 4:
        raise ValueError(f"a target with {target.max_positions} positions has no room to measure its latency in")
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = greedy_decoder(target, head, [prompt] * rows, tree, room)
    if copied:
        for request in decoder.requests:
            request.copies = SameCopies(prompt[: copied - 1])
    return same_cycle(decoder)


class SameCopies(TextSource):
    """A chain of always the same tokens, to measure what verifying it takes."""

    def __init__(self, chain: Sequence[int]) -> None:
        super().__init__([], TextDrafts())
        numbers = list(range(len(chain)))
        self.chain = Copies(list(chain), [number - 1 for number in numbers], [0.0] * len(chain), [1] * len(chain),
                            [0] * len(chain))

    def propose(self, forced: Copies | None = None, room: int = 0) -> Copies:
        return self.chain


@torch.inference_mode()
def share_of(latency: Latency, target: TargetModel, head: DraftHead | None) -> float:
    """What cycles take now, of what a latency says: of plain ones and of the largest tree's, the smaller share."""
    nodes, width = max(latency.base), min(WIDEST, max(latency.level))
    trees = {None: latency.plain}
    if head is not None:
        trees[TreeConfig(nodes, SHORT, width)] = float(latency.cycle(nodes, SHORT, width))
    shares = []
    for tree, said in trees.items():
        once = _measured_cycle(target, head, tree, before=SHORT_CONTEXT)
        shares.append(min(seconds_of(once, target.device) for _ in range(3)) / said)  # the first one warms up
    return min(shares)


def known_latency(target: TargetModel, head: DraftHead | None) -> Latency:
    """From the cache on disk, else measured and kept there."""
    key = hashlib.sha256(circumstances(target, head).encode()).hexdigest()[:16]
    path = cache_directory() / "latency" / f"{key}.json"
    if path.is_file():
        try:
            kept = Latency.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:  # damaged
            log.warning("%s holds no latency (%s): measuring again", path, error)
        else:
            share = share_of(kept, target, head)
            if share >= DISTURBED:
                return kept
            log.warning("cycles take %.0f%% of what was measured here before, when other work slowed the machine: "
                        "measuring again", 100 * share)
    log.warning("measuring how long drafting and checking take on this machine, to choose how much to draft: up "
                "to a minute; kept in %s", path)
    latency = measure(target, head)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_atomically(path, lambda part: part.write_text(json.dumps(asdict(latency), indent=1)))
    except OSError as error:
        log.warning("%s cannot be written (%s): latencies are measured again next time", path, error)
    return latency


def circumstances(target: TargetModel, head: DraftHead | None) -> str:
    """What a latency depends on, as one string."""
    device = target.output_device
    threads = f"{device}, {processor_name()}, {torch.get_num_threads()} threads"
    return "; ".join([
        packed_form(target.model) or "plain", target.digest(),
        "no head" if head is None else weights_digest(head), str(target.dtype),
        torch.cuda.get_device_name(device) if device.type == "cuda" else threads,
        target.computed_by, f"torch {torch.__version__}", f"transformers {transformers.__version__}",
    ])


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """As the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
