"""Options of a comparison, and acceptance settings as text. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..data.questions import Question, choose_questions
from ..drafting.config import TreeConfig, parse_tree
from ..options.generate import GenerateOptions

REFERENCE = "exact"  # the setting that others are compared with


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions to ask.

    Args:
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, or prompts with or without answers.
        per_category: use only the first questions of each category.
        categories: use only questions of these categories.
        limit: use only the first questions.
    """

    questions: tuple[Path, ...]
    per_category: int | None = None
    categories: tuple[str, ...] = ()
    limit: int | None = None

    def chosen_questions(self) -> list[Question]:
        """Read and select the questions; see `choose_questions`."""
        return choose_questions(self.questions, self.per_category, self.categories)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How to compare methods.

    Args:
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: most tokens per turn.
        seed: seed of the sampling noise.
        tree: size of the draft tree; None: as fast as possible on this machine.
        text_drafts: "off": the drafter alone drafts, in all methods.
        drafter_alone: also let the draft model, a causal LM, answer without the target.
        repeats: timed runs of each question; their median counts.
        run_code: run the programs of HumanEval and MBPP answers to grade them; without it they are not graded.
        out: write OUT.json, OUT.md and OUT.png, and OUT.answers.jsonl, from which an interrupted run resumes.
    """

    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0
    tree: TreeConfig | None = None
    text_drafts: Literal["auto", "off"] = "auto"
    drafter_alone: bool = False
    repeats: int = 1
    run_code: bool = False
    out: Path


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(ComparisonOptions):
    """How to compare settings with `exact`.

    Args:
        settings: rules with thresholds and other options of generate, including sampling options of lossless ones:
            "fsd 0.3" "fsd 0.5 head_guard=none" "fsd 0.2 tree=16,15,1" "exact top_p=0.6".
        points: largest loss of accuracy of a recommended setting, in points.
        batch: number of questions to answer together, except the timed ones, with one tree (--tree, or the default of
            the device); 1: answer every question alone and time it.
        timed: with --batch, number of questions to answer alone, interleaved, for timing.
        stop_after_code: end answers after their first fenced code block, to time only the program.
        seeds: number of answers to each question, over which accuracy is averaged; needs --temperature above 0.
    """

    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5")
    points: float = 1.0
    batch: int = 1
    timed: int = 24
    stop_after_code: bool = False
    seeds: int = 1


def parse_setting(text: str) -> tuple[str, dict[str, object]]:
    """Parse a setting into its name and options: a rule, its threshold, and other options of `generate`, such as
    "fsd 0.3", "fsd 0.5 head_guard=none divergence=tv", "fsd 0.2 tree=16,15,1" or "exact temperature=0.35 top_p=0.9".

    Raises:
        ValueError, TypeError: the text has another form, or an option is invalid.
    """
    rule, *words = text.split() or [""]
    options: dict[str, object] = {"acceptance": rule}
    for word in words:
        name, _, value = word.rpartition("=")
        name = name or "threshold"
        try:
            parsed: object = None if value == "none" else int(value) if name == "top_k" else float(value)
        except ValueError:
            parsed = parse_tree(value) if name == "tree" else value
        if name in options or name == "threshold" and not isinstance(parsed, float):
            rule = ""
        options[name] = parsed
    if not rule:
        raise ValueError(f'a setting must be a rule, a threshold and options, such as "fsd 0.3" or "fsd 0.5 '
                         f'head_guard=none", got {text!r}')
    GenerateOptions(**options)
    return " ".join([rule, *words]), options


def read_settings(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """Parse settings into options by name, with `exact` first; see `parse_setting`."""
    settings = dict(map(parse_setting, texts))
    if REFERENCE in settings:
        raise ValueError(f"--settings: {REFERENCE} is always included, leave it out of {list(texts)}")
    return {REFERENCE: {"acceptance": "exact"}, **settings}
