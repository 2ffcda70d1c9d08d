"""A seeded generator of verifiable tasks: chat questions with worked answers and one checkable result.

Every task has a worked answer that ends in a line `#### result`, as in GSM8K. Each step of an answer is
phrased in one of several ways drawn at random, so that the text cannot be predicted from the question alone:
what remains to be chosen at each step is what a draft head gets wrong, and what a fuzzy rule may accept.

Splits: a task's operands (all numbers, words and names that determine its result) are hashed; one hash bucket
in eight is held out, so no operand tuple of a held-out task ever occurs in training. Held-out tasks can
also be asked in wordings that are never trained on (`unseen_wording=True`).

    for task in tasks("heldout", seed=0, count=500): print(task.messages, task.answer, task.result)

    python -m train.tasks --count 2000 --out tasks.json    # conversations in ShareGPT's format
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.measure.grading import extract_result, same_json
from train.tasks.families import FAMILIES
from train.tasks.wordings import Writer

HELDOUT_BUCKETS = 8  # one operand tuple in eight is never trained on
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Task:
    """One question with its worked answer.

    `messages` ends with a user turn (follow-up tasks have earlier turns); `answer` is the worked assistant
    turn; `result` is the string behind `####`; `level` (1..3) is the size of the problem.
    """

    family: str
    messages: list[dict[str, str]]
    answer: str
    result: str
    level: int
    operands: tuple = field(repr=False)
    unseen_wording: bool = False


def is_correct(task: Task, text: str) -> bool:
    """Whether `text` states the task's result (JSON results are compared as values)."""
    stated = extract_result(text)
    return stated is not None and (same_json if task.family == "json" else str.__eq__)(stated, task.result)


def split_of(family: str, operands: tuple) -> str:
    """The split that a task with these operands belongs to, a function of nothing else."""
    bucket = zlib.crc32(repr((family, operands)).encode()) % HELDOUT_BUCKETS
    return "heldout" if bucket == 0 else "train"


def make_task(family: str, rng: random.Random, split: str, *, level: int | None = None,
              unseen_wording: bool = False) -> Task:
    """Draw one task of `family` from `split`; `level` 1..3, drawn evenly where None.

    Raises:
        ValueError: unknown family or split, or unseen wordings asked for in training.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown task family {family!r}; known: {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if unseen_wording and split == "train":
        raise ValueError("unseen wordings are for held-out tasks only")
    level = level or rng.randint(1, 3)
    while True:
        writer = Writer(rng, unseen_wording)
        problem = FAMILIES[family](writer, level)
        if split_of(family, problem.operands) == split:
            break
    roles = ["user", "assistant"] * len(problem.turns)
    messages = [{"role": r, "content": t} for r, t in zip(roles, problem.turns, strict=False)]
    answer = writer.answer(problem.sentences, problem.result)
    return Task(family, messages, answer, problem.result, level, problem.operands, unseen_wording)


def tasks(
    split: str, *, seed: int, count: int, unseen_wording: bool = False, families: Sequence[str] = tuple(FAMILIES)
) -> Iterator[Task]:
    """`count` tasks of `split`, the families in turn; the same for the same arguments."""
    rng = random.Random(f"{split}/{seed}/{unseen_wording}")
    for index in range(count):
        yield make_task(families[index % len(families)], rng, split, unseen_wording=unseen_wording)


def as_sharegpt(task: Task) -> dict:
    """The whole conversation as a ShareGPT record."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [*task.messages, {"role": "assistant", "content": task.answer}]
    return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]}


@dataclass(frozen=True)
class Arguments:
    """Write task conversations as a ShareGPT JSON file.

    Args:
        out: the file.
        count: how many.
        split: which of them; "heldout" shares no operands with "train".
        seed: of the drawing.
    """

    out: Path
    count: int = 2000
    split: Literal["train", "heldout"] = "train"
    seed: int = 0


def write_tasks(arguments: Arguments) -> None:
    """Write the file, and say so."""
    check_counts(arguments, "count")
    drawn = tasks(arguments.split, seed=arguments.seed, count=arguments.count)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([as_sharegpt(task) for task in drawn], indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.count} conversations in {arguments.out}")


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.tasks")
    return exit_status("train.tasks", lambda: write_tasks(arguments))

