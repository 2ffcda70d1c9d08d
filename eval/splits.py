"""Does calibration keep its promise on answers it has not seen? On a sweep's logged answers, in random halves.

    python -m eval.splits --tasks 2000 --work runs/confirm --out eval/results/splits.json    # options of the sweep

In each split a setting is chosen on one half, as `eagle-fsd calibrate` does (each rule's thresholds from the smallest
on until one fails; of those that pass and are surely faster than `exact` the fastest), and its loss and time are looked
at on the other half. What is needed for that is kept in OUT, so that it can be repeated without the answers.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eagle_fsd.measure.experiment import EXACT
from eagle_fsd.measure.promises import parse_promise
from eagle_fsd.measure.records import environment
from eagle_fsd.measure.search import family_confidence
from eagle_fsd.measure.statistics import drop_is_within, fixed_sequence, mean_bound
from eagle_fsd.measure.summaries import paired
from eval.command import run_command
from eval.questions import load_questions
from eval.report.sweeps import family_of
from eval.sweep import SweepArguments, checked, experiments, kept_tree
from eval.sweep_times import timed_questions

RANDOM_SPLITS = 20


@dataclass(frozen=True)
class SplitsArguments(SweepArguments):
    """What `eval.splits` looks at: the options of a finished sweep.

    Args:
        promise: about accuracy_drop, such as "accuracy_drop<=1%".
        out: JSON file for what is found.
    """

    promise: str = "accuracy_drop<=1%"
    out: Path = Path("eval/results/splits.json")


def choose_on(record: Mapping, half: Collection[int], margin: float) -> str:
    """The fastest setting whose loss on these answers is shown to be at most `margin`; `exact` where none is faster."""
    settings = record["settings"]
    rules = sorted({row["rule"] for row in settings.values()})
    confidence = family_confidence(len(rules))

    def passes(name: str) -> bool:
        lost, gained, count = paired(*half_records(record, name, half))
        return drop_is_within(lost, gained, count, margin, confidence)

    passed = []
    for rule in rules:
        family = sorted((name for name in settings if settings[name]["rule"] == rule),
                        key=lambda name: settings[name]["threshold"])
        passed += fixed_sequence(family, passes)

    def is_surely_faster(name: str) -> bool:
        return mean_bound([ours - exact for ours, exact in timed_pairs(record, name, half)]) < 0

    faster = filter(is_surely_faster, passed)
    return min(faster, key=lambda name: time_of_exact(record, name, half), default=EXACT)


def half_records(record: Mapping, name: str, half: Collection[int]) -> tuple[list[dict], list[dict]]:
    """A setting's and `exact`'s records of the answers in the half."""
    return tuple([{"correct": bool(correct[i])} for i in half]
                 for correct in (record["settings"][name]["correct"], record["exact"]))


def timed_pairs(record: Mapping, name: str, half: Collection[int]) -> list[tuple[float, float]]:
    """(seconds of the setting, seconds of `exact`) of the questions in the half that were timed.

    Raises:
        ValueError: there are none.
    """
    pairs = zip(record["timed"], record["settings"][name]["seconds"], record["exact_seconds"], strict=True)
    found = [(ours, exact) for question, ours, exact in pairs if question in half]
    if not found:
        raise ValueError(f"a half has none of the {len(record['timed'])} timed questions: time more (--timed)")
    return found


def time_of_exact(record: Mapping, name: str, half: Collection[int]) -> float:
    """Of those questions in the half that were timed."""
    if name == EXACT:
        return 1.0
    ours, exact = (sum(column) for column in zip(*timed_pairs(record, name, half), strict=True))
    return ours / exact


def try_splits(record: Mapping, margin: float, splits: int = RANDOM_SPLITS, seed: int = 0) -> list[dict]:
    """One row per random split: the setting chosen on one half, and its time and drop on the other."""
    count, rows = len(record["exact"]), []
    for number in range(splits):
        order = random.Random(f"{seed}/{number}").sample(range(count), count)
        first, second = set(order[: count // 2]), set(order[count // 2 :])
        name = choose_on(record, first, margin)
        lost, gained = (0, 0) if name == EXACT else paired(*half_records(record, name, second))[:2]
        rows.append({"setting": name, "time_of_exact": time_of_exact(record, name, second),
                     "drop": (lost - gained) / len(second)})
    return rows


def logged(args: SplitsArguments) -> dict:
    """Correctness of every answer and times of the timed ones, of a finished sweep.

    Raises:
        ValueError: answers or times are missing.
    """
    questions = load_questions(args.questions, args.tasks, args.task_seed, args.tasks)
    model = args.pair.load()
    args = replace(args, tree=args.tree or kept_tree(args, model))
    own = next(iter(experiments(args, model, questions).values()))
    number = {question.id: at for at, question in enumerate(own.questions)}
    timed = timed_questions(args, own, [EXACT, *own.rules])
    if len(timed) < 4:
        raise ValueError(f"{len(timed)} questions were timed with all settings; at least 4 are needed")

    def correct(name: str) -> list[int]:
        return [int(record["correct"]) for record in own.results(name)]

    def seconds(name: str) -> list[float]:
        return [methods[name]["seconds"] for methods in timed.values()]

    return {
        "exact": correct(EXACT), "timed": [number[question] for question in timed], "exact_seconds": seconds(EXACT),
        "settings": {name: {"rule": family_of(name), "threshold": rule.threshold, "correct": correct(name),
                            "seconds": seconds(name)} for name, rule in own.rules.items()},
    }


def run(args: SplitsArguments) -> None:
    promise = parse_promise(args.promise)
    if promise.kind != "accuracy_drop":
        raise ValueError(f"--promise must be one about accuracy_drop, got {promise}")
    record = logged(checked(args))
    rows = try_splits(record, promise.limit)
    kept = sum(row["drop"] <= promise.limit for row in rows)
    fast = sum(row["time_of_exact"] <= 0.95 for row in rows)
    print(f"{promise}: kept on the other half in {kept} of {len(rows)} splits of {len(record['exact'])} answers; "
          f"at least 5% faster than exact there in {fast}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({  # on one line: a figure for each of thousands of answers
        "environment": environment(), "promise": str(promise), "splits": rows, **record}) + "\n", encoding="utf-8")


main = partial(run_command, "eval.splits", SplitsArguments, run)

if __name__ == "__main__":
    sys.exit(main())
