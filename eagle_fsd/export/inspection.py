"""Inspect a drafter: its properties, whether it fits a target, and a head's problems with each server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..data.gguf import target_source
from ..data.sources import fetch
from ..heads.checkpoint import TOKEN_MAP, is_causal_lm, load_head, weight_files, weight_names
from ..heads.eagle import DraftHead
from ..heads.eagle3 import Eagle3Head
from ..heads.layouts import LAYER_IDS, SPECFORGE, eagle_config, read_json
from ..utils.text import token_difference
from ..utils.threads import one_at_a_time
from .servers import LAYERS, LAYOUTS, eagle3_traits, has_trained_bias, not_computed


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_head`.

    facts: properties by name.
    target_problems: why the drafter does not fit the target; None: no target was passed.
    server_problems: what each server would read wrongly in the files as they are.
    """

    facts: dict[str, str]
    target_problems: list[str] | None
    server_problems: dict[str, list[str]]


def inspect_head(
    source: str | Path, target: str | Path | None = None, *, trust_remote_code: bool = False
) -> Inspection:
    """The properties of a head or causal LM, whether it fits a target, and a head's problems with each server.

    Raises:
        ValueError: neither a supported head, see `load_head`, nor a causal LM.
    """
    if is_causal_lm(source):
        return inspect_causal_lm(source, target, trust_remote_code)
    head = load_head(source)
    config, eagle3, named = head.config, isinstance(head, Eagle3Head), head.draft_vocab_size
    count = sum(p.numel() for name, p in head.named_parameters() if not name.startswith("embed_tokens"))
    facts = {
        "kind": head.kind + (" (one layer; features of several target layers and embeddings in, logits out)" if eagle3
                             else " (one layer; features and embeddings in, features out)"),
        "hidden size": str(config.hidden_size),
        "vocabulary": str(config.vocab_size),
        "draft vocabulary": "all of them" if named == config.vocab_size
        else f"{named} of them" + ("" if eagle3 else f", in {TOKEN_MAP}; vLLM drafts all"),
        "attention": f"{config.num_attention_heads} heads, {config.num_key_value_heads} key/value",
        "fc bias": "none" if head.fc.bias is None else "trained" if has_trained_bias(head) else "all zero",
        "q/k/v bias": "yes" if config.attention_bias else "no",
        "embeddings": "the target's" if head.shares_embeddings else "its own",
        "parameters": f"{count / 1e6:.2f} M without embeddings",
        "fits": f"targets of hidden size {head.target_hidden_size} and vocabulary {config.vocab_size}",
    }
    if eagle3:
        layers = ", ".join(map(str, getattr(config, LAYER_IDS, None) or ("2", "n/2", "n-3")))
        facts["output layer"] = "the target's" if head.lm_head is None else "its own"
        facts["variant"] = ", ".join(eagle3_traits(head)) or "as published by its authors"
        facts["reads"] = f"the inputs of layers {layers} of the target's n"
    problems = {server: server_problems(head, server, str(source)) for server in LAYOUTS}
    fit = None if target is None else target_problems(head, target, trust_remote_code)
    return Inspection(facts, fit, problems)


@one_at_a_time
def inspect_causal_lm(source: str | Path, target: str | Path | None, trust_remote_code: bool) -> Inspection:
    """The properties of a causal LM by its config, and whether its tokens are the target's."""
    place = target_source(source)
    config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    facts = {
        "kind": f"causal LM ({type(model).__name__}, {text.num_hidden_layers} layers; tokens in, logits out)",
        "hidden size": str(text.hidden_size),
        "vocabulary": str(text.vocab_size),
        "positions": str(getattr(text, "max_position_embeddings", "no limit")),
        "parameters": f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M",
        "fits": "targets with the same tokenizer",
    }
    if target is None:
        return Inspection(facts, None, {})
    tokenizers = [AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
                  for source in (target_source(target), place)]
    problem = token_difference(*tokenizers)
    return Inspection(facts, [] if problem is None else [problem], {})


def target_problems(head: DraftHead, target: str | Path, trust_remote_code: bool) -> list[str]:
    """Why a head does not fit a target, according to the target's config."""
    config = AutoConfig.from_pretrained(target_source(target), trust_remote_code=trust_remote_code)
    config = config.get_text_config(decoder=True)
    pairs = (("hidden size", head.target_hidden_size, config.hidden_size),
             ("vocabulary", head.config.vocab_size, config.vocab_size))
    problems = [f"{what}: head {ours}, target {theirs}" for what, ours, theirs in pairs if ours != theirs]
    try:
        head.target_layers(config.num_hidden_layers)
    except ValueError as error:
        problems.append(str(error))
    return problems


def server_problems(head: DraftHead, server: str, source: str) -> list[str]:
    """What a server would read wrongly in the files of a head, by its published code."""
    layout, files, fields = LAYOUTS[server], weight_files(source), read_json(fetch(source, "config.json"))
    problems = [f"it would not compute {trait}" for trait in not_computed(head, layout)]
    architecture = (fields.get("architectures") or ["none"])[0]
    if isinstance(head, Eagle3Head):
        if server == "vllm":
            return problems
        lacks_layers = LAYERS in eagle3_traits(head) and not eagle_config(fields).get(LAYER_IDS)
        found = {
            "it looks for midlayer.*, and would ignore layers.0.*":
                not any(name.startswith("midlayer.") for name in weight_names(files[0])),
            f"config.json has the architecture {architecture}, required is {SPECFORGE}":
                server == "sglang" and architecture != SPECFORGE,
            f"it looks for {LAYER_IDS} in eagle_config, and would read layers 2, n/2 and n-3":
                server == "sglang" and lacks_layers,
            "it looks for one file of weights": server == "eagle" and len(files) > 1,
        }
    else:
        found = {
            f"config.json has the architecture {architecture}, required is {layout.architecture}":
                architecture != layout.architecture,
            "it has no fc.bias, and the server would use a random one":
                layout.bias == "always" and head.fc.bias is None,
            "the file has no embed_tokens.weight": layout.embeddings and head.shares_embeddings,
            f"there is no {layout.file}": Path(source).is_dir() and not Path(source, layout.file).is_file(),
        }
    return [*problems, *(problem for problem, applies in found.items() if applies)]
