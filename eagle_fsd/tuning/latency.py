"""What a decode cycle costs, by the size of its tree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """Seconds of a decode cycle; linear between what was measured.

    Args:
        base: of a cycle that drafts one level, by nodes verified. level: of each further level, by top_k.
        plain: of a cycle without drafting.
    """

    base: Mapping[int, float]
    level: Mapping[int, float]
    plain: float

    def cycle(self, nodes: float, levels: float, top_k: int, rows: int = 1) -> float:
        """Seconds of a cycle that drafts so many levels (at least 1) and verifies so many nodes for each of the rows.

        Rows count like nodes: what they do not share, keys and values of their prefixes, is little beside the weights.
        """
        return between(self.base, nodes * rows) + (levels - 1) * between(self.level, top_k * rows)

    def plain_cycle(self, rows: int = 1) -> float:
        """Seconds of a cycle without drafting."""
        return self.plain + between(self.base, rows) - between(self.base, 1)


def between(measured: Mapping[int, float], at: float) -> float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    if at <= points[0] or len(points) == 1:
        return measured[points[0]]
    right = min(max(1, bisect_left(points, at)), len(points) - 1)
    low, high = points[right - 1], points[right]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]
