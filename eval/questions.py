"""The questions that the evaluation commands ask: those of a file, or held-out tasks of the bundled generator."""

from __future__ import annotations

from pathlib import Path

from eagle_fsd.data.questions import Question, read_questions
from train.tasks.generator import tasks


def generated_questions(count: int, seed: int = 1) -> list[Question]:
    """Held-out tasks of the bundled generator; the category is the task's family."""
    chosen = tasks("heldout", seed=seed, count=count)
    return [
        Question(number, task.family, tuple(m["content"] for m in task.messages if m["role"] == "user"), task.result)
        for number, task in enumerate(chosen)
    ]


def load_questions(path: Path | None, count: int, seed: int, limit: int | None = None) -> list[Question]:
    """Those of a file, or `count` generated ones; at most `limit`.

    Raises:
        ValueError: see `read_questions`; or `count` or `limit` is below 1.
    """
    if count < 1 or limit is not None and limit < 1:
        raise ValueError(f"at least one question has to be asked for, got {count if count < 1 else limit}")
    return (read_questions(path) if path else generated_questions(count, seed))[:limit]
