"""Statistics of methods on the same questions, with confidence intervals over the questions.

Ratios have bootstrap intervals. Changes of accuracy have intervals of Tango's score test, or of the bootstrap if a
question's accuracy is a fraction, as with several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
FEWEST = 5  # questions for an interval; with two it would be their minimum and maximum
GRAM = 4
CHOSEN = "chosen"  # name of the method that `cross_fitted` chose
POSITIONS = 8  # of drafts, whose acceptance is counted
# Spec-Bench's tasks: its six, of which the first is all categories of MT-Bench.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}


def interval(
    statistic: Callable[..., np.ndarray], *columns: np.ndarray, ends: Sequence[float] = (0.025, 0.975)
) -> list[float] | None:
    """Bootstrap percentile interval of a statistic, by default at 95%. Questions are drawn with replacement.

    Args:
        statistic: function of the columns [..., questions] that reduces their last axis.
        columns: one value per question; all columns are drawn together.
        ends: quantiles to return.

    Returns:
        The quantiles; None for fewer than `FEWEST` questions.
    """
    count = len(columns[0])
    if count < FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    return np.quantile(statistic(*(np.asarray(column)[drawn] for column in columns)), ends).tolist()


def ratio_interval(ours: np.ndarray, theirs: np.ndarray) -> list[float] | None:
    """95% percentile interval of the ratio of two sums over the same questions."""
    return interval(lambda a, b: a.sum(-1) / b.sum(-1), ours, theirs)


def drop_bound(lost: float, gained: float, count: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of the drop of accuracy (Tango, Stat. Med. 17, 1998); a negative drop is a rise.

    Args:
        lost: answers that are right in the reference and wrong here. gained: the reverse. count: all pairs.
    """
    def score(drop: float) -> float:
        """By how many standard errors the observed drop exceeds this one; decreasing in `drop`."""
        # Maximum-likelihood rate of `gained` under the constraint of this drop.
        a, b, c = 2 * count, (2 * count - lost + gained) * drop - lost - gained, -gained * drop * (1 - drop)
        rate = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        spread = count * (2 * rate + drop * (1 - drop))
        return (lost - gained - count * drop) / math.sqrt(max(spread, 1e-30))

    low, high, quantile = -1.0, 1.0, -NormalDist().inv_cdf(confidence)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if score(middle) <= quantile else (middle, high)
    return high


def drop_interval(lost: float, gained: float, count: int) -> list[float]:
    """Two-sided 95% interval of the drop of accuracy."""
    return [-drop_bound(gained, lost, count, 0.975), drop_bound(lost, gained, count, 0.975)]


def repetition(tokens: Sequence[object]) -> float:
    """Share of 4-grams that occurred earlier in the text."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if the texts are the same."""
    pairs = enumerate(zip_longest(tokens, reference))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), None)


def method_rows(records: Sequence[Mapping], reference: str, texts: str | None = None) -> list[dict]:
    """One row per method over the records of `compare`, relative to the reference on the same questions.

    Args:
        texts: the method whose texts the others' are compared with; None: the reference.

    Returns:
        speedup (tokens per second) and time (per answer): ratios to the reference, with 95% intervals (None: too few
        questions), over the timed questions, like the following; None: none is timed, or unknown; mean_speed: mean of
        each question's tokens per second, and mean_speedup: its ratio to the reference's, as Spec-Bench has them, with
        their standard deviations over runs; tau; steps: forwards of the target per answer; accepted: see
        `acceptance_by_position`. same_tokens: share of tokens before the first difference; drop: of accuracy, with its
        interval; bound: its one-sided 95% bound, with Bonferroni's correction over all methods but the reference.
    """
    timed = [line["methods"] for line in records if all(record["timed"] for record in line["methods"].values())]
    rows = []
    for name in records[0]["methods"]:
        ours = [line["methods"][name] for line in records]
        theirs = [line["methods"][reference] for line in records]
        parts = [first_difference(line["methods"][name]["ids"], line["methods"][texts or reference]["ids"])
                 for line in records]
        runs, their_runs = ([runs_of(line[method]) for line in timed] for method in (name, reference))
        columns = [np.array([np.mean([run[key] for run in each]) for each in by_question], float)
                   for by_question in (runs, their_runs) for key in ("tokens", "seconds")]
        tokens, every = sum(record["tokens"] for record in ours), [run for each in runs for run in each]

        def mean(counts: Sequence[Mapping], key: str, over: int) -> float | None:
            return None if any(each.get(key) is None for each in counts) else sum(each[key] for each in counts) / over

        forwards, own = sum(run["forwards"] for run in every), ours if mean(ours, "cut_off", 1) is not None else [{}]
        rows.append({
            "method": name, "answers": len(records), "timed": len(timed), **speeds(*columns),
            **mean_speeds(runs, their_runs),
            "tau": sum(run["emitted"] for run in every) / forwards if forwards else None,
            "steps": mean(every or [{}], "steps", len(every)),
            "accepted": acceptance_by_position([length for run in every for length in run.get("lengths", ())]),
            "regret_per_token": mean(own, "regret", max(1, tokens)), "cut_off": mean(own, "cut_off", len(ours)),
            "tokens_per_answer": tokens / len(records), "same_answers": parts.count(None) / len(records),
            "same_tokens": None if mean(ours, "fuzzy", 1) is None else sum(  # None: the ids are texts
                each["tokens"] if at is None else at for each, at in zip(ours, parts, strict=True)) / max(1, tokens),
            "fuzzy_share": mean(ours, "fuzzy", max(1, tokens)), "repeated": mean(ours, "repeated", len(ours)),
            **_accuracy(ours, theirs, max(1, len(records[0]["methods"]) - 1)),
        })
    return rows


def runs_of(record: Mapping) -> Sequence[Mapping]:
    """The records of each run, if `join_runs` has joined several."""
    return record.get("runs") or [record]


def mean_speeds(runs: Sequence[Sequence[Mapping]], their_runs: Sequence[Sequence[Mapping]]) -> dict:
    """The mean of each question's tokens per second and its ratio to the reference's: means over runs, and standard
    deviations (None: of one run). None without questions.

    Args:
        runs: for each question, the record of each run; `their_runs`: those of the reference.
    """
    ours, theirs = (np.array([np.mean([run["tokens"] / run["seconds"] for run in run_of_all])
                              for run_of_all in zip(*each, strict=True)]) for each in (runs, their_runs))
    return {f"{key}{suffix}": None if len(values) < least else float(measure(values))
            for key, values in (("mean_speed", ours), ("mean_speedup", ours / theirs))
            for suffix, least, measure in (("", 1, np.mean), ("_deviation", 2, lambda values: np.std(values, ddof=1)))}


def acceptance_by_position(lengths: Sequence[int]) -> list[float]:
    """The share of forwards that accepted the draft token at each position, of those that accepted all before it (the
    EAGLE papers' n-alpha), up to the last position that any accepted: none may have been drafted beyond it.

    Args:
        lengths: accepted draft tokens of each verify forward.
    """
    reached = [sum(length >= position for length in lengths) for position in range(POSITIONS + 1)]
    return [now / before for before, now in zip(reached, reached[1:], strict=False) if now]


def cross_fitted(records: Sequence[Mapping], reference: str, points: float) -> dict | None:
    """Estimate the result of choosing a method without bias from the choice, by two-fold cross-fitting.

    Each half of the questions chooses the fastest method that loses at most `points` of accuracy there (possibly the
    reference); the other half measures it. The row is over both halves.

    Returns:
        The `chosen` names and a row as in `method_rows`, without a correction for the choice; None: nothing is graded,
        nothing is timed, or there is only one question.
    """
    ordered = sorted(records, key=lambda line: not all(record["timed"] for record in line["methods"].values()))
    halves = ordered[::2], ordered[1::2]  # each has half of the timed questions
    chosen, tested = [], []
    for fit, rest in (halves, halves[::-1]):
        rows = method_rows(fit, reference) if fit else []
        if not rows or rows[0]["accuracy"] is None or rows[0]["time"] is None:
            return None
        best = min((row for row in rows if 100 * row.get("drop", 0) <= points), key=lambda row: row["time"])
        chosen.append(best["method"])
        tested += [{**line, "methods": {reference: line["methods"][reference], CHOSEN: line["methods"][best["method"]]}}
                   for line in rest]
    return {"chosen": chosen, **method_rows(tested, reference)[1]}


def speeds(tokens: np.ndarray, seconds: np.ndarray, their_tokens: np.ndarray, their_seconds: np.ndarray) -> dict:
    """Speed and time per answer, absolute and relative to the reference; None without questions."""
    if not len(tokens):
        return dict.fromkeys(("tokens_per_second", "speedup", "speedup_interval", "time", "time_interval",
                              "seconds_per_answer"))

    def speedup(tokens: np.ndarray, seconds: np.ndarray, their_tokens: np.ndarray, their_seconds: np.ndarray):
        return tokens.sum(-1) / seconds.sum(-1) / (their_tokens.sum(-1) / their_seconds.sum(-1))

    columns = tokens, seconds, their_tokens, their_seconds
    return {"tokens_per_second": float(tokens.sum() / seconds.sum()), "speedup": float(speedup(*columns)),
            "speedup_interval": interval(speedup, *columns), "time": float(seconds.sum() / their_seconds.sum()),
            "time_interval": ratio_interval(seconds, their_seconds), "seconds_per_answer": float(seconds.mean())}


def _accuracy(ours: Sequence[Mapping], theirs: Sequence[Mapping], methods: int) -> dict:
    pairs = [(a["right"], b["right"]) for a, b in zip(ours, theirs, strict=True) if a["right"] is not None]
    if not pairs:
        return {"graded": 0, "accuracy": None}
    falls, confidence = np.array([them - us for us, them in pairs], float), 1 - 0.05 / methods
    lost, gained = falls.clip(min=0).sum().item(), (-falls).clip(min=0).sum().item()
    if all(right in (0, 1) for pair in pairs for right in pair):
        ends, bound = drop_interval(lost, gained, len(pairs)), drop_bound(lost, gained, len(pairs), confidence)
    else:
        quantiles = interval(lambda fall: fall.mean(-1), falls, ends=(0.025, 0.975, confidence))
        ends, bound = (None, 1.0) if quantiles is None else (quantiles[:2], quantiles[2])
    return {"graded": len(pairs), "accuracy": sum(right for right, _ in pairs) / len(pairs), "lost": lost,
            "gained": gained, "drop": falls.mean().item(), "drop_interval": ends, "bound": bound}


def by_category(records: Sequence[Mapping], reference: str, texts: str | None = None) -> dict[str, list[dict]]:
    """The rows of all questions and, if there are several categories, of each category; see `method_rows`."""
    return {category: method_rows([records[place] for place in places], reference, texts)
            for category, places in places_by_category([line["category"] for line in records]).items()}


def by_turn(records: Sequence[Mapping], reference: str, texts: str | None = None) -> dict[str, list[dict]]:
    """The rows of the first turns, the second turns and so on; empty if all questions have one turn. They have no
    accuracy, because the grade is of the whole conversation."""
    def turns_of(record: Mapping, number: int) -> list[dict]:
        """The turn in each run; empty if a run ended before."""
        turns = [run["by_turn"][number:][:1] for run in runs_of(record) if "by_turn" in run]
        return [{"timed": record["timed"], "right": None, **turn} for (turn,) in turns] if all(turns) else []

    rows: dict[str, list[dict]] = {}
    for number in range(max(len(record.get("by_turn", ())) for line in records for record in line["methods"].values())):
        found = [{name: turns_of(record, number) for name, record in line["methods"].items()} for line in records]
        lines = [{**line, "methods": {name: {**turns[0], "runs": turns} for name, turns in by_name.items()}}
                 for line, by_name in zip(records, found, strict=True) if all(by_name.values())]
        if lines:
            rows[f"turn {number + 1}"] = method_rows(lines, reference, texts)
    return rows


def places_by_category(categories: Sequence[str]) -> dict[str, list[int]]:
    """Indices of all questions as "all" and, if there are several categories, of the questions of each category. Those
    of MT-Bench are one, "mt-bench", beside others of Spec-Bench.

    Args:
        categories: category of each question; "all": none.
    """
    groups: dict[str, list[int]] = {}
    spec_bench = not SPEC_BENCH.isdisjoint(categories)
    for place, category in enumerate(categories):
        groups.setdefault("mt-bench" if spec_bench and category in MT_BENCH else category, []).append(place)
    named = {category: places for category, places in groups.items() if category != "all"}
    return {"all": list(range(len(categories))), **(named if len(groups) > 1 else {})}
