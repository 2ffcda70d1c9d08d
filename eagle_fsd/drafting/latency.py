"""The time of a decode cycle, by the size of its tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Latency:
    """Seconds of a decode cycle, interpolated linearly between measurements.

    Args:
        base: of a cycle that drafts one level, by nodes verified. level: of each further level, by top_k.
        plain: of a cycle without drafting.
        row, plain_row: of each further row of a batch, beyond the time of its nodes: rows do not share keys and values.
    """

    base: Mapping[int, float]
    level: Mapping[int, float]
    plain: float
    row: float = 0.0
    plain_row: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> Latency:
        """The inverse of `json.dumps(asdict(latency))`.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: any other text.
        """
        stored = json.loads(text)
        base, level = ({int(at): float(value) for at, value in stored[name].items()} for name in ("base", "level"))
        plain, row, plain_row = (float(stored[name]) for name in ("plain", "row", "plain_row"))
        times = [*base.values(), *level.values(), plain, row, plain_row]
        if 1 not in base or not level or not plain > 0 or not all(time >= 0 for time in times):
            raise ValueError("these cannot be measured times")
        return cls(base, level, plain, row, plain_row)

    def cycle(self, nodes: ArrayLike, levels: ArrayLike, top_k: int, rows: int = 1) -> np.ndarray | float:
        """Seconds of a cycle that drafts `levels` (at least 1) and verifies `nodes` in each row.

        A further row costs as much as its nodes, and `row`.
        """
        further = np.subtract(levels, 1) * self.level_of(top_k * rows)
        return between(self.base, np.multiply(nodes, rows)) + further + (rows - 1) * self.row

    def level_of(self, nodes: int) -> float:
        """Seconds of a further level with this many nodes, summed over rows."""
        return float(between(self.level, nodes))

    def relative(self, top_k: int, rows: int, nodes: int, levels: int) -> float:
        """The time of a cycle, in cycles without drafting; `levels` 0: the drafter is not used."""
        seconds = self.cycle(nodes, levels, top_k, rows) if levels else self.undrafted_cycle(nodes, rows)
        return float(seconds) / self.plain_cycle(rows)

    def plain_cycle(self, rows: int = 1) -> float:
        """Seconds of a cycle without drafting."""
        return self.undrafted_cycle(1, rows)

    def undrafted_cycle(self, nodes: int, rows: int = 1) -> float:
        """Seconds of a cycle that verifies `nodes` in each row, none of them drafted by the drafter."""
        verified = between(self.base, nodes * rows) - between(self.base, 1)
        return float(self.plain + verified + (rows - 1) * self.plain_row)


def between(measured: Mapping[int, float], at: ArrayLike) -> np.ndarray | float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    values = [measured[point] for point in points]
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2]) if len(points) > 1 else 0.0
    return np.interp(at, points, values) + np.maximum(0, np.subtract(at, points[-1])) * slope
