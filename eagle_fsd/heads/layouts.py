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

from ..models.masks import SLIDING
from ..utils.checks import require_integer
from .eagle3 import LAST_NORM, LAYER_IDS, POST_NORM, Eagle3Head

log = logging.getLogger(__name__)

# Fields of config.json that change what an EAGLE-3 head computes, with the weights that also imply them.
NORMS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight", "norm_output": None}
# Drafters that are no EAGLE heads, by a part of their names in config.json; the variants of DFlash before DFlash.
DRAFTERS = {
    "dspark": "DSpark, a DFlash drafter whose draft tokens depend on the one before by a Markov head",
    "domino": "Domino, a DFlash drafter whose draft tokens depend on those before by a recurrent layer",
    "xpress": "XPress, a DFlash drafter whose blocks are refined in several passes",
    "dflash": "DFlash, a block-diffusion drafter: one forward fills in all masked tokens of a block",
    "peagle": "P-EAGLE (arXiv 2602.01469), a parallel drafter: one forward predicts all draft tokens, and a learned "
              "state stands for those not known yet",
    "mtp": "MTP, layers for multi-token prediction of one target, with inputs of their own",
}
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # they compute the same, but for norms of queries and keys
SPECFORGE = "LlamaForCausalLMEagle3"
# Their layer is Llama's, whatever `model_type` says: configs written by hand have the target's.
LLAMA_HEADS = (SPECFORGE, "Eagle3LlamaForCausalLM")
LAYER = "layers.0."
# Tensors that a head does not need: the tokens of d2t as a mask, parts of the target, values that the config implies.
UNUSED = re.compile(r"t2d|verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
# The first parts of other names: of the EAGLE authors and SpecForge; of EAGLE-1 in speculators 0.2; of older SGLang.
FIRST_NAMES = {"midlayer": "layers.0", "transformer": "layers.0", "fusion_fc": "fc",
               "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def read_fields(path: str) -> dict:
    """The fields of `config.json`, flattened: `speculators` nests the fields of the layer.

    Raises:
        ValueError: not JSON, or an unsupported type of `speculators`.
    """
    fields = read_json(path)
    kind = drafter_kind(fields)
    if kind is not None:
        raise ValueError(not_eagle(kind, path))
    if "speculators_model_type" not in fields:
        return fields
    kind, layer = fields["speculators_model_type"], fields.get("transformer_layer_config")
    if kind not in ("eagle", "eagle3"):
        raise ValueError(f"{path} has the speculators_model_type {kind!r}; accepted: eagle, eagle3")
    if not isinstance(layer, dict):
        raise ValueError(f"{path} has the speculators_model_type {kind}, but no transformer_layer_config")
    if kind == "eagle3" and fields.get("norm_before_residual") is None:
        raise ValueError(f"{path} has no norm_before_residual, for which programs have different defaults: add it")
    own = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS, *NORMS)
    return {**layer, **{name: fields.get(name) for name in own}}


def eagle_config(fields: dict) -> dict:
    """The fields that SGLang, SpecForge and ModelOpt nest."""
    nested = fields.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def read_json(path: str) -> dict:
    """The fields of `config.json`.

    Raises:
        ValueError: not JSON, or no object.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no Llama config: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no Llama config: it contains a {type(fields).__name__}")
    return fields


def is_drafter(path: str) -> bool:
    """Whether `config.json` has fields that only drafters with features have, and causal LMs have not."""
    try:
        fields = read_json(path)
    except ValueError:
        return False  # whoever loads it reports it
    own = ("speculators_model_type", "eagle_config", "draft_vocab_size")
    return any(fields.get(name) is not None for name in own) or drafter_kind(fields) is not None


def drafter_kind(fields: dict) -> str | None:
    """The name in DRAFTERS of a drafter that is no EAGLE head; None: an EAGLE head or another model."""
    architectures = fields.get("architectures")
    names = [fields.get("speculators_model_type"), *(architectures if isinstance(architectures, list) else ())]
    name = " ".join(map(str, names)).lower().replace("-", "")
    parallel = fields.get("parallel_drafting") or eagle_config(fields).get("parallel_drafting")
    marks = {"dspark": "markov_rank" in fields, "dflash": "dflash_config" in fields, "peagle": parallel}
    return next((kind for kind in DRAFTERS if kind in name or marks.get(kind)), None)


def not_eagle(kind: str, path: str) -> str:
    return f"{path} is of {DRAFTERS[kind]}; accepted: EAGLE-1/2 and EAGLE-3 heads, which draft token after token"


def plain_names(state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors of the head, under this library's names.

    Raises:
        ValueError: two tensors get the same name, there are other layers than layer 0, or it is no EAGLE head.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        first, dot, rest = name.removeprefix("model.").partition(".")
        plain = FIRST_NAMES.get(first, first) + dot + rest
        if plain in tensors:
            raise ValueError(f"{path} contains {plain} twice, once as {name}")
        if not UNUSED.fullmatch(plain):
            tensors[plain] = value
    if "mask_hidden" in tensors:
        raise ValueError(not_eagle("peagle", path))
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
    nested = eagle_config(fields)
    layer, eagle3 = fields.get("model_type") or "llama", is_eagle3(state)
    if eagle3 and layer not in LLAMA_LIKE and not set(LLAMA_HEADS) & set(fields.get("architectures") or ()):
        raise ValueError(f"{path} has a layer of type {layer!r}; accepted: {', '.join(LLAMA_LIKE)}")
    windowed = fields.get("layer_types") == [SLIDING]
    if windowed:
        require_integer(f"sliding_window of {path}", fields.get("sliding_window"), 1)
    if nested.get("use_aux_hidden_state") is False and (eagle3 or "fc.weight" not in state):
        raise ValueError(f"{path} has use_aux_hidden_state false; accepted: heads that read several target layers")
    norms = {name: bool(nested.get(name, fields.get(name))) or weight in state for name, weight in NORMS.items()}
    norms["fc_norm"] |= bool(fields.get("use_aux_norm"))  # its name in older files of SGLang
    post_norm = bool(nested.get(POST_NORM))
    norms["norm_output"] |= post_norm
    if eagle3 and norms["norm_output"] and not post_norm and fields.get("architectures") == [SPECFORGE]:
        log.warning("%s has norm_output: further steps continue from the state after the norm, as in EAGLE-3.1. "
                    "SpecForge before September 2026 wrote it for heads that continue from the state before: "
                    "`eagle-fsd heads check` compares the two", path)
    queries, output = (f"{LAYER}self_attn.{name}_proj.bias" in state for name in "qo")
    from_weights = {"num_hidden_layers": 1, "layer_types": [SLIDING] if windowed else None,
                    "qkv_bias": queries and not output,
                    "qk_norm": LAYER + "self_attn.q_norm.weight" in state or None,
                    "attention_bias": output, "mlp_bias": LAYER + "mlp.down_proj.bias" in state}
    try:
        layers = fields.get(LAYER_IDS)
        if layers is None and nested.get(LAYER_IDS) is not None:  # these ids are of layers whose output is read
            layers = [number + 1 for number in nested[LAYER_IDS]]
        if eagle3 and not layers:
            log.info("%s does not list the target layers that the head reads: using 2, n/2 and n-3 of n", path)
        rows = state["lm_head.weight"].shape[0] if "lm_head.weight" in state else None
        size = (fields.get("draft_vocab_size") or rows) if eagle3 else None
        own = {LAYER_IDS: layers if eagle3 else None, "draft_vocab_size": size,
               LAST_NORM: False if eagle3 and lacks_last_norm(fields, state, path) else None,
               **{name: eagle3 and on or None for name, on in norms.items()}}
        # A null in a published config means the default.
        return LlamaConfig(**{name: text_rope(value) if name in ("rope_scaling", "rope_parameters") else value
                              for name, value in {**fields, **own, **from_weights}.items()
                              if name not in ("bias", "model_type") and value is not None})
    except Exception as error:  # among them the config classes' own errors
        raise ValueError(f"{path} is no Llama config: {error}") from error


def lacks_last_norm(fields: dict, state: dict[str, Tensor], path: str) -> bool:
    """Whether an EAGLE-3 head was trained without the norm before its output layer. SpecForge before September 2026
    (its pull request 879) did so for `norm_output: false`; then the norm's weights are still those of the start."""
    used = eagle_config(fields).get(LAST_NORM, fields.get(LAST_NORM))
    if used is not None:
        return not used
    norm = state.get("norm.weight")
    untrained = norm is not None and norm.dim() == 1 and bool((norm == norm[:1]).all())
    if not untrained or fields.get("norm_output") is not False or fields.get("architectures") != [SPECFORGE]:
        return False
    log.warning("%s has norm_output false, and norm.weight was never trained: the head is computed without this norm, "
                "as SpecForge before September 2026 trained it; %s true in config.json turns it on", path, LAST_NORM)
    return True


def text_rope(rope: object) -> object:
    """The parameters of a rotary embedding for text, where the three positions of `mrope` are the same."""
    if not isinstance(rope, dict) or "mrope" not in (rope.get("rope_type"), rope.get("type")):
        return rope
    return {"rope_type": "default", **{name: value for name, value in rope.items() if name == "rope_theta"}}


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
