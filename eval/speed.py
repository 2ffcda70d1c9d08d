"""Speed-up of one answers file over another, with bootstrap intervals.

    python -m eval.speed fsd.jsonl plain.jsonl [--out eval/results/mt-bench-fsd]

Speed is new tokens over wall time, summed over the questions that both files answer; intervals are 95% percentiles over
resampled questions. tau = tokens per target forward; "same" is the share of questions whose answers are the baseline's.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from eagle_fsd.measure.records import record_path, write_json
from eval.command import run_command
from eval.mt_bench import read_answers, read_note
from eval.report.intervals import interval
from eval.report.tables import markdown, percent, span

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeedArguments:
    """What `eval.speed` compares.

    Args:
        method: answers of eval.mt_bench.
        baseline: answers to compare with.
        out: write this .json and .md, with how the answers were made.
    """

    method: Positional[Path]
    baseline: Positional[Path]
    out: Path | None = None


@dataclass(frozen=True)
class Totals:
    """Per question: new tokens, seconds, answers, emitted tokens of verify forwards and their number."""

    tokens: np.ndarray
    seconds: np.ndarray
    emitted: np.ndarray
    forwards: np.ndarray

    @classmethod
    def of(cls, records: list[dict]) -> Totals:
        def total(name: str) -> np.ndarray:
            return np.array([sum(sum(choice[name]) for choice in record["choices"]) for record in records], float)

        lengths = [[n for choice in r["choices"] for n in choice.get("accept_lengths", [])] for r in records]
        return cls(total("new_tokens"), total("wall_time"), np.array([sum(n) for n in lengths], float),
                   np.array([len(n) for n in lengths], float))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def tau(self) -> float:
        forwards = self.forwards.sum()
        return float(self.emitted.sum() / forwards) if forwards else 1.0


def speedup(tokens: np.ndarray, seconds: np.ndarray, other_tokens: np.ndarray, other_seconds: np.ndarray, axis: int
            ) -> np.ndarray:
    """Of totals of questions over others'."""
    return tokens.sum(axis) / seconds.sum(axis) / (other_tokens.sum(axis) / other_seconds.sum(axis))


def speed_rows(method: dict, baseline: dict) -> list[dict]:
    """One row per category and one for all, over questions in both files.

    Raises:
        ValueError: no question in common.
    """
    common = [i for i in method if i in baseline]
    if not common:
        raise ValueError("the two files have no question in common")
    categories: dict[str, list] = {}
    for i in common:
        categories.setdefault(method[i].get("category", "all questions"), []).append(i)
    groups = {**categories, "all": common} if len(categories) > 1 else {"all": common}
    return [speed_row(name, [method[i] for i in ids], [baseline[i] for i in ids]) for name, ids in groups.items()]


def speed_row(category: str, method: list[dict], baseline: list[dict]) -> dict:
    """Of the same questions' records in both files."""
    ours, theirs = Totals.of(method), Totals.of(baseline)
    low, high = interval(speedup, ours.tokens, ours.seconds, theirs.tokens, theirs.seconds)
    same = [[choice["turns"] for choice in record["choices"]] == [choice["turns"] for choice in other["choices"]]
            for record, other in zip(method, baseline, strict=True)]
    return {
        "category": category, "questions": len(method), "tokens_per_second": ours.speed,
        "baseline_tokens_per_second": theirs.speed, "tau": ours.tau, "speedup": ours.speed / theirs.speed,
        "low": low, "high": high, "seconds_per_question": float(ours.seconds.mean()),
        "tokens_per_question": float(ours.tokens.mean()),
        "baseline_seconds_per_question": float(theirs.seconds.mean()),
        "baseline_tokens_per_question": float(theirs.tokens.mean()), "same": sum(same) / len(same),
    }


def speed_table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    return markdown({
        "category": row["category"], "questions": row["questions"], "tokens/s": f"{row['tokens_per_second']:.1f}",
        "baseline's": f"{row['baseline_tokens_per_second']:.1f}",
        "speed-up (95%)": f"{row['speedup']:.2f}x ({span((row['low'], row['high']))})", "tau": f"{row['tau']:.2f}",
        "s/question": f"{row['seconds_per_question']:.2f}",
        "baseline's s": f"{row['baseline_seconds_per_question']:.2f}",
        "tokens/question": f"{row['tokens_per_question']:.0f}",
        "baseline's tokens": f"{row['baseline_tokens_per_question']:.0f}", "same": percent(row["same"]),
    } for row in rows)


def notes_of(args: SpeedArguments) -> dict[str, dict]:
    """What `eval.mt_bench` noted beside both files; a speed-up over answers made otherwise is warned of.

    Raises:
        ValueError: the answers were limited to different lengths or numbers.
    """
    paths = {name: getattr(args, name) for name in ("method", "baseline")}
    notes = {name: note for name, path in paths.items() if (note := read_note(record_path(path, ".meta.json")))}
    for name in paths.keys() - notes.keys():
        log.warning("%s has no note of how it was made: whether its answers can be compared is not known", paths[name])
    if len(notes) < len(paths):
        return notes
    ours, theirs = ({**note.get("environment", {}), **note["settings"], "loaded as": note.get("dtype"),
                     "processes": note.get("processes")} for note in notes.values())
    for setting in ("max_new_tokens", "num_choices"):
        if ours.get(setting) != theirs.get(setting):
            raise ValueError(f"{args.method} was made with {setting} {ours.get(setting)} and {args.baseline} with "
                             f"{theirs.get(setting)}: their speeds cannot be compared")
    for setting in ("target", "temperature", "loaded as", "processes", "processor", "gpu", "threads"):
        if ours.get(setting) != theirs.get(setting):
            log.warning("the two files differ in %s: %s and %s", setting, ours.get(setting), theirs.get(setting))
    return notes


def store_speeds(args: SpeedArguments, rows: list[dict], notes: dict[str, dict]) -> None:
    """The rows, and the environments and settings that `eval.mt_bench` noted beside both files."""
    write_json(record_path(args.out, ".json"), {**notes, "rows": rows})
    made = "\n".join(f"- {name}: `{found['environment']['command']}` at {found['environment']['commit']}"
                     for name, found in notes.items())
    page = f"# {record_path(args.out, '').name}\n\n{made}\n\n{speed_table(rows)}\n"
    record_path(args.out, ".md").write_text(page, encoding="utf-8")


def run(args: SpeedArguments) -> None:
    for path in (args.method, args.baseline):
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
    notes = notes_of(args)
    rows = speed_rows(read_answers(args.method), read_answers(args.baseline))
    print(speed_table(rows))
    if args.out is not None:
        store_speeds(args, rows, notes)


main = partial(run_command, "eval.speed", SpeedArguments, run)

if __name__ == "__main__":
    sys.exit(main())
