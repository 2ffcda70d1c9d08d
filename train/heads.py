"""New heads in the target's shape, and their draft vocabularies."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from eagle_fsd.data.documents import Documents
from eagle_fsd.data.token_counts import TokenCounts
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import LAYER_IDS, Eagle3Head
from eagle_fsd.models.fused import FIXED_ROPE

from .config import SIZES, TrainingConfig
from .teacher import TargetEnds

log = logging.getLogger("train.train_draft_head")

# Fields that a head's config inherits from the target's.
SHAPE = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
MLP_SIZES = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")  # the families' names of one field
# Parameters of the rotary embeddings in FIXED_ROPE.
ROPE = ("rope_type", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Settings of EAGLE-3 heads, and fields of their config.
VARIANT = ("norm_before_residual", "fc_norm", "norm_output")


def target_shape(text: PreTrainedConfig) -> dict[str, object]:
    """The fields of a head's config that follow the target's: of its last layer, where layers differ. What a Llama
    layer cannot have is replaced, and the log says so.

    Raises:
        ValueError: the target has no attention heads, as state-space models have none.
    """
    if text.is_heterogeneous:
        text = text.per_layer_config[-1]
        log.info("the target's layers differ in size: the head has the sizes of the last one")
    fields = {name: getattr(text, name) for name in SHAPE if getattr(text, name, None) is not None}
    for name in ("vocab_size", "hidden_size", "num_attention_heads"):
        if name not in fields:
            raise ValueError(f"a head cannot follow {type(text).__name__}, which has no {name}")
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    mlp = next((getattr(text, name) for name in MLP_SIZES if getattr(text, name, None)), 4 * hidden)
    fields["intermediate_size"] = mlp if isinstance(mlp, int) else mlp[-1]
    if hidden % heads:  # which Llama's config refuses, whatever head_dim is
        shared = fields.get("num_key_value_heads", heads)
        counts = [count for count in range(1, heads) if hidden % count == 0]
        count = max((count for count in counts if count % shared == 0), default=counts[-1])
        fields |= {"num_attention_heads": count, "num_key_value_heads": shared if count % shared == 0 else count}
        log.info("the head has %d attention heads, since the target's %d do not divide the hidden size %d", count,
                 heads, hidden)
    return fields | {"rope_parameters": head_rope(text)}


def head_rope(text: PreTrainedConfig) -> dict[str, object]:
    """The rotary embedding of a head: the one of the target's global layers, over whole attention heads; a plain one
    where its angles depend on more than the position, and the log says so."""
    rope = getattr(text, "rope_parameters", None) or {}
    if by_layer := [each for each in rope.values() if isinstance(each, Mapping)]:
        rope = rope.get("full_attention") or max(by_layer, key=lambda each: each.get("rope_theta", 0.0))
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or LlamaConfig.default_theta
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    followed = {name: rope[name] for name in ROPE if name in rope} if kind in FIXED_ROPE else {"rope_type": "default"}
    if not rope or part != 1 or kind not in FIXED_ROPE:
        log.info("the head has a %s rotary embedding with theta %g over whole attention heads; the target has %s",
                 followed.get("rope_type", "default"), theta,
                 f"one of type {kind}, over {part:g} of each" if rope else "none that its config describes")
    return followed | {"rope_theta": theta}


def new_head(config: TrainingConfig, text: PreTrainedConfig) -> DraftHead:
    """A new head: one Llama layer of the target's shape, with the changes in the settings.

    Args:
        text: config of the target's language model.

    Raises:
        ValueError: the sizes do not match, a setting belongs to the other kind of head, or see `target_shape`.
    """
    kind, other = (Eagle3Head, ("qkv_bias",)) if config.head == "eagle3" else (DraftHead, ("layers", *VARIANT))
    for name in other:
        if getattr(config, name):
            raise ValueError(f"{name} is not a setting of an {config.head} head")
    fields = target_shape(text) | {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    fields |= {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    if (config.draft_vocab_size or 0) > fields["vocab_size"]:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {fields['vocab_size']}")
    if config.head == "eagle3":
        fields |= {"norm_before_residual": False} | {name: True for name in VARIANT if getattr(config, name)}
        fields |= {LAYER_IDS: list(config.layers)} if config.layers else {}
    else:
        fields.pop("draft_vocab_size", None)  # EAGLE-3 heads only: `set_draft_vocabulary` limits the others
        fields["qkv_bias"] = config.qkv_bias
    torch.manual_seed(config.seed)
    return kind(LlamaConfig(**fields), bias=config.bias)


def most_frequent_tokens(documents: Documents, vocab_size: int, size: int) -> Tensor:
    """[size] the most frequent learned tokens, in ascending order."""
    counts = np.bincount(documents.tokens[documents.learned], minlength=vocab_size)
    return torch.from_numpy(TokenCounts(counts, np.zeros_like(counts)).most_frequent(size))


def set_draft_vocabulary(head: DraftHead, config: TrainingConfig, documents: Documents, ends: TargetEnds) -> None:
    """Limit a new head to the `draft_vocab_size` most frequent learned tokens; a head from `init_from` keeps its
    vocabulary. The output layer of a new EAGLE-3 head starts as a copy of the target's. `output_rows` becomes the rows
    of the target's output layer for the draft vocabulary."""
    new, vocabulary = config.init_from is None, head.config.vocab_size
    if not isinstance(head, Eagle3Head):
        if new and config.draft_vocab_size is not None:
            head.limit_vocabulary(most_frequent_tokens(documents, vocabulary, config.draft_vocab_size))
    elif new:
        if head.d2t is not None:
            size = head.draft_vocab_size
            head.d2t.copy_(most_frequent_tokens(documents, vocabulary, size) - torch.arange(size))
        weight, named = ends.lm_head.weight, head.draft_tokens
        with torch.no_grad():
            head.lm_head.weight.copy_(weight if named is None else weight[named.to(weight.device)])
    if head.draft_tokens is not None:
        head.output_rows = ends.rows(head.draft_tokens)
