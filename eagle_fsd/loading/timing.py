"""Latency of decode cycles on this machine, measured on whole cycles and stored in the user's cache directory."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
import transformers
from tqdm import tqdm

from ..decoding import cycle
from ..decoding.batch import Batch
from ..decoding.request import Request
from ..drafting.config import TreeConfig
from ..drafting.copies import Copies, TextDrafts, TextSource, forced_copies
from ..drafting.drafter import Drafter
from ..drafting.sizing import Drafting, Latency, Plan, Prices
from ..models.digest import config_digest
from ..models.linear import packed_form, packed_kernels
from ..models.target import TargetModel
from ..options.generate import GenerateOptions
from ..utils.files import remembered
from ..utils.installation import code_version, processor_name

log = logging.getLogger(__name__)
MEASURED_NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHORT, LONG, WIDEST = 6, 14, 4  # levels, and largest top_k, of the measured trees
ROWS, ROW_TREE = 4, TreeConfig(4, 2, 1)  # of the measured batch
PLAIN = Plan(TreeConfig(), drafts=False)
CONTEXT = 256  # tokens before the measured cycles
SHORT_CONTEXT = 32  # before cycles that only check a stored latency: a longer prefill would delay every start
ROUNDS = 12
ENOUGH = 30.0  # seconds after which no further round starts
DISTURBED = 0.6  # if cycles take less than this fraction of the stored latency, other work disturbed its measurement


def greedy_batch(
    target: TargetModel, drafter: Drafter | None, prompts: Sequence[Sequence[int]], plan: Plan, max_new_tokens: int,
) -> Batch:
    """A batch of greedy, lossless requests with this largest plan."""
    requests = [Request(prompt, GenerateOptions(), max_new_tokens=max_new_tokens) for prompt in prompts]
    return Batch(target, drafter, requests, Drafting(lambda _: plan))


class SameCycle:
    """Cycles of one batch that all start from the same state, after a context of random tokens.

    In each of them a head has three tokens to process; a causal LM, whose cache keeps accepted nodes, has two.
    """

    def __init__(self, target: TargetModel, drafter: Drafter | None, rows: int = 1, before: int = CONTEXT) -> None:
        room = max(MEASURED_NODES) + LONG
        limits = [limit for limit in (target.max_positions, drafter and drafter.max_positions) if limit]
        context = min([before, *(limit - room for limit in limits)])
        if context < 4:
            raise ValueError(f"a model with {min(limits)} positions is too short to measure its latency")
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(target.vocab_size, (context + room,), generator=random).tolist()
        self.copied = tokens[context:]
        largest = Plan(TreeConfig(max(MEASURED_NODES), LONG, WIDEST), drafts=drafter is not None)
        self.batch = batch = greedy_batch(target, drafter, [tokens[:context]] * rows, largest, room)
        for number in range(rows):
            cycle.prefill(batch, number)
        self.length = batch.cache.length
        self.texts = [list(request.tokens) for request in batch.requests]
        # The values of the features do not affect the time.
        self.features = [[part[-1:].expand(3, -1) for part in parts[-1:]] for parts in batch.features]

    def of(self, plan: Plan, copies: bool = False) -> Callable[[], object]:
        """A function that runs a cycle with this largest plan, of the drafter's nodes or of copies."""
        batch, drafting = self.batch, Drafting(lambda _: plan)
        drafting.resize(batch.requests)
        source = SameCopies(self.copied[: plan.tree.total_tokens - 1]) if copies else None

        def once() -> None:
            batch.drafting = drafting
            if batch.drafter is not None:
                batch.draft_cache.truncate(self.length - (3 if batch.reads_features else 1))
            batch.features = [list(parts) for parts in self.features]
            for request, tokens in zip(batch.requests, self.texts, strict=True):
                request.tokens, request.text_source = list(tokens), source
            cycle.step(batch)
            for request in batch.requests:
                if request.error is not None:  # memory ran out: the time is not that of a cycle
                    raise request.error
            batch.cache.truncate(self.length)

        return once


def fastest(parts: Mapping[Hashable, Callable[[], object]], device: torch.device) -> dict[Hashable, float]:
    """Seconds of each part: the shortest of several rounds, since other work on the machine only adds time.

    The first round is a warm-up. There are fewer rounds if they take too long.
    """
    shortest, started = dict.fromkeys(parts, math.inf), time.perf_counter()
    for number in tqdm(range(ROUNDS + 1), desc="measuring the machine", unit="round", leave=False, disable=None):
        for name, work in parts.items():
            shortest[name] = min(seconds_of(work, device), shortest[name] if number > 1 else math.inf)
        if time.perf_counter() - started > ENOUGH:
            break
    return shortest


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes, until the device has finished it."""
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    finish()
    started = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - started


@torch.inference_mode()
def measure(target: TargetModel, drafter: Drafter | None) -> Latency:
    """Measure whole cycles after a context of random tokens. This takes some seconds for a small model.

    Repeated alone, a part of a cycle would find its weights in the processor's cache and seem too cheap. Without a
    drafter, the cycles verify copies, and no level is drafted.
    """
    one, several = SameCycle(target, drafter).of, SameCycle(target, drafter, ROWS).of
    if drafter is None:
        seconds = fastest({
            "plain": one(PLAIN), "plain rows": several(PLAIN),
            **{count: one(Plan(TreeConfig(count), drafts=False), copies=True) for count in MEASURED_NODES},
        }, target.input_device)
        sizes = {1: seconds["plain"], **{count: seconds[count] for count in MEASURED_NODES}}
        shared = Latency(_ascending(sizes, seconds["plain"]), {1: 0.0}, seconds["plain"])
        return with_rows(shared, seconds["plain rows"], seconds["plain rows"])
    wide = min(WIDEST, drafter.draft_vocab_size)
    widths = range(1, wide + 1)
    nodes = [count for count in MEASURED_NODES if count <= TreeConfig(count, SHORT, wide).nodes]
    seconds = fastest({
        "plain": one(PLAIN),
        "root": one(Plan(TreeConfig(2, 1, 1), prices=Prices(lambda nodes, levels: 0.5 if nodes == 1 else 9.0))),
        **{("nodes", count): one(Plan(TreeConfig(count, SHORT, wide))) for count in nodes},
        **{("short", top_k): one(Plan(TreeConfig(SHORT, SHORT, top_k))) for top_k in widths},
        **{("long", top_k): one(Plan(TreeConfig(SHORT, LONG, top_k))) for top_k in widths},
        "plain rows": several(PLAIN), "drafted rows": several(Plan(ROW_TREE)),
    }, target.input_device)
    per_level = (max(0.0, seconds["long", k] - seconds["short", k]) / (LONG - SHORT) for k in widths)
    level = dict(zip(widths, itertools.accumulate(per_level, max), strict=True))
    further = (SHORT - 1) * level[wide]
    sizes = {1: seconds["root"], **{count: seconds["nodes", count] - further for count in nodes}}
    shared = Latency(_ascending(sizes, seconds["plain"]), level, seconds["plain"])
    return with_rows(shared, seconds["drafted rows"], seconds["plain rows"])


def _ascending(sizes: Mapping[int, float], plain: float) -> dict[int, float]:
    """Seconds by number of nodes, corrected for disturbances: none exceeds that of more nodes, or is less than `plain`,
    that of a cycle without drafting."""
    least = [max(plain, size) for size in itertools.accumulate(reversed(sizes.values()), min)]
    return dict(zip(sizes, reversed(least), strict=True))


def with_rows(shared: Latency, drafted: float, plain: float) -> Latency:
    """Add the latency of further rows, from the seconds of a drafted and a plain cycle of a batch."""
    tree = ROW_TREE
    plain_row = max(0.0, (plain - shared.cycle(rows=ROWS)) / (ROWS - 1))
    row = (drafted - shared.cycle(tree.nodes, tree.depth, tree.top_k, ROWS)) / (ROWS - 1)
    return replace(shared, row=max(plain_row, row), plain_row=plain_row)


class SameCopies(TextSource):
    """Always proposes the same chain of tokens, to measure how long verification takes."""

    def __init__(self, chain: Sequence[int]) -> None:
        super().__init__([], TextDrafts())
        self.chain = forced_copies(chain)

    def propose(self, forced: Copies | None = None, left: int = 0) -> Copies:
        return self.chain


@torch.inference_mode()
def share_of(latency: Latency, target: TargetModel, drafter: Drafter | None) -> float:
    """Time of cycles now as a fraction of a stored latency: the minimum over a plain cycle and the largest tree."""
    nodes, width = max(latency.base), min(WIDEST, max(latency.level))
    plans = {PLAIN: latency.plain}
    if drafter is not None:
        plans[Plan(TreeConfig(nodes, SHORT, width))] = latency.cycle(nodes, SHORT, width)
    shares, cycles = [], SameCycle(target, drafter, before=SHORT_CONTEXT)
    for plan, stored in plans.items():
        once = cycles.of(plan)
        shares.append(min(seconds_of(once, target.input_device) for _ in range(3)) / stored)  # the first: a warm-up
    return min(shares)


def known_latency(target: TargetModel, drafter: Drafter | None) -> Latency:
    """The latency from the cache on disk; otherwise it is measured and stored there."""
    def measured() -> dict:
        log.warning("measuring how long drafting and verification take on this machine, to choose how much to draft. "
                    "This takes up to half a minute for a small model, minutes for a large one or beside other work; "
                    "the result is stored for later")
        return asdict(measure(target, drafter))

    def holds(stored: object) -> bool:
        try:
            latency = latency_of(stored)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        share = share_of(latency, target, drafter)
        if share < DISTURBED:
            log.warning("cycles take %.0f%% of the stored latency: other work slowed the machine when it was measured. "
                        "Measuring again", 100 * share)
        return share >= DISTURBED

    return latency_of(remembered("latency", circumstances(target, drafter), measured, holds))


def latency_of(stored: Mapping) -> Latency:
    """The inverse of `asdict(latency)`, also with strings as keys, which JSON has.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: any other value.
    """
    base, level = ({int(at): float(value) for at, value in stored[name].items()} for name in ("base", "level"))
    plain, row, plain_row = (float(stored[name]) for name in ("plain", "row", "plain_row"))
    times = [*base.values(), *level.values(), plain, row, plain_row]
    if 1 not in base or not level or not plain > 0 or not all(time >= 0 for time in times):
        raise ValueError("these cannot be measured times")
    return Latency(base, level, plain, row, plain_row)


def circumstances(target: TargetModel, drafter: Drafter | None) -> dict[str, str | int | list[str] | None]:
    """Everything that a latency depends on, by name, as JSON values."""
    device = target.output_device
    on_gpu = device.type == "cuda"
    facts = {"target": target.digest(), "config": config_digest(target.model.config), "dtype": str(target.dtype),
             "weights": packed_form(target.model) or "plain", "computed_by": target.computed_by,
             "kernels": packed_kernels(target.model), "head": None if drafter is None else drafter.digest()}
    if drafter is not None:
        config = getattr(drafter.module, "config", None)
        facts |= {"head_config": config and config_digest(config), "head_dtype": str(drafter.dtype),
                  "head_device": sorted(map(str, drafter.devices)), "head_kernels": packed_kernels(drafter.module),
                  "head_weights": packed_form(drafter.module) or "plain", "head_computed_by": drafter.computed_by}
    return facts | {
        "device": device.type, "processor": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "threads": None if on_gpu else torch.get_num_threads(),
        "eagle_fsd": code_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    }
