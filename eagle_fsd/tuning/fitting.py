"""How likely a draft probability is to be accepted, fitted to logged cycles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..trees.config import Confidence
from .logs import LoggedCycle

BINS = 24
LEAST_EDGES = 200  # to fit a confidence to



def fit_confidence(cycles: Sequence[LoggedCycle]) -> Confidence | None:
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
