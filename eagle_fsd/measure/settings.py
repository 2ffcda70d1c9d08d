"""Options of a comparison, and settings of acceptance as text. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.questions import Question, choose_questions
from ..drafting.config import TreeConfig
from ..options import GenerateOptions

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions are asked.

    Args:
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, or prompts with or without answers.
        per_category: only the first questions of each category.
        categories: only questions of these categories.
        limit: only the first questions of all.
    """

    questions: tuple[Path, ...]
    per_category: int | None = None
    categories: tuple[str, ...] = ()
    limit: int | None = None

    def chosen_questions(self) -> list[Question]:
        """See `choose_questions`."""
        return choose_questions(self.questions, self.per_category, self.categories)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How methods are compared.

    Args:
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: of a turn.
        seed: of the sampling noise.
        tree: size of the draft tree; without it the fastest that is known here.
        repeats: timed runs of each question, of which the median counts.
        run_code: run the programs of HumanEval and MBPP answers to grade them; otherwise they are not graded.
        out: OUT.json, OUT.md and OUT.png are written, and OUT.answers.jsonl, which a stopped run goes on with.
    """

    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0
    tree: TreeConfig | None = None
    repeats: int = 1
    run_code: bool = False
    out: Path


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(ComparisonOptions):
    """How settings are compared with `exact`.

    Args:
        settings: rules with thresholds and other options of generate, also lossless ones with other sampling: "fsd 0.3"
            "fsd 0.5 head_guard=none" "exact top_p=0.6".
        points: of accuracy, that a recommended setting may lose at most.
        batch: questions that are answered together, all but the timed ones, with one tree (--tree, or the default of
            the device); 1: every question is answered alone and timed.
        timed: with --batch, questions that are answered alone, interleaved, to time them.
        stop_after_code: answers end where their first fenced block does: what is timed is the program alone.
        seeds: answers to each question, of which accuracy is the mean; with --temperature above 0.
    """

    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5")
    points: float = 1.0
    batch: int = 1
    timed: int = 24
    stop_after_code: bool = False
    seeds: int = 1


def parse_setting(text: str) -> tuple[str, dict[str, object]]:
    """Name and options of a setting: a rule, its threshold, and other options of `generate`, such as "fsd 0.3",
    "fsd 0.5 head_guard=none divergence=tv" or "exact temperature=0.35 top_p=0.9".

    Raises:
        ValueError, TypeError: not of this form, or refused by `generate`.
    """
    rule, *words = text.split() or [""]
    options: dict[str, object] = {"acceptance": rule}
    for word in words:
        name, _, value = word.rpartition("=")
        name = name or "threshold"
        try:
            parsed: object = None if value == "none" else int(value) if name == "top_k" else float(value)
        except ValueError:
            parsed = value
        if name in options or name == "threshold" and not isinstance(parsed, float):
            rule = ""
        options[name] = parsed
    if not rule:
        raise ValueError(f'{text!r} is no setting; it takes a rule, a threshold and options, such as "fsd 0.3" or '
                         '"fsd 0.5 head_guard=none"')
    GenerateOptions.from_names(options)
    return " ".join([rule, *words]), options


def read_settings(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """Settings by name, `exact` first; see `parse_setting`."""
    settings = dict(map(parse_setting, texts))
    if not settings or EXACT in settings:
        raise ValueError(f"--settings takes at least one, and {EXACT} is always there, got {list(texts)}")
    return {EXACT: {"acceptance": EXACT}, **settings}
