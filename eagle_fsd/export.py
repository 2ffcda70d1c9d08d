"""What a draft head is, what would be wrong with it for each server, and writing it as each of them loads it.

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
from transformers import AutoConfig, AutoModelForCausalLM

from .checkpoint import LAYER_IDS, TOKEN_MAP, load_head, save_head
from .draft import DraftHead, Eagle3Head

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
    """[V, D] token embeddings of a target; of a local safetensors directory, without loading the rest."""
    for shard in sorted(Path(target).glob("*.safetensors")) if Path(target).is_dir() else []:
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                if name.endswith("embed_tokens.weight"):
                    return file.get_tensor(name)
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto", trust_remote_code=trust_remote_code)
    return model.get_input_embeddings().weight.detach()


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
        ValueError: an unknown consumer, an EAGLE-3 head, a trained bias that the consumer would drop, or missing
            embeddings.
    """
    if to not in LAYOUTS:
        raise ValueError(f"unknown format {to!r}; accepted: {', '.join(LAYOUTS)}")
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
        if tuple(embeddings.shape) != wanted:
            raise ValueError(f"the embeddings of {target} are {tuple(embeddings.shape)}, the head needs {wanted}")
        head.own_embeddings(embeddings.float())
    if head.token_map is not None and not layout.token_map:
        log.warning("%s drafts all %d tokens: it takes no reduced vocabulary", to, head.config.vocab_size)
        head.limit_vocabulary(None)
    return save_head(head, directory, dtype=dtype, file=layout.file, architectures=[layout.architecture])


@dataclass(frozen=True)
class Inspection:
    """What `inspect_head` finds: `facts` by name, whether the target fits (None: none given), and what is wrong with
    the head for each server as it is (nothing: it can be served unchanged; not judged for EAGLE-3 heads)."""

    facts: dict[str, str]
    target_problems: list[str] | None
    server_problems: dict[str, list[str]]


def inspect_head(
    source: str | Path, target: str | Path | None = None, *, trust_remote_code: bool = False
) -> Inspection:
    """What a head is, whether it fits a target, and what would be wrong with it for each server.

    Raises:
        ValueError: not a head.
    """
    head = load_head(source)
    config = head.config
    count = sum(p.numel() for name, p in head.named_parameters() if not name.startswith("embed_tokens"))
    bias = "none" if head.fc.bias is None else "trained" if has_trained_bias(head) else "all zero"
    eagle3 = isinstance(head, Eagle3Head)
    facts = {
        "kind": "EAGLE-3 (one layer; features of several target layers and embeddings in, logits out)" if eagle3
        else "EAGLE-1/2 (one layer; features and embeddings in, features out)",
        "hidden size": str(config.hidden_size),
        "vocabulary": str(config.vocab_size),
        "draft vocabulary": "all of them" if head.draft_vocab_size == config.vocab_size
        else f"{head.draft_vocab_size} of them" + ("" if eagle3 else f", in {TOKEN_MAP}; vLLM drafts all"),
        **(_eagle3_facts(head) if eagle3 else {}),
        "attention": f"{config.num_attention_heads} heads, {config.num_key_value_heads} key/value",
        "intermediate size": str(config.intermediate_size),
        "positions": str(config.max_position_embeddings),
        "fc bias": bias,
        "q/k/v bias": "yes" if config.attention_bias else "no",
        "embeddings": "the target's" if head.shares_embeddings else "its own",
        "parameters": f"{count / 1e6:.2f} M without embeddings",
        "fits": f"targets of hidden size {head.target_hidden_size} and vocabulary {config.vocab_size}",
    }
    architectures = getattr(config, "architectures", None) or ["none"]
    problems = {} if eagle3 else {
        name: layout_problems(head, layout, architectures[0], Path(source)) for name, layout in LAYOUTS.items()
    }
    fit = None if target is None else target_problems(head, target, trust_remote_code)
    return Inspection(facts, fit, problems)


def _eagle3_facts(head: Eagle3Head) -> dict[str, str]:
    layers = getattr(head.config, LAYER_IDS, None)
    before = getattr(head.config, "norm_before_residual", False)
    return {
        "reads": f"what enters layers {', '.join(map(str, layers or ('2', 'n/2', 'n-3')))} of the target's n",
        "residual": "after hidden_norm" if before else "before hidden_norm",
    }


def target_problems(head: DraftHead, target: str | Path, trust_remote_code: bool) -> list[str]:
    """Why a head does not fit a target, judged by the target's config."""
    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    pairs = (("hidden size", head.target_hidden_size, config.hidden_size),
             ("vocabulary", head.config.vocab_size, config.vocab_size))
    problems = [f"{what}: head {ours}, target {theirs}" for what, ours, theirs in pairs if ours != theirs]
    try:
        head.target_layers(config.num_hidden_layers)
    except ValueError as error:
        problems.append(str(error))
    return problems


def layout_problems(head: DraftHead, layout: Layout, architecture: str, source: Path) -> list[str]:
    """What a consumer would get wrong with the head's files as they are."""
    problems = []
    if architecture != layout.architecture:
        problems.append(f"config.json names the architecture {architecture}, wanted is {layout.architecture}")
    if layout.bias == "never" and has_trained_bias(head):
        problems.append("its trained fc.bias would be dropped without a word")
    if layout.bias == "always" and head.fc.bias is None:
        problems.append("it has no fc.bias, and one left at random would be used")
    if layout.embeddings and head.shares_embeddings:
        problems.append("the file has no embed_tokens.weight")
    if source.is_dir() and not (source / layout.file).is_file():
        problems.append(f"there is no {layout.file}")
    return problems
