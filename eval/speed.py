"""Speed-up of one answers file of eval.mt_bench over another, with bootstrap intervals.

    python -m eval.speed fsd.jsonl plain.jsonl [--out eval/results/mt-bench-fsd]

Speed is new tokens over wall time, summed over the questions that both files answer; intervals are 95% percentiles over
resampled questions, of five questions at least. With --out also the page, whose legend says what the columns mean, and
a plot by category.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from eagle_fsd.measure.records import bullets, markdown, percent, record_path, with_span, write_record
from eagle_fsd.measure.statistics import FEWEST, speeds
from eval.command import run_command
from eval.mt_bench import read_answers, read_note
from eval.plots import plot_speeds

log = logging.getLogger(__name__)

LEGEND = {
    "tokens/s": "new tokens over wall time, prompts included; a question is all its turns and choices",
    "speed-up, time over the baseline's (95%)": "ratios over the questions that both files answer, with bootstrap "
    f"intervals over questions; of fewer than {FEWEST} questions there is none",
    "tau": "tokens emitted per forward of the target, its own token included; copies from the text count as well, "
    'where they are drafted. EAGLE\'s own tau is that of the head alone (--setting "exact text_drafts=off")',
    "same": "questions whose answers are the baseline's. Lossless methods can have less in half precision, where texts "
    "part at ties (docs/python.md, Lossless in half precision), and when sampling, with other noise",
}


@dataclass(frozen=True)
class SpeedArguments:
    """What `eval.speed` compares.

    Args:
        method: answers of eval.mt_bench.
        baseline: answers to compare with.
        out: write this .json, .md and .png, with how the answers were made.
    """

    method: Positional[Path]
    baseline: Positional[Path]
    out: Path | None = None


def totals(records: Sequence[Mapping], name: str) -> np.ndarray:
    """Of each question the sum over its choices and turns."""
    return np.array([sum(sum(choice[name]) for choice in record["choices"]) for record in records], float)


def speed_rows(method: Mapping, baseline: Mapping) -> list[dict]:
    """One row per category and one for all, over questions in both files.

    Raises:
        ValueError: no question in common.
    """
    groups: dict[str, list] = {"all": [number for number in method if number in baseline]}
    if not groups["all"]:
        raise ValueError("the two files have no question in common")
    for number in groups["all"]:
        groups.setdefault(method[number].get("category", "all"), []).append(number)
    return [speed_row(name, [method[number] for number in ids], [baseline[number] for number in ids])
            for name, ids in groups.items()]


def speed_row(category: str, method: Sequence[Mapping], baseline: Sequence[Mapping]) -> dict:
    """Of the same questions' records in both files."""
    tokens, seconds = totals(method, "new_tokens"), totals(method, "wall_time")
    their_tokens, their_seconds = totals(baseline, "new_tokens"), totals(baseline, "wall_time")
    emitted = [count for record in method for choice in record["choices"] for count in choice.get("accept_lengths", [])]
    same = [[choice["turns"] for choice in ours["choices"]] == [choice["turns"] for choice in theirs["choices"]]
            for ours, theirs in zip(method, baseline, strict=True)]
    return {
        "category": category, "questions": len(method), **speeds(tokens, seconds, their_tokens, their_seconds),
        "tau": sum(emitted) / len(emitted) if emitted else 1.0,
        "tokens_per_question": float(tokens.mean()), "baseline_tokens_per_question": float(their_tokens.mean()),
        "same": sum(same) / len(same),
    }


def speed_table(rows: Sequence[Mapping]) -> str:
    """The rows in Markdown."""
    return markdown({
        "category": row["category"], "questions": row["questions"], "tokens/s": f"{row['tokens_per_second']:.1f}",
        "speed-up (95%)": with_span(f"{row['speedup']:.2f}x", row["speedup_interval"]),
        "time over the baseline's (95%)": with_span(f"{row['time']:.2f}", row["time_interval"]),
        "tau": f"{row['tau']:.2f}", "s/question": f"{row['seconds_per_answer']:.2f}",
        "tokens/question": f"{row['tokens_per_question']:.0f}",
        "baseline's": f"{row['baseline_tokens_per_question']:.0f}", "same": percent(row["same"]),
    } for row in rows)


def notes_of(args: SpeedArguments) -> dict[str, dict]:
    """What `eval.mt_bench` noted beside both files; a speed-up over answers made otherwise is warned of.

    Raises:
        ValueError: the answers were limited to different lengths or numbers.
    """
    notes = {name: read_note(getattr(args, name)) for name in ("method", "baseline")}
    for name, note in notes.items():
        if note is None:
            log.warning("%s has no note of how it was made: whether its answers can be compared is not known",
                        getattr(args, name))
    if None in notes.values():
        return {name: note for name, note in notes.items() if note}
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


def run(args: SpeedArguments) -> None:
    for path in (args.method, args.baseline):
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
    notes = notes_of(args)
    rows = speed_rows(read_answers(args.method), read_answers(args.baseline))
    print(speed_table(rows))
    if args.out is not None:
        made = "\n".join(f"- {name}: `{found['environment']['command']}` at {found['environment']['commit']}; "
                         f"target {name_in(found, 'target')}, head {name_in(found, 'head')}"
                         for name, found in notes.items())
        write_record(args.out, {**notes, "rows": rows}, f"{made}\n\n{speed_table(rows)}\n\n{bullets(LEGEND)}")
        plot_speeds({row["category"]: [{"method": str(args.baseline)}, {**row, "method": str(args.method)}]
                     for row in rows}, record_path(args.out, ".png"))


def name_in(note: Mapping, part: str) -> str:
    """What a note calls the target or the head; of older notes, which name neither, what the command was told."""
    if "names" in note:
        return note["names"][part] or "none"
    told = note["settings"].get({"head": "draft"}.get(part, part))
    return told if told not in (None, "None") else "not named"


main = partial(run_command, "eval.speed", SpeedArguments, run)

if __name__ == "__main__":
    sys.exit(main())
