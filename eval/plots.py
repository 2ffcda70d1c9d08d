"""Plots of the evaluation commands; measure/records.py has the plot of a comparison of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.measure.records import save_plot, whiskers


def plot_speeds(rows: Mapping[str, Sequence[Mapping]], path: Path) -> None:
    """Plot the speed of each method relative to the first, as bars by category.

    Args:
        rows: rows of `eval.benchmark` or `eval.mt_bench`, by category.
    """
    categories = list(rows)[::-1]  # the first at the top
    baseline, *names = [row["method"] for row in rows[categories[0]]]
    height = 0.8 / len(names)

    def draw(axes: Any) -> None:
        for number, name in enumerate(names):
            shown = [next(row for row in rows[category] if row["method"] == name) for category in categories]
            reach = zip(*(whiskers(row["speedup"], row["speedup_interval"]) for row in shown), strict=True)
            places = [at + 0.4 - height * (number + 0.5) for at in range(len(categories))]
            axes.barh(places, [row["speedup"] for row in shown], height, label=name, xerr=list(reach),
                      error_kw={"elinewidth": 0.7, "ecolor": "0.35"})
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(categories)), categories)
        axes.set_xlabel(f"tokens per second, relative to {baseline}")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    save_plot(path, 8, 1.4 + 0.16 * len(categories) * (len(names) + 1), draw)


def plot_forwards(rows: Sequence[Mapping], path: Path) -> None:
    """Plot milliseconds over the number of nodes, a line for each part with several numbers of nodes. The programs of
    captured cycles are left out.

    Args:
        rows: rows of `eval.forwards`.
    """
    def draw(axes: Any) -> None:
        for part in dict.fromkeys(row["part"] for row in rows):
            line = sorted((row for row in rows if row["part"] == part), key=lambda row: row["nodes"])
            program = part.startswith("captured ") and not part.startswith("captured cycle")
            if len(line) > 1 and not program:
                axes.plot([row["nodes"] for row in line], [row["ms"] for row in line], marker="o", label=part)
        axes.set(xlabel="nodes", ylabel="milliseconds", ylim=(0, None))
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    save_plot(path, 10, 4.5, draw)
