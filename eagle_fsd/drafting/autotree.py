"""tree="auto": the tree that emits the most tokens per second with this pair, setting and machine.

Logged cycles say how likely a draft probability is to be accepted (`fit_confidence`) and how many tokens any smaller
tree would have emitted there (`Replay`); `Latency` says how long it would have taken. `choose` tries shapes and
stopping rules on these logs, without generating.

C logged cycles, N their nodes, S numbers of nodes that are tried, R rows of a batch, G batches made of the cycles.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from .config import CPU_TREE, Choice, Confidence, TreeConfig
from .latency import Latency
from .logs import LOGGED_TREE, LoggedCycle, Setting, TreeLog

log = logging.getLogger(__name__)
TRIED_NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
REACHES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
PROBABILITIES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)
WORTH = 1.1  # what a batch has to gain: where drafting fails after all, every row of it has to catch up to try again
BINS = 24  # of a confidence
LEAST_EDGES = 200  # to fit a confidence to


def fit_confidence(cycles: Sequence[LoggedCycle]) -> Confidence | None:
    """How often a child was accepted after an accepted parent, by the draft's probability; None from too few.

    Isotonic regression over bins of equally many edges, apart for best and other children.
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
        curves.append(_curve(*np.array(chosen, float).T))
    knots = np.unique(np.concatenate([x for x, _ in curves]).round(4))
    first, others = (np.maximum.accumulate(np.minimum(0.0, np.interp(knots, x, y))) for x, y in curves)
    level = (np.diff(first) == 0) & (np.diff(others) == 0)
    needed = ~(np.concatenate([[False], level]) & np.concatenate([level, [False]]))  # not inside a flat part
    return Confidence(*(tuple(np.round(values[needed], 4).tolist()) for values in (knots, first, others)))


def _curve(log_probs: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and log rates, not descending; every bin counts half an acceptance and half a refusal more than it saw."""
    parts = np.array_split(log_probs, BINS)
    accepted = np.array([part.sum() for part in np.array_split(taken, BINS)]) + 0.5
    seen = np.array([len(part) for part in parts]) + 1.0
    return np.array([part.mean() for part in parts]), np.log(_isotonic(accepted, seen))


def _isotonic(accepted: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Rates that do not descend, closest to accepted / seen: neighbours that descend are pooled, until none do."""
    pools: list[list[float]] = []  # accepted, seen, bins
    for pool in zip(accepted, seen, np.ones(len(seen)), strict=True):
        pools.append(list(pool))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] >= pools[-1][0] * pools[-2][1]:
            last = pools.pop()
            pools[-1] = [mine + its for mine, its in zip(pools[-1], last, strict=True)]
    return np.concatenate([np.full(int(bins), taken / of) for taken, of, bins in pools])


class Replay:
    """The logged cycles as trees of other shapes would have drafted them, with one frontier width."""

    def __init__(self, cycles: Sequence[LoggedCycle], confidence: Confidence | None, top_k: int) -> None:
        self.top_k = top_k
        scored = [_scored(cycle, confidence, top_k) for cycle in cycles]
        width = max((len(depths) for depths, *_ in scored), default=0)
        # [C, N], best nodes first, and [C, levels]; nodes that a cycle lacks lie below every tree.
        self.depths, self.scores, self.accepted = (
            np.array([np.pad(cycle[part], (0, width - len(cycle[part])), constant_values=lacking) for cycle in scored])
            for part, lacking in enumerate((np.iinfo(int).max, -math.inf, 0.0)))
        self.reach = np.array([cycle[3] for cycle in scored])

    def rate(self, tree: TreeConfig, latency: Latency, nodes: Sequence[int] = (), rows: int = 1) -> np.ndarray:
        """[S] tokens per second and row, for each number of nodes (default: the tree's own)."""
        tokens, verified, levels = self.run(tree, np.array(nodes or [tree.total_tokens]), rows)
        return tokens.sum(0) / latency.cycle(verified, levels[:, None], self.top_k, rows).sum(0)

    def run(self, tree: TreeConfig, counts: np.ndarray, rows: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a row and its verified nodes [G, S], and drafted levels [G].

        Several rows are cycles drawn at random: as in `draft_tree`, the stopping rules go by their mean.
        """
        cycles = len(self.reach)
        together = min(rows, cycles)
        order = np.arange(cycles) if rows == 1 else np.random.default_rng(0).permutation(cycles)
        groups = order[: cycles // together * together].reshape(-1, together)  # [G, R]
        levels = np.full(len(groups), tree.depth)  # that were scored
        drafted = np.ones(len(groups), bool)
        if tree.least_reach:
            weak = self.reach[groups].mean(1)[:, : tree.depth] < tree.least_reach
            levels = np.where(weak.any(1), weak.argmax(1) + 1, tree.depth)
            drafted = ~weak[:, 0]
        inside = (self.depths[groups] <= levels[:, None, None]) & drafted[:, None, None]  # [G, R, N]
        if tree.least_probability:
            likely = inside & (self.scores[groups] >= math.log(tree.least_probability))
            shared = np.ceil(likely.sum(-1).mean(1)).astype(int)
        else:
            shared = inside.sum(-1).max(1)
        most = np.minimum(counts - 1, shared[:, None])  # [G, S]
        first = np.argsort(~inside, axis=-1, kind="stable")  # the nodes inside, in the order of scores
        taken = np.take_along_axis(np.where(inside, self.accepted[groups], 0), first, -1).cumsum(-1)
        taken = np.concatenate([np.zeros_like(taken[..., :1]), taken], -1)  # [G, R, 1 + N], by number of nodes
        tokens = 1 + np.take_along_axis(taken, most[:, None].repeat(groups.shape[1], 1), -1).mean(1)
        return tokens, 1 + most, np.where(drafted, levels, 1)


def _scored(cycle: LoggedCycle, confidence: Confidence | None, top_k: int) -> tuple[np.ndarray, ...]:
    """Depths, scores and acceptance of the nodes that a frontier of `top_k` reaches, best first; reach by level.

    Reach is the summed acceptance probability of a level's frontier, what `TreeConfig.least_reach` looks at.
    """
    parents, ranks, steps = map(np.array, (cycle.parents, cycle.ranks, cycle.log_probs))
    if confidence is not None:
        best, other = (np.interp(steps, confidence.knots, curve) for curve in (confidence.first, confidence.others))
        steps = np.where(ranks == 0, best, other)
    depths, scores = np.zeros(len(steps) + 1, int), np.zeros(len(steps) + 1)  # the root's are the last: parent -1
    for node, parent in enumerate(parents):
        depths[node], scores[node] = depths[parent] + 1, scores[parent] + steps[node]
    depths, scores = depths[:-1], scores[:-1]
    reached, expanded, reach = np.zeros(len(steps), bool), np.zeros(len(steps) + 1, bool), []
    expanded[-1] = True
    for level in range(1, LOGGED_TREE.depth + 1):
        members = np.flatnonzero((depths == level) & (ranks < top_k) & expanded[parents])
        frontier = members[np.argsort(-scores[members], kind="stable")][:top_k]
        reached[members] = expanded[frontier] = True
        reach.append(np.exp(scores[frontier]).sum())
    order = np.argsort(-scores, kind="stable")
    order = order[reached[order]]
    return depths[order], scores[order], np.array(cycle.accepted, float)[order], np.array(reach)


def choose(cycles: Sequence[LoggedCycle], latency: Latency, *, stopping: bool = True, rows: int = 1) -> Choice:
    """The tree with the most tokens per second on these cycles.

    Shape first, then the stopping rules, then the shape again.

    Args:
        stopping: whether a cycle may draft less than the whole tree, which waits for the device at every level.
        rows: sequences of the batch.
    """
    confidence = fit_confidence(cycles)
    base = TreeConfig(2, 1, 1, confidence=confidence)
    replays = {k: Replay(cycles, confidence, k) for k in sorted(latency.level) if k <= LOGGED_TREE.top_k}
    rate, tree = _best_shape(base, replays, latency, rows)
    if stopping:
        whole = replace(base, depth=LOGGED_TREE.depth, total_tokens=max(TRIED_NODES))
        candidates = [replace(whole, top_k=top_k, least_reach=reach, least_probability=p)
                      for top_k in replays for reach in REACHES for p in PROBABILITIES]
        start = max(candidates, key=lambda c: replays[c.top_k].rate(c, latency, rows=rows)[0])
        rate, tree = max((rate, tree), _best_shape(start, replays, latency, rows), key=lambda each: each[0])
    plain = latency.plain_cycle(rows)
    log.info("draft tree for %d request%s at once: up to %d tokens, %d levels; %.1f tokens/s expected, %.1f without "
             "drafting", rows, "s" * (rows > 1), tree.total_tokens, tree.depth, rows * rate, rows / plain)
    worth = 1.0 if rows == 1 else WORTH
    return Choice(tree if rate * plain > worth else None, rate, partial(latency.relative, tree.top_k, rows))


def _best_shape(
    start: TreeConfig, replays: Mapping[int, Replay], latency: Latency, rows: int
) -> tuple[float, TreeConfig]:
    """The best rate of such a tree with any nodes, depth and top_k."""
    found = []
    for top_k, replay in replays.items():
        for depth in range(1, LOGGED_TREE.depth + 1):
            tree = replace(start, depth=depth, top_k=top_k)
            rates = replay.rate(tree, latency, TRIED_NODES, rows)
            at = int(rates.argmax())
            found.append((float(rates[at]), replace(tree, total_tokens=TRIED_NODES[at])))
    return max(found, key=lambda each: each[0])


def describe_tree(tree: TreeConfig) -> str:
    """A tree without its confidence's numbers."""
    shape = f"{tree.total_tokens} nodes, depth {tree.depth}, top_k {tree.top_k}"
    stops = f", least_reach {tree.least_reach:g}, least_probability {tree.least_probability:g}"
    return shape + (stops if tree.least_reach or tree.least_probability else "")


class AutoTree:
    """Chooses the tree of a request, from the logs beside a head and this machine's latency.

    Args:
        default: the tree where there are no logs; None: there is no head, and nothing but copies is drafted.
    """

    def __init__(
        self, logs: Sequence[TreeLog], latency: Latency, *, stopping: bool, default: TreeConfig | None = CPU_TREE
    ) -> None:
        self.logs, self.latency, self.stopping, self.default = logs, latency, stopping, default
        self._chosen: dict[tuple[int, int], Choice] = {}

    @property
    def largest(self) -> list[TreeConfig]:
        """No tree that it chooses has more nodes, levels or nodes of a level than the largest of these."""
        return [self.default or LOGGED_TREE, LOGGED_TREE]

    def of(self, setting: Setting, rows: int = 1) -> Choice:
        """Greedy logs for greedy decoding, of those at the nearest temperature the setting's own, else that of `exact`
        (which accepts least), else any. A batch gets that of the next power of two."""
        rows = 1 << (rows - 1).bit_length()
        if not self.logs:
            top_k = 1 if self.default is None else self.default.top_k
            return Choice(self.default, cost=partial(self.latency.relative, top_k, rows))

        def distance(number: int) -> tuple:
            own = self.logs[number].setting
            return ((own.temperature == 0) != (setting.temperature == 0), abs(own.temperature - setting.temperature),
                    own[:3] != setting[:3], own.rule != "exact")

        nearest = min(range(len(self.logs)), key=distance)
        if (nearest, rows) not in self._chosen:
            cycles = self.logs[nearest].cycles
            self._chosen[nearest, rows] = choose(cycles, self.latency, stopping=self.stopping, rows=rows)
        return self._chosen[nearest, rows]
