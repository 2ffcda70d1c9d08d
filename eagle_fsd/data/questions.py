"""Question files: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, and any prompt/answer file."""

from __future__ import annotations

import json
import logging
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .files import parse_json

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """One question of one or more user turns; `answer` is the reference, `tests` a program's or, as JSON, IFEval's
    instructions, if any."""

    id: int | str
    category: str
    turns: tuple[str, ...]
    answer: str | None = None
    tests: str | None = None


def converse(answer: Callable[[list[dict[str, str]]], T], turns: Sequence[str]) -> list[T]:
    """Answers to the turns of a conversation, each with the ones before in its chat.

    A conversation that has outgrown the target ends with the turns it has.

    Args:
        answer: from a chat to an answer, whose `text` goes into the following chats.
    """
    chat, answers = [], []
    for turn in turns:
        chat.append({"role": "user", "content": turn})
        try:
            answers.append(answer(chat))
        except ValueError as error:
            if not answers:
                raise
            log.warning("turn %d of %d is left out: %s", len(answers) + 1, len(turns), error)
            break
        chat.append({"role": "assistant", "content": answers[-1].text})
    return answers


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON lines file; each line tells its format by its keys.

    Raises:
        ValueError: no file, a line that is no JSON object or of no known format, an id that occurs twice, no question.
    """
    if not path.is_file():
        raise ValueError(f"questions are read from a JSON lines file, and {path} is none")
    questions = []
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):  # not at \u2028
        if line.strip():
            try:
                questions.append(as_question(parse_json(line), number))
            except KeyError as error:
                raise ValueError(f"{path}, line {number}: {error} is missing") from error
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path} holds no question")
    twice = next((i for i, count in Counter(question.id for question in questions).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: question {twice!r} occurs twice")
    return questions


def choose_questions(
    paths: Iterable[Path], per_category: int | None = None, categories: Sequence[str] = ()
) -> list[Question]:
    """The questions of all files: the first ones of each category (None: all), of these categories alone (none: all).

    Raises:
        ValueError: see `read_questions`, or no question of these categories.
    """
    counts: Counter[str] = Counter()
    chosen = []
    for question in (question for path in paths for question in read_questions(path)):
        if categories and question.category not in categories:
            continue
        counts[question.category] += 1
        if per_category is None or counts[question.category] <= per_category:
            chosen.append(question)
    if not chosen:
        among = f" of the categories {', '.join(categories)}" if categories else ""
        raise ValueError(f"there is nothing to ask{among}: give --questions")
    return chosen


def as_question(record: dict, number: int) -> Question:
    """A parsed line as a question; `number` is its id where it has none."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "turns" in record:  # MT-Bench, Spec-Bench
        turns = record["turns"]
        if not _are_texts(turns) or not turns:
            raise ValueError(f"turns must be a list of strings, got {turns!r}")
        return Question(_id_of(record, "question_id", number), record.get("category", "all"), tuple(turns))
    if "instruction_id_list" in record:  # IFEval
        kinds, given = record["instruction_id_list"], record["kwargs"]
        if not isinstance(kinds, list) or not isinstance(given, list) or not len(kinds) == len(given) > 0:
            raise ValueError(f"an instruction_id_list and as many kwargs are needed, got {kinds!r} and {given!r}")
        return Question(_id_of(record, "key", number), "ifeval", (_text_of(record, "prompt"),),
                        tests=json.dumps({"instruction_id_list": kinds, "kwargs": given}))
    if "test_list" in record:  # MBPP, whose sanitised version has a prompt in place of a text
        task, tests = _text_of(record, "prompt" if "prompt" in record else "text"), record["test_list"]
        if not _are_texts(tests):
            raise ValueError(f"test_list must be a list of strings, got {tests!r}")
        shown = "\n".join(tests)
        before = [record.get("test_setup_code") or "", *(record.get("test_imports") or ())]
        return Question(_id_of(record, "task_id", number), "mbpp",
                        (f"{task}\nYour code should pass these tests:\n\n{shown}\n",), record.get("code"),
                        "\n".join([*filter(None, before), shown, ""]))
    if "task_id" in record and "prompt" in record:  # HumanEval
        tests = f"{record['test']}\ncheck({record['entry_point']})\n" if "test" in record else None
        return Question(_id_of(record, "task_id", number), "humaneval", (_text_of(record, "prompt"),),
                        record.get("canonical_solution"), tests)
    for asked, category in (("question", "gsm8k"), ("prompt", "prompts")):
        if isinstance(record.get(asked), str):
            given = record.get("answer")
            return Question(_id_of(record, "question_id", number), record.get("category", category), (record[asked],),
                            None if given is None else str(given))
    raise ValueError("no known format: turns, task_id with prompt, test_list, question or prompt is needed")


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _text_of(record: dict, name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"{name} must be a string, got {record[name]!r}")
    return record[name]


def _id_of(record: dict, name: str, number: int) -> int | str:
    found = record.get(name, number)
    if isinstance(found, bool) or not isinstance(found, (int, str)):
        raise ValueError(f"{name} must be a number or a string, got {found!r}")
    return found
