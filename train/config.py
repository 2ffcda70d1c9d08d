"""Settings of a training run: a dataclass whose fields are the flags, and recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from eagle_fsd.cli.arguments import Tree
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.utils.checks import check_choice, require_integer, require_number

from .objectives import OBJECTIVES, Objective, make_objective, objective_text

# An objective on the command line: a name, fields, or a name and changed fields.
ObjectiveText = Annotated[Objective, PrimitiveConstructorSpec(
    nargs=1, metavar="NAME[,FIELD=VALUE]", instance_from_str=lambda words: make_objective(*words),
    is_instance=lambda value: isinstance(value, Objective),
    str_from_instance=lambda objective: [objective_text(objective)])]
COUNTS = ("steps", "batch_tokens", "gradient_accumulation", "save_every", "keep", "eval_every", "eval_documents",
          "log_every")
SIZES = ("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Train a draft head for a target.

    Args:
        target: directory, Hub ID or GGUF file of the target. If omitted: SmolLM2-135M-Instruct, as in eagle_fsd.load.
        output: folder of the run. The trained head is in `head`, the head with the best held-out tau in `best`.
        conversations: files of conversations. The target answers their questions greedily, and the head learns from
            these answers. The run's folder keeps the dataset and, on a CPU, its features. For more control, use
            prepare_data and --data.
        data: dataset from prepare_data, instead of --conversations.
        features: folder that the module features wrote. If omitted: the target computes the features in every step.
        target_dtype: dtype of the target when it computes features and in evaluations. auto: bfloat16, or float32 on a
            CPU where bfloat16 is slower; with --features, theirs.
        quantization: int8: 8-bit weights of the target on a CPU, for its answers, features and evaluations.
        device_map: how accelerate places a large target, for example auto.
        trust_remote_code: run code from the target's repository.
        head: kind of a new head.
        init_from: directory or Hub ID of a head to continue from, instead of a new one.
        draft_vocab_size: limit the vocabulary of a new head to this many of the most frequent learned tokens. If
            omitted: all tokens.
        intermediate_size: size of a new head's MLP. If this or one of the next three is omitted: the target's.
        num_attention_heads: attention heads of a new head.
        num_key_value_heads: key and value heads of a new head.
        head_dim: dimension of each attention head of a new head.
        layers: target layers whose inputs a new EAGLE-3 head reads. If omitted: 2, the middle one, third from the end.
        bias: give the fc layer of a new head a bias.
        qkv_bias: give q, k and v of a new EAGLE-2 head a bias.
        norm_before_residual: take the residual of a new EAGLE-3 head after the norm.
        fc_norm: give a new EAGLE-3 head a norm of each target layer's features, as EAGLE-3.1 has (arXiv 2605.09992).
        norm_output: let a new EAGLE-3 head continue from its normalised states, as EAGLE-3.1 does.
        objective: a name in train.objectives.OBJECTIVES, fields of Objective (tv=1,soft_ce=0.1), or a name and changed
            fields (hass,aligned_steps=4).
        steps: optimizer steps. If omitted: as many as --epochs need.
        epochs: passes over the data.
        batch_tokens: most tokens in one optimizer step, over all processes, with each document as long as the longest.
        gradient_accumulation: forward passes into which each process splits its share of a step.
        lr: peak learning rate, after the warm-up. It then falls linearly to zero.
        warmup: steps in which the learning rate rises linearly from zero; a tenth of the steps if there are no more.
        betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        clip: clip gradients by norm, or by value as in the published EAGLE recipe.
        clip_at: largest norm or value of the gradients.
        shard: divide head, gradients and optimizer over the processes (FSDP), for heads of large targets.
        mixed_precision: precision of the head's forward pass. auto: bf16, or no on a CPU where bf16 is slower.
        seed: seed of a new head's weights, the order of the data, and the noise.
        save_every: steps between resumable checkpoints.
        save_minutes: most minutes between resumable checkpoints.
        keep: number of resumable checkpoints to keep.
        log_every: steps between entries of the tracker; train.jsonl has every step.
        evaluate: decode held-out prompts during training and at its end. Without evaluation, training with --features
            does not load the target.
        eval_every: steps between evaluations.
        eval_data: dataset for evaluations. If omitted: the last --eval-documents of --data, which are then not learned.
        eval_documents: number of held-out documents whose answers are decoded.
        eval_tokens: tokens to decode of each, at least 2: the first comes before any draft.
        decode_prompts: prompts to decode with and without the finished head, to compare speeds, for example 24.
        decode_tokens: tokens to decode of each, at least 2.
        tree: draft tree of the evaluations.
        tracker: where accelerate also logs. A resumed run continues there.
        run_name: name of the run in wandb. If omitted: that of the output folder.
        cpu: train on the CPU even if there is a GPU.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range.
    """

    target: str | None = None
    output: Path
    conversations: tuple[str, ...] = ()
    data: Path | None = None
    features: Path | None = None
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None
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
    fc_norm: bool = False
    norm_output: bool = False
    objective: ObjectiveText = OBJECTIVES["hass"]
    steps: int | None = None
    epochs: float = 20.0
    batch_tokens: int = 32_768
    gradient_accumulation: int = 16  # the states of a forward pass take most of the memory
    lr: float = 1e-4
    warmup: int = 2000
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: Literal["norm", "value"] = "norm"
    clip_at: float = 0.5
    shard: bool = False
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
    run_name: str | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in (*COUNTS, *SIZES):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        for name in ("eval_tokens", "decode_tokens"):
            require_integer(name, getattr(self, name), 2)
        require_integer("warmup", self.warmup, 0)
        require_integer("decode_prompts", self.decode_prompts, 0)
        for name in ("lr", "epochs", "clip_at", "save_minutes"):
            require_number(name, getattr(self, name), "a number above 0", lambda value: value > 0)
        for beta in self.betas:
            require_number("betas", beta, "two numbers of at least 0 and below 1", lambda value: 0 <= value < 1)
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                check_choice(name, getattr(self, name), get_args(kind))


# Each recipe: its purpose, and the settings that differ from the defaults above.
RECIPES: dict[str, tuple[str, dict]] = {
    "hass": ("targets of 7 to 13 B parameters on one GPU: EAGLE-2 head, unrolled over three steps", {}),
    "eagle2": ("the recipe published with EAGLE-1/2 (arXiv 2401.15077, appendix)",
               {"objective": OBJECTIVES["eagle"], "lr": 3e-5, "clip": "value"}),
    "eagle3": ("EAGLE-3 (arXiv 2503.01840): features of three target layers, seven steps on the head's own states",
               {"head": "eagle3", "draft_vocab_size": 32_000, "objective": OBJECTIVES["eagle3"], "epochs": 10.0,
                "lr": 5e-5, "warmup": 1000}),
    # The output layer dominates the cost of a step and of a draft level: compute some rows of it at some positions.
    "small": ("targets of 0.1 to 1.5 B parameters on a CPU, from stored features",
              {"draft_vocab_size": 8192, "objective": OBJECTIVES["sparse"], "batch_tokens": 4096,
               "gradient_accumulation": 1, "lr": 1.5e-3, "warmup": 100, "save_every": 200, "eval_every": 500,
               "tree": TreeConfig(16, 5, 4)}),
}
