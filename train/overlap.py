"""Keeps the questions that a head will be judged by out of its training: by word n-grams that a conversation shares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eagle_fsd.data.conversations import Record
from eagle_fsd.data.questions import read_questions

WORDS = 10  # in a row; a shorter question must be the whole of a turn


def grams(text: str) -> Iterator[tuple[str, ...]]:
    """The n-grams of a text's words, whatever their case and punctuation; of a shorter text the whole."""
    words = re.findall(r"\w+", text.casefold())
    for start in range(max(1, len(words) - WORDS + 1)):
        yield tuple(words[start : start + WORDS])


def without(records: Iterable[Record], files: Sequence[Path]) -> Iterator[Record]:
    """The records, of which those that share words with a question are bad.

    Args:
        files: of questions, as `read_questions` takes them.

    Raises:
        ValueError: files that hold no questions.
    """
    questions = {gram for file in files for question in read_questions(file) for turn in question.turns
                 for gram in grams(turn)} - {()}
    return (Record(reason="shares words with --exclude") if questions and any(
        gram in questions for text in asked(record) for gram in grams(text)) else record for record in records)


def asked(record: Record) -> list[str]:
    """What users say in a record, or its plain text."""
    return [record.text] if record.text else [
        message["content"] for message in record.messages or [] if message["role"] == "user"]
