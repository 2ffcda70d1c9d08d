"""What the files of published heads say: `config.json` in several dialects, and EAGLE-3 weights under our names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .eagle3 import Eagle3Head

# Fields of config.json that change what an EAGLE-3 head computes without a key of their own in the weights.
VARIANTS = ("norm_output", "fc_norm", "use_aux_norm", "norm_before_fc", "parallel_drafting")
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # layers that compute what Llama's does, where their keys are its
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_fields(path: str) -> dict:
    """What `config.json` holds, flat: the kinds of `speculators` keep the fields of the layer apart from their own.

    Raises:
        ValueError: not JSON, or a kind of `speculators` that is not read.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no Llama config: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no Llama config: it holds a {type(fields).__name__}")
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"{path} is of the speculators kind {kind!r}; of those only eagle3 is read")
    if "speculators_model_type" not in fields:
        return fields
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{path} is of the kind eagle3 and has no transformer_layer_config")
    if fields.get("norm_before_residual") is None:
        raise ValueError(f"{path} does not say norm_before_residual, and programs differ in what that means: add it")
    own = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS, *VARIANTS)
    return {**layer, **{name: fields.get(name) for name in own}}


def llama_config(fields: dict, path: str) -> LlamaConfig:
    """The config of a head's layer, with the target's layers counted as `Eagle3Head` counts them.

    Raises:
        ValueError: no Llama config, or a variant that is not read.
    """
    nested = fields.get("eagle_config") or {}  # of SGLang, SpecForge and ModelOpt
    if not isinstance(nested, dict):
        raise ValueError(f"{path}: eagle_config must hold fields by name, got {nested!r}")
    for name in ("draft_vocab_size", "target_hidden_size"):
        size = fields.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{path}: {name} must be a whole number of at least 1, got {size!r}")
    variant = next((name for name in VARIANTS if fields.get(name) or nested.get(name)), None)
    if variant is not None:
        raise ValueError(f"{path} is of a variant of EAGLE-3 that is not read: it has {variant}")
    layer = fields.get("model_type") or "llama"
    if "draft_vocab_size" in fields and layer not in LLAMA_LIKE:
        raise ValueError(f"{path} has a layer of type {layer!r}; read are {', '.join(LLAMA_LIKE)}")
    layers, shift = fields.get(LAYER_IDS), 0
    if layers is None:  # there the layers are named whose output is read, elsewhere those that it enters
        layers, shift = nested.get(LAYER_IDS), 1
    if layers is not None:
        if not isinstance(layers, list) or not layers or not all(type(number) is int for number in layers):
            raise ValueError(f"{path}: {LAYER_IDS} must be a list of layer numbers, got {layers!r}")
        layers = [number + shift for number in layers]
    # Published configs carry the target's `head_dim`-free Llama fields; null entries stand for defaults.
    given = {**fields, LAYER_IDS: layers}
    given = {name: value for name, value in given.items() if name not in ("bias", "model_type") and value is not None}
    try:
        config = LlamaConfig(**given)
    except Exception as error:  # one of the config classes' own errors
        raise ValueError(f"{path} is no Llama config: {error}") from error
    _check_numbers(config, path)
    return config


def _check_numbers(config: LlamaConfig, path: str) -> None:
    """Raise ValueError for what a config class accepts and no layer can be made of or compute with."""
    rope, kinds = config.rope_parameters, ("default", *ROPE_INIT_FUNCTIONS)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "max_position_embeddings", "head_dim"):
        if not getattr(config, name) >= 1:
            raise ValueError(f"{path}: {name} must be at least 1, got {getattr(config, name)}")
    if heads % shared:
        raise ValueError(f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} and "
                         f"{shared}")
    for name, value, accepted in (("hidden_act", config.hidden_act, ACT2FN),
                                  ("rope_type", rope.get("rope_type", "default"), kinds)):
        if value not in accepted:
            raise ValueError(f"{path}: {name} must be one that transformers knows, got {value!r}")
    for name, value in (("rms_norm_eps", config.rms_norm_eps), ("rope_theta", rope.get("rope_theta")),
                        ("factor", rope.get("factor", 1.0))):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{path}: {name} must be a positive number, got {value!r}")


def eagle3_state(head: Eagle3Head, state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors under our names, without what says a thing twice.

    Raises:
        ValueError: draft tokens that stand for no token of the target, or two for one.
    """
    state = {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: value
        for name, value in state.items() if name != "t2d"  # the tokens of d2t, as a mask
    }
    named, vocabulary, offsets = head.draft_vocab_size, head.config.vocab_size, state.get("d2t")
    if head.d2t is None:
        if state.pop("d2t", None) is not None and offsets.any():
            raise ValueError(f"{path} has offsets in d2t, although its draft vocabulary is the whole one")
        return state
    if offsets is None:
        raise ValueError(f"{path} has no d2t, which says what its {named} tokens stand for among {vocabulary}")
    if offsets.is_floating_point() or tuple(offsets.shape) != (named,):
        raise ValueError(f"{path}: d2t must be integers [{named}], got {offsets.dtype} {list(offsets.shape)}")
    tokens = torch.arange(named) + offsets
    if tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) < named:
        raise ValueError(f"{path}: d2t must name {named} different tokens of {vocabulary}, as offsets")
    return state
