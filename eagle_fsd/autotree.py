"""tree="auto": the tree that emits the most tokens per second with this pair, rule, temperature and machine.

What a wide tree's nodes did in some hundred cycles (`CycleLog`) says how likely a draft probability is to be accepted
(`fit_confidence`) and how many tokens any smaller tree would have emitted there; `Latency` says how long it would have
taken. `choose` tries shapes and stopping rules on these logs, without generating. A log belongs to a pair, a rule and a
temperature, not to a machine, and is stored beside the head; a latency belongs to the machine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from .acceptance import Decision, Rule, Verification, walk
from .checkpoint import fetch
from .config import CPU_TREE, Choice, Confidence, TreeConfig
from .files import read_entries, write_entries
from .latency import Latency

log = logging.getLogger(__name__)

FILE = "tree.json"
WIDE = TreeConfig(total_tokens=64, depth=16, top_k=4, draft_temperature=0.5)  # what is logged
BINS = 24
LEAST_EDGES = 200  # to fit a confidence to
NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
REACHES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
PROBABILITIES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)


@dataclass
class Cycle:
    """One cycle's wide tree without its root: a row per node, parents first."""

    parents: list[int]  # index of the parent's row, -1 for the root
    ranks: list[int]  # among the siblings, the best 0
    log_probs: list[float]  # of the step under the draft, at temperature 1
    accepted: list[bool]


class CycleLog:
    """Decodes by a rule, as a rule for `generate`, and notes each cycle's tree and what was accepted."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.cycles: list[Cycle] = []

    def __call__(self, verification: Verification) -> Decision:
        decision = self.rule(verification)
        tree = verification.tree
        if tree.max_depth:
            draft = verification.node_draft_logits.log_softmax(-1)
            log_probs = verification.of_step(draft)[0, 1:].tolist()
            parents = tree.parents[0, 1:].tolist()
            accepted = walk(verification, decision).accepted[0, 1:].tolist()
            ranks = [sum(other == parent and log_probs[j] > log_probs[i] for j, other in enumerate(parents))
                     for i, parent in enumerate(parents)]
            self.cycles.append(Cycle([parent - 1 for parent in parents], ranks, log_probs, accepted))
        return decision


# Confidence --------------------------------------------------------------------------------------------------


def fit_confidence(cycles: Sequence[Cycle]) -> Confidence | None:
    """How often a child was accepted behind an accepted parent, by the draft's probability; None from too few.

    Isotonic regression (pool adjacent violators) over bins of equally many edges, apart for best and other children.
    """
    edges = [(rank == 0, log_prob, taken) for cycle in cycles
             for parent, rank, log_prob, taken in zip(
                 cycle.parents, cycle.ranks, cycle.log_probs, cycle.accepted, strict=True)
             if parent < 0 or cycle.accepted[parent]]
    curves = []
    for best in (True, False):
        chosen = sorted((log_prob, taken) for first, log_prob, taken in edges if first == best)
        if len(chosen) < LEAST_EDGES:
            return None
        curves.append(_isotonic(np.array([p for p, _ in chosen]), np.array([t for _, t in chosen], float)))
    knots = np.unique(np.concatenate([x for x, _ in curves]).round(4))
    first, others = (np.maximum.accumulate(np.minimum(0.0, np.interp(knots, x, y))) for x, y in curves)
    level = (np.diff(first) == 0) & (np.diff(others) == 0)
    needed = ~(np.concatenate([[False], level]) & np.concatenate([level, [False]]))  # not inside a flat part
    return Confidence(*(tuple(np.round(values[needed], 4).tolist()) for values in (knots, first, others)))


def _isotonic(log_probs: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and log rates, not descending; every bin counts half an acceptance and half a refusal more than it saw."""
    places = [(part.mean(), taken[start : start + len(part)].sum() + 0.5, len(part) + 1.0)
              for start, part in _bins(log_probs)]
    blocks: list[list] = []  # [accepted, seen, bins]
    for _, accepted, seen in places:
        blocks.append([accepted, seen, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            accepted, seen, bins = blocks.pop()
            blocks[-1] = [blocks[-1][0] + accepted, blocks[-1][1] + seen, blocks[-1][2] + bins]
    rates = np.concatenate([np.full(bins, accepted / seen) for accepted, seen, bins in blocks])
    return np.array([at for at, _, _ in places]), np.log(rates)


def _bins(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(start, values) of equally large parts."""
    parts = np.array_split(values, BINS)
    starts = np.cumsum([0, *map(len, parts)])
    return [(int(start), part) for start, part in zip(starts, parts, strict=False) if len(part)]


# Choice ------------------------------------------------------------------------------------------------------


class Replay:
    """The logged cycles as trees of other shapes would have drafted them, with one frontier width."""

    def __init__(self, cycles: Sequence[Cycle], confidence: Confidence | None, top_k: int) -> None:
        knots = None if confidence is None else [np.array(v) for v in asdict(confidence).values()]
        self.top_k = top_k
        self.cycles = [_scored(cycle, knots, top_k) for cycle in cycles]

    def rate(self, tree: TreeConfig, latency: Latency, nodes: Sequence[int] = (), rows: int = 1) -> np.ndarray:
        """Tokens per second and row, for each number of nodes (default: the tree's own)."""
        counts = np.array(nodes or [tree.total_tokens])
        flat = np.array([latency.cycle(size, 1, self.top_k, rows) for size in range(max(counts) + 1)])
        level = latency.cycle(1, 2, self.top_k, rows) - flat[1]
        tokens, verified, levels = self.run(tree, counts)
        return tokens.sum(0) / (flat[verified] + level * (levels - 1)[:, None]).sum(0)

    def run(self, tree: TreeConfig, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and verified nodes [cycles, counts], and drafted levels [cycles]."""
        tokens, verified, levels = [], [], []
        least = math.log(tree.least_probability) if tree.least_probability else -math.inf
        for depths, scores, accepted, reach in self.cycles:
            weak = np.flatnonzero(reach[: tree.depth] < tree.least_reach) if tree.least_reach else ()
            depth = int(weak[0]) + 1 if len(weak) else tree.depth  # levels that were scored
            drafted = not (len(weak) and weak[0] == 0)
            inside = (depths <= depth) & (scores >= least) if drafted else np.zeros(len(depths), bool)
            taken = np.concatenate([[0], accepted[inside].cumsum()])  # in the order of scores
            kept = np.minimum(counts - 1, len(taken) - 1)
            tokens.append(1 + taken[kept])
            verified.append(1 + kept)
            levels.append(depth if drafted else 1)
        return np.array(tokens), np.array(verified), np.array(levels)


def _scored(cycle: Cycle, knots: list[np.ndarray] | None, top_k: int) -> tuple[np.ndarray, ...]:
    """Depths, scores and acceptance of the nodes that a frontier of `top_k` reaches, best first; reach by level.

    Reach is the summed acceptance probability of a level's frontier, what `TreeConfig.least_reach` looks at.
    """
    steps = np.array(cycle.log_probs)
    ranks = np.array(cycle.ranks)
    if knots is not None:
        steps = np.where(ranks == 0, np.interp(steps, knots[0], knots[1]), np.interp(steps, knots[0], knots[2]))
    depths, scores = np.zeros(len(steps), int), np.zeros(len(steps))
    for node, parent in enumerate(cycle.parents):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        scores[node] = steps[node] + (0 if parent < 0 else scores[parent])
    reached, expanded, reach = np.zeros(len(steps), bool), {-1}, []
    parents = np.array(cycle.parents)
    for level in range(1, depths.max(initial=0) + 1):
        members = [n for n in np.flatnonzero((depths == level) & (ranks < top_k)) if parents[n] in expanded]
        reached[members] = True
        frontier = sorted(members, key=lambda n: -scores[n])[:top_k]
        expanded = set(frontier)
        reach.append(np.exp(scores[frontier]).sum())
    order = [n for n in np.argsort(-scores, kind="stable") if reached[n]]
    return depths[order], scores[order], np.array(cycle.accepted, float)[order], np.array([*reach, *[0.0] * WIDE.depth])


def choose(cycles: Sequence[Cycle], latency: Latency, *, stopping: bool = True, rows: int = 1) -> Choice:
    """The tree with the most tokens per second on these cycles.

    Shape first, then the stopping rules, then the shape again.

    Args:
        stopping: whether a cycle may draft less than the whole tree, which waits for the device at every level.
        rows: sequences of the batch.
    """
    confidence = fit_confidence(cycles)
    replays = {top_k: Replay(cycles, confidence, top_k) for top_k in sorted(latency.level) if top_k <= WIDE.top_k}
    base = TreeConfig(2, 1, 1, confidence=confidence)

    def best_shape(start: TreeConfig) -> tuple[float, TreeConfig]:
        found = []
        for top_k, replay in replays.items():
            for depth in range(1, WIDE.depth + 1):
                tree = replace(start, depth=depth, top_k=top_k)
                rates = replay.rate(tree, latency, NODES, rows)
                at = int(rates.argmax())
                found.append((float(rates[at]), replace(tree, total_tokens=NODES[at])))
        return max(found, key=lambda each: each[0])

    rate, tree = best_shape(base)
    if stopping:
        candidates = [replace(base, depth=WIDE.depth, total_tokens=max(NODES), top_k=top_k, least_reach=reach,
                              least_probability=p) for top_k in replays for reach in REACHES for p in PROBABILITIES]
        start = max(candidates, key=lambda c: replays[c.top_k].rate(c, latency, rows=rows)[0])
        rate, tree = max((rate, tree), best_shape(start), key=lambda each: each[0])
    plain = latency.plain_cycle(rows)
    log.info("tree for %d logged cycles in batches of %d: %s, %.1f tokens/s expected, %.1f plainly", len(cycles), rows,
             describe(tree), rows * rate, rows / plain)
    return Choice(tree if rate * plain > 1 else None, rate, cost_of(tree, latency, rows))


def cost_of(tree: TreeConfig, latency: Latency, rows: int) -> Callable[[int, int], float]:
    """Of cycles of a batch with such a tree, by nodes and levels, in cycles without drafting: see `Choice`."""
    plain = latency.plain_cycle(rows)
    return lambda nodes, levels: latency.cycle(nodes, levels, tree.top_k, rows) / plain


def describe(tree: TreeConfig) -> str:
    """A tree without its confidence's numbers."""
    shape = f"{tree.total_tokens} nodes, depth {tree.depth}, top_k {tree.top_k}"
    stops = f", least_reach {tree.least_reach:g}, least_probability {tree.least_probability:g}"
    return shape + (stops if tree.least_reach or tree.least_probability else "")


# On disk -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeLog:
    """Logged cycles of a rule at a temperature."""

    rule: str  # repr
    temperature: float
    cycles: list[Cycle]


def read_logs(head: str | Path) -> list[TreeLog]:
    """Those stored beside a head, in a directory or hub repository; none where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    def build(entry: dict) -> TreeLog:
        if not entry["cycles"]:
            raise ValueError("a log without cycles")
        return TreeLog(entry["rule"], float(entry["temperature"]), [_unpacked(*each) for each in entry["cycles"]])

    return read_entries(fetch(str(head), FILE), "logs", build, "eagle-fsd tune")


def store_log(head: str | Path, found: TreeLog) -> Path:
    """Add one to those beside a head, in place of one for the same rule and temperature."""
    kept = [entry for entry in read_logs(head) if (entry.rule, entry.temperature) != (found.rule, found.temperature)]
    return write_entries(Path(head) / FILE, "logs", [
        {"rule": entry.rule, "temperature": entry.temperature, "cycles": [_packed(cycle) for cycle in entry.cycles]}
        for entry in [*kept, found]])


def _packed(cycle: Cycle) -> list:
    return [cycle.parents, cycle.ranks, [round(value, 2) for value in cycle.log_probs],
            [node for node, taken in enumerate(cycle.accepted) if taken]]


def _unpacked(parents: list[int], ranks: list[int], log_probs: list[float], taken: list[int]) -> Cycle:
    count = len(parents)
    if not 0 < count == len(ranks) == len(log_probs) or not all(-1 <= p < node for node, p in enumerate(parents)):
        raise ValueError("a cycle needs as many parents, ranks and log-probabilities, and parents before children")
    if not all(map(math.isfinite, log_probs)):
        raise ValueError("log-probabilities must be finite")
    return Cycle(parents, ranks, log_probs, [node in taken for node in range(count)])


class AutoTree:
    """Chooses the tree of a request, from the logs beside a head and this machine's latency.

    Args:
        default: the tree where there are no logs.
        single: latency of single prompts where they run otherwise, as CUDA graphs.
    """

    def __init__(
        self, logs: Sequence[TreeLog], latency: Latency, *, stopping: bool, default: TreeConfig = CPU_TREE,
        single: Latency | None = None,
    ) -> None:
        self.logs, self.latency, self.stopping, self.default = logs, latency, stopping, default
        self.single = single or latency
        self._chosen: dict[tuple[int, int], Choice] = {}

    def of(self, rule: Rule, temperature: float, rows: int = 1) -> Choice:
        """For a rule at a temperature: greedy logs for greedy decoding, of those at the nearest temperature its own,
        else that of `exact` (which accepts least), else any. A batch gets that of the next power of two."""
        ours, rows = repr(rule), 1 << (rows - 1).bit_length()
        latency = self.single if rows == 1 else self.latency
        if not self.logs:
            return Choice(self.default, cost=cost_of(self.default, latency, rows))

        def distance(entry: TreeLog) -> tuple:
            return ((entry.temperature == 0) != (temperature == 0), abs(entry.temperature - temperature),
                    entry.rule != ours, not entry.rule.startswith("Exact"))

        nearest = min(range(len(self.logs)), key=lambda number: distance(self.logs[number]))
        if (nearest, rows) not in self._chosen:
            cycles = self.logs[nearest].cycles
            self._chosen[nearest, rows] = choose(cycles, latency, stopping=self.stopping, rows=rows)
        return self._chosen[nearest, rows]
