"""Options as keyword arguments: types and signatures for editors and `help`, and hints for unknown names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from ..drafting.config import TreeConfig
from ..drafting.copies import TextDrafts

F = TypeVar("F", bound=Callable)
REPLACEMENTS = {  # names from other libraries and servers: what to use here
    "add_generation_prompt": 'chat_template_kwargs={"add_generation_prompt": ...}',
    "assistant_model": "load(target, draft): a draft head or a small causal LM drafts",
    "attention_mask": "the output of the tokenizer, mask included, as the prompt",
    "bad_words_ids": "logits_processor=[NoBadWordsLogitsProcessor(...)]",
    "continue_final_message": 'chat_template_kwargs={"continue_final_message": True}',
    "do_sample": "temperature= (0 is greedy)",
    "enable_thinking": 'chat_template_kwargs={"enable_thinking": ...}',
    "grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_choice": 'response_format={"type": "choice", "choice": [...]}',
    "guided_grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_json": 'response_format={"type": "json_schema", "json_schema": {"schema": S}}',
    "guided_regex": 'response_format={"type": "regex", "regex": R}',
    "input_ids": "prompt, the first argument",
    "inputs": "prompt, the first argument",
    "logprobs": "receipts of the output, one for each token",
    "max_completion_tokens": "max_new_tokens=",
    "json_schema": 'response_format={"type": "json_schema", "json_schema": {"schema": S}}',
    "max_length": "max_new_tokens=",
    "max_time": "stopping_criteria=[MaxTimeCriteria(seconds)]",
    "max_tokens": "max_new_tokens=",
    "messages": "prompt, the first argument",
    "m": "target=",
    "min_length": "min_new_tokens=",
    "min_tokens": "min_new_tokens=",
    "model": "target=",
    "n": "a list of prompts with a list of seeds",
    "n_predict": "max_new_tokens=",
    "no_repeat_ngram_size": "logits_processor=[NoRepeatNGramLogitsProcessor(n)]",
    "num_beams": "greedy decoding or sampling: there are no beams",
    "num_return_sequences": "a list of prompts with a list of seeds",
    "output_scores": "receipts of the output, one for each token",
    "pad_token_id": "nothing: prompts of a batch are not padded",
    "prefix_allowed_tokens_fn": "logits_processor=[PrefixConstrainedLogitsProcessor(...)]",
    "pool": "reference=, a text from which drafts are copied",
    "prediction": "reference=",
    "remember": "reference=, a text from which drafts are copied",
    "repeat_penalty": "repetition_penalty=",
    "session": "Chat(model), which keeps one",
    "stop_strings": "stop=",
    "prompt_lookup_num_tokens": "text_drafts=, which is on by default",
    "stream": "streamer=, or Engine(model).submit(...), whose ticket is an iterator",
    "streamer": "Engine(model).submit(...), whose ticket is an iterator",
    "structured_outputs": "response_format=",
    "temp": "temperature=",
    "tokenizer": "nothing: the model has its tokenizer",
    "tools": 'chat_template_kwargs={"tools": [...]}',
    "use_cache": "nothing: there is always a cache",
    # of load
    "compile": "nothing: prepacked weights, the default, are faster",
    "load_in_4bit": "quantization_config=",
    "load_in_8bit": "quantization_config=",
    "torch_dtype": "dtype=",
    "tp_plan": "device_map=, or vLLM with an exported head (eagle-fsd export)",
}


def unknown_option(name: str, accepted: Sequence[str]) -> str:
    """The error message for an unknown option: what to use instead, or the accepted names."""
    near = difflib.get_close_matches(str(name), [*accepted, *REPLACEMENTS], 1, cutoff=0.75)  # a misspelt name
    meant = name if name in REPLACEMENTS else next(iter(near), None)
    hint = (f"accepted: {', '.join(accepted)}" if meant is None else f"did you mean {meant!r}?" if meant in accepted
            else f"use {REPLACEMENTS[meant]}")
    return f"unknown option {name!r}; {hint}"


# The options as keywords for editors and type checkers (PEP 692). A test compares them with the dataclasses.
class GenerateKeywords(TypedDict, total=False):
    """The options of `generate`: the fields of `GenerateOptions`, and some names of `model.generate`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    top_logprobs: int
    min_new_tokens: int | None
    generation_config: Any
    eos_token_id: int | Sequence[int] | None
    ignore_eos: bool
    seed: int | Sequence[int] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    acceptance: Any
    threshold: float | None
    divergence: str | None
    head_guard: float | str | None
    budget: float | None
    fuzzy_within: Sequence[str] | Sequence[int] | None
    tree: TreeConfig | None
    text_drafts: TextDrafts | str
    reference: str | Sequence[str] | None
    speculative: bool
    response_format: Any
    chat_template_kwargs: Mapping[str, Any] | None
    # see `from_generate`
    do_sample: bool | None
    stop_strings: str | Sequence[str] | None


class LoadKeywords(TypedDict, total=False):
    """The options of `load` besides target and draft: the fields of `LoadOptions`."""

    dtype: Any
    device: Any
    device_map: str | dict[str, Any] | None
    quantization_config: object | None
    attn_implementation: str | None
    trust_remote_code: bool
    tree: TreeConfig | str | None
    prepack: bool
    cuda_graphs: bool
    quantization: str | None
    draft_dtype: Any
    draft_quantization: str | None


def lists_options(
    options: type, keywords: type, *, names: Sequence[str] | None = None, described: bool = False
) -> Callable[[F], F]:
    """A decorator that lists the options a function takes as `**keywords`, with defaults, in its signature.

    Args:
        options: the dataclass. keywords: the `TypedDict` of the same options.
        names: the options; None: all.
        described: add the descriptions of the options to the docstring.
    """
    known = {field.name: field for field in fields(options)}

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        listed = [inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=known[name].default if name in known else None,
            annotation=known[name].type if name in known else inspect.Parameter.empty,
        ) for name in (keywords.__annotations__ if names is None else names)]
        function.__signature__ = signature.replace(parameters=[*own, *listed])
        if described:
            meanings = inspect.cleandoc(options.__doc__ or "").partition("Args:\n")[2]  # python -OO has none
            function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions by name:\n{meanings}"
        return function

    return decorate
