"""Answers in FastChat's file format, with the fields that Spec-Bench and EAGLE's scripts read.

A file has a JSON line per question: question_id, category, answer_id, model_id, tstamp, and choices [{index, turns,
decoding_steps, idxs, new_tokens, wall_time, accept_lengths}]. decoding_steps and idxs are the target's forwards after
that of the prompt in each turn, accept_lengths the tokens that each of them emitted, its own included.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from ..data.questions import Question
from ..utils.files import read_lines
from .methods import Answer


def digest_of(question: Question) -> str:
    return hashlib.sha256(repr(astuple(question)).encode()).hexdigest()[:16]


def answer_record(question: Question, name: str, by_choice: Sequence[Sequence[Answer]]) -> dict:
    """The line of a question.

    Args:
        name: of the method.
        by_choice: for each choice, the answers to the turns.
    """
    return {"question_id": question.id, "asked": digest_of(question), "category": question.category,
            "answer_id": uuid.uuid4().hex, "model_id": name, "tstamp": time.time(), "choices": [{
                "index": index, "turns": [answer.text for answer in answers],
                "decoding_steps": (steps := [answer.steps for answer in answers]), "idxs": steps,
                "new_tokens": [len(answer.token_ids) for answer in answers],
                "wall_time": [answer.seconds for answer in answers],
                "accept_lengths": [length + 1 for answer in answers for length in answer.accepted_lengths or ()],
            } for index, answers in enumerate(by_choice)]}


def read_answers(path: Path, repair: bool = False) -> list[dict]:
    """The lines of a file; `repair` as in `read_lines`.

    Raises:
        ValueError: a line is not an answer.
    """
    records = read_lines(path, repair)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("choices"), list) or "question_id" not in record:
            raise ValueError(f"{path}, line {number} is no answer: it needs question_id and choices")
    return records


def counts_of(record: dict) -> dict:
    """What `comparison.compare` records of an answer, as far as a line of any code has it; ids are its texts."""
    def total(name: str) -> list:
        return [value for choice in record["choices"] for value in choice.get(name) or ()]

    emitted, texts = total("accept_lengths"), total("turns")
    steps = total("decoding_steps") or total("idxs")
    return {"ids": texts, "tokens": sum(total("new_tokens")), "seconds": sum(total("wall_time")),
            "forwards": len(emitted), "emitted": sum(emitted), "lengths": [count - 1 for count in emitted],
            "steps": None if None in steps else sum(steps), "timed": True,
            **dict.fromkeys(("fuzzy", "regret", "repeated", "cut_off", "right"))}
