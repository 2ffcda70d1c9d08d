"""Bootstrap intervals over questions, the same in every table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 2000


def interval(statistic: Callable[..., np.ndarray], *columns: np.ndarray, seed: int = 0) -> list[float]:
    """95% percentile interval of a statistic of questions, which are drawn with replacement.

    Args:
        statistic: of the columns [..., questions] and `axis`, which it takes away.
        columns: one value per question each.

    Returns:
        Both ends; of a single question twice its value.
    """
    if len(columns[0]) < 2:
        return 2 * [float(statistic(*columns, axis=-1))]
    found = bootstrap(columns, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
                      rng=seed).confidence_interval
    return [float(found.low), float(found.high)]


def ratio_interval(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """95% percentile interval of the ratio of two sums over the same questions."""
    return interval(lambda a, b, axis: a.sum(axis) / b.sum(axis), ours, theirs)
