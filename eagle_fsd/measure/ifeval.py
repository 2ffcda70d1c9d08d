"""Whether an answer follows the instructions of an IFEval prompt, as lm-evaluation-harness checks them (strictly)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import import_module

from ..data.questions import Question

SENTENCES = ("length_constraints:number_sentences", "change_case:capital_word_frequency")  # take nltk's punkt_tab


@cache
def _checks() -> object:
    """The harness' module.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import_module("langdetect").DetectorFactory.seed = 0  # its own is another one in every process
        return import_module("lm_eval.tasks.ifeval.utils")
    except (ImportError, AssertionError) as error:  # it asserts a version of nltk
        raise ValueError(f"IFEval is graded by lm-evaluation-harness, which is not there ({error}): "
                         "pip install 'eagle-fsd[lm_eval]'") from error


@cache
def _has_punkt() -> bool:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


def check_instructions(questions: Iterable[Question]) -> None:
    """Raise where the instructions of one of these cannot be checked here; others than IFEval's are passed over.

    Raises:
        ValueError: the harness, or what it needs for some kinds of instructions, is not there; or it does not know an
            instruction or its arguments.
    """
    for question in questions:
        if question.category == "ifeval":
            _check(question)


def _check(question: Question) -> None:
    kinds = [kind for kind in json.loads(question.tests or "{}")["instruction_id_list"] if kind in SENTENCES]
    _checks()
    if kinds and not _has_punkt():
        raise ValueError(f"question {question.id}: {kinds[0]} is checked with data that nltk downloads: "
                         "python -m nltk.downloader punkt_tab, or leave such questions out")
    try:
        followed(question, "x")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"question {question.id}: the harness cannot check its instructions: {error!r}") from error


def followed(question: Question, text: str) -> tuple[bool, ...]:
    """Which of the instructions an answer follows; see `check_instructions`.

    Raises:
        ValueError: the harness is not there.
    """
    checks = _checks()
    asked = checks.InputExample(key=question.id, prompt=question.turns[0], **json.loads(question.tests or "{}"))
    return tuple(checks.test_instruction_following_strict(asked, text).follow_instruction_list)
