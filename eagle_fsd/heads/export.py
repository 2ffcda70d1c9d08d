"""Export a draft head in the layout of a server.

Three servers read the same tensors. They differ in the file, the name of the architecture, and the treatment of `fc`'s
bias; llama.cpp reads a GGUF file (`llama_cpp.py`). vLLM's CPU build (`make test-vllm`) and llama.cpp were tested.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.loading import load_target
from .checkpoint import load_head, require_empty, save_head
from .eagle import DraftHead
from .eagle3 import Eagle3Head
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
        eagle3: whether EAGLE-3 heads are exported for it, in the layout of their authors.
        activations: those that the server supports; None: not checked.
    """

    architecture: str
    bias: str
    file: str
    embeddings: bool
    token_map: bool
    eagle3: bool = False
    activations: tuple[str, ...] | None = None


LAYOUTS: dict[str, Layout] = {
    "eagle": Layout("LlamaForCausalLM", "any", "pytorch_model.bin", embeddings=True, token_map=False),
    "sglang": Layout("LlamaForCausalLMEagle", "always", "model.safetensors", embeddings=False, token_map=True),
    "vllm": Layout("LlamaForCausalLM", "never", "model.safetensors", embeddings=False, token_map=False, eagle3=True,
                   activations=("silu",)),
}
LLAMA_CPP = "llama.cpp"


def has_trained_bias(head: DraftHead) -> bool:
    """Whether `fc` has a bias that is not zero."""
    return head.fc.bias is not None and bool(head.fc.bias.detach().abs().max() > 0)


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
        ValueError: the server is unknown, or does not support the head (EAGLE-3, the activation), or would drop its
            trained bias; embeddings are missing; or the folder is not empty. For llama.cpp see `write_gguf`.
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
    if eagle3 and not layout.eagle3:
        accepted = [*(name for name, form in LAYOUTS.items() if form.eagle3), LLAMA_CPP]
        raise ValueError(f"{source} is an EAGLE-3 head, which can be exported to {', '.join(accepted)} only, got {to}")
    if layout.activations and head.config.hidden_act not in layout.activations:
        raise ValueError(f"{source} has the activation {head.config.hidden_act!r}; {to} supports "
                         f"{' and '.join(layout.activations)} only")
    if eagle3 and isinstance(head.norm, torch.nn.Identity):
        raise ValueError(f"{source} has no norm before its output layer, and {to} always computes one")
    if layout.bias == "never":
        if has_trained_bias(head):
            raise ValueError(f"{source} has a trained fc.bias, which {to} would drop; train the head without one")
        head.fc.bias = None
    if layout.bias == "always" and head.fc.bias is None:
        head.fc.bias = torch.nn.Parameter(torch.zeros(head.config.hidden_size))
    if layout.embeddings and head.shares_embeddings:
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
    if eagle3:
        return save_head(head, directory, dtype=dtype, **own)
    return save_head(head, directory, dtype=dtype, file=layout.file, architectures=[layout.architecture], **own)
