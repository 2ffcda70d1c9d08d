"""What all commands of evaluation do alike: read and note their options, choose questions, end with a status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TypeVar

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data.questions import Question, read_questions
from eagle_fsd.measure.grading import check_gradable
from eagle_fsd.measure.records import shown

A = TypeVar("A")


def run_command(
    module: str, arguments: type[A], work: Callable[[A], int | None], argv: Sequence[str] | None = None, *,
    stopped: str | None = None,
) -> int:
    """The exit status of a command: that of `work` (None: 0), or see `exit_status`.

    Args:
        module: such as "eval.benchmark".
        arguments: the dataclass of its options; what its module says is what --help begins with.
        stopped: what to say after Ctrl-C.
    """
    found: list[int | None] = [0]
    about = sys.modules[arguments.__module__].__doc__
    status = exit_status(module, lambda: found.append(work(parse_options(
        arguments, argv, program=f"python -m {module}", description=about))), stopped=stopped)
    return status or found[-1] or 0


def noted(args: object) -> dict[str, str]:
    """Every option by its flag's name, as records keep them."""
    found: dict[str, str] = {}
    for name, value in vars(args).items():
        if is_dataclass(value) and name in ("pair", "decoding"):  # a group of options, whose flags have no prefix
            found |= noted(value)
        else:
            found[name] = shown(value)
    return found


def chosen_questions(
    paths: Iterable[Path], per_category: int | None, run_code: bool, categories: Sequence[str] = ()
) -> list[Question]:
    """The questions of all files, of each category the first ones, or of these categories alone.

    Raises:
        ValueError: no questions, bad ones, or ones that cannot be graded here.
    """
    chosen = first_questions(paths, per_category, categories)
    check_gradable(chosen, run_code)
    return chosen


def first_questions(
    paths: Iterable[Path], per_category: int | None, categories: Sequence[str] = ()
) -> list[Question]:
    """The questions of all files, of each category the first ones, or of these alone; they need not be gradable.

    Raises:
        ValueError: no questions, or bad ones.
    """
    counts: dict[str, int] = {}
    chosen = []
    for question in (question for path in paths for question in read_questions(path)):
        if categories and question.category not in categories:
            continue
        counts[question.category] = counts.get(question.category, 0) + 1
        if per_category is None or counts[question.category] <= per_category:
            chosen.append(question)
    if not chosen:
        among = f" of the categories {', '.join(categories)}" if categories else ""
        raise ValueError(f"there is nothing to ask{among}: give --questions")
    return chosen
