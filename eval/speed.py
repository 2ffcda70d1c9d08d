"""Compare the speed of answers files in FastChat's format with a baseline's, the last one.

    python -m eval.speed exact.jsonl plain.jsonl
    python -m eval.speed runs/x.answers/run_1/{exact,no-drafting}.jsonl --out runs/speed

The files are those of eval.mt_bench, of `eagle-fsd benchmark`, or of EAGLE's and Spec-Bench's own code. The tables are
those of `benchmark`, over the questions that all files answer.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from eagle_fsd.measure.answers import counts_of, read_answers
from eagle_fsd.measure.comparison import legend, page_text
from eagle_fsd.measure.records import plot_speeds, record_path, shown, version_text, write_record
from eagle_fsd.measure.statistics import by_category
from eval.command import run_command

log = logging.getLogger(__name__)
SAME = ("A lossless method can have less than 100%: in half precision because of ties (docs/python.md, Lossless in "
        "half precision), in sampling because of other noise.")


@dataclass(frozen=True, kw_only=True)
class SpeedArguments:
    """Options of `eval.speed`.

    Args:
        answers: answers files, the baseline last.
        out: write OUT.json, OUT.md and OUT.png.
    """

    answers: Positional[tuple[Path, ...]]
    out: Path | None = None


def run(args: SpeedArguments) -> None:
    check_files(args.answers)
    print(speed(args.answers, args.out))


def check_files(paths: Sequence[Path], begun: bool = True) -> None:
    """Raise ValueError unless these are several files with different names.

    Args:
        begun: whether the first one must exist.
    """
    if len(set(map(shown, paths))) < max(2, len(paths)):
        raise ValueError("--answers takes one file with --questions, or several files with different names to compare, "
                         f"got {' '.join(map(str, paths)) or 'none'}")
    for path in paths[not begun :]:
        if not path.is_file():
            raise ValueError(f"{path} does not exist")


def speed(paths: Sequence[Path], out: Path | None = None) -> str:
    """Compare the speed of each file's answers with that of the last file.

    Args:
        out: write OUT.json, OUT.md and OUT.png, with the provenance of the answers.

    Returns:
        The tables of `page_text`.

    Raises:
        ValueError: damaged files, files without a common question, or answers with different limits.
    """
    for path in paths[:-1]:
        check_comparable(path, paths[-1])
    baseline = shown(paths[-1])
    rows = speed_rows({shown(path): read_answers(path) for path in paths})
    page = f"{rows['all'][0]['answers']} questions\n\n{page_text(rows, {}, baseline)}"
    if out is not None:
        notes = {shown(path): read_note(path) for path in paths}
        made = "\n".join(f"- {name}: {made_by(note)}" for name, note in notes.items() if note)
        write_record(out, {"answers": notes, "rows": rows},
                     f"{made}\n\n{page}\n\n{legend(rows['all'], baseline, baseline, SAME)}")
        plot_speeds(rows, record_path(out, ".png"), baseline)
    return page


def speed_rows(files: Mapping[str, Sequence[dict]]) -> dict[str, list[dict]]:
    """Rows of each file by category (see `method_rows`), relative to the last one, over all common questions: those
    with the same content (`asked`), or the same id where a file of other code has none.

    Args:
        files: the records of at least two files by name.

    Raises:
        ValueError: a file has two answers to one question, or the files have no common question.
    """
    key = "asked" if all("asked" in record for records in files.values() for record in records) else "question_id"
    found = {name: {record[key]: record for record in records} for name, records in files.items()}
    for name, records in files.items():
        if len(found[name]) < len(records):
            twice, _ = Counter(record[key] for record in records).most_common(1)[0]
            raise ValueError(f"{name} has two answers to question {found[name][twice]['question_id']!r}")
    first = next(iter(found.values()))
    common = [number for number in first if all(number in each for each in found.values())]
    if not common:
        raise ValueError("the files have no question in common")
    return by_category([{"category": first[number].get("category", "all"), "methods": {
        name: counts_of(each[number]) for name, each in found.items()}} for number in common], list(files)[-1])


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
    if path.parent == baseline.parent and (path.parent / "about.json").is_file():  # of one comparison
        return
    notes = {each: read_note(each) for each in (path, baseline)}
    for each in (each for each, note in notes.items() if note is None):
        log.warning("%s has no .meta.json: it is unknown whether its answers are comparable", each)
    if None in notes.values():
        return
    ours, theirs = ({**note.get("environment", {}), **note["settings"], **note.get("made_with", {})}
                    for note in notes.values())
    for setting in ("max_new_tokens", "num_choices", "target", "temperature", "dtype", "weights", "template",
                    "processes", "processor", "threads"):
        if ours.get(setting) != theirs.get(setting):
            if setting in ("max_new_tokens", "num_choices"):
                raise ValueError(f"{path} has {setting} {ours.get(setting)} and {baseline} has {theirs.get(setting)}: "
                                 "their speeds are not comparable")
            log.warning("%s and %s differ in %s: %s and %s", path, baseline, setting, ours.get(setting),
                        theirs.get(setting))


def made_by(note: Mapping) -> str:
    """Command, version and pair of the answers. Older files do not name the pair."""
    source = f"`{note['environment']['command']}` by {version_text(note['environment'])}"
    names = note.get("names")
    return f"{source}; target {names['target']}, head {names['head'] or 'none'}" if names else source


main = partial(run_command, "eval.speed", SpeedArguments, run)

if __name__ == "__main__":
    sys.exit(main())
