"""What the files of published heads say: `config.json` in several dialects, and weights under our names.

Configs in the wild are often the target's with a few fields changed: what the weights show (kind, layers, biases) is
taken from them.
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
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # layers that compute what Llama's does, where their keys are its
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "layers.0."
# Tensors that say nothing of a head: the tokens of d2t as a mask, parts of the target, what follows from the config.
NOT_THE_HEADS = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")


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


def plain_names(state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors that are the head's, by our names.

    Raises:
        ValueError: two of them have the same name here; layers that are not one layer, the first.
    """
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        ours = name.removeprefix("model.")
        ours = LAYER + ours.removeprefix("midlayer.") if ours.startswith("midlayer.") else ours
        if ours in named:
            raise ValueError(f"{path} holds {ours} twice, once as {name}")
        if not NOT_THE_HEADS.fullmatch(ours):
            named[ours] = value
    layers = sorted({int(found[1]) for found in map(re.compile(r"layers\.(\d+)\.").match, named) if found})
    if layers not in ([], [0]):
        numbers = ", ".join(map(str, layers))
        raise ValueError(f"{path} has weights of layer {numbers}; read are draft heads of 1 layer, layer 0")
    return named


def is_eagle3(state: dict[str, Tensor]) -> bool:
    """Whether these are the weights of an EAGLE-3 head."""
    return LAYER + "hidden_norm.weight" in state or "d2t" in state


def llama_config(fields: dict, state: dict[str, Tensor], path: str) -> LlamaConfig:
    """The config of a head with these weights, with the target's layers counted as `Eagle3Head` counts them.

    Raises:
        ValueError: no Llama config, or a variant that is not read.
    """
    nested = fields.get("eagle_config")  # of SGLang, SpecForge and ModelOpt
    nested = nested if isinstance(nested, dict) else {}
    variant = next((name for name in VARIANTS if fields.get(name) or nested.get(name)), None)
    if variant is not None:
        raise ValueError(f"{path} is of a variant of EAGLE-3 that is not read: it has {variant}")
    layer, eagle3 = fields.get("model_type") or "llama", is_eagle3(state)
    if eagle3 and layer not in LLAMA_LIKE:
        raise ValueError(f"{path} has a layer of type {layer!r}; read are {', '.join(LLAMA_LIKE)}")
    queries, output = (f"{LAYER}self_attn.{name}_proj.bias" in state for name in "qo")
    seen = {"num_hidden_layers": 1, "layer_types": None, "qkv_bias": queries and not output,
            "attention_bias": output, "mlp_bias": LAYER + "mlp.down_proj.bias" in state}
    try:
        layers = fields.get(LAYER_IDS)
        if layers is None and nested.get(LAYER_IDS) is not None:  # the layers whose output is read, not those it enters
            layers = [number + 1 for number in nested[LAYER_IDS]]
        if eagle3 and not layers:
            log.info("%s does not say which layers of the target are read: taking 2, n/2 and n-3 of n", path)
        rows = state["lm_head.weight"].shape[0] if "lm_head.weight" in state else None
        named = (fields.get("draft_vocab_size") or rows) if eagle3 else None
        own = {LAYER_IDS: layers if eagle3 else None, "draft_vocab_size": named}
        # Published configs carry the target's `head_dim`-free Llama fields; null entries stand for defaults.
        given = {name: value for name, value in {**fields, **own, **seen}.items()
                 if name not in ("bias", "model_type") and value is not None}
        return LlamaConfig(**given)
    except Exception as error:  # among them the config classes' own errors
        raise ValueError(f"{path} is no Llama config: {error}") from error


def check_draft_tokens(head: Eagle3Head, state: dict[str, Tensor], path: str) -> None:
    """Take the offsets of a whole draft vocabulary, which are all 0, from `state`.

    Raises:
        ValueError: draft tokens that stand for no token of the target, or two for one.
    """
    named, vocabulary, offsets = head.draft_vocab_size, head.config.vocab_size, state.get("d2t")
    if head.d2t is None:
        if state.pop("d2t", None) is not None and offsets.any():
            raise ValueError(f"{path} has offsets in d2t, although its draft vocabulary is the whole one")
        return
    if offsets is None:
        raise ValueError(f"{path} has no d2t, which says what its {named} tokens stand for among {vocabulary}")
    if offsets.is_floating_point() or tuple(offsets.shape) != (named,):
        raise ValueError(f"{path}: d2t must be integers [{named}], got {offsets.dtype} {list(offsets.shape)}")
    tokens = torch.arange(named) + offsets
    if tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) < named:
        raise ValueError(f"{path}: d2t must name {named} different tokens of {vocabulary}, as offsets")
