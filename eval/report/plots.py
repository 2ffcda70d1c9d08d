"""Tables and plots of a sweep."""

from __future__ import annotations

from pathlib import Path

from eagle_fsd.experiments.experiment import EXACT
from eagle_fsd.quality.statistics import fixed_sequence

MARGIN = 0.01  # accuracy that counts as equal: the one-sided 95% bound of the drop is at most this


def pareto(rows: list[dict]) -> list[str]:
    """Settings that no other is both at least as accurate and faster than."""
    timed = [row for row in rows if "time_of_exact" in row]
    return [row["setting"] for row in timed if not any(
        other["accuracy"] >= row["accuracy"] and other["time_of_exact"] <= row["time_of_exact"]
        and (other["accuracy"], -other["time_of_exact"]) != (row["accuracy"], -row["time_of_exact"]) for other in timed
    )]


def harmless(rows: list[dict]) -> list[dict]:
    """Settings that are shown to lose at most MARGIN: each rule's thresholds from the smallest on, up to the first that
    fails, so that the choice among many costs no error (see `eagle_fsd.calibration.fixed_sequence`)."""
    found = []
    for family in by_rule(rows).values():
        bounds = {row["setting"]: row["family_bound"] for row in family}
        passed = fixed_sequence(list(bounds), lambda name, bounds=bounds: bounds[name] <= MARGIN)
        found += [row for row in family if row["setting"] in passed]
    return found


def headline(rows: list[dict]) -> str:
    """Speed at equal accuracy, in a few sentences."""
    fuzzy = [row for row in rows if "threshold" in row and "time_of_exact" in row]
    if not fuzzy:
        return "Nothing was timed."
    equal = [row for row in harmless(rows) if "time_of_exact" in row]
    chosen = min(equal or fuzzy, key=lambda row: row["time_of_exact"])
    low, high = chosen["time_of_exact_interval"]
    time = (f"`{chosen['setting']}` takes {chosen['time_of_exact']:.2f} of `exact`'s time per finished answer "
            f"(95% interval {low:.2f} to {high:.2f}, not corrected for the choice)")
    told = f"its accuracy differs by {0 - 100 * chosen['drop']:+.1f} points, with a loss of at most " \
           f"{100 * chosen['family_bound']:.1f} (one-sided 95% bound)"
    forwards = f"over all answers it takes {forwards_of_exact(chosen, rows):.3f} of `exact`'s forwards of the target"
    start = "At equal accuracy (a loss of at most one point) the fastest setting," if equal else \
        "No setting is shown to lose at most one point of accuracy. The fastest one,"
    text = f"{start} {time}; {forwards}; {told}."
    if "matched" in chosen:
        matched = chosen["matched"]
        text += (f" Lossless decoding of the same log-probability per token (temperature {matched['temperature']:.2f}) "
                 f"takes {matched['time_of_exact']:.2f} at {100 * matched['accuracy']:.1f}% accuracy, against "
                 f"{100 * chosen['accuracy']:.1f}%.")
    return text


def forwards_of_exact(row: dict, rows: list[dict]) -> float:
    """Forwards of the target per answer over lossless decoding's, on all answers: what a few timings cannot blur."""
    exact = next(each for each in rows if each["setting"] == EXACT)
    return row["cycles_per_answer"] / exact["cycles_per_answer"]


def table(rows: list[dict], baselines: list[dict]) -> str:
    """All settings in Markdown. tau = tokens per target forward."""
    lines = [
        "| setting | accuracy | drop (95%) | bound | forwards of exact | time of exact (95%) | s/answer | tokens/s "
        "| vs HF | tau | tokens/answer | = lossless | fuzzy | p < 0.2 max p, per 1000 | log p/token | KL/token "
        "| repeated 4-grams | cut off |", "|---" * 18 + "|",
    ]

    def speed(row: dict) -> str:
        if "time_of_exact" not in row:
            return " | | | "
        low, high = row["time_of_exact_interval"]
        return (f"{row['time_of_exact']:.2f} ({low:.2f} to {high:.2f}) | {row['seconds_per_answer']:.3f} | "
                f"{row['tokens_per_second']:.0f} | {row['speedup']:.2f}x")

    for row in rows:
        low, high = row["drop_interval"]
        kl = "" if row["kl_per_token"] is None else f"{row['kl_per_token']:.4f}"
        mark = "**" if row.get("front") else ""
        lines.append(
            f"| {mark}{row['setting']}{mark} | {100 * row['accuracy']:.1f}% | {100 * row['drop']:.1f} ({100 * low:.1f} "
            f"to {100 * high:.1f}) | {100 * row['drop_bound']:.1f} | {forwards_of_exact(row, rows):.3f} | {speed(row)} "
            f"| {row['tau']:.2f} | {row['tokens_per_answer']:.0f} | {100 * (1 - row['differing']):.0f}% "
            f"| {100 * row['fuzzy_share']:.1f}% | "
            f"{row['low_per_thousand']:.1f} | {row['logprob_per_token']:.3f} | {kl} | {100 * row['repetition']:.1f}% | "
            f"{100 * row['cut_off']:.1f}% |"
        )
    for row in baselines:
        lines.append(f"| {row['setting']} | | | | | {speed(row)} | | {row['timed_tokens']:.0f} | "
                     "| | | | | | |")
    return "\n".join(lines)


def short_table(record: dict) -> str:
    """Baselines, lossless decoding and the settings on the Pareto front."""
    lines = ["| setting | accuracy | bound of the loss | s/answer | time of exact | tokens/s | vs model.generate | tau "
             "| tokens/answer |", "|---" * 9 + "|"]
    for row in record["baselines"]:
        lines.append(f"| {row['setting']} | | | {row['seconds_per_answer']:.3f} | {row['time_of_exact']:.2f} | "
                     f"{row['tokens_per_second']:.0f} | {row['speedup']:.2f}x | | {row['timed_tokens']:.0f} |")
    for row in record["rows"]:
        if "time_of_exact" in row and (row["front"] or "threshold" not in row):
            lines.append(
                f"| {row['setting']} | {100 * row['accuracy']:.1f}% | {100 * row['drop_bound']:.1f} | "
                f"{row['seconds_per_answer']:.3f} | {row['time_of_exact']:.2f} | {row['tokens_per_second']:.0f} | "
                f"{row['speedup']:.2f}x | {row['tau']:.2f} | {row['tokens_per_answer']:.0f} |"
            )
    return "\n".join(lines)


def plot(record: dict, out: Path) -> list[Path]:
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


def by_rule(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows with a threshold by rule; guarded ones are a rule of their own."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if "threshold" in row:
            name = row["setting"].split(" ")[0] + (" guarded" if row["setting"].endswith("guarded") else "")
            groups.setdefault(name, []).append(row)
    return {name: sorted(found, key=lambda row: row["threshold"]) for name, found in groups.items()}


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
            yerr=_whiskers(found, "drop", "drop_interval", 100), color=colours(number), label=rule, marker="o",
            markersize=4, linewidth=1, elinewidth=0.6, alpha=0.8,
        )
    lossless = [row for row in rows if "threshold" not in row]
    for row, marker in zip(lossless, "*^vsDP<>", strict=False):
        axes.plot(row["time_of_exact"], 100 * row["accuracy"], color="black", linestyle="none", marker=marker,
                  markersize=12 if marker == "*" else 6, label=row["setting"], zorder=5)
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["time_of_exact"])
    axes.plot([row["time_of_exact"] for row in front], [100 * row["accuracy"] for row in front], color="0.4",
              linestyle="--", linewidth=1, label="Pareto front", zorder=1)
    exact = next(row for row in rows if row["setting"] == "exact")
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
    exact = next(row for row in record["rows"] if row["setting"] == "exact")
    figure, panels = pyplot.subplots(
        2, len(groups), figsize=(max(4.0, 2.3 * len(groups)), 5), sharey="row", layout="constrained", squeeze=False)
    for column, (rule, found) in enumerate(groups.items()):
        for line, (value, label) in enumerate((("tau", "tau (tokens per forward)"), ("tokens_per_answer",
                                                                                     "tokens per answer"))):
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
