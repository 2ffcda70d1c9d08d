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
        row, plain_row: what each further row of a batch adds to a cycle, beyond what its nodes do: rows have no keys
            and values in common.
    """

    base: Mapping[int, float]
    level: Mapping[int, float]
    plain: float
    row: float = 0.0
    plain_row: float = 0.0

    def cycle(self, nodes: float, levels: float, top_k: int, rows: int = 1) -> float:
        """Seconds of a cycle that drafts so many levels (at least 1) and verifies so many nodes for each of the rows.

        Rows count like nodes, beside what they do not share.
        """
        shared = between(self.base, nodes * rows) + (levels - 1) * between(self.level, top_k * rows)
        return shared + (rows - 1) * self.row

    def plain_cycle(self, rows: int = 1) -> float:
        """Seconds of a cycle without drafting."""
        return self.plain + between(self.base, rows) - between(self.base, 1) + (rows - 1) * self.plain_row


def between(measured: Mapping[int, float], at: float) -> float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    if at <= points[0] or len(points) == 1:
        return measured[points[0]]
    right = min(max(1, bisect_left(points, at)), len(points) - 1)
    low, high = points[right - 1], points[right]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]
