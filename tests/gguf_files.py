"""GGUF files of tiny models, written as llama.cpp's converter writes those of each architecture."""

import re

import gguf
import numpy as np
import torch
from tiny import VOCAB
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def permuted(weight, heads):
    """The rows of q and k as llama.cpp keeps them for Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def first(config, *names):
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def write(path, model, *, architecture="llama", tokens=True, names=(), numbers=None, split=None, **fields):
    """The model's weights in float32 as a GGUF file.

    Args:
        names: of the last tokens, which are control tokens then.
        numbers: of the architecture, beside those that the config has.
        split: number of this shard and of all; the first has the metadata, the last the last layer.
        fields: of the tokenizer, by the writer's names for them, such as eot_token_id.
    """
    writer, shard = gguf.GGUFWriter(path, architecture), split[0] if split else None
    if not shard:
        write_numbers(writer, model.config, numbers or {})
    if tokens and not shard:
        writer.add_tokenizer_model("gpt2")
        others = [f"<{number}>" for number in range(VOCAB - 28 - len(names))]
        writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz", "ab", "cd", *others, *names])
        writer.add_token_types([gguf.TokenType.NORMAL] * (VOCAB - len(names)) + [gguf.TokenType.CONTROL] * len(names))
        writer.add_token_merges(["a b", "c d"])  # transformers 5.17 reads a list of one as its entry
        for name, value in ({"eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 2} | fields).items():
            getattr(writer, f"add_{name}")(value)
    last = f"blk.{model.config.num_hidden_layers - 1}."
    for name, tensor in tensors(model, architecture).items():
        if split is None or name.startswith(last) == (shard == split[1] - 1):
            writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    if split:
        writer.add_uint16("split.no", shard)
        writer.add_uint16("split.count", split[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_numbers(writer, config, numbers):
    """The numbers of an architecture; `numbers` has others, by their keys."""
    heads = config.num_attention_heads
    size = first(config, "head_dim") or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(first(config, "ffn_hidden_size", "n_inner", "intermediate_size"))
    writer.add_head_count(heads)
    writer.add_vocab_size(VOCAB)
    if config.model_type in ("stablelm", "starcoder2", "nemotron", "falcon", "gpt2"):
        writer.add_layer_norm_eps(first(config, "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps"))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "gpt2":
        writer.add_head_count_kv(1 if config.model_type == "falcon" else config.num_key_value_heads)
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        writer.add_key_length(size)
        writer.add_value_length(size)
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] in ("longrope", "yarn"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if experts := first(config, "num_experts", "num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(first(config, "moe_intermediate_size", "intermediate_size"))
    for key, value in numbers.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{writer.arch}.{key}", value)


def tensors(model, architecture):
    """The tensors of a model by llama.cpp's names, in its layouts."""
    config, found = model.config, rope_tensors(model)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, weight in state.items():
        layer = (re.findall(r"\d+", name) or [None])[0]
        if architecture == "llama" and ".q_proj." in name:
            weight = permuted(weight, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            weight = permuted(weight, config.num_key_value_heads)
        elif architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            weight = weight + 1
        elif architecture == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            weight = weight.T
        elif name.endswith("shared_expert_gate.weight"):
            weight = weight[0]
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = half
        elif name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = weight
        else:
            stem, _, kind = name.rpartition(".")
            found[f"{known.get_name(stem)}.{kind}"] = weight
    return found


def rope_tensors(model):
    """The factors of RoPE that llama.cpp keeps as tensors."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"]) for length in ("short", "long")}
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
        return {"rope_freqs.weight": rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled)) / scaled}
    return {}
