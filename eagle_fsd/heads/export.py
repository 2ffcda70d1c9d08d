"""Writing a draft head as each server loads it.

The three consumers read the same tensors and differ in three points: the file, the name of the architecture, and
what they do with the bias of `fc`. Of the servers only vLLM's CPU build was run (`make test-vllm`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.loading import load_target
from .checkpoint import check_place, load_head, save_head
from .eagle import DraftHead
from .eagle3 import Eagle3Head

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """What a consumer of heads expects.

    Args:
        architecture: its name for a head, in config.json.
        bias: of `fc`: "any" follows the config; "always" has one and leaves it at random where the file has none;
            "never" ignores the file's without a word.
        file: name of the weights file.
        embeddings: whether the file must hold the token embeddings (the target's are used otherwise).
        token_map: whether it can draft a reduced vocabulary.
        eagle3: whether EAGLE-3 heads are written for it; as saved, they have the layout of their authors.
        activations: that its layer computes; None: not looked up.
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


def has_trained_bias(head: DraftHead) -> bool:
    """Whether `fc` has a bias that does anything."""
    return head.fc.bias is not None and bool(head.fc.bias.detach().abs().max() > 0)


def export_head(
    source: str | Path, to: str, directory: str | Path, *, target: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16, trust_remote_code: bool = False,
) -> Path:
    """Write a head as a consumer loads it; returns the path of the weights.

    A reduced draft vocabulary goes with it where the consumer can use one, and is left out with a warning elsewhere.

    Args:
        source: a head that `load_head` reads. to: a name in LAYOUTS.
        target: where the embeddings come from, for a consumer that wants them in a head without its own.

    Raises:
        ValueError: an unknown consumer, a head that it does not take (an EAGLE-3 head, an activation), a trained bias
            that it would drop, missing embeddings, or a folder that is not empty.
        OSError: `directory` cannot be written.
    """
    if to not in LAYOUTS:
        raise ValueError(f"unknown format {to!r}; accepted: {', '.join(LAYOUTS)}")
    check_place(directory)
    layout, head = LAYOUTS[to], load_head(source)
    eagle3 = isinstance(head, Eagle3Head)
    if eagle3 and not layout.eagle3:
        raise ValueError(f"{source} is an EAGLE-3 head, which is exported to "
                         f"{', '.join(name for name, each in LAYOUTS.items() if each.eagle3)} only, got {to}")
    if layout.activations and head.config.hidden_act not in layout.activations:
        raise ValueError(f"{source} has the activation {head.config.hidden_act!r}; {to} computes "
                         f"{' and '.join(layout.activations)} only")
    if layout.bias == "never":
        if has_trained_bias(head):
            raise ValueError(f"{source} has a trained fc.bias, which {to} would drop; train the head without one")
        head.fc.bias = None
    if layout.bias == "always" and head.fc.bias is None:
        head.fc.bias = torch.nn.Parameter(torch.zeros(head.config.hidden_size))
    if layout.embeddings and head.shares_embeddings:
        if target is None:
            raise ValueError(f"{source} has no embeddings, and {to} wants them in the file: give the target")
        model, _ = load_target(target, device="cpu", trust_remote_code=trust_remote_code)
        embeddings = model.get_input_embeddings().weight.detach()
        wanted = (head.config.vocab_size, head.config.hidden_size)
        if not embeddings.is_floating_point():
            raise ValueError(f"the embeddings of {target} are {embeddings.dtype}: give the target before quantisation")
        if tuple(embeddings.shape) != wanted:
            raise ValueError(f"the embeddings of {target} are {tuple(embeddings.shape)}, the head needs {wanted}")
        vars(head).pop("embed_tokens")
        head.embed_tokens = torch.nn.Embedding.from_pretrained(embeddings.float())
    if head.token_map is not None and not layout.token_map:
        log.warning("%s drafts all %d tokens: it takes no reduced vocabulary", to, head.config.vocab_size)
        head.limit_vocabulary(None)
    # There attention_bias is o's as well; qkv_bias stays.
    own = {"attention_bias": False} if to == "vllm" and head.layers[0].self_attn.o_proj.bias is None else {}
    if eagle3:
        return save_head(head, directory, dtype=dtype, **own)
    return save_head(head, directory, dtype=dtype, file=layout.file, architectures=[layout.architecture], **own)
