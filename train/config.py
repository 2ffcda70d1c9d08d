"""Configuration of a head training run: a dataclass, filled from one YAML or JSON file and `name=value` overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_fsd.acceptance import Rule, make_rule
from eagle_fsd.checks import check_choice
from eagle_fsd.drafting.config import TreeConfig
from train.core.objectives import make_objective, require_count

try:
    from omegaconf import ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError
except ImportError as error:
    raise ImportError("training needs OmegaConf: pip install eagle_fsd[train] (in the checkout: .[train])") from error

DTYPES = ("float32", "bfloat16", "float16")
CLIPS = ("norm", "value")
TRACKERS = ("tensorboard", "wandb", "none")
COUNTS = ("batch_tokens", "gradient_accumulation", "eval_documents", "eval_tokens", "save_every", "eval_every",
          "log_every", "keep", "decode_prompts", "decode_tokens")
HEAD_COUNTS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
               "vocab_size", "draft_vocab_size", "max_position_embeddings", "num_hidden_layers")
MOST_ALIGNED_STEPS = 32  # each takes the memory of one more step


@dataclass(frozen=True)
class TrainingConfig:
    """What a run needs to know. Paths are as seen from where the script runs.

    Args:
        target: directory or hub id. data: dataset of train.prepare_data. output: folder of the run; the trained head
            is in its `head`, the best by estimated tau in `best`.
        eval_data: dataset for tau and the held-out loss; None: the last `eval_documents` of `data`, kept out of it.
        eval_tokens: of the held-out answers that an estimate of tau walks through, in all: of longer answers a stretch
            each, always the same.
        features: folder of train.features; None: online, by the target's forward in each step.
        target_dtype: of the target when features are made online and for evaluation.
        device_map: placement of a large target, such as "auto".
        init_from: a head to continue from (directory or hub id); None: a new one.
        head: fields of a new head's Llama config that differ from the target's, such as intermediate_size, `bias` of
            its fc, and `kind`: "eagle2" (the default) or "eagle3", which takes draft_vocab_size too.
        objective: name in train.core.objectives.OBJECTIVES, or a mapping of its fields (`name` says what to start
            from); the configuration holds the `Objective` that is meant.
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
    eval_tokens: int = 1024
    features: str | None = None
    target_dtype: str = "bfloat16"
    device_map: str | None = None
    trust_remote_code: bool = False
    init_from: str | None = None
    head: dict[str, Any] = field(default_factory=dict)
    objective: Any = "hass"  # once made, an Objective
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
        for name in COUNTS if self.steps is None else (*COUNTS, "steps"):
            require_count(name, getattr(self, name))
        for name in ("lr", "epochs", "clip_at"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be a whole number of at least 0, got {self.warmup!r}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        for name, accepted in (
            ("target_dtype", DTYPES), ("clip", CLIPS), ("tracker", TRACKERS), ("mixed_precision", ("no", "bf16"))
        ):
            check_choice(name, getattr(self, name), accepted)
        if len(self.tree) not in (3, 4):
            raise ValueError(f"tree must be [total_tokens, depth, top_k] or with a draft temperature, got {self.tree}")
        self.tree_config, self.rules  # noqa: B018 (both check what they are made of)
        object.__setattr__(self, "objective", make_objective(self.objective))
        if self.objective.aligned_steps > MOST_ALIGNED_STEPS:
            raise ValueError(f"objective: aligned_steps must be at most {MOST_ALIGNED_STEPS}, got "
                             f"{self.objective.aligned_steps}")
        for name in HEAD_COUNTS:
            if self.head.get(name) is not None:
                require_count(f"head: {name}", self.head[name])

    @property
    def tree_config(self) -> TreeConfig:
        """The tree that tau is estimated and measured with."""
        total, depth, top_k, *temperature = self.tree
        return TreeConfig(*(int(n) if n == int(n) else n for n in (total, depth, top_k)), *temperature)

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules that tau is estimated and measured for, by name."""
        return {"exact": make_rule("exact"), **{f"fsd {t:g}": make_rule("fsd", t) for t in self.eval_thresholds}}


def make_config(values: Mapping[str, Any]) -> TrainingConfig:
    """A configuration from plain values.

    Raises:
        ValueError: a setting that does not exist, one that is missing, or a value of another type or out of range.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(TrainingConfig)}
    config = OmegaConf.structured(TrainingConfig)
    OmegaConf.set_readonly(config, False)  # as frozen dataclasses are
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"unknown setting {name!r}; accepted: {', '.join(kinds)}")
        try:  # an unquoted `no` in YAML is False
            OmegaConf.update(config, name, "no" if name == "mixed_precision" and value is False else value)
        except OmegaConfBaseException as error:
            raise ValueError(f"{name} must be {kinds[name]}, got {value!r}") from error
    for name in sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"setting {name!r} is missing")
    return OmegaConf.to_object(config)


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """The configuration of a YAML or JSON file, changed by overrides.

    Args:
        overrides: `name=value` with the value in YAML; `head.bias=true` changes one entry of a mapping.

    Raises:
        ValueError: what cannot be read; see `make_config`.
    """
    try:
        settings = OmegaConf.load(path)
        if isinstance(settings, ListConfig):
            raise ValueError(f"{path} must hold settings by name")
        if isinstance(settings.get("objective"), str):
            settings.objective = {"name": settings.objective}
        for override in overrides:
            name, equals, _ = override.partition("=")
            if not (name and equals):
                raise ValueError(f"an override is name=value, got {override!r}")
            OmegaConf.update(settings, name, OmegaConf.select(OmegaConf.from_dotlist([override]), name), merge=False)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} {' '.join(overrides)} cannot be read as settings: {error}") from error
    return make_config(OmegaConf.to_container(settings))
