"""Pairs of published shapes with random weights: what can be timed and weighed without a download."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel, fit_head


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, as in its published config, and where its published head's differ."""

    sizes: dict
    model_type: str = "llama"
    head: dict = field(default_factory=dict)


SHAPES = {
    "llama-3.1-8b": Shape({
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "llama-3.1-70b": Shape({
        "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8}),
    "qwen2.5-7b": Shape({
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4}, "qwen2"),
    "demo": Shape({
        "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 528, "num_hidden_layers": 24,
        "num_attention_heads": 6, "num_key_value_heads": 2}, head={"intermediate_size": 768}),
    "tiny": Shape({
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}),
}
ShapeName = Literal[tuple(SHAPES)]


def build_pair(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, layers: int | None = None, positions: int = 131_072,
    attn_implementation: str | None = None,
) -> EagleModel:
    """A pair of this shape with random weights, made on the device.

    Args:
        layers: of the target in place of its own number.
    """
    sizes = {**shape.sizes, "max_position_embeddings": positions, "tie_word_embeddings": False,
             "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes |= {"num_hidden_layers": layers} if layers else {}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape.model_type, **sizes), dtype=dtype, attn_implementation=attn_implementation)
        head = DraftHead(LlamaConfig(**sizes | shape.head | {"num_hidden_layers": 1}))
    head.share_embeddings(None)
    target = TargetModel(model, check=False)  # random weights in half precision may miss its tolerance
    fit_head(head, target)
    return EagleModel(target, head)
