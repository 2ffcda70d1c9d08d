"""Pictures of a sweep, and of methods by category."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from eagle_fsd.measure.experiment import EXACT
from eval.report.sweeps import MARGIN, by_rule


def plot_sweep(record: dict, out: Path) -> list[Path]:
    """Two pictures beside `out`: the frontier, and tau and answer length against each rule's threshold.

    Raises:
        ImportError: matplotlib is not installed (`pip install eagle_fsd[eval]`).
    """
    import matplotlib

    matplotlib.use("Agg")
    rows = [row for row in record["rows"] if "time_of_exact" in row]
    paths = []
    if rows:
        paths.append(_frontier(record, rows, out.with_name(out.name + "-frontier.png")))
    paths.append(_dials(record, out.with_name(out.name + "-dials.png")))
    return paths


def plot_speeds(rows: dict[str, list[dict]], path: Path) -> Path:
    """Times the speed of the first method, by category: a bar for each other one but plain decoding.

    Args:
        rows: of `eval.benchmark`, by category.

    Raises:
        ImportError: matplotlib is not installed (`pip install eagle_fsd[eval]`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    categories = list(rows)[::-1]  # the first at the top
    baseline, *names = [row["method"] for row in rows[categories[0]] if row["method"] != "plain"]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.16 * len(categories) * (len(names) + 1)), layout="constrained")
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [next(row for row in rows[category] if row["method"] == name) for category in categories]
        whiskers = [[max(0.0, sign * (row["speedup_interval"][end] - row["speedup"])) for row in found]
                    for end, sign in ((0, -1), (1, 1))]
        places = [at + 0.4 - height * (number + 0.5) for at in range(len(categories))]
        axes.barh(places, [row["speedup"] for row in found], height, xerr=whiskers, label=name,
                  error_kw={"elinewidth": 0.7, "ecolor": "0.35"})
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(categories)), categories)
    axes.set_xlabel(f"tokens per second, times those of {baseline}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _title(record: dict) -> str:
    sampling = "greedy" if record["temperature"] == 0 else f"temperature {record['temperature']:g}"
    seeds = f", {len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else ""
    return f"{record['questions']} tasks, {sampling}{seeds}"


def _frontier(record: dict, rows: list[dict], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.2), layout="constrained")
    colours = pyplot.get_cmap("tab10")
    groups = by_rule(rows)
    for number, (rule, found) in enumerate(groups.items()):
        axes.errorbar(
            [row["time_of_exact"] for row in found], [100 * row["accuracy"] for row in found],
            xerr=_whiskers(found, "time_of_exact", "time_of_exact_interval", 1),
            yerr=_whiskers(found, "drop", "drop_interval", 100), color=colours(number % 10), label=rule, marker="o",
            markersize=4, linewidth=1, elinewidth=0.6, alpha=0.8,
        )
        for row in found:
            axes.annotate(f"{row['threshold']:g}", (row["time_of_exact"], 100 * row["accuracy"]), fontsize=6,
                          xytext=(3, 3), textcoords="offset points", color=colours(number % 10))
    lossless = [row for row in rows if "threshold" not in row]
    for row, marker in zip(lossless, cycle("*^vsDP<>Xhd"), strict=False):
        axes.plot(row["time_of_exact"], 100 * row["accuracy"], color="black", linestyle="none", marker=marker,
                  markersize=12 if marker == "*" else 6, label=row["setting"], zorder=5)
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["time_of_exact"])
    axes.plot([row["time_of_exact"] for row in front], [100 * row["accuracy"] for row in front], color="0.4",
              linestyle="--", linewidth=1, label="Pareto front", zorder=1)
    exact = next(row for row in rows if row["setting"] == EXACT)
    axes.axhspan(100 * (exact["accuracy"] - MARGIN), 100 * exact["accuracy"], color="0.92", zorder=0,
                 label="at most one point below exact")
    axes.set(xlabel="time per finished answer, relative to exact", ylabel="accuracy (%)", title=_title(record))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _whiskers(rows: list[dict], value: str, interval: str, scale: float) -> list[list[float]]:
    """Distances from the value to both ends of its interval; a drop's upper end is the accuracy's lower one."""
    below = [scale * max(0.0, row[value] - row[interval][0]) for row in rows]
    above = [scale * max(0.0, row[interval][1] - row[value]) for row in rows]
    return [above, below] if value == "drop" else [below, above]


def _dials(record: dict, path: Path) -> Path:
    from matplotlib import pyplot

    groups = by_rule(record["rows"])
    exact = next(row for row in record["rows"] if row["setting"] == EXACT)
    figure, panels = pyplot.subplots(
        2, len(groups), figsize=(max(4.0, 2.3 * len(groups)), 5), sharey="row", layout="constrained", squeeze=False)
    for column, (rule, found) in enumerate(groups.items()):
        for line, (value, label) in enumerate({"tau": "tau (tokens per forward)",
                                               "tokens_per_answer": "tokens per answer"}.items()):
            axes = panels[line][column]
            axes.plot([row["threshold"] for row in found], [row[value] for row in found], "o-", markersize=4)
            axes.axhline(exact[value], color="0.5", linestyle="--", linewidth=1)
            axes.grid(alpha=0.3)
            if column == 0:
                axes.set_ylabel(label)
        panels[0][column].set_title(rule, fontsize=10)
        panels[1][column].set_xlabel("threshold")
    figure.suptitle(f"{_title(record)}; dashed: exact", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
