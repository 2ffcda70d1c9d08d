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
    reach += [0.0] * LOGGED_TREE.depth
    return depths[order], scores[order], np.array(cycle.accepted, float)[order], np.array(reach)
