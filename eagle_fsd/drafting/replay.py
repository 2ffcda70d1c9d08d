"""Logged cycles as trees of other shapes would have drafted them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from ..drafting.config import Confidence, TreeConfig
from .latency import Latency
from .logs import LOGGED_TREE, LoggedCycle


class Replay:
    """The logged cycles as trees of other shapes would have drafted them, with one frontier width."""

    def __init__(self, cycles: Sequence[LoggedCycle], confidence: Confidence | None, top_k: int) -> None:
        knots = None if confidence is None else [np.array(v) for v in asdict(confidence).values()]
        self.top_k = top_k
        scored = [_scored(cycle, knots, top_k) for cycle in cycles]
        width = max((len(depths) for depths, *_ in scored), default=0)
        # [C, N], best nodes first, and [C, levels]; nodes that a cycle lacks lie below every tree.
        self.depths, self.scores, self.accepted = (
            np.array([np.pad(cycle[part], (0, width - len(cycle[part])), constant_values=lacking) for cycle in scored])
            for part, lacking in enumerate((np.iinfo(int).max, -math.inf, 0.0)))
        self.reach = np.array([cycle[3] for cycle in scored])

    def rate(self, tree: TreeConfig, latency: Latency, nodes: Sequence[int] = (), rows: int = 1) -> np.ndarray:
        """Tokens per second and row, for each number of nodes (default: the tree's own)."""
        counts = np.array(nodes or [tree.total_tokens])
        flat = np.array([latency.cycle(size, 1, self.top_k, rows) for size in range(max(counts) + 1)])
        level = latency.cycle(1, 2, self.top_k, rows) - flat[1]
        tokens, verified, levels = self.run(tree, counts, rows)
        return tokens.sum(0) / (flat[verified] + level * (levels - 1)[:, None]).sum(0)

    def run(self, tree: TreeConfig, counts: np.ndarray, rows: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a row and its verified nodes [cycles, counts], and drafted levels [cycles].

        Several rows are cycles drawn at random: as in `grow_tree`, the stopping rules go by their mean.
        """
        groups = self._groups(rows)  # [G, R]
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
        most = np.minimum(counts - 1, shared[:, None])  # [G, K]
        first = np.argsort(~inside, axis=-1, kind="stable")  # the nodes inside, in the order of scores
        taken = np.take_along_axis(np.where(inside, self.accepted[groups], 0), first, -1).cumsum(-1)
        taken = np.concatenate([np.zeros_like(taken[..., :1]), taken], -1)  # [G, R, 1 + N], by number of nodes
        tokens = 1 + np.take_along_axis(taken, most[:, None].repeat(groups.shape[1], 1), -1).mean(1)
        return tokens, 1 + most, np.where(drafted, levels, 1)

    def _groups(self, rows: int) -> np.ndarray:
        """[G, R]: the cycles, each in one group of so many."""
        count = len(self.reach)
        if rows == 1:
            return np.arange(count)[:, None]
        each = min(rows, count)
        order = np.random.default_rng(0).permutation(count)
        return order[: count // each * each].reshape(-1, each)


def _scored(cycle: LoggedCycle, knots: list[np.ndarray] | None, top_k: int) -> tuple[np.ndarray, ...]:
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
    reach = np.array(reach + [0.0] * LOGGED_TREE.depth)[: LOGGED_TREE.depth]
    return depths[order], scores[order], np.array(cycle.accepted, float)[order], reach
