"""The config of a model in a GGUF file, from every number in it that changes what the model computes.

`transformers` reads some of these numbers and takes the defaults of its config classes for the others, which belong to
one checkpoint of the family. So the table below says what becomes of each number of an architecture, and a number that
it does not have is an error. It was tried by difference: random models of each architecture, our logits beside those of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

# What becomes of a number: a name is the config's field; None, it changes nothing or is clear from the tensors; any
# other value is the only one accepted. Numbers of one field must be equal. Keys of RoPE: `rope_parameters`.
SHARED = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "attention.causal": True, "expert_count": 0, "expert_used_count": 0,
    "vocab_size": None, "tensor_data_layout": None,
}
RMS = SHARED | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EXPERTS = RMS | {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
WINDOW = RMS | {"attention.sliding_window": "sliding_window"}
GEMMA = WINDOW | {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}


@dataclass(frozen=True)
class Family:
    """What is read of an architecture.

    Args:
        model_type: its name in `transformers`.
        fields: see SHARED.
        partial: RoPE may turn only the first dimensions of a head.
        fixed: config fields that no number in the file expresses.
    """

    model_type: str
    fields: Mapping[str, object]
    partial: bool = False
    fixed: Mapping[str, object] | None = None


FAMILIES = {
    "llama": Family("llama", RMS),
    "qwen2": Family("qwen2", RMS),
    "qwen2moe": Family("qwen2_moe", EXPERTS),
    "qwen3": Family("qwen3", RMS),
    "qwen3moe": Family("qwen3_moe", EXPERTS, fixed={"norm_topk_prob": True}),
    "gemma2": Family("gemma2", GEMMA | {"attention.sliding_window_pattern": 2}),
    "gemma3": Family("gemma3_text", GEMMA | {"attention.sliding_window_pattern": 6}),
    "phi3": Family("phi3", WINDOW, partial=True),
    "starcoder2": Family("starcoder2", SHARED | {"attention.layer_norm_epsilon": "norm_epsilon"}),
    "stablelm": Family("stablelm", SHARED | {
        "attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": None}, partial=True),
    "nemotron": Family("nemotron", SHARED | {"attention.layer_norm_epsilon": "norm_eps"}, partial=True),
    "falcon": Family("falcon", SHARED | {
        "feed_forward_length": "ffn_hidden_size", "attention.key_length": None, "attention.value_length": None,
        "attention.head_count_kv": 1,  # with more, transformers would need other rows of q, k and v
        "attention.layer_norm_epsilon": "layer_norm_epsilon"}),
    "gpt2": Family("gpt2", {
        "context_length": "n_positions", "block_count": "n_layer", "embedding_length": "n_embd",
        "feed_forward_length": "n_inner", "attention.head_count": "n_head", "vocab_size": None,
        "attention.layer_norm_epsilon": "layer_norm_epsilon"}),
    "minimax-m2": Family("minimax_m2", RMS | {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size", "expert_gating_func": 2}, partial=True),
}
# Gemma divides queries by the root of the head's size, except the model of 27 billion parameters, of so many layers.
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def gguf_config(
    metadata: Mapping[str, object], tensors: Mapping[str, list[int]], rope: dict[str, Tensor]
) -> PreTrainedConfig:
    """The config of the model in a file.

    Args:
        metadata: of the file, by its keys.
        tensors: the shape of each tensor.
        rope: those of ROPE_TENSORS that the file has; the config expresses them.

    Raises:
        ValueError: the architecture is not in FAMILIES; a number is missing, or cannot be expressed.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ValueError(f"its architecture is {architecture!r}; accepted: {', '.join(FAMILIES)}")
    family, start = FAMILIES[architecture], f"{architecture}."
    numbers = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    fields = {}
    for key, field in family.fields.items():
        value = numbers.pop(key, None)
        if value is None or field is None:
            continue
        if isinstance(field, str):
            value, accepted = one_of(value), fields.setdefault(field, one_of(value))
        else:
            accepted = field
        if value != accepted:
            raise ValueError(f"its {start}{key} is {value!r}; accepted: {accepted!r}")
    names = family.fields
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        if not fields.get(names[key]):
            raise ValueError(f"it has no {start}{key}")
    if "token_embd.weight" not in tensors:
        raise ValueError("it lacks weights: token_embd.weight")
    heads, hidden = fields[names["attention.head_count"]], fields[names["embedding_length"]]
    # llama.cpp's defaults
    for field, default in (("num_key_value_heads", heads), ("head_dim", hidden // heads), ("sliding_window", None)):
        if field in names.values():
            fields[field] = fields.get(field) or default
    head_dim = fields.get("head_dim", hidden // heads)
    if architecture != "gpt2":
        fields["rope_parameters"] = rope_parameters(numbers, family, rope, head_dim, fields["max_position_embeddings"])
    if architecture == "phi3":  # its config has another field for it, which takes precedence
        fields["original_max_position_embeddings"] = fields["rope_parameters"].get(
            "original_max_position_embeddings", fields["max_position_embeddings"])
    if architecture in LARGEST_GEMMA:
        large = fields["num_hidden_layers"] == LARGEST_GEMMA[architecture]
        fields["query_pre_attn_scalar"] = hidden // heads if large else head_dim
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": numbers.pop("rope.freq_base_swa", 1e4)}
        fields["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    if numbers or rope:
        left = [f"{start}{key} = {value!r}" for key, value in numbers.items()] + list(rope)
        raise ValueError(f"what these change cannot be expressed: {', '.join(left)}")
    fields |= {
        "vocab_size": tensors["token_embd.weight"][0], "tie_word_embeddings": "output.weight" not in tensors,
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))},
        **tensor_fields(family.model_type, tensors), **(family.fixed or {}),
    }
    try:
        return AutoConfig.for_model(family.model_type, **fields)
    except Exception as error:  # it has many
        raise ValueError(f"transformers refuses its numbers ({type(error).__name__}: {error})") from error


def one_of(value: object) -> object:
    """The value of all layers, where a file has one for each."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"its layers differ: {value}")
    return value[0]


def tensor_fields(model_type: str, tensors: Mapping[str, object]) -> dict[str, bool]:
    """The config fields that follow from which tensors a file has."""
    query_bias = "blk.0.attn_q.bias" in tensors
    if model_type == "llama":
        return {"attention_bias": query_bias, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if model_type == "stablelm":
        return {"use_qkv_bias": query_bias, "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}
    return {}


def rope_parameters(
    numbers: dict[str, object], family: Family, tensors: dict[str, Tensor], head_dim: int, context: int
) -> dict[str, object]:
    """The parameters of RoPE; the numbers and tensors that they express are removed.

    Raises:
        ValueError: RoPE has a scaling that `transformers` does not compute.
    """
    size, base = numbers.pop("rope.dimension_count", head_dim), numbers.pop("rope.freq_base", 1e4)
    rope = {"rope_type": "default", "rope_theta": base}
    if family.partial:
        rope["partial_rotary_factor"] = size / head_dim
    elif size != head_dim:
        raise ValueError(f"its RoPE turns {size} of a head's {head_dim} dimensions")
    numbers.pop("rope.scaling.finetuned", None)
    factor = numbers.pop("rope.scaling.factor", numbers.pop("rope.scale_linear", 0.0)) or 1.0
    kind = numbers.pop("rope.scaling.type", "linear")  # as in llama.cpp
    original = numbers.pop("rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in tensors and family.model_type == "phi3":
        return rope | {
            "rope_type": "longrope", "factor": context / original, "original_max_position_embeddings": original,
            "attention_factor": numbers.pop("rope.scaling.attn_factor", 1.0),
            **{f"{length}_factor": tensors.pop(f"rope_factors_{length}.weight").tolist()
               for length in ("short", "long")}}
    if numbers.get("rope.scaling.attn_factor") == 1.0:
        del numbers["rope.scaling.attn_factor"]
    if "rope_freqs.weight" in tensors and family.model_type == "llama":
        if kind != "none" and factor != 1.0:
            raise ValueError(f"its RoPE has both a scaling of type {kind!r} and rope_freqs.weight")
        return rope | llama3_scaling(tensors.pop("rope_freqs.weight"), base)
    if kind == "yarn":
        betas = {name: numbers.pop(f"rope.scaling.yarn_{name}", value) for name, value in
                 (("beta_fast", 32.0), ("beta_slow", 1.0))}
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | betas
    if kind not in ("none", "linear"):
        raise ValueError(f"its RoPE has a scaling of type {kind!r}; accepted: none, linear, yarn")
    return rope | ({"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {})


def llama3_scaling(factors: Tensor, base: float) -> dict[str, object]:
    """The parameters of Llama 3's RoPE scaling from the factors by which it divides frequencies.

    Only the ratios of three of them count, so that low_freq_factor is 1; high_freq_factor is 4 in all known models.
    """
    factors, size = factors.double(), 2 * len(factors)
    waves = 2 * torch.pi * base ** (torch.arange(0, size, 2, dtype=torch.double) / size)
    factor, low, high = factors.max().item(), 1.0, 4.0
    if factor == 1.0:
        return {}
    between = (factors > 1.001) & (factors < 0.999 * factor)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    contexts = ((high - low) * smooth + low) * waves
    original = round(contexts[between].mean().item()) if between.any() else 8192
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise ValueError(f"its rope_freqs.weight is no scaling of Llama 3's kind: {factors.tolist()}")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}
