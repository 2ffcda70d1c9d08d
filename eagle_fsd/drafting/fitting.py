"""How likely a draft probability is to be accepted, fitted to logged cycles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from ..drafting.config import Confidence
from .logs import LoggedCycle

BINS = 24
LEAST_EDGES = 200  # to fit a confidence to


def fit_confidence(cycles: Sequence[LoggedCycle]) -> Confidence | None:
    """How often a child was accepted behind an accepted parent, by the draft's probability; None from too few.

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
        curves.append(_isotonic(np.array([p for p, _ in chosen]), np.array([t for _, t in chosen], float)))
    knots = np.unique(np.concatenate([x for x, _ in curves]).round(4))
    first, others = (np.maximum.accumulate(np.minimum(0.0, np.interp(knots, x, y))) for x, y in curves)
    level = (np.diff(first) == 0) & (np.diff(others) == 0)
    needed = ~(np.concatenate([[False], level]) & np.concatenate([level, [False]]))  # not inside a flat part
    return Confidence(*(tuple(np.round(values[needed], 4).tolist()) for values in (knots, first, others)))


def _isotonic(log_probs: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and log rates, not descending; every bin counts half an acceptance and half a refusal more than it saw."""
    parts = np.array_split(log_probs, BINS)
    accepted = np.array([part.sum() for part in np.array_split(taken, BINS)]) + 0.5
    seen = np.array([len(part) for part in parts]) + 1.0
    return np.array([part.mean() for part in parts]), np.log(isotonic_regression(accepted / seen, weights=seen).x)
