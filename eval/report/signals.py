"""How well signals tell harmful mismatches from harmless ones: areas under the curve, dials, tables, a picture.

K mismatches, R resamples of their questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eval.report.tables import markdown, percent, span
from train.mining.regression import passing

RESAMPLES = 1000
STOPPED = (0.95, 0.99)  # shares of the harmful that a dial is to stop


def resampled(groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """[R, K] how often each mismatch occurs in resamples of the questions, drawn with replacement."""
    _, question = np.unique(groups, return_inverse=True)
    count = question.max() + 1
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    times = np.stack([np.bincount(row, minlength=count) for row in drawn])
    return times[:, question]


def area(scores: np.ndarray, harmful: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[R] area under the curve, the chance that a harmful one scores above a harmless one (equal: half), of
    weights [R, K]; NaN where one of the kinds is missing."""
    order = np.argsort(scores, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(scores[order]) != 0])  # of equal scores
    bad, good = (np.add.reduceat(weights[:, order] * kind[order], begins, axis=1) for kind in (harmful, ~harmful))
    below = np.cumsum(good, 1) - good
    with np.errstate(invalid="ignore"):
        return (bad * (below + good / 2)).sum(1) / (bad.sum(1) * good.sum(1))


def ends(values: np.ndarray) -> list[float] | None:
    """95% percentile interval of resampled values; None where hardly any resample has one."""
    values = values[np.isfinite(values)]
    return [float(end) for end in np.percentile(values, [2.5, 97.5])] if len(values) > RESAMPLES // 2 else None


def share(what: np.ndarray, of: np.ndarray, weights: np.ndarray) -> tuple[float | None, list[float] | None]:
    """The share of some mismatches that has something, with its interval."""
    if not of.any():
        return None, None
    with np.errstate(invalid="ignore"):
        drawn = (weights[:, of] * what[of]).sum(1) / weights[:, of].sum(1)
    return float(what[of].mean()), ends(drawn)


def signal_rows(
    signals: dict[str, np.ndarray], harmful: np.ndarray, groups: np.ndarray, parts: dict[str, np.ndarray], seed: int = 0
) -> list[dict]:
    """A row per part of the mismatches (such as a kind of token) and signal.

    Args:
        signals: scores by name, larger where harm is likelier. parts: [K] bool by name; dials are set on all.
        seed: of the folds.

    Returns:
        part; signal; count; harmful (share); auc with interval, None where a kind is missing; per share that dials
        are to stop: passed (of the harmless) with interval, and stopped (of the harmful), both of unseen questions.
    """
    weights, rows = resampled(groups), []
    for name, scores in signals.items():
        passes = {level: passing(scores, harmful, groups, level, seed) for level in STOPPED}
        for part, inside in parts.items():
            if not inside.any():
                continue
            mine, ones = harmful[inside], np.ones((1, inside.sum()))
            auc = float(area(scores[inside], mine, ones)[0])
            row = {"part": part, "signal": name, "count": int(inside.sum()), "harmful": float(mine.mean()),
                   "auc": None if np.isnan(auc) else auc,
                   "auc_interval": None if np.isnan(auc) else ends(area(scores[inside], mine, weights[:, inside]))}
            for level in STOPPED:
                found, interval = share(passes[level], inside & ~harmful, weights)
                row[f"passed_{100 * level:.0f}"], row[f"passed_{100 * level:.0f}_interval"] = found, interval
                row[f"stopped_{100 * level:.0f}"] = share(~passes[level], inside & harmful, weights)[0]
            rows.append(row)
    return rows


def oracle_row(
    part: str, inside: np.ndarray, harmful: np.ndarray, groups: np.ndarray, questions: Sequence[Mapping]
) -> dict:
    """What a gate would give that passes exactly the harmless mismatches: the most that any gate can.

    Not all mismatches of a question were tried: its share of harmless ones, of the part among those tried, stands for
    all that it has.

    Args:
        inside: [K] bool, the mismatches of the part. questions: by their number in `groups`, with `tokens` and
            `mismatches`.
    """
    found, interval = share(~harmful, inside, resampled(groups))
    labelled = [(questions[group], groups == group) for group in np.unique(groups)]
    tokens = sum(each["tokens"] for each, _ in labelled)
    harmless = sum(each["mismatches"] * (inside & ~harmful)[own].mean() for each, own in labelled)
    return {"part": part, "count": int(inside.sum()), "passed": found, "passed_interval": interval,
            "per_100_tokens": float(100 * harmless / tokens) if tokens else None}


def agreement(outcome: Sequence[bool], likelihood: Sequence[bool], nats: Sequence[float], groups: np.ndarray) -> dict:
    """How well the likelihood label predicts the outcome label, on mismatches that have both."""
    truth, said, lost = np.array(outcome), np.array(likelihood), np.array(nats)
    weights, every = resampled(groups), np.ones(len(truth), dtype=bool)
    same, interval = share(truth == said, every, weights)
    chance = truth.mean() * said.mean() + (1 - truth.mean()) * (1 - said.mean())
    auc = float(area(lost, truth, np.ones((1, len(truth))))[0])
    return {"count": len(truth), "agree": same, "agree_interval": interval,
            "kappa": None if chance == 1 else float((same - chance) / (1 - chance)),
            "harmful_found": share(said, truth, weights)[0], "harmless_found": share(~said, ~truth, weights)[0],
            "auc_of_nats": None if np.isnan(auc) else auc,
            "auc_interval": None if np.isnan(auc) else ends(area(lost, truth, weights))}


def _number(value: float | None, interval: list[float] | None = None) -> str:
    return "-" if value is None else f"{value:.3f}" + (f" ({span(interval, 3)})" if interval else "")


def _percents(value: float | None, interval: list[float] | None = None) -> str:
    if value is None:
        return "-"
    return percent(value, 1) + (f" ({' to '.join(percent(end, 1) for end in interval)})" if interval else "")


def signal_table(rows: Sequence[dict]) -> str:
    """The rows of one part, best first."""
    ordered = sorted(rows, key=lambda row: -(row["auc"] or 0))
    return markdown({
        "signal": row["signal"], "AUC (95%)": _number(row["auc"], row["auc_interval"]),
        **{heading: cell for level in ("95", "99") for heading, cell in (
            (f"harmless passed at {level}%", _percents(row[f"passed_{level}"], row[f"passed_{level}_interval"])),
            (f"harmful stopped at {level}%", _percents(row[f"stopped_{level}"])))},
    } for row in ordered)


def kind_table(rows: Sequence[dict], kinds: Sequence[str]) -> str:
    """AUC by kind of token: a row per signal, a column per kind."""
    names = list(dict.fromkeys(row["signal"] for row in rows))
    cells = {(row["signal"], row["part"]): row for row in rows}
    first = {"signal": "mismatches (harmful)", **{kind: "-" if (names[0], kind) not in cells else
             f"{cells[names[0], kind]['count']} ({percent(cells[names[0], kind]['harmful'])})" for kind in kinds}}
    return markdown([first, *({"signal": name, **{
        kind: _number(cells[name, kind]["auc"], cells[name, kind]["auc_interval"]) if (name, kind) in cells else "-"
        for kind in kinds}} for name in names)])


def plot_signals(rows: Sequence[dict], path: Path) -> Path:
    """AUC and share of the harmless passed at 95%, a bar per signal, best at the top.

    Raises:
        ImportError: matplotlib is not installed (`pip install eagle_fsd[eval]`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(rows, key=lambda row: row["auc"] or 0)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 1.2 + 0.26 * len(rows)), sharey=True, layout="constrained")
    for axes, name, label in zip(panels, ("auc", "passed_95"), (
            "area under the curve", "harmless passed with 95% of harmful stopped"), strict=True):
        values = [row[name] or 0 for row in rows]
        whiskers = [[max(0.0, sign * ((row[f"{name}_interval"] or [value] * 2)[end] - value))
                     for row, value in zip(rows, values, strict=True)] for end, sign in ((0, -1), (1, 1))]
        axes.barh(range(len(rows)), values, xerr=whiskers, error_kw={"elinewidth": 0.8, "ecolor": "0.35"})
        axes.set_yticks(range(len(rows)), [row["signal"] for row in rows], fontsize=8)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.3)
    panels[0].axvline(0.5, color="black", linewidth=0.8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
