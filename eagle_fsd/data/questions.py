"""Question files: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, and any prompt/answer file."""

from __future__ import annotations

import json
import logging
import urllib.request
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..utils.files import parse_json

log = logging.getLogger(__name__)
T = TypeVar("T")
# Public sets by name: arguments of `datasets.load_dataset`, or the address of a file.
PUBLIC: dict[str, dict[str, str] | str] = {
    "mt_bench": {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
    "spec_bench": "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    "humaneval": {"path": "openai/openai_humaneval", "split": "test"},
    "mbpp": {"path": "google-research-datasets/mbpp", "name": "full", "split": "test"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
}


@dataclass(frozen=True)
class Question:
    """One question of one or more user turns.

    answer: the reference answer, if any.
    tests: the tests of a program, or IFEval's instructions as JSON, if any.
    """

    id: int | str
    category: str
    turns: tuple[str, ...]
    answer: str | None = None
    tests: str | None = None


def converse(answer: Callable[[list[dict[str, str]]], T], turns: Sequence[str]) -> list[T]:
    """Answers to the turns of a conversation, each with the previous turns and answers in its chat.

    A conversation that becomes too long for the target ends early.

    Args:
        answer: maps a chat to an answer, whose `text` is part of the following chats.
    """
    chat, answers = [], []
    for turn in turns:
        chat.append({"role": "user", "content": turn})
        try:
            answers.append(answer(chat))
        except ValueError as error:
            if not answers:
                raise
            log.warning("skipping turn %d of %d: %s", len(answers) + 1, len(turns), error)
            break
        chat.append({"role": "assistant", "content": answers[-1].text})
    return answers


def converse_together(
    answer: Callable[[list[list[dict[str, str]]]], Sequence[T]], conversations: Sequence[Sequence[str]]
) -> list[list[T]]:
    """Answers to the turns of several conversations. Those of each turn are one batch, without the conversations that
    have ended.

    Args:
        answer: maps chats to answers, see `converse`.
    """
    chats, answers = [[] for _ in conversations], [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        rows = [row for row, turns in enumerate(conversations) if turn < len(turns)]
        for row in rows:
            chats[row].append({"role": "user", "content": conversations[row][turn]})
        for row, found in zip(rows, answer([chats[row] for row in rows]), strict=True):
            answers[row].append(found)
            chats[row].append({"role": "assistant", "content": found.text})
    return answers


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON lines file, or of a public set if there is no file and the path is its name. The keys of
    each line determine its format.

    Raises:
        ValueError: there is no file or no question, a line is no JSON object or has no known format, or an id occurs
            twice.
        ImportError, OSError: a public set cannot be loaded.
    """
    if path.is_file():
        lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")  # not at \u2028
        rows = ((number, partial(parse_json, line)) for number, line in enumerate(lines, 1) if line.strip())
    elif str(path) in PUBLIC:
        rows = ((number, partial(dict, row)) for number, row in enumerate(public_set(str(path)), 1))
    else:
        raise ValueError(f"questions must be in a JSON lines file, got {path}, which is no file and none of the public "
                         f"sets {', '.join(PUBLIC)}")
    questions = []
    for number, row in rows:
        try:
            questions.append(as_question(row(), number))
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: {error} is missing") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path} contains no question")
    twice = next((i for i, count in Counter(question.id for question in questions).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: question {twice!r} occurs twice")
    return questions


def public_set(name: str) -> Iterable[dict]:
    """The rows of a public set, from the hub or its cache, or from its address.

    Raises:
        ImportError: the package `datasets` is missing.
        OSError: the set cannot be loaded.
    """
    source = PUBLIC[name]
    try:
        if isinstance(source, str):
            with urllib.request.urlopen(source, timeout=60) as response:
                return [parse_json(line) for line in response if line.strip()]
        import datasets

        return datasets.load_dataset(**source)
    except ImportError as error:
        raise ImportError(f"{name} is no file here; to download the public set, install the package `datasets` (pip "
                          "install datasets)") from error
    except Exception as error:  # of the network, the hub or a builder
        place = source if isinstance(source, str) else source["path"]
        raise OSError(f"{name} is no file here, and {place} cannot be loaded ({error}): give a file") from error


def choose_questions(
    paths: Iterable[Path], per_category: int | None = None, categories: Sequence[str] = ()
) -> list[Question]:
    """The questions of all files.

    Args:
        per_category: only the first ones of each category; None: all.
        categories: only these; empty: all.

    Raises:
        ValueError: see `read_questions`; there is no question of these categories.
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
        raise ValueError(f"there are no questions{among}: pass --questions")
    return chosen


def as_question(record: dict, number: int) -> Question:
    """The question of a parsed line; `number` is the default of its id."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "turns" in record or isinstance(record.get("prompt"), list):  # MT-Bench, Spec-Bench; MT-Bench on the hub
        name, key = ("turns", "question_id") if "turns" in record else ("prompt", "prompt_id")
        if not _are_texts(record[name]) or not record[name]:
            raise ValueError(f"{name} must be a list of strings, got {record[name]!r}")
        return Question(_id_of(record, key, number), record.get("category", "all"), tuple(record[name]))
    if "instruction_id_list" in record:  # IFEval
        kinds, kwargs = record["instruction_id_list"], record["kwargs"]
        if not isinstance(kinds, list) or not isinstance(kwargs, list) or not len(kinds) == len(kwargs) > 0:
            raise ValueError(f"instruction_id_list and kwargs must have the same length, got {kinds!r} and {kwargs!r}")
        return Question(_id_of(record, "key", number), "ifeval", (_text_of(record, "prompt"),),
                        tests=json.dumps({"instruction_id_list": kinds, "kwargs": kwargs}))
    if "test_list" in record:  # MBPP, whose sanitised version has `prompt` in place of `text`
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
    for key, category in (("question", "gsm8k"), ("prompt", "prompts")):
        if isinstance(record.get(key), str):
            answer = record.get("answer")
            return Question(_id_of(record, "question_id", number), record.get("category", category), (record[key],),
                            None if answer is None else str(answer))
    raise ValueError("no known format: a question needs turns, task_id and prompt, test_list, question or prompt")


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _text_of(record: dict, name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"{name} must be a string, got {record[name]!r}")
    return record[name]


def _id_of(record: dict, name: str, number: int) -> int | str:
    value = record.get(name, number)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} must be a number or a string, got {value!r}")
    return value
