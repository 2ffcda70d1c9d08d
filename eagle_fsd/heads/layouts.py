"""Parse the files of published heads: dialects of `config.json`, and the names of weights.

A published config is often the target's with a few fields changed. Therefore the weights determine the kind of head,
its layers and its biases.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from .eagle3 import Eagle3Head

log = logging.getLogger(__name__)

# Fields of config.json that change what an EAGLE-3 head computes without a key of their own in the weights.
VARIANTS = ("norm_output", "fc_norm", "use_aux_norm", "norm_before_fc", "parallel_drafting")
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # with the keys of Llama's layer, they compute the same
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "layers.0."
# Tensors that a head does not need: the tokens of d2t as a mask, parts of the target, values that the config implies.
UNUSED = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")


def read_fields(path: str) -> dict:
    """The fields of `config.json`, flattened: `speculators` nests the fields of the layer.

    Raises:
        ValueError: not JSON, or an unsupported type of `speculators`.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no Llama config: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no Llama config: it contains a {type(fields).__name__}")
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"{path} has the speculators_model_type {kind!r}; only eagle3 is supported")
    if "speculators_model_type" not in fields:
        return fields
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{path} has the speculators_model_type eagle3, but no transformer_layer_config")
    if fields.get("norm_before_residual") is None:
        raise ValueError(f"{path} has no norm_before_residual, for which programs have different defaults: add it")
    own = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS, *VARIANTS)
    return {**layer, **{name: fields.get(name) for name in own}}


def plain_names(state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors of the head, under this library's names.

    Raises:
        ValueError: two tensors get the same name, or there are other layers than layer 0.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        plain = name.removeprefix("model.")
        plain = LAYER + plain.removeprefix("midlayer.") if plain.startswith("midlayer.") else plain
        if plain in tensors:
            raise ValueError(f"{path} contains {plain} twice, once as {name}")
        if not UNUSED.fullmatch(plain):
            tensors[plain] = value
    layers = sorted({int(match[1]) for match in map(re.compile(r"layers\.(\d+)\.").match, tensors) if match})
    if layers not in ([], [0]):
        numbers = ", ".join(map(str, layers))
        raise ValueError(f"{path} has weights of layer {numbers}; accepted: draft heads of 1 layer, layer 0")
    return tensors


def is_eagle3(state: dict[str, Tensor]) -> bool:
    """Whether these are the weights of an EAGLE-3 head."""
    return LAYER + "hidden_norm.weight" in state or "d2t" in state


def llama_config(fields: dict, state: dict[str, Tensor], path: str) -> LlamaConfig:
    """The config of a head with these weights; the ids of target layers are converted to those of `Eagle3Head`.

    Raises:
        ValueError: not a Llama config, or an unsupported variant.
    """
    nested = fields.get("eagle_config")  # of SGLang, SpecForge and ModelOpt
    nested = nested if isinstance(nested, dict) else {}
    variant = next((name for name in VARIANTS if fields.get(name) or nested.get(name)), None)
    if variant is not None:
        raise ValueError(f"{path} is an unsupported variant of EAGLE-3: it has {variant}")
    layer, eagle3 = fields.get("model_type") or "llama", is_eagle3(state)
    if eagle3 and layer not in LLAMA_LIKE:
        raise ValueError(f"{path} has a layer of type {layer!r}; accepted: {', '.join(LLAMA_LIKE)}")
    queries, output = (f"{LAYER}self_attn.{name}_proj.bias" in state for name in "qo")
    from_weights = {"num_hidden_layers": 1, "layer_types": None, "qkv_bias": queries and not output,
                    "attention_bias": output, "mlp_bias": LAYER + "mlp.down_proj.bias" in state}
    try:
        layers = fields.get(LAYER_IDS)
        if layers is None and nested.get(LAYER_IDS) is not None:  # these ids are of layers whose output is read
            layers = [number + 1 for number in nested[LAYER_IDS]]
        if eagle3 and not layers:
            log.info("%s does not list the target layers that the head reads: using 2, n/2 and n-3 of n", path)
        rows = state["lm_head.weight"].shape[0] if "lm_head.weight" in state else None
        size = (fields.get("draft_vocab_size") or rows) if eagle3 else None
        own = {LAYER_IDS: layers if eagle3 else None, "draft_vocab_size": size}
        # A null in a published config means the default.
        return LlamaConfig(**{name: value for name, value in {**fields, **own, **from_weights}.items()
                              if name not in ("bias", "model_type") and value is not None})
    except Exception as error:  # among them the config classes' own errors
        raise ValueError(f"{path} is no Llama config: {error}") from error


def check_draft_tokens(head: Eagle3Head, state: dict[str, Tensor], path: str) -> None:
    """Check the offsets in `d2t`; remove them from `state` if the draft vocabulary is the whole one.

    Raises:
        ValueError: offsets are missing, or do not map the draft tokens to distinct tokens of the target.
    """
    count, vocabulary, offsets = head.draft_vocab_size, head.config.vocab_size, state.get("d2t")
    if head.d2t is None:
        if state.pop("d2t", None) is not None and offsets.any():
            raise ValueError(f"{path} has offsets in d2t, although its draft vocabulary is the whole one")
        return
    if offsets is None:
        raise ValueError(f"{path} has no d2t, which maps its {count} tokens to the target's {vocabulary}")
    if offsets.is_floating_point() or tuple(offsets.shape) != (count,):
        raise ValueError(f"{path}: d2t must be integers [{count}], got {offsets.dtype} {list(offsets.shape)}")
    tokens = torch.arange(count) + offsets
    if tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) < count:
        raise ValueError(f"{path}: d2t must be the offsets of {count} distinct tokens among {vocabulary}")
