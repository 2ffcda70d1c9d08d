"""From prompts and options to requests: everything is checked here, before any forward."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from .acceptance import FuzzyRule, Rule
from .checks import OptionError, check_functions, require_integer
from .data.rendering import check_rendering, most_characters
from .decoding.grammar import Grammar
from .decoding.request import EXACT, Request
from .decoding.sampling import build_processors
from .drafting.text import TextDrafts, TextIndex, TextSource
from .options import GenerateOptions
from .pair import EagleModel
from .text import StopStrings

log = logging.getLogger(__name__)
ROLES = ("system", "developer", "user", "assistant", "tool")


def make_requests(
    model: EagleModel, prompts: Sequence[Sequence[int]], options: GenerateOptions,
    logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
) -> list[Request]:
    """One request for each prompt, as token ids.

    Raises:
        ValueError, TypeError: options that this pair or these prompts cannot be decoded with.
    """
    check_functions("stopping_criteria", stopping_criteria)
    if options.tree is not None:
        model.check_tree(options.tree)
    rule = options.rule if options.speculative else EXACT
    warn_of_threshold(rule, model, options)
    if options.lossless and (options.budget is not None or options.head_guard not in ("default", None)):
        log.warning("budget= and head_guard= change nothing without a threshold: decoding is lossless")
    check_ids([0, *(options.logit_bias or {})], model)
    rooms = [check_length(len(ids), options.max_new_tokens, model) for ids in prompts]
    seeds = seeds_of(options.seed, len(prompts))
    ends = frozenset() if options.ignore_eos else end_tokens(model)
    strings, stop_ids = options.stop_strings, check_stop_ids(options.stop_token_ids, model)
    for string in strings:
        encodable("stop", string)
    if strings and model.tokenizer is None:
        raise OptionError("stop", problem="needs a tokenizer, and this model has no tokenizer")
    within = None if options.fuzzy_within is None else tuple(
        mark_of(mark, model) for mark in options.fuzzy_within)
    copying = TextDrafts() if options.text_drafts == "auto" else options.text_drafts
    references = [TextIndex(check_ids(tokenised("reference", text, model, add_special_tokens=False), model))
                  for text in options.references if text]
    text_free = not (options.repetition_penalty != 1 or options.min_new_tokens or logits_processor
                     or options.frequency_penalty or options.presence_penalty or options.logit_bias
                     or options.response_format is not None)
    grammars = [None if options.response_format is None else Grammar(
        options.response_format, model.tokenizer, vocab_size=model.target.vocab_size, eos_ids=sorted(ends),
        start=len(ids)) for ids in prompts]
    return [Request(
        ids, max_new_tokens=room, rule=rule, temperature=float(options.temperature), seed=seed,
        budget=None if options.budget is None else float(options.budget),
        processors=build_processors(options, logits_processor, grammar, prompt_length=len(ids),
                                    eos_ids=sorted(stop_ids | ends), device=model.target.output_device),
        alike=(options.temperature, options.top_k, options.top_p, options.min_p) if text_free else None,
        eos_ids=ends, stop_ids=stop_ids,
        text_ends=StopStrings(model.tokenizer, strings) if strings else None, criteria=list(stopping_criteria or []),
        copies=None if copying == "off" or not options.speculative else TextSource(ids, copying, references),
        grammar=grammar, speculative=options.speculative,
        top_logprobs=min(options.top_logprobs, model.target.vocab_size), within=within, device=model.target.device,
    ) for ids, room, seed, grammar in zip(prompts, rooms, seeds, grammars, strict=True)]


def mark_of(mark: str | int, model: EagleModel) -> int:
    """The one token that a mark of `fuzzy_within` is.

    Raises:
        ValueError: it is another number of tokens, or no token of the target.
    """
    ids = [mark] if isinstance(mark, int) else tokenised("fuzzy_within", mark, model, add_special_tokens=False)
    if len(ids) != 1:
        raise OptionError("fuzzy_within", problem=f"takes marks of one token each, and {mark!r} is {len(ids)} of this "
                          "model's")
    return check_ids(ids, model)[0]


def warn_of_threshold(rule: Rule, model: EagleModel, options: GenerateOptions) -> None:
    """Warn where a threshold changes nothing, a divergence never exceeds it, or is infinite since the draft cannot name
    every token."""
    if isinstance(options.rule, FuzzyRule) and not options.lossless and (model.draft is None or rule is EXACT):
        log.warning("%s with threshold %g changes nothing %s: decoding is lossless", options.rule.name,
                    options.rule.threshold, "where speculative is False, as nothing is drafted" if rule is EXACT
                    else "without a draft head, as copies from the text are accepted exactly")
        return
    budget, divergence = options.budget, getattr(rule, "divergence", None)
    most = {"js": math.log(2), "tv": 1.0}.get(str(divergence).partition("_top")[0])
    if most is not None and most <= rule.threshold < math.inf and budget is None:
        log.warning("a threshold of %g lets every drafted token pass that the guard allows: %s is at most %.3g",
                    rule.threshold, divergence, most)
    if model.draft is None or model.draft.draft_vocab_size == model.target.vocab_size:
        return
    if divergence in ("kl", "js_fsd_code") and rule.threshold > 0:
        log.warning("%s is infinite with a draft that names %d of %d tokens: nothing passes; take js, tv or reverse_kl",
                    divergence, model.draft.draft_vocab_size, model.target.vocab_size)


def seeds_of(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One for each prompt; drawn where none is given."""
    if seed is None:
        generator = random.SystemRandom()
        return [generator.getrandbits(48) for _ in range(count)]
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise OptionError("seed", problem=f"needs one for each prompt: {count}, got {len(seed)}")
        return list(map(int, seed))
    if int(seed) + count > 2**63:
        raise OptionError("seed", int(seed) + count - 1, "below 2**63")
    return [int(seed) + number for number in range(count)]


def check_stop_ids(stop_token_ids: Sequence[int] | None, model: EagleModel) -> frozenset[int]:
    """The tokens, refused where the target has no such ones."""
    return frozenset(check_ids(list(stop_token_ids), model)) if stop_token_ids else frozenset()


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends the streamer also where decoding fails: who reads it in another thread would wait for ever.

    Raises:
        TypeError: it has not the methods of the streamers of `transformers`.
    """
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def encode_prompts(prompt: object, model: EagleModel) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether they came as a batch.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = unpadded(prompt)
    if not (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple, Tensor))):
        return [encode_prompt(prompt, model)], False
    prompts = []
    for number, each in enumerate(prompt):
        try:
            prompts.append(encode_prompt(each, model))
        except (TypeError, ValueError) as error:
            raise OptionError("prompt", problem=f"{number} of {len(prompt)}: {error}") from error
    return prompts, True


def unpadded(encoding: Mapping) -> object:
    """The prompt or prompts of what a tokenizer returns, without the padding that their masks tell of, on either side.

    Raises:
        ValueError: a mask with zeros elsewhere or of another shape, or inputs other than tokens.
    """
    others = encoding.keys() - {"input_ids", "attention_mask", "token_type_ids"}
    if others:
        raise ValueError(f"a prompt has input_ids and attention_mask only, got {', '.join(sorted(others))}")
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    alone = not len(ids) or np.ndim(ids[0]) == 0
    rows, masks = ([ids], [mask]) if alone else (ids, [None] * len(ids) if mask is None else mask)
    if len(rows) != len(masks):
        raise ValueError(f"{len(rows)} rows of input_ids have {len(masks)} rows of attention_mask")
    prompts = []
    for row, seen in zip(rows, masks, strict=True):
        row = torch.as_tensor(row)
        seen = torch.ones_like(row) if seen is None else torch.as_tensor(seen)
        shown = (seen == 1).nonzero().flatten()
        if seen.shape != row.shape or ((seen != 0) & (seen != 1)).any() or (shown.diff() != 1).any():
            raise ValueError(f"an attention mask has the shape of input_ids, {list(row.shape)}, a 1 per token, and "
                             f"a 0 for padding before or after them, got {seen.tolist()}")
        prompts.append(row[shown].tolist())
    return prompts[0] if alone or (len(prompts) == 1 and not isinstance(ids, list)) else prompts  # [1, L] is one


def encode_prompt(prompt: object, model: EagleModel) -> list[int]:
    """Token ids of a single prompt.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Mapping):
        raise TypeError(f"a chat is a list of messages, each with role and content, got one {type(prompt).__name__}")
    if isinstance(prompt, np.ndarray):
        prompt = torch.from_numpy(prompt)
    if isinstance(prompt, Tensor):
        integers = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool)
        if not integers or prompt.is_meta or prompt.dim() not in (1, 2) or (prompt.dim() == 2 and len(prompt) != 1):
            raise ValueError(
                f"a prompt tensor must be integer [L] or [1, L] (a batch is a list of prompts, without padding), got "
                f"{prompt.dtype} {list(prompt.shape)}"
            )
        return check_ids(prompt.flatten().tolist(), model)
    if isinstance(prompt, str):
        ids = tokenised("the prompt", prompt, model)
    elif isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt) and prompt:
        ids = encode_chat(list(prompt), model)
    elif isinstance(prompt, (list, tuple)):
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            raise TypeError("a list prompt must hold token ids, chat messages, or prompts, not a mixture or others")
        ids = [int(token) for token in prompt]
    else:
        raise TypeError(f"a prompt must be text, a chat, or token ids, got {type(prompt).__name__}")
    return check_ids(ids, model)


def check_ids(ids: list[int], model: EagleModel) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    wrong = next((token for token in ids if not 0 <= token < model.target.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary (0 to {model.target.vocab_size - 1})")
    return ids


def need_tokenizer(model: EagleModel):
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    return model.tokenizer


def encodable(what: str, text: str) -> str:
    """The text, refused where a lone surrogate in it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(what, problem=f"is no valid text: a lone surrogate {text[error.start]!r} at "
                          f"{error.start}") from error
    return text


def encode_chat(messages: list[dict], model: EagleModel, tools: list[dict] | None = None) -> list[int]:
    """Token ids of a chat, with the schemas of functions that may be called.

    Raises:
        ValueError: no chat, or one that the tokenizer's template cannot render.
    """
    tokenizer = need_tokenizer(model)
    for message in messages:
        text = isinstance(message.get("content"), str) or "content" not in message and message.get("tool_calls")
        if not (isinstance(message.get("role"), str) and text):
            raise OptionError("messages", problem=f'need "role" and "content", both text, got {message!r}')
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give the prompt as text or token ids")
    known = {*ROLES, *re.findall(r"\w+", f"{tokenizer.chat_template} {' '.join(tokenizer.get_added_vocab())}")}
    wrong = next((message["role"] for message in messages if message["role"] not in known), None)
    if wrong is not None:  # many templates would show it as if it was one
        raise OptionError("messages", problem=f"have roles, which must be one of {', '.join(ROLES)}, or one that the "
                          f"chat template or a special token names, got {wrong!r}")
    calling = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if calling and "tool" not in tokenizer.get_chat_template(tools=tools):
        raise OptionError("tools", problem="cannot be used with this model: its chat template has no place for them")
    positions = model.target.max_positions
    if positions is not None:
        check_rendering(tokenizer, messages, most_characters(tokenizer, positions), tools)
    try:
        rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise for roles or an order that they do not know
        raise ValueError(f"the tokenizer's chat template refuses the chat: {error}") from error
    return tokenised("the chat", rendered, model, add_special_tokens=False)


def tokenised(what: str, text: str, model: EagleModel, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text; what its tokenizer puts before texts is not put before one that begins with it, such as
    what a chat template has rendered.

    Raises:
        ValueError: it cannot be encoded, or is longer than anything that the target has positions for.
    """
    tokenizer, positions = need_tokenizer(model), model.target.max_positions
    if positions is not None and len(text) > most_characters(tokenizer, positions):
        raise OptionError(what, problem=f"has {len(text)} characters, more than the target's {positions} positions can "
                          "hold")
    ids = tokenizer(encodable(what, text), add_special_tokens=add_special_tokens)["input_ids"]
    first = ids[0] if ids else None
    if add_special_tokens and first in tokenizer.all_special_ids and text.startswith(
            tokenizer.convert_ids_to_tokens(first)):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        for count in range(len(ids) - len(own), 0, -1):
            if ids[:count] == own[:count] and ids[count:][: len(own)] == own:
                return ids[count:]
    return ids


def check_length(prompt_length: int, max_new_tokens: int, model: EagleModel) -> int:
    """`max_new_tokens`, or the number of positions left where that is smaller."""
    require_integer("max_new_tokens", max_new_tokens, 1)
    limit = model.target.limit_of(prompt_length)
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise ValueError(f"the prompt has {prompt_length} tokens, the target takes at most {limit - 1} and one new one")
    if prompt_length + max_new_tokens > limit:
        log.warning("max_new_tokens lowered from %d to the %d positions left", max_new_tokens, limit - prompt_length)
    return min(max_new_tokens, limit - prompt_length)


def end_tokens(model: EagleModel) -> frozenset[int]:
    """The target's end tokens, from its generation config."""
    config = model.target.model.generation_config
    ids = config.eos_token_id if config is not None else None
    return frozenset([ids] if isinstance(ids, int) else ids or ())
