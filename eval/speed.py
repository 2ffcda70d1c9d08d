"""Compare the speed of MT-Bench answers files with a baseline, with bootstrap intervals, for `eval.mt_bench`.

Speed is new tokens per second of wall time, over the questions that all files answer. Intervals are 95% bootstrap
percentiles over questions, and need at least five questions.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eagle_fsd.data.files import read_lines
from eagle_fsd.measure.records import (
    bullets,
    decimals,
    markdown,
    percent,
    record_path,
    shown,
    version_text,
    with_span,
    write_record,
)
from eagle_fsd.measure.statistics import FEWEST, places_by_category, speeds
from eval.plots import plot_speeds

log = logging.getLogger(__name__)

LEGEND = {
    "tokens/s": "new tokens per second of wall time, including prompts; a question has all its turns and choices",
    "speed-up, time over the baseline's (95%)": "ratios over the questions that all files answer, with bootstrap "
    f"intervals over questions, for at least {FEWEST} questions",
    "tau": "tokens emitted per forward pass of the target, including its own token and accepted text drafts. "
    'EAGLE\'s tau is that of the head alone (--setting "exact text_drafts=off")',
    "same": "share of questions with the baseline's answers. It can be below 100% for lossless methods: in half "
    "precision because of ties (docs/python.md, Lossless in half precision), in sampling because of other noise",
}


def speed(paths: Sequence[Path], out: Path | None = None) -> str:
    """Compare the speed of each file's answers with that of the last file.

    Args:
        out: write OUT.json, OUT.md and OUT.png, with the provenance of the answers.

    Returns:
        A Markdown table, by category and overall.

    Raises:
        ValueError: damaged files, files without a common question, or answers with different limits.
    """
    *others, baseline = paths
    for path in others:
        check_comparable(path, baseline)
    rows = speed_rows(by_question({shown(path): read_answers(path) for path in paths}))
    table = speed_table(rows)
    if out is not None:
        notes = {shown(path): read_note(path) for path in paths}
        made = "\n".join(f"- {name}: {made_by(note)}" for name, note in notes.items() if note)
        write_record(out, {"answers": notes, "rows": rows}, f"{made}\n\n{table}\n\n{bullets(LEGEND)}")
        plot_speeds({category: [{"method": shown(baseline)}, *each] for category, each in rows.items()},
                    record_path(out, ".png"))
    return table


def read_answers(path: Path, repair: bool = False) -> list[dict]:
    """The answer records of a file; `repair` as in `read_lines`.

    Raises:
        ValueError: a line is not an answer.
    """
    records = read_lines(path, repair)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("choices"), list) or "question_id" not in record:
            raise ValueError(f"{path}, line {number} is no answer of eval.mt_bench: it needs question_id and choices")
    return records


def by_question(files: Mapping[str, Sequence[dict]]) -> dict[str, dict[int | str, dict]]:
    """The records of each file by question: by its content (`asked`), or by its id where a file of other code has none.

    Raises:
        ValueError: a file has two answers to one question.
    """
    key = "asked" if all("asked" in record for records in files.values() for record in records) else "question_id"
    found = {name: {record[key]: record for record in records} for name, records in files.items()}
    for name, records in files.items():
        if len(found[name]) < len(records):
            twice, _ = Counter(record[key] for record in records).most_common(1)[0]
            raise ValueError(f"{name} has two answers to question {found[name][twice]['question_id']!r}")
    return found


def read_note(answers: Path) -> dict | None:
    """The provenance file beside an answers file, or None.

    Raises:
        ValueError: the file is damaged.
    """
    about = record_path(answers, ".meta.json")
    if not about.exists():
        return None
    try:
        note = json.loads(about.read_text(encoding="utf-8"))
        if not isinstance(note["settings"], dict):
            raise TypeError("settings must be an object")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{about} is damaged ({error!r}): delete it and its answers file") from error
    return note


def check_comparable(path: Path, baseline: Path) -> None:
    """Raise ValueError if the answers have different limits; warn about other differences in their provenance."""
    notes = {each: read_note(each) for each in (path, baseline)}
    for each, note in notes.items():
        if note is None:
            log.warning("%s has no .meta.json: it is unknown whether its answers are comparable", each)
    if None in notes.values():
        return
    ours, theirs = ({**note.get("environment", {}), **note["settings"], **note.get("made_with", {})}
                    for note in notes.values())
    for setting in ("max_new_tokens", "num_choices"):
        if ours.get(setting) != theirs.get(setting):
            raise ValueError(f"{path} has {setting} {ours.get(setting)} and {baseline} has {theirs.get(setting)}: "
                             "their speeds are not comparable")
    for setting in ("target", "temperature", "dtype", "weights", "template", "processes", "processor", "threads"):
        if ours.get(setting) != theirs.get(setting):
            log.warning("%s and %s differ in %s: %s and %s", path, baseline, setting, ours.get(setting),
                        theirs.get(setting))


def made_by(note: Mapping) -> str:
    """Command, version and pair of the answers. Older files do not name the pair."""
    source = f"`{note['environment']['command']}` by {version_text(note['environment'])}"
    names = note.get("names")
    return f"{source}; target {names['target']}, head {names['head'] or 'none'}" if names else source


def speed_rows(files: Mapping[str, Mapping[int | str, Mapping]]) -> dict[str, list[dict]]:
    """Rows for each file but the last, which is the baseline: over all common questions, and by category if there are
    several.

    Args:
        files: answers by question, for at least two files by name.

    Raises:
        ValueError: the files have no common question.
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
    """Compare the records of the same questions in two files."""
    tokens, seconds = totals(method, "new_tokens"), totals(method, "wall_time")
    their_tokens, their_seconds = totals(baseline, "new_tokens"), totals(baseline, "wall_time")
    emitted = [count for record in method for choice in record["choices"] for count in choice.get("accept_lengths", [])]
    same = [[choice["turns"] for choice in ours["choices"]] == [choice["turns"] for choice in theirs["choices"]]
            for ours, theirs in zip(method, baseline, strict=True)]
    return {
        "questions": len(method), **speeds(tokens, seconds, their_tokens, their_seconds),
        "tau": sum(emitted) / len(emitted) if emitted else None,  # files of other code have no accept_lengths
        "tokens_per_question": float(tokens.mean()), "baseline_tokens_per_question": float(their_tokens.mean()),
        "same": sum(same) / len(same),
    }


def totals(records: Sequence[Mapping], name: str) -> np.ndarray:
    """The sum over choices and turns of each question."""
    return np.array([sum(sum(choice[name]) for choice in record["choices"]) for record in records], float)


def speed_table(rows: Mapping[str, Sequence[Mapping]]) -> str:
    """The rows as a Markdown table."""
    return markdown({
        "category": category, "answers": Path(row["method"]).stem, "questions": row["questions"],
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        "speed-up (95%)": with_span(f"{row['speedup']:.2f}x", row["speedup_interval"]),
        "time over the baseline's (95%)": with_span(f"{row['time']:.2f}", row["time_interval"]),
        "tau": decimals(row["tau"]), "s/question": f"{row['seconds_per_answer']:.2f}",
        "tokens/question": f"{row['tokens_per_question']:.0f}",
        "baseline's": f"{row['baseline_tokens_per_question']:.0f}", "same": percent(row["same"]),
    } for category, each in rows.items() for row in each)
