"""Options of a comparison, and acceptance settings as text. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..data.questions import Question, choose_questions
from ..drafting.config import TreeConfig, parse_tree
from ..options.generate import GenerateOptions

FORMS = {"int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"}}  # of a pair, as options of `load`
REFERENCE = "exact"  # the setting that others are compared with


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Which questions to ask.

    Args:
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, or prompts with or without answers;
            or a name of a public set to download: mt_bench, spec_bench, humaneval, mbpp, gsm8k.
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
        settings: rules with thresholds and other options of generate, including sampling options of lossless ones:
            "fsd 0.3" "fsd 0.5 head_guard=none" "fsd 0.2 tree=16,15,1" "exact top_p=0.6".
        also: further forms of the pair to compare, without --settings: int8 (weights), bfloat16, draft=HEAD.
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: most tokens per turn.
        seed: seed of the sampling noise.
        tree: size of the draft tree; None: as fast as possible on this machine.
        text_drafts: "off": the drafter alone drafts, in all methods.
        drafter_alone: also let the draft model, a causal LM, answer without the target.
        runs: number of times to answer all questions. Speed is their mean, with its deviation. With --temperature,
            each run has the next seed, and accuracy is the mean, too. All else is of the first run.
        run_code: run the programs of HumanEval and MBPP answers to grade them; without it they are not graded.
        out: write OUT.json, OUT.md and OUT.png, and the answers in FastChat's format into OUT.answers, from which an
            interrupted run resumes.
    """

    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3")
    also: tuple[str, ...] = ()
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    tree: TreeConfig | None = None
    text_drafts: Literal["auto", "off"] = "auto"
    drafter_alone: bool = False
    runs: int = 1
    run_code: bool = False
    out: Path


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(ComparisonOptions):
    """How to compare methods with `model.generate`.

    Args:
        then: additional last turn of every question, for example "Now add type hints, and return the whole program."
        without_head: also compare decoding with text drafts but no head.
        static: also compare model.generate with a static cache, which transformers compiles on a GPU.
        leave_out: names of methods to leave out. The others are compared with the first of them.
        assisted: weights of the target in assisted generation; 1: lossless.
        reread: process the whole conversation in each turn, without the caches of earlier turns.
        endpoints: servers with an OpenAI-compatible API to compare with, as "NAME=URL" or "NAME=URL#MODEL".
        rows: questions to answer in one batch. Above 1, later turns process the whole conversation, and there is no
            prompt lookup and no assisted generation, which take one prompt.
        minutes: time from the warm-up on after which no further question of a run is asked. The results are those so
            far, and the same command continues.
        warm_up: questions (with --rows, batches) to answer once without timing.
    """

    seed: int = 1
    then: str | None = None
    without_head: bool = False
    static: bool = False
    leave_out: tuple[str, ...] = ()
    assisted: tuple[float, ...] = (1.0, 0.7)
    reread: bool = False
    endpoints: tuple[str, ...] = ()
    rows: int = 1
    minutes: float | None = None
    warm_up: int = 2

    @property
    def keeps_history(self) -> bool:
        """Whether later turns process only what is new."""
        return not self.reread and self.rows == 1


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(ComparisonOptions):
    """How to choose among settings.

    Args:
        points: largest loss of accuracy of a recommended setting, in points.
        batch: number of questions to answer together, except the timed ones, with one tree (--tree, or the default of
            the device); 1: answer every question alone and time it.
        timed: with --batch, number of questions to answer alone, interleaved, for timing.
        stop_after_code: end answers after their first fenced code block, to time only the program.
    """

    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5")
    max_new_tokens: int = 256
    points: float = 1.0
    batch: int = 1
    timed: int = 24
    stop_after_code: bool = False


def read_forms(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """The options of `load` that each further form of the pair changes: a name in `FORMS`, or "draft=HEAD".

    Raises:
        ValueError: the text has another form.
    """
    forms = {text: FORMS.get(text) or {"draft": text.removeprefix("draft=")} for text in texts}
    for text, changed in forms.items():
        if changed.get("draft") in ("", text):
            raise ValueError(f"--also takes {', '.join(FORMS)} or draft=HEAD, got {text!r}")
    return forms


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
