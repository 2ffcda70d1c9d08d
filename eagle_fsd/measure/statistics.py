"""Bounds of what is lost, one-sided, and tests in sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from scipy.optimize import brentq

CONFIDENCE = 0.95  # one-sided, of every promise about quality
LEAST_MARGIN = 1e-12  # margins are looked for between this and 1 minus this


def fewest_answers(margin: float, confidence: float = CONFIDENCE) -> int:
    """How many answers are needed to tell, if not one of them is lost, that the loss is at most `margin`.

    From (1 - margin)^n <= 1 - confidence, which below a few hundred asks for more than the score test.
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-margin))


def drop_score(lost: float, gained: float, count: int, margin: float) -> float:
    """How many standard errors the drop lies above `margin` (Tango, Stat. Med. 17, 1998); falls with the margin."""
    # Maximum-likelihood rate of `gained` where the drop is exactly the margin.
    a, b, c = 2 * count, (2 * count - lost + gained) * margin - lost - gained, -gained * margin * (1 - margin)
    rate = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    spread = math.sqrt(count * (2 * rate + margin * (1 - margin)))
    return (lost - gained - count * margin) / spread


def drop_is_within(lost: float, gained: float, count: int, margin: float, confidence: float = CONFIDENCE) -> bool:
    """Whether paired answers show that accuracy fell by at most `margin` (score test).

    Args:
        lost: answers that are right losslessly and wrong with the rule. gained: the reverse. count: all pairs.
            lost and gained may be fractions: means over seeds of the same questions.
    """
    if count < 1 or not 0 < margin < 1:
        raise ValueError(f"count must be at least 1 and margin in (0, 1), got {count} and {margin}")
    return bool(drop_score(lost, gained, count, margin) <= -stats.norm.ppf(confidence))


def drop_bound(lost: float, gained: float, count: int, confidence: float = CONFIDENCE) -> float:
    """Upper bound of the accuracy drop: the smallest margin that `drop_is_within` accepts; 1 where it accepts none."""
    if drop_is_within(lost, gained, count, LEAST_MARGIN, confidence):
        return 0.0
    if not drop_is_within(lost, gained, count, 1 - LEAST_MARGIN, confidence):
        return 1.0
    wanted = -stats.norm.ppf(confidence)
    return brentq(lambda margin: drop_score(lost, gained, count, margin) - wanted, LEAST_MARGIN, 1 - LEAST_MARGIN)


def mean_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Upper bound of a mean by Student's t."""
    if len(values) < 2:
        return math.inf
    return float(np.mean(values) + stats.t.ppf(confidence, len(values) - 1) * stats.sem(values))


def fixed_sequence(settings: Sequence[str], passes: Callable[[str], bool]) -> list[str]:
    """The settings that pass, from the safest on, up to the first that does not.

    Testing in an order fixed beforehand and stopping at the first failure keeps the error of the whole sequence at that
    of one test (Maurer, Hothorn and Lehmacher, 1995).
    """
    passed = []
    for setting in settings:
        if not passes(setting):
            break
        passed.append(setting)
    return passed
