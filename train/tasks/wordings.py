"""What the tasks are worded with (`wordings.json`), and the writer that draws from it.

Phrases are what a step of an answer is said in: four or more for each, the later ones rarer, as in real text.
Questions have wordings to train on and others that are kept for evaluation.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDINGS = json.loads(Path(__file__).with_name("wordings.json").read_text(encoding="utf-8"))
NAMES, ITEMS, CITIES, WORDS, EVENTS = (WORDINGS[name] for name in ("names", "items", "cities", "words", "events"))
UNITS: list[tuple[str, str, str, int]] = WORDINGS["units"]  # unit, plural, small unit, how many of it are one
PHRASES: dict[str, list[str]] = WORDINGS["phrases"]
QUESTIONS: dict[str, dict[str, list[str]]] = WORDINGS["questions"]  # each with "trained" and "unseen" wordings
STORY_EVENTS: dict[str, list[str]] = WORDINGS["story_events"]
STRING_EDITS: dict[str, list[str]] = WORDINGS["string_edits"]


class Writer:
    """Draws the wordings of one task.

    Args:
        unseen: ask in the wordings that are kept out of training.
    """

    def __init__(self, rng: random.Random, unseen: bool) -> None:
        self.rng, self.asked, self.steps = rng, "unseen" if unseen else "trained", 0

    def pick(self, wordings: list[str]) -> str:
        """One wording, the first ones a little more often (weights 1/(rank + 3))."""
        return self.rng.choices(wordings, weights=[1 / (i + 4) for i in range(len(wordings))])[0]

    def ask(self, question: str, **values) -> str:
        return self.rng.choice(QUESTIONS[question][self.asked]).format(**values)

    def say(self, phrase: str, **values) -> str:
        return self.pick(PHRASES[phrase]).format(**values)

    def calc(self, op: str, a: int, b: int) -> tuple[str, int]:
        """One calculation step: its sentence and its value."""
        link = "First" if self.steps == 0 and self.rng.random() < 0.7 else self.pick(PHRASES["link"][1:])
        self.steps += 1
        if op == "add":
            return self.say("add", l=link, a=a, b=b, c=a + b), a + b
        if op == "sub":
            return self.say("sub", l=link, a=a, b=b, c=a - b), a - b
        if op == "div":
            return self.say("div", l=link, a=a, b=b, c=a // b), a // b
        if a < 10 or a % 10 == 0:
            return self.say("mul", l=link, a=a, b=b, c=a * b), a * b
        tens, ones = a - a % 10, a % 10
        return self.say("mul_parts", l=link, a=a, b=b, t=tens, u=ones, tb=tens * b, ub=ones * b, c=a * b), a * b

    def answer(self, sentences: list[str], result: str) -> str:
        """Opening, sentences, mostly a closing sentence, and the marked result."""
        parts = [self.say("open"), *sentences]
        if self.rng.random() < 0.75 and len(result) < 12:
            parts.append(self.say("close", r=result))
        return " ".join(parts) + f"\n#### {result}"


@dataclass(frozen=True)
class Problem:
    """What a family returns: chat turns before the answer, the sentences of the answer, and the result."""

    turns: list[str]
    sentences: list[str]
    result: str
    operands: tuple
