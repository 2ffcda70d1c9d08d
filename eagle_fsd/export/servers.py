"""Export a draft head in the layout of a server.

Three programs read the same tensors. They differ in the file, the name of the architecture, the treatment of `fc`'s
bias, and the variants of EAGLE-3 that they compute; llama.cpp reads a GGUF file (`llama_cpp.py`). vLLM's CPU build
(`make test-vllm`) and llama.cpp were tested.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ..heads.checkpoint import load_head, require_empty, save_head
from ..heads.eagle import DraftHead
from ..heads.eagle3 import Eagle3Head, default_layers
from ..heads.layouts import LAYER_IDS, NORMS
from ..models.loading import load_target
from .llama_cpp import write_gguf

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """The layout of heads that a server expects.

    Args:
        architecture: the server's name for a head, in config.json.
        bias: of `fc`: "any" follows the config; "always" has a bias, which stays random if the file has none; "never"
            silently ignores the file's.
        file: name of the weights file.
        embeddings: whether the file must contain the token embeddings (otherwise the server uses the target's).
        token_map: whether the server can draft a reduced vocabulary.
        eagle3: those of `eagle3_traits` that it computes.
        activations: those that the server supports; None: not checked.
    """

    architecture: str
    bias: str
    file: str
    embeddings: bool
    token_map: bool
    eagle3: tuple[str, ...] = ()
    activations: tuple[str, ...] | None = None


VARIANTS = (*NORMS, "norm_before_residual", "qk_norm")  # fields of config.json
FC_BIAS, QKV_BIAS, NO_NORM = "a trained fc.bias", "biases of q, k and v", "no norm before its output layer"
NO_OUTPUT, LAYERS = "no output layer of its own", "target layers other than 2, n/2 and n-3"
LAYOUTS: dict[str, Layout] = {
    "eagle": Layout("LlamaForCausalLM", "any", "pytorch_model.bin", embeddings=True, token_map=False),
    "sglang": Layout("LlamaForCausalLMEagle", "always", "model.safetensors", embeddings=False, token_map=True,
                     eagle3=(FC_BIAS, LAYERS)),
    "vllm": Layout("LlamaForCausalLM", "never", "model.safetensors", embeddings=False, token_map=False,
                   eagle3=(*VARIANTS, QKV_BIAS, NO_OUTPUT, LAYERS), activations=("silu",)),
}
LLAMA_CPP = "llama.cpp"


def has_trained_bias(head: DraftHead) -> bool:
    """Whether `fc` has a bias that is not zero."""
    return head.fc.bias is not None and bool(head.fc.bias.detach().abs().max() > 0)


def eagle3_traits(head: Eagle3Head) -> list[str]:
    """What an EAGLE-3 head has that those of the authors have not: fields of config.json, and names above."""
    ids = getattr(head.config, LAYER_IDS, None)
    others = {FC_BIAS: has_trained_bias(head), QKV_BIAS: head.layers[0].self_attn.q_proj.bias is not None,
              NO_NORM: isinstance(head.norm, torch.nn.Identity), NO_OUTPUT: head.lm_head is None,
              LAYERS: ids is not None and tuple(sorted(ids)) != default_layers(max(ids) + 3)}
    return [*(name for name in VARIANTS if getattr(head.config, name, False)), *(name for name, has in others.items()
                                                                                  if has)]


def not_computed(head: DraftHead, layout: Layout) -> list[str]:
    """What a head has that a server does not compute, or would drop."""
    if isinstance(head, Eagle3Head):
        traits = [trait for trait in eagle3_traits(head) if trait not in layout.eagle3]
    else:
        traits = [FC_BIAS] if layout.bias == "never" and has_trained_bias(head) else []
    if layout.activations and head.config.hidden_act not in layout.activations:
        traits.append(f"the activation {head.config.hidden_act!r} in place of {' or '.join(layout.activations)}")
    return traits


def export_head(
    source: str | Path, to: str, directory: str | Path, *, target: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16, trust_remote_code: bool = False,
) -> Path:
    """Export a head in the layout of a server; return the path of the weights.

    A reduced draft vocabulary is exported if the server supports it, and otherwise omitted with a warning.

    Args:
        source: a head for `load_head`. to: a name in LAYOUTS, or llama.cpp.
        directory: a new or empty folder; for llama.cpp the file to write, NAME.gguf.
        target: source of the embeddings, if the server needs them and the head has none; for llama.cpp the target's
            GGUF file.

    Raises:
        ValueError: the server is unknown, or does not compute the head (`not_computed`); embeddings are missing; or the
            folder is not empty. For llama.cpp see `write_gguf`.
        ImportError: see `write_gguf`.
        OSError: `directory` cannot be written.
    """
    if to == LLAMA_CPP:
        return write_gguf(source, directory, target, dtype)
    if to not in LAYOUTS:
        raise ValueError(f"unknown format {to!r}; accepted: {', '.join((*LAYOUTS, LLAMA_CPP))}")
    require_empty(directory)
    layout, head = LAYOUTS[to], load_head(source)
    eagle3 = isinstance(head, Eagle3Head)
    if wrong := not_computed(head, layout):
        raise ValueError(f"{source} has {', '.join(wrong)}: {to} does not compute such heads")
    if layout.bias == "never" or eagle3 and FC_BIAS not in layout.eagle3:  # it is zero
        head.fc.bias = None
    if layout.bias == "always" and head.fc.bias is None and not eagle3:
        head.fc.bias = torch.nn.Parameter(torch.zeros(head.config.hidden_size))
    if eagle3 and head.shares_embeddings:  # the authors' code loads the target's unless the config has this field
        head.config.target_hidden_size = None
    elif layout.embeddings and head.shares_embeddings:
        if target is None:
            raise ValueError(f"{source} has no embeddings, and {to} needs them in the file: pass the target")
        model, _ = load_target(target, device="cpu", trust_remote_code=trust_remote_code)
        embeddings = model.get_input_embeddings().weight.detach()
        shape = (head.config.vocab_size, head.config.hidden_size)
        if not embeddings.is_floating_point():
            raise ValueError(f"the embeddings of {target} are {embeddings.dtype}: pass the target before quantisation")
        if tuple(embeddings.shape) != shape:
            raise ValueError(f"the embeddings of {target} are {tuple(embeddings.shape)}, the head needs {shape}")
        vars(head).pop("embed_tokens")
        head.embed_tokens = torch.nn.Embedding.from_pretrained(embeddings.float())
    if head.token_map is not None and not layout.token_map:
        log.warning("%s does not support a reduced vocabulary: it drafts all %d tokens", to, head.config.vocab_size)
        head.limit_vocabulary(None)
    # In vLLM, attention_bias would give o a bias, too; qkv_bias stays.
    own = {"attention_bias": False} if to == "vllm" and head.layers[0].self_attn.o_proj.bias is None else {}
    own |= {} if eagle3 else {"architectures": [layout.architecture]}
    return save_head(head, directory, dtype=dtype, file=layout.file, **own)
