"""New heads in the target's shape, and their draft vocabularies."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.heads.layouts import LAYER_IDS

from .config import SIZES, TrainingConfig
from .teacher import TargetEnds

# Fields that a head's config inherits from the target's.
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id")


def new_head(config: TrainingConfig, text: PreTrainedConfig) -> DraftHead:
    """A new head: one Llama layer of the target's shape, with the changes in the settings.

    Args:
        text: config of the target's language model.

    Raises:
        ValueError: the sizes do not match, or a setting belongs to the other kind of head.
    """
    kind, other = (Eagle3Head, ("qkv_bias",)) if config.head == "eagle3" else (DraftHead, ("layers",
                                                                                         "norm_before_residual"))
    for name in other:
        if getattr(config, name):
            raise ValueError(f"{name} is not a setting of an {config.head} head")
    fields = {name: copy.deepcopy(getattr(text, name)) for name in SHAPE if getattr(text, name, None) is not None}
    fields |= {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    fields |= {name: getattr(config, name) for name in SIZES if getattr(config, name) is not None}
    if (config.draft_vocab_size or 0) > fields["vocab_size"]:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds vocab_size {fields['vocab_size']}")
    if config.head == "eagle3":
        fields |= {"norm_before_residual": config.norm_before_residual}
        fields |= {LAYER_IDS: list(config.layers)} if config.layers else {}
    else:
        fields.pop("draft_vocab_size", None)  # EAGLE-3 heads only: `set_draft_vocabulary` limits the others
        fields["qkv_bias"] = config.qkv_bias
    torch.manual_seed(config.seed)
    return kind(LlamaConfig(**fields), bias=config.bias)


def most_frequent_tokens(documents: Documents, vocab_size: int, size: int) -> Tensor:
    """[size] the most frequent learned tokens, in ascending order."""
    counts = np.bincount(documents.tokens[documents.learned], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


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
