"""The speed of files of MT-Bench answers beside another one, with bootstrap intervals, for `eval.mt_bench`.

Speed is new tokens over wall time, summed over the questions that all files answer; intervals are 95% percentiles over
resampled questions, of five questions at least.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eagle_fsd.data.files import read_lines
from eagle_fsd.measure.records import bullets, markdown, percent, record_path, shown, with_span, write_record
from eagle_fsd.measure.statistics import FEWEST, places_by_category, speeds
from eval.plots import plot_speeds

log = logging.getLogger(__name__)

LEGEND = {
    "tokens/s": "new tokens over wall time, prompts included; a question is all its turns and choices",
    "speed-up, time over the baseline's (95%)": "ratios over the questions that all files answer, with bootstrap "
    f"intervals over questions; of fewer than {FEWEST} questions there is none",
    "tau": "tokens emitted per forward of the target, its own token included; copies from the text count as well, "
    'where they are drafted. EAGLE\'s own tau is that of the head alone (--setting "exact text_drafts=off")',
    "same": "questions whose answers are the baseline's. Lossless methods can have less in half precision, where texts "
    "part at ties (docs/python.md, Lossless in half precision), and when sampling, with other noise",
}


def speed(paths: Sequence[Path], out: Path | None = None) -> str:
    """The speed of each file's answers beside those of the last one.

    Args:
        out: write OUT.json, OUT.md and OUT.png, with how the answers were made.

    Returns:
        A table in Markdown, by category and in all.

    Raises:
        ValueError: damaged files, none of whose questions are in all of them, or answers of other limits.
    """
    *others, baseline = paths
    for path in others:
        check_comparable(path, baseline)
    rows = speed_rows({shown(path): read_answers(path) for path in paths})
    table = speed_table(rows)
    if out is not None:
        notes = {shown(path): read_note(path) for path in paths}
        made = "\n".join(f"- {name}: {made_by(note)}" for name, note in notes.items() if note)
        write_record(out, {"answers": notes, "rows": rows}, f"{made}\n\n{table}\n\n{bullets(LEGEND)}")
        plot_speeds({category: [{"method": shown(baseline)}, *each] for category, each in rows.items()},
                    record_path(out, ".png"))
    return table


def read_answers(path: Path, repair: bool = False) -> dict[int | str, dict]:
    """Answer records by question; `repair` as of `read_lines`.

    Raises:
        ValueError: a line that is no answer.
    """
    records = read_lines(path, repair)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("choices"), list) or "question_id" not in record:
            raise ValueError(f"{path}, line {number}: no answer of eval.mt_bench, it needs question_id and choices")
    return {record["question_id"]: record for record in records}


def read_note(answers: Path) -> dict | None:
    """The note beside an answers file of how it was made; None where there is none.

    Raises:
        ValueError: the note is damaged.
    """
    about = record_path(answers, ".meta.json")
    if not about.exists():
        return None
    try:
        note = json.loads(about.read_text(encoding="utf-8"))
        if not isinstance(note["settings"], dict):
            raise TypeError("its settings are no object")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{about} is damaged ({error!r}): delete it and the answers beside it") from error
    return note


def check_comparable(path: Path, baseline: Path) -> None:
    """Raise ValueError where answers were limited to different lengths or numbers; warn of other differences in how
    they were made."""
    notes = {each: read_note(each) for each in (path, baseline)}
    for each, note in notes.items():
        if note is None:
            log.warning("%s has no note of how it was made: whether its answers can be compared is not known", each)
    if None in notes.values():
        return
    ours, theirs = ({**note.get("environment", {}), **note["settings"], "loaded as": note.get("dtype"),
                     "processes": note.get("processes")} for note in notes.values())
    for setting in ("max_new_tokens", "num_choices"):
        if ours.get(setting) != theirs.get(setting):
            raise ValueError(f"{path} was made with {setting} {ours.get(setting)} and {baseline} with "
                             f"{theirs.get(setting)}: their speeds cannot be compared")
    for setting in ("target", "temperature", "loaded as", "processes", "processor", "gpu", "threads"):
        if ours.get(setting) != theirs.get(setting):
            log.warning("%s and %s differ in %s: %s and %s", path, baseline, setting, ours.get(setting),
                        theirs.get(setting))


def made_by(note: Mapping) -> str:
    """Command, commit and pair of a note; older notes have no names of the pair."""
    made = f"`{note['environment']['command']}` at {note['environment']['commit']}"
    names = note.get("names")
    return f"{made}; target {names['target']}, head {names['head'] or 'none'}" if names else made


def speed_rows(files: Mapping[str, Mapping[int | str, Mapping]]) -> dict[str, list[dict]]:
    """A row of each file but the last, which is the baseline, by category: all questions that all files answer, and
    those of each category where there are several.

    Args:
        files: answers by question, of at least two files by their names.

    Raises:
        ValueError: no question in common.
    """
    *names, baseline = files
    common = [number for number in files[names[0]] if all(number in each for each in files.values())]
    if not common:
        raise ValueError("the files have no question in common")
    records = {name: [each[number] for number in common] for name, each in files.items()}
    groups = places_by_category([record.get("category", "all") for record in records[names[0]]])
    return {category: [{"method": name, **speed_row(*([records[each][place] for place in places]
                                                      for each in (name, baseline)))} for name in names]
            for category, places in groups.items()}


def speed_row(method: Sequence[Mapping], baseline: Sequence[Mapping]) -> dict:
    """What the records of the same questions in two files amount to."""
    tokens, seconds = totals(method, "new_tokens"), totals(method, "wall_time")
    their_tokens, their_seconds = totals(baseline, "new_tokens"), totals(baseline, "wall_time")
    emitted = [count for record in method for choice in record["choices"] for count in choice.get("accept_lengths", [])]
    same = [[choice["turns"] for choice in ours["choices"]] == [choice["turns"] for choice in theirs["choices"]]
            for ours, theirs in zip(method, baseline, strict=True)]
    return {
        "questions": len(method), **speeds(tokens, seconds, their_tokens, their_seconds),
        "tau": sum(emitted) / len(emitted) if emitted else 1.0,
        "tokens_per_question": float(tokens.mean()), "baseline_tokens_per_question": float(their_tokens.mean()),
        "same": sum(same) / len(same),
    }


def totals(records: Sequence[Mapping], name: str) -> np.ndarray:
    """Of each question the sum over its choices and turns."""
    return np.array([sum(sum(choice[name]) for choice in record["choices"]) for record in records], float)


def speed_table(rows: Mapping[str, Sequence[Mapping]]) -> str:
    """The rows in Markdown."""
    return markdown({
        "category": category, "answers": Path(row["method"]).stem, "questions": row["questions"],
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        "speed-up (95%)": with_span(f"{row['speedup']:.2f}x", row["speedup_interval"]),
        "time over the baseline's (95%)": with_span(f"{row['time']:.2f}", row["time_interval"]),
        "tau": f"{row['tau']:.2f}", "s/question": f"{row['seconds_per_answer']:.2f}",
        "tokens/question": f"{row['tokens_per_question']:.0f}",
        "baseline's": f"{row['baseline_tokens_per_question']:.0f}", "same": percent(row["same"]),
    } for category, each in rows.items() for row in each)
