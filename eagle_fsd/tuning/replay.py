"""Logged cycles as trees of other shapes would have drafted them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from ..trees.config import Confidence, TreeConfig
from .latency import Latency
from .logs import LOGGED_TREE, LoggedCycle


class Replay:
    """The logged cycles as trees of other shapes would have drafted them, with one frontier width."""

    def __init__(self, cycles: Sequence[LoggedCycle], confidence: Confidence | None, top_k: int) -> None:
        knots = None if confidence is None else [np.array(v) for v in asdict(confidence).values()]
        self.top_k = top_k
        self.cycles = [_scored(cycle, knots, top_k) for cycle in cycles]

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
        tokens, verified, levels = [], [], []
        least = math.log(tree.least_probability) if tree.least_probability else -math.inf
        for group in self._groups(rows):
            reach = np.mean([cycle[3] for cycle in group], 0)
            weak = np.flatnonzero(reach[: tree.depth] < tree.least_reach) if tree.least_reach else ()
            depth = int(weak[0]) + 1 if len(weak) else tree.depth  # levels that were scored
            drafted = not (len(weak) and weak[0] == 0)
            inside = [cycle[0] <= depth if drafted else np.zeros(len(cycle[0]), bool) for cycle in group]
            likely = [(cycle[1][own] >= least).sum() for cycle, own in zip(group, inside, strict=True)]
            shared = math.ceil(np.mean(likely)) if tree.least_probability else max(likely)
            most = np.minimum(counts - 1, shared)
            taken = [np.concatenate([[0], cycle[2][own].cumsum()])  # in the order of scores
                     for cycle, own in zip(group, inside, strict=True)]
            tokens.append(np.mean([1 + own[np.minimum(most, len(own) - 1)] for own in taken], 0))
            verified.append(1 + most)
            levels.append(depth if drafted else 1)
        return np.array(tokens), np.array(verified), np.array(levels)

    def _groups(self, rows: int) -> list[list[tuple[np.ndarray, ...]]]:
        """The cycles, each in one group of so many."""
        if rows == 1:
            return [[cycle] for cycle in self.cycles]
        order = np.random.default_rng(0).permutation(len(self.cycles))
        each = min(rows, len(order))
        return [[self.cycles[at] for at in order[start : start + each]]
                for start in range(0, len(order) - each + 1, each)]


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
