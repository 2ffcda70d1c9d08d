"""What a comparison is told: its options, and settings of acceptance as text. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..drafting.config import TreeConfig
from ..options import GenerateOptions

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How methods are compared.

    Args:
        settings: rules with thresholds, and other options of generate: "fsd 0.3", "fsd 0.5 head_guard=none".
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: of a turn.
        seed: of the sampling noise.
        tree: size of the draft tree; without it the fastest that is known here.
        repeats: timed runs of each question, of which the median counts.
        run_code: allow programs of HumanEval and MBPP answers to be run; else they are not graded.
        out: OUT.json, OUT.md and OUT.png are written, and OUT.answers.jsonl, which a stopped run goes on with.
    """

    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5")
    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0
    tree: TreeConfig | None = None
    repeats: int = 1
    run_code: bool = False
    out: Path


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
            given: object = None if value == "none" else int(value) if name == "top_k" else float(value)
        except ValueError:
            given = value
        if name in options or name == "threshold" and not isinstance(given, float):
            rule = ""
        options[name] = given
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
