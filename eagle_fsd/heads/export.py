"""Writing a draft head as each server loads it.

The three consumers read the same tensors and differ in three points: the file, the name of the architecture, and
what they do with the bias of `fc`. The servers themselves are not run here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..data.gguf import target_source
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
    """

    architecture: str
    bias: str
    file: str
    embeddings: bool
    token_map: bool


LAYOUTS: dict[str, Layout] = {
    "eagle": Layout("LlamaForCausalLM", "any", "pytorch_model.bin", embeddings=True, token_map=False),
    "sglang": Layout("LlamaForCausalLMEagle", "always", "model.safetensors", embeddings=False, token_map=True),
    "vllm": Layout("LlamaForCausalLM", "never", "model.safetensors", embeddings=False, token_map=False),
}


def has_trained_bias(head: DraftHead) -> bool:
    """Whether `fc` has a bias that does anything."""
    return head.fc.bias is not None and bool(head.fc.bias.detach().abs().max() > 0)


def target_embeddings(target: str | Path, *, trust_remote_code: bool = False) -> Tensor:
    """[V, D] token embeddings of a target; of a local safetensors directory, without loading the rest.

    Raises:
        ValueError: its files hold none.
    """
    target = target_source(target)
    try:
        for shard in sorted(Path(target).glob("*.safetensors")) if Path(target).is_dir() else []:
            with safe_open(shard, "pt") as file:
                for name in file.keys():
                    if name.endswith("embed_tokens.weight"):
                        return file.get_tensor(name)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            target, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True)
    except (OSError, ValueError):
        raise
    except Exception as error:  # what damaged files end in
        raise ValueError(f"{target} cannot be loaded as a causal LM: {type(error).__name__}: {error}") from error
    embeddings = model.get_input_embeddings().weight
    names = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight is embeddings}
    if names & set(loaded["missing_keys"]):  # transformers goes on with random numbers
        raise ValueError(f"{target} has no token embeddings: its files lack {min(names)}")
    return embeddings.detach()


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
        ValueError: an unknown consumer, an EAGLE-3 head, a trained bias that the consumer would drop, missing
            embeddings, or a folder that is not empty.
        OSError: `directory` cannot be written; nothing in it is changed then.
    """
    if to not in LAYOUTS:
        raise ValueError(f"unknown format {to!r}; accepted: {', '.join(LAYOUTS)}")
    check_place(directory)
    layout, head = LAYOUTS[to], load_head(source)
    if isinstance(head, Eagle3Head):
        raise ValueError(f"{source} is an EAGLE-3 head; only EAGLE-1/2 heads are exported")
    if layout.bias == "never":
        if has_trained_bias(head):
            raise ValueError(f"{source} has a trained fc.bias, which {to} would drop; train the head without one")
        head.fc.bias = None
    if layout.bias == "always" and head.fc.bias is None:
        head.fc.bias = torch.nn.Parameter(torch.zeros(head.config.hidden_size))
    if layout.embeddings and head.shares_embeddings:
        if target is None:
            raise ValueError(f"{source} has no embeddings, and {to} wants them in the file: give the target")
        embeddings = target_embeddings(target, trust_remote_code=trust_remote_code)
        wanted = (head.config.vocab_size, head.config.hidden_size)
        if not embeddings.is_floating_point():
            raise ValueError(f"the embeddings of {target} are {embeddings.dtype}: give the target before quantisation")
        if tuple(embeddings.shape) != wanted:
            raise ValueError(f"the embeddings of {target} are {tuple(embeddings.shape)}, the head needs {wanted}")
        head.own_embeddings(embeddings.float())
    if head.token_map is not None and not layout.token_map:
        log.warning("%s drafts all %d tokens: it takes no reduced vocabulary", to, head.config.vocab_size)
        head.limit_vocabulary(None)
    return save_head(head, directory, dtype=dtype, file=layout.file, architectures=[layout.architecture])
