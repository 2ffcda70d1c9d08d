"""Observe cycles with a wide tree and fit a head's curves to them, by which `tree="auto"` sizes its cycles.

Each node of a cycle has the draft's log-probability given its parent (for sampled rows, after `Coupling.perturb`), its
rank among its siblings, and whether it was accepted. K = `WIDTH` children of a node and nodes of a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..api import decode_requests
from ..drafting.sizing import PRICES, WIDE_TREE, WIDTH, Curves, HeadCurves
from ..drafting.tree import DraftTree
from ..inputs.prompts import encode_prompts
from ..inputs.requests import make_requests
from ..loading.pair import EagleModel
from ..options.generate import GenerateOptions
from ..utils.progress import Progress

BINS = 12  # of log-probabilities
REACHES = 6  # bins of reaches
LEAST_EDGES = 200  # fewer do not determine a curve
LEAST_REACH = 0.02  # levels below a smaller reach are not counted


class Cycle(NamedTuple):
    """A cycle's wide tree without its root: an entry per node, parents first."""

    parents: list[int]  # index of the parent's entry, -1 for the root
    ranks: list[int]  # among the siblings, the best 0
    log_probs: list[float]  # of the step from the parent
    accepted: list[bool]


def fit_curves(model: EagleModel, prompts: Sequence, max_new_tokens: int) -> HeadCurves:
    """Fit curves to greedy and to sampled answers to these prompts.

    Raises:
        ValueError: a bad prompt, or too few cycles.
    """
    return HeadCurves(*(fit(wide_cycles(model, prompts, max_new_tokens, temperature)) for temperature in (0.0, 1.0)))


def wide_cycles(model: EagleModel, prompts: Sequence, max_new_tokens: int, temperature: float) -> list[Cycle]:
    """The cycles of lossless answers to prompts (texts, chats or token ids), drafted with a wide tree.

    Raises:
        ValueError: a prompt that is too long or otherwise bad, before anything is generated.
    """
    options = GenerateOptions(acceptance="exact", text_drafts="off", temperature=temperature, seed=0, tree=WIDE_TREE,
                              max_new_tokens=max_new_tokens)
    requests = make_requests(model, encode_prompts(list(prompts), model)[0], options)
    cycles: list[Cycle] = []

    def observe(tree: DraftTree, draft_logits: list[Tensor], paths: list[list[int]]) -> None:
        cycles.append(observed(tree, paths[0]))

    for request in Progress(requests, desc=f"cycles at temperature {temperature:g}", unit="prompt"):
        decode_requests(model, [request], observe=observe)
    return cycles


def observed(tree: DraftTree, path: Sequence[int]) -> Cycle:
    """The cycle of a tree of one row, drafted without curves at draft temperature 1.

    Args:
        path: the accepted nodes, the root first.
    """
    (parents,), (scores,) = tree.parents.tolist(), tree.scores.tolist()
    log_probs = [score - scores[parent] for score, parent in zip(scores, parents, strict=True)]
    ranks = [sum(parents[other] == parents[node] and (log_probs[other], -other) > (log_probs[node], -node)
                 for other in range(1, len(parents))) for node in range(1, len(parents))]
    return Cycle([parent - 1 for parent in parents[1:]], ranks, log_probs[1:],
                 [node in path for node in range(1, len(parents))])


def fit(cycles: Sequence[Cycle]) -> Curves:
    """Fit curves to these cycles.

    Raises:
        ValueError: there are too few of them.
    """
    edges = [(rank == 0, log_prob, accepted) for cycle in cycles
             for parent, rank, log_prob, accepted in zip(*cycle, strict=True)
             if rank < WIDTH and (parent < 0 or cycle.accepted[parent])]
    curves = []
    for best in (True, False):
        chosen = sorted((log_prob, accepted) for first, log_prob, accepted in edges if first == best)
        if len(chosen) < LEAST_EDGES:
            raise ValueError(f"{len(cycles)} cycles are too few to fit curves to: give more prompts or longer answers")
        curves.append(_curve(*np.array(chosen, float).T))
    knots = np.unique(np.concatenate([x for x, _ in curves]).round(2))
    first, others = (np.maximum.accumulate(np.minimum(0.0, np.interp(knots, x, y))) for x, y in curves)
    level = (np.diff(first) == 0) & (np.diff(others) == 0)
    needed = ~(np.concatenate([[False], level]) & np.concatenate([level, [False]]))  # not inside a flat part
    lines = tuple(tuple(np.round(values[needed], 3).tolist()) for values in (knots, first, others))
    return Curves(*lines, *_levels(cycles, *lines))


def _curve(log_probs: np.ndarray, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and log rates, not descending; each bin counts half an acceptance and half a rejection more than it saw."""
    parts = np.array_split(log_probs, BINS)
    counts = np.array([part.sum() for part in np.array_split(accepted, BINS)]) + 0.5
    seen = np.array([len(part) for part in parts]) + 1.0
    return np.array([part.mean() for part in parts]), np.log(_isotonic(counts, seen))


def _isotonic(accepted: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Isotonic regression of accepted / seen: neighbours that descend are pooled until none do."""
    pools: list[list[float]] = []  # accepted, seen, bins
    for pool in zip(accepted, seen, np.ones(len(seen)), strict=True):
        pools.append(list(pool))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] >= pools[-1][0] * pools[-2][1]:
            last = pools.pop()
            pools[-1] = [mine + its for mine, its in zip(pools[-1], last, strict=True)]
    return np.concatenate([np.full(int(bins), count / of) for count, of, bins in pools])


def _levels(
    cycles: Sequence[Cycle], knots: Sequence[float], first: Sequence[float], others: Sequence[float]
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Reaches, and the mean worth of a level by reach and price, of frontiers of the K best nodes in these cycles."""
    reaches, worths = [], []
    for cycle in cycles:
        ranks, log_probs = np.array(cycle.ranks), np.array(cycle.log_probs)
        log_probs = np.where(ranks == 0, np.interp(log_probs, knots, first), np.interp(log_probs, knots, others))
        scores: list[float] = []
        for parent, log_prob in zip(cycle.parents, log_probs, strict=True):
            scores.append(log_prob + (0.0 if parent < 0 else scores[parent]))
        frontier, reach = {-1}, 1.0
        for _ in range(WIDE_TREE.depth):
            members = [node for node, parent in enumerate(cycle.parents) if parent in frontier and ranks[node] < WIDTH]
            likely = np.exp([scores[node] for node in members])
            reaches.append(reach)
            worths.append([np.maximum(likely - price, 0).sum() for price in PRICES])
            best = sorted(members, key=lambda node: -scores[node])[:WIDTH]
            frontier, reach = set(best), math.fsum(math.exp(scores[node]) for node in best)
            if reach < LEAST_REACH:
                break
    parts = np.array_split(np.argsort(reaches, kind="stable"), REACHES)
    means = [(np.mean([reaches[at] for at in part]), np.mean([worths[at] for at in part], 0)) for part in parts]
    return (tuple(round(float(reach), 3) for reach, _ in means),
            tuple(tuple(np.round(worth, 3).tolist()) for _, worth in means))
