"""Bootstrap intervals over questions, the same in every table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000


def interval(count: int, statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> list[float]:
    """95% percentile interval.

    Args:
        count: of questions, which are drawn with replacement.
        statistic: of drawn questions [resamples, count] -> [resamples].
    """
    picks = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    return np.percentile(statistic(picks), [2.5, 97.5]).tolist()
