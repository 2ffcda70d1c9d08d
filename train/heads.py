"""Freshly initialised heads, in the target's shape."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from eagle_fsd.checks import check_choice
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.gguf import target_source
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.heads.layouts import LAYER_IDS
from train.core.config import TrainingConfig
from train.core.objectives import require_count
from train.core.teacher import TargetEnds

VOCABULARY = "draft_vocab_size"
KINDS = {"eagle2": DraftHead, "eagle3": Eagle3Head}


def text_config(config: TrainingConfig) -> PreTrainedConfig:
    """The target's, of its language model."""
    target = AutoConfig.from_pretrained(target_source(config.target), trust_remote_code=config.trust_remote_code)
    return target.get_text_config(decoder=True)


def new_head(config: TrainingConfig) -> DraftHead:
    """A freshly initialised head: one Llama layer of the target's shape, changed by `config.head`.

    Raises:
        ValueError: a kind that there is not, or a field of `config.head` that is no field of a Llama config.
    """
    text, options = text_config(config), dict(config.head)
    bias, kind = options.pop("bias", False), options.pop("kind", "eagle2")
    check_choice("head: kind", kind, tuple(KINDS))
    if kind == "eagle2":
        options.pop(VOCABULARY, None)  # of an EAGLE-3 head it is a field of its config
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
             "pad_token_id")
    fields = {name: getattr(text, name) for name in shape if getattr(text, name, None) is not None}
    own = {"draft_vocab_size", "norm_before_residual", LAYER_IDS} if kind == "eagle3" else {"qkv_bias"}
    known = {*LlamaConfig().to_dict(), "head_dim", *own}
    unknown = options.keys() - known
    if unknown:
        raise ValueError(
            f"head has no setting {sorted(unknown)[0]!r}; it takes kind, bias, {VOCABULARY} and the fields of a "
            "LlamaConfig"
        )
    fields |= {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False, **options}
    torch.manual_seed(config.seed)
    return KINDS[kind](LlamaConfig(**fields), bias=bias)


def commonest_tokens(documents: Documents, vocab_size: int, size: int) -> Tensor:
    """[size] the tokens that are learned most often, by number."""
    counts = np.bincount(documents.tokens[documents.learned], minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def limit_output(head: DraftHead, size: int | None, documents: Documents, ends: TargetEnds) -> None:
    """Let an EAGLE-1/2 head name the `size` tokens that are learned most often; None: all it names now.

    Raises:
        ValueError: a size that the vocabulary does not have.
    """
    if size is not None:
        require_count(f"head: {VOCABULARY}", size)
        if size > head.config.vocab_size:
            raise ValueError(f"head: {VOCABULARY} {size} exceeds vocab_size {head.config.vocab_size}")
        head.limit_vocabulary(commonest_tokens(documents, head.config.vocab_size, size))
    if head.token_map is not None:
        head.output_rows = ends.rows(head.token_map)


def start_output(head: Eagle3Head, documents: Documents, ends: TargetEnds) -> None:
    """Let a new EAGLE-3 head name the tokens that are learned most often, with the target's own output layer to start
    from."""
    if head.d2t is not None:
        commonest = commonest_tokens(documents, head.config.vocab_size, head.draft_vocab_size)
        head.d2t.copy_(commonest - torch.arange(head.draft_vocab_size))
    with torch.no_grad():
        head.lm_head.weight.copy_(ends.lm_head.weight[head.target_tokens.to(ends.lm_head.weight.device)])
