"""Does calibration keep its promise on answers it has not seen? On a sweep's logged answers, in random halves.

    python -m eval.splits eval/results/confirm-greedy.json --work runs/confirm --promise "accuracy_drop<=1%"

In each split a setting is chosen on one half, as `eagle-fsd calibrate` does (each rule's thresholds from the smallest
on until one fails; of those that pass the fastest), and its loss is looked at on the other half. What is needed for
that is kept in OUT, so that it can be repeated without the answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle_fsd.calibrate import family_confidence
from eagle_fsd.calibration import CONFIDENCE, drop_is_within, fixed_sequence, parse_promise
from eagle_fsd.cli import exit_status
from eagle_fsd.experiment import EXACT
from eagle_fsd.files import read_lines
from eval.environment import environment

SPLITS = 20


def choose(record: Mapping, half: Sequence[int], margin: float) -> str:
    """The fastest setting whose loss on these answers is shown to be at most `margin`; `exact` where none is faster."""
    settings, exact = record["settings"], record["exact"]
    rules = {row["rule"] for row in settings.values()}
    confidence = family_confidence(sorted(rules)) if rules else CONFIDENCE

    def passes(name: str) -> bool:
        lost, gained = losses(settings[name]["correct"], exact, half)
        return drop_is_within(lost, gained, len(half), margin, confidence)

    passed = []
    for rule in sorted(rules):
        family = sorted((name for name in settings if settings[name]["rule"] == rule),
                        key=lambda name: settings[name]["threshold"])
        passed += fixed_sequence(family, passes)
    return min([EXACT, *passed], key=lambda name: settings[name]["time_of_exact"] if name != EXACT else 1.0)


def losses(correct: Sequence[int], exact: Sequence[int], chosen: Sequence[int]) -> tuple[int, int]:
    """(lost, gained) among the chosen answers."""
    return (sum(exact[i] > correct[i] for i in chosen), sum(exact[i] < correct[i] for i in chosen))


def try_splits(record: Mapping, margin: float, splits: int = SPLITS, seed: int = 0) -> list[dict]:
    """One row per random split: the setting chosen on one half, and its time and drop on the other."""
    count, rows = len(record["exact"]), []
    for number in range(splits):
        order = random.Random(f"{seed}/{number}").sample(range(count), count)
        first, second = order[: count // 2], order[count // 2 :]
        name = choose(record, first, margin)
        if name == EXACT:
            lost = gained = 0
        else:
            lost, gained = losses(record["settings"][name]["correct"], record["exact"], second)
        time = 1.0 if name == EXACT else record["settings"][name]["time_of_exact"]
        rows.append({"setting": name, "time_of_exact": time, "drop": (lost - gained) / len(second)})
    return rows


def logged(results: Path, work: Path) -> dict:
    """Correctness of every answer and time of every setting of a finished sweep.

    Raises:
        ValueError: a setting that was not timed or not answered everywhere.
    """
    sweep = json.loads(results.read_text(encoding="utf-8"))
    path = work / f"answers-{sweep['temperature']:g}-{sweep['seeds'][0]}.jsonl"
    answers = {(line["setting"], line["question"]): line for line in read_lines(path)[1:]}
    questions = [question for setting, question in answers if setting == EXACT]
    settings = {}
    for row in sweep["rows"]:
        if "threshold" not in row:
            continue
        if "time_of_exact" not in row:
            raise ValueError(f"{results}: {row['setting']} was not timed")
        correct = [answers.get((row["setting"], q), answers[EXACT, q])["correct"] for q in questions]
        settings[row["setting"]] = {"rule": row["setting"].split(" ")[0], "threshold": row["threshold"],
                                    "time_of_exact": row["time_of_exact"], "correct": [int(c) for c in correct]}
    return {"exact": [int(answers[EXACT, q]["correct"]) for q in questions], "settings": settings}


def run(args: argparse.Namespace) -> None:
    promise = parse_promise(args.promise)
    if promise.kind != "accuracy_drop":
        raise ValueError(f"--promise must be one about accuracy_drop, got {promise}")
    record = logged(args.results, args.work)
    rows = try_splits(record, promise.limit)
    kept = sum(row["drop"] <= promise.limit for row in rows)
    fast = sum(row["time_of_exact"] <= 0.95 for row in rows)
    print(f"{promise}: kept on the other half in {kept} of {len(rows)} splits of {len(record['exact'])} answers; "
          f"at least 5% faster than exact in {fast}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "environment": environment(), "promise": str(promise), "splits": rows, **record}) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="OUT.json of a sweep")
    parser.add_argument("--work", type=Path, required=True, help="its work folder")
    parser.add_argument("--promise", default="accuracy_drop<=1%")
    parser.add_argument("--out", type=Path, default=Path("eval/results/splits.json"))
    args = parser.parse_args()
    return exit_status("eval.splits", lambda: run(args), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
