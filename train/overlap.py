"""Exclude conversations that share word n-grams with the questions of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from eagle_fsd.data.conversations import Record
from eagle_fsd.data.questions import read_questions

WORDS = 10  # length of an n-gram; a shorter question matches only a turn with exactly its words


def grams(text: str) -> Iterator[tuple[str, ...]]:
    """The word n-grams of a text, ignoring case and punctuation. A shorter text is one n-gram."""
    words = re.findall(r"\w+", text.casefold())
    for start in range(max(1, len(words) - WORDS + 1)):
        yield tuple(words[start : start + WORDS])


def exclude_overlapping(records: Iterable[Record], files: Sequence[Path]) -> Iterator[Record]:
    """Replace each record that shares an n-gram with a question by a bad record.

    Args:
        files: question files for `read_questions`.

    Raises:
        ValueError: a file without questions.
    """
    questions = {gram for file in files for question in read_questions(file) for turn in question.turns
                 for gram in grams(turn)} - {()}
    return (Record(reason="shares words with --exclude") if questions and any(
        gram in questions for text in user_texts(record) for gram in grams(text)) else record for record in records)


def user_texts(record: Record) -> list[str]:
    """The user turns of a record, or its plain text."""
    return [record.text] if record.text else [
        message["content"] for message in record.messages or [] if message["role"] == "user"]
