"""Configuration of a head training run: one YAML or JSON file, read into a frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eagle_fsd.acceptance import Rule, make_rule
from eagle_fsd.checks import check_choice
from eagle_fsd.trees.config import TreeConfig
from train.objectives import Objective, check_count, make_objective

DTYPES = ("float32", "bfloat16", "float16")
CLIPS = ("norm", "value")
TRACKERS = ("tensorboard", "wandb", "none")


@dataclass(frozen=True)
class TrainingConfig:
    """What a run needs to know. Paths are as seen from where the script runs.

    Args:
        target: directory or hub id. data: dataset of train.prepare_data. output: folder of the run; the trained head
            is in its `head`, the best by estimated tau in `best`.
        eval_data: dataset for tau and the held-out loss; None: the last `eval_documents` of `data`, kept out of it.
        features: folder of train.features; None: online, by the target's forward in each step.
        target_dtype: of the target when features are made online and for evaluation.
        device_map: placement of a large target, such as "auto".
        init_from: a head to continue from (directory or hub id); None: a new one.
        head: fields of a new head's Llama config that differ from the target's, such as intermediate_size, `bias` of
            its fc, and `kind`: "eagle2" (the default) or "eagle3", which takes draft_vocab_size too.
        objective: name in train.objectives.OBJECTIVES, or a mapping of its fields (`name` says what to start from).
        steps: optimiser steps; None: as many as `epochs` take.
        batch_tokens: tokens of one optimiser step over all processes, padding included.
        gradient_accumulation: forwards that a process deals its share of them out to.
        lr, warmup, betas, weight_decay: AdamW; the rate rises over `warmup` steps, then falls linearly to zero.
        clip: "norm" or "value" (the published EAGLE recipe), at `clip_at`.
        save_every, eval_every, log_every: in steps. keep: how many resumable states are kept.
        evaluate: estimate tau while training and decode at the end, for which the main process holds the whole target;
            without it, training with `features` never loads the target.
        eval_thresholds: of fsd, for the estimate of tau.
        decode_prompts, decode_tokens: what the finished head is measured on, by real decoding.
        tree: total_tokens, depth, top_k and, as a fourth, draft_temperature of the trees that tau is estimated with.
        mixed_precision: of the head: "no" or "bf16".

    Raises:
        ValueError: a value out of range.
    """

    target: str
    data: str
    output: str
    eval_data: str | None = None
    eval_documents: int = 64
    features: str | None = None
    target_dtype: str = "bfloat16"
    device_map: str | None = None
    trust_remote_code: bool = False
    init_from: str | None = None
    head: dict[str, Any] = field(default_factory=dict)
    objective: Objective = field(default_factory=lambda: make_objective("hass"))
    steps: int | None = None
    epochs: float = 20.0
    batch_tokens: int = 16_384
    gradient_accumulation: int = 1
    lr: float = 1e-4
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: str = "norm"
    clip_at: float = 0.5
    seed: int = 0
    mixed_precision: str = "bf16"
    save_every: int = 500
    keep: int = 2
    eval_every: int = 500
    log_every: int = 10
    evaluate: bool = True
    eval_thresholds: tuple[float, ...] = (0.1, 0.3)
    decode_prompts: int = 24
    decode_tokens: int = 128
    tree: tuple[float, ...] = (60, 8, 10)
    tracker: str = "tensorboard"

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "gradient_accumulation", "eval_documents", "save_every", "eval_every", "log_every",
                     "keep", "decode_prompts", "decode_tokens"):
            check_count(name, getattr(self, name))
        if self.steps is not None:
            check_count("steps", self.steps)
        for name in ("lr", "epochs", "clip_at"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup must be a whole number of at least 0, got {self.warmup!r}")
        if len(self.betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        if not isinstance(self.head, dict):
            raise ValueError(f"head must be a mapping of settings, got {self.head!r}")
        for name, accepted in (
            ("target_dtype", DTYPES), ("clip", CLIPS), ("tracker", TRACKERS), ("mixed_precision", ("no", "bf16"))
        ):
            check_choice(name, getattr(self, name), accepted)
        if len(self.tree) not in (3, 4):
            raise ValueError(f"tree must be [total_tokens, depth, top_k] or with a draft temperature, got {self.tree}")
        self.tree_config, self.rules  # noqa: B018 (both check what they are made of)

    @property
    def tree_config(self) -> TreeConfig:
        """The tree that tau is estimated and measured with."""
        total, depth, top_k, *temperature = self.tree
        return TreeConfig(*(int(n) if n == int(n) else n for n in (total, depth, top_k)), *temperature)

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules that tau is estimated and measured for, by name."""
        return {"exact": make_rule("exact"), **{f"fsd {t:g}": make_rule("fsd", t) for t in self.eval_thresholds}}


def make_config(values: dict[str, Any]) -> TrainingConfig:
    """A configuration from plain values.

    Raises:
        ValueError: a field that does not exist, one that is missing, or a value out of range.
    """
    known = {f.name: f for f in dataclasses.fields(TrainingConfig)}
    for name in values:
        if name not in known:
            raise ValueError(f"unknown setting {name!r}; accepted: {', '.join(known)}")
    for name in ("target", "data", "output"):
        if not isinstance(values.get(name), (str, Path)):
            raise ValueError(f"setting {name!r} is missing, or is no path")
    converted = {**values, **{name: str(values[name]) for name in ("target", "data", "output")}}
    if values.get("mixed_precision") is False:  # an unquoted `no` in YAML
        converted["mixed_precision"] = "no"
    if "objective" in values and not isinstance(values["objective"], Objective):
        converted["objective"] = make_objective(values["objective"])
    for name in ("betas", "eval_thresholds", "tree"):
        if name in values:
            if not isinstance(values[name], (list, tuple)):
                raise ValueError(f"{name} must be a list, got {values[name]!r}")
            converted[name] = tuple(map(_number, values[name]))
    return TrainingConfig(**converted)


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """The configuration of a YAML or JSON file, with `name=value` overrides (value in YAML)."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings by name")
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"an override is name=value, got {override!r}")
        # YAML 1.1 reads 3e-4 as text; numbers in that form are numbers here.
        values[name] = _number(yaml.safe_load(value))
    if isinstance(values.get("objective"), dict):
        values["objective"] = {name: _number(value) for name, value in values["objective"].items()}
    return make_config({name: _number(value) for name, value in values.items()})


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
