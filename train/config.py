"""Settings of a training run: one dataclass, whose fields are the flags, and recipes to start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from eagle_fsd.checks import check_choice, require_integer, require_number
from eagle_fsd.cli.arguments import Tree
from eagle_fsd.drafting.config import TreeConfig
from train.objectives import OBJECTIVES, Objective, make_objective, objective_text

# How the command line writes an objective: a name, fields, or a name and what differs from it.
ObjectiveText = Annotated[Objective, PrimitiveConstructorSpec(
    nargs=1, metavar="NAME[,FIELD=VALUE]", instance_from_str=lambda words: make_objective(*words),
    is_instance=lambda value: isinstance(value, Objective),
    str_from_instance=lambda objective: [objective_text(objective)])]
COUNTS = ("steps", "batch_tokens", "gradient_accumulation", "save_every", "keep", "eval_every", "eval_documents",
          "eval_tokens", "decode_tokens", "log_every")
SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Train a draft head for a target.

    Args:
        target: directory, hub id or GGUF file; without it SmolLM2-135M-Instruct, as of eagle_fsd.load.
        output: folder of the run, with the trained head in `head` and the best by held-out tau in `best`.
        conversations: files whose questions the target answers itself, greedily, to learn from; the dataset is made in
            the run's folder, on a CPU with its features. For other ways take train.prepare_data and --data.
        data: dataset of train.prepare_data, in place of conversations.
        features: folder of train.features; without it the target makes them in each step.
        target_dtype: of the target, for features made on the spot and for evaluation; auto: bfloat16, on a CPU that is
            slower in it float32.
        device_map: placement of a large target by accelerate, such as auto.
        trust_remote_code: allow a target to run code from its repository.
        head: kind of a new head.
        init_from: a head to continue from (directory or hub id), in place of a new one.
        draft_vocab_size: a new head names so many of the target's tokens, those that are learned most often.
        intermediate_size: of a new head; this and the next three are the target's unless they are given.
        num_attention_heads: of a new head.
        num_key_value_heads: of a new head.
        head_dim: of a new head.
        layers: what enters these target layers is read by a new EAGLE-3 head; else 2, half, third from the end.
        bias: give a new head's fc a bias.
        qkv_bias: give a new EAGLE-2 head's q, k and v a bias.
        norm_before_residual: of a new EAGLE-3 head.
        objective: name in train.objectives.OBJECTIVES, fields of an Objective (tv=1,soft_ce=0.1), or a name and what
            differs from it (hass,aligned_steps=4).
        steps: optimiser steps; without it as many as --epochs take.
        epochs: passes over the data.
        batch_tokens: of one optimiser step over all processes, padding included.
        gradient_accumulation: forwards that a process deals its share of a step out to.
        lr: learning rate after the warm-up, from where it falls linearly to zero.
        warmup: steps in which the rate rises.
        betas: of AdamW.
        weight_decay: of AdamW.
        clip: norm, or value as in the published EAGLE recipe.
        clip_at: largest norm or value of the gradients.
        mixed_precision: of the head; auto: bf16, on a CPU that is slower in it none.
        seed: of a new head, the order of the data and the noise.
        save_every: steps from one resumable state to the next.
        save_minutes: the same in minutes, where so many steps take longer.
        keep: how many states are kept.
        log_every: steps from one entry of the tracker to the next; train.jsonl has every step.
        evaluate: where it is off, no held-out prompts are decoded while training and at the end, and training with
            --features never loads the target.
        eval_every: steps from one evaluation to the next.
        eval_data: dataset for evaluations; without it the last --eval-documents of --data, which are not learned.
        eval_documents: how many of its answers are continued.
        eval_tokens: decoded of each.
        decode_prompts: so many prompts are decoded with the finished head and without, to compare speeds, such as 24.
        decode_tokens: decoded of each.
        tree: draft tree of evaluations.
        tracker: what accelerate logs to besides.
        cpu: keep off a GPU that is there.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range.
    """

    target: str | None = None
    output: Path
    conversations: tuple[str, ...] = ()
    data: Path | None = None
    features: Path | None = None
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    head: Literal["eagle2", "eagle3"] = "eagle2"
    init_from: str | None = None
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layers: tuple[int, ...] = ()
    bias: bool = False
    qkv_bias: bool = False
    norm_before_residual: bool = False
    objective: ObjectiveText = OBJECTIVES["hass"]
    steps: int | None = None
    epochs: float = 20.0
    batch_tokens: int = 32_768
    gradient_accumulation: int = 16  # the logits of a forward are what fills the memory
    lr: float = 1e-4
    warmup: int = 2000
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: Literal["norm", "value"] = "norm"
    clip_at: float = 0.5
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    seed: int = 0
    save_every: int = 1000
    save_minutes: float = 5.0
    keep: int = 2
    log_every: int = 10
    evaluate: bool = True
    eval_every: int = 1000
    eval_data: Path | None = None
    eval_documents: int = 64
    eval_tokens: int = 32
    decode_prompts: int = 0
    decode_tokens: int = 128
    tree: Tree = TreeConfig(60, 8, 10)
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in (*COUNTS, *SIZES):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        require_integer("warmup", self.warmup, 0)
        require_integer("decode_prompts", self.decode_prompts, 0)
        for name in ("lr", "epochs", "clip_at", "save_minutes"):
            require_number(name, getattr(self, name), "a number above 0", lambda value: value > 0)
        for beta in self.betas:
            require_number("betas", beta, "two numbers of at least 0 and below 1", lambda value: 0 <= value < 1)
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                check_choice(name, getattr(self, name), get_args(kind))


# What each recipe is for, and what differs from the defaults above in it.
RECIPES: dict[str, tuple[str, dict]] = {
    "hass": ("targets of 7 to 13 B parameters on one GPU: EAGLE-2 head, unrolled over three steps", {}),
    "eagle2": ("the recipe published with EAGLE-1/2 (arXiv 2401.15077, appendix)",
               {"objective": OBJECTIVES["eagle"], "lr": 3e-5, "clip": "value"}),
    "eagle3": ("EAGLE-3 (arXiv 2503.01840): features of three target layers, seven steps on the head's own states",
               {"head": "eagle3", "draft_vocab_size": 32_000, "objective": OBJECTIVES["eagle3"], "epochs": 10.0,
                "lr": 5e-5, "warmup": 1000}),
    # The output layer is most of a step's cost, and of a draft level's: a part of it on a part of the positions.
    "small": ("targets of 0.1 to 0.5 B parameters on a CPU, from stored features",
              {"draft_vocab_size": 8192, "objective": OBJECTIVES["sparse"], "batch_tokens": 4096,
               "gradient_accumulation": 1, "lr": 1.5e-3, "warmup": 100, "save_every": 200, "eval_every": 500,
               "tree": TreeConfig(16, 5, 4)}),
}
