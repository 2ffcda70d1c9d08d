"""What decode cycles and attention implementations cost on this machine, measured on whole cycles."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
import transformers
from tqdm import tqdm

from ..acceptance import Rule
from ..acceptance.budget import EXACT_RULE
from ..drafting.config import Choice, TreeConfig
from ..engine.decoder import Decoder
from ..engine.graphs import GraphCycles
from ..engine.request import BatchSettings, RequestSettings
from ..heads.eagle import DraftHead
from ..models.implementations import GROUPED, SPLIT
from ..models.parallel import of_first
from ..models.target import TargetModel
from .latency import Latency

log = logging.getLogger(__name__)
MEASURED_NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOP_K = (1, 2, 3, 4)
SHORT, LONG, WIDEST = 6, 14, 4  # levels, and top_k, of the measured trees
ROWS, ROW_TREE = 4, TreeConfig(4, 2, 1)  # of the measured batch
CONTEXT = 256  # tokens before the measured cycles
LONG_CONTEXT = 1024  # tokens before the tree that attention implementations are compared with
ROUNDS = 20
ENOUGH = 40.0  # seconds, after which no further round is begun


@torch.inference_mode()
def measure(target: TargetModel, head: DraftHead, graphs: GraphCycles | None = None) -> Latency:
    """Run whole cycles behind a context of random tokens: some seconds for a small model.

    Whole ones, because a part that is repeated alone finds its weights in the processor's cache and looks too cheap.
    """
    cycle = functools.partial(_measured_cycle, target, head, graphs)
    widths = [top_k for top_k in TOP_K if top_k <= head.draft_vocab_size]
    wide = max(width for width in widths if width <= WIDEST)
    nodes = [count for count in MEASURED_NODES if count <= TreeConfig(count, SHORT, wide).nodes]
    parts = {
        ("plain", 1): cycle(None),  # first: with graphs all share their caches, and this one leaves the draft's empty
        **{("nodes", count): cycle(TreeConfig(count, SHORT, wide)) for count in nodes},
        **{("short", top_k): cycle(TreeConfig(SHORT, SHORT, top_k)) for top_k in widths},
        **{("long", top_k): cycle(TreeConfig(SHORT, LONG, top_k)) for top_k in widths},
    }
    if graphs is None:  # with graphs nothing stops at the root, and there are no batches
        parts |= {("root", 1): cycle(TreeConfig(2, 1, 1, least_reach=2.0)),
                  ("plain", ROWS): cycle(None, rows=ROWS), ("drafted", ROWS): cycle(ROW_TREE, rows=ROWS)}
    seconds = fastest(parts, target)
    steps = (max(0.0, seconds["long", k] - seconds["short", k]) / (LONG - SHORT) for k in widths)
    level = dict(zip(widths, itertools.accumulate(steps, max), strict=True))
    further = (SHORT - 1) * level[wide]
    sizes = [seconds["plain" if graphs else "root", 1], *(seconds["nodes", count] - further for count in nodes)]
    # None costs more than a larger one, nor less than a cycle without drafting: where it seems so, it was disturbed.
    least = [max(seconds["plain", 1], size) for size in itertools.accumulate(reversed(sizes), min)][::-1]
    shared = Latency(dict(zip([1, *nodes], least, strict=True)), level, seconds["plain", 1])
    return shared if graphs else _with_rows(shared, seconds["drafted", ROWS], seconds["plain", ROWS])


def _with_rows(shared: Latency, drafted: float, plain: float) -> Latency:
    """With what the rows of a batch add, from the seconds of its two cycles: no less where they are drafted."""
    tree = ROW_TREE
    plain_row = max(0.0, (plain - shared.plain_cycle(ROWS)) / (ROWS - 1))
    row = (drafted - shared.cycle(tree.nodes, tree.depth, tree.top_k, ROWS)) / (ROWS - 1)
    return replace(shared, row=max(plain_row, row), plain_row=plain_row)


def _measured_cycle(
    target: TargetModel, head: DraftHead, graphs: GraphCycles | None, tree: TreeConfig | None, rows: int = 1
) -> Callable[[], object]:
    """A cycle with this tree behind the context that all measurements have in common, for so many rows."""
    room = max(MEASURED_NODES) + LONG
    context = min(CONTEXT, (target.max_positions or CONTEXT + room) - room)
    if context < 4:
        raise ValueError(f"a target with {target.max_positions} positions has no room to measure its latency in")
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    return same_cycle(greedy_decoder(target, head, prompt, tree, room, graphs, rows))


@torch.inference_mode()
def share_of(latency: Latency, target: TargetModel, head: DraftHead, graphs: GraphCycles | None = None) -> float:
    """What cycles take now, of what a latency says: of plain ones and of the largest tree's, the smaller share."""
    nodes, width = max(latency.base), min(WIDEST, max(latency.level))
    trees = {None: latency.plain, TreeConfig(nodes, SHORT, width): latency.cycle(nodes, SHORT, width)}
    shares = []
    for tree, said in trees.items():
        once, taken = _measured_cycle(target, head, graphs, tree), []
        for _ in range(3):  # the first one warms up
            started = now(target.device)
            once()
            taken.append(now(target.device) - started)
        shares.append(min(taken) / said)
    return min(shares)


def greedy_decoder(
    target: TargetModel, head: DraftHead | None, prompt: Sequence[int], tree: TreeConfig | None, max_new_tokens: int,
    graphs: GraphCycles | None = None, rows: int = 1, rule: Rule = EXACT_RULE,
) -> Decoder:
    """Greedy decoding of so many times the same prompt with always the same tree; None: without drafting."""
    batch = BatchSettings(lambda requests: Choice(tree))
    settings = RequestSettings(transformers.LogitsProcessorList(), seed=0, max_new_tokens=max_new_tokens, rule=rule)
    return Decoder(target, head if tree else None, [prompt] * rows, batch, [settings] * rows, graphs=graphs)


def same_cycle(decoder: Decoder) -> Callable[[], object]:
    """A cycle from the same state each time, behind three tokens that the draft has yet to read."""
    decoder.prefill()
    forwards, length = decoder.forwards, decoder.forwards.cache.length
    before = [(request, list(request.tokens), None if decoder.head is None else request.features[-1:].expand(3, -1))
              for request in decoder.requests]  # what features hold takes no time

    def once() -> None:
        if decoder.head is not None:
            forwards.draft_cache.truncate(length - 3)
        for request, said, features in before:
            request.features, request.tokens = features, list(said)
        decoder.step()
        forwards.cache.truncate(length)

    return once


def fastest(parts: Mapping[Hashable, Callable[[], object]], target: TargetModel) -> dict[Hashable, float]:
    """Seconds of each part: the shortest of several rounds, since other work on the machine only ever adds to it.

    The first round warms up; with a slow model there are fewer.
    """
    found, begun = dict.fromkeys(parts, math.inf), time.perf_counter()
    for number in tqdm(range(ROUNDS + 1), desc="measuring the machine", unit="round", leave=False, disable=None):
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
        return fastest(parts, target)
    finally:
        target.model.set_attn_implementation(present)
