"""From options to requests. Everything that depends on model and prompt is checked here, before any forward."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from transformers import LogitsProcessor

from .acceptance import FuzzyRule, Rule
from .checks import OptionError, check_functions, require_integer
from .decoding.grammar import Grammar
from .decoding.processing import build_processors
from .decoding.request import EXACT, Request, RequestParams
from .drafting.copies import TextDrafts, TextIndex, TextSource
from .options import GenerateOptions
from .pair import EagleModel
from .prompts import check_ids, require_encodable, tokenised
from .text import StopStrings

log = logging.getLogger(__name__)


def make_requests(
    model: EagleModel, prompts: Sequence[Sequence[int]], options: GenerateOptions,
    logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
    own: Sequence[Mapping[str, object]] | None = None,
) -> list[Request]:
    """One request for each prompt.

    Args:
        prompts: token ids.
        own: for each prompt, fields of `RequestParams` that override those from the options.

    Raises:
        ValueError, TypeError: options that do not suit this pair or these prompts.
    """
    check_functions("stopping_criteria", stopping_criteria)
    if options.tree is not None:
        model.check_tree(options.tree)
    rule = options.rule if options.speculative else EXACT
    warn_about_threshold(rule, model, options)
    if options.lossless and (options.budget is not None or options.head_guard not in ("default", None)):
        log.warning("budget= and head_guard= change nothing without a threshold: decoding is lossless")
    check_ids([0, *(options.logit_bias or {})], model)
    limits = [check_length(len(ids), options.max_new_tokens, model) for ids in prompts]
    seeds = seeds_for(options.seed, len(prompts))
    eos_ids = frozenset() if options.ignore_eos else end_tokens(model)
    strings, stop_ids = options.stop_strings, check_stop_ids(options.stop_token_ids, model)
    for string in strings:
        require_encodable("stop", string)
    if strings and model.tokenizer is None:
        raise OptionError("stop", problem="needs a tokenizer, and this model has none")
    within = None if options.fuzzy_within is None else tuple(
        mark_token(mark, model) for mark in options.fuzzy_within)
    text_drafts = TextDrafts() if options.text_drafts == "auto" else options.text_drafts
    copying = options.speculative and text_drafts != "off"
    references = [TextIndex(check_ids(tokenised("reference", text, model, add_special_tokens=False), model))
                  for text in options.references if text]
    context_free = not (options.repetition_penalty != 1 or options.min_new_tokens or logits_processor
                     or options.frequency_penalty or options.presence_penalty or options.logit_bias
                     or options.response_format is not None)
    requests = []
    for number, ids in enumerate(prompts):
        grammar = None if options.response_format is None else Grammar(
            options.response_format, model.tokenizer, vocab_size=model.target.vocab_size, eos_ids=sorted(eos_ids),
            start=len(ids))
        params = RequestParams(
            max_new_tokens=limits[number], rule=rule, temperature=float(options.temperature), seed=seeds[number],
            budget=None if options.budget is None else float(options.budget),
            processors=build_processors(options, logits_processor, grammar, prompt_length=len(ids),
                                        eos_ids=sorted(stop_ids | eos_ids), device=model.target.output_device),
            processors_key=(options.temperature, options.top_k, options.top_p, options.min_p) if context_free else None,
            eos_ids=eos_ids, stop_ids=stop_ids, criteria=list(stopping_criteria or []), speculative=options.speculative,
            tree=options.tree, top_logprobs=min(options.top_logprobs, model.target.vocab_size), within=within)
        requests.append(Request(
            ids, params if own is None else replace(params, **own[number]), grammar=grammar,
            stop_strings=StopStrings(model.tokenizer, strings) if strings else None,
            text_source=TextSource(ids, text_drafts, references) if copying else None))
    model.refresh()
    return requests


def mark_token(mark: str | int, model: EagleModel) -> int:
    """The token of a mark of `fuzzy_within`.

    Raises:
        ValueError: the mark is not exactly one token of the target.
    """
    ids = [mark] if isinstance(mark, int) else tokenised("fuzzy_within", mark, model, add_special_tokens=False)
    if len(ids) != 1:
        raise OptionError("fuzzy_within", problem=f"needs marks of one token each, but {mark!r} is {len(ids)} tokens "
                          "of this model")
    return check_ids(ids, model)[0]


def warn_about_threshold(rule: Rule, model: EagleModel, options: GenerateOptions) -> None:
    """Warn if the threshold has no effect, also because the tree is too shallow for the rule's window; if no divergence
    exceeds it; or if the divergence is infinite because the drafter does not have every token."""
    drafted = isinstance(options.rule, FuzzyRule) or options.rule.mixes_draft
    if drafted and not options.lossless and (model.draft is None or rule is EXACT):
        log.warning("%s with threshold %g changes nothing %s: decoding is lossless", options.rule.name,
                    options.rule.threshold, "with speculative=False, because nothing is drafted" if rule is EXACT
                    else "without a drafter, because copies from the text are accepted exactly")
        return
    if rule.window and not options.lossless and model.draft is not None:
        tree = options.tree or (model.default_tree if model.sizing is None else model.sizing.largest)
        if tree.depth <= rule.window:
            log.warning("%s with a window of %d changes nothing on a tree of %d levels: it needs at least %d",
                        rule.name, rule.window, tree.depth, rule.window + 1)
    budget, divergence = options.budget, getattr(rule, "divergence", None)
    most = {"js": math.log(2), "tv": 1.0}.get(str(divergence).partition("_top")[0])
    if most is not None and most <= rule.threshold < math.inf and budget is None:
        log.warning("a threshold of %g accepts every token of the drafter that the guard allows: %s is at most %.3g",
                    rule.threshold, divergence, most)
    named, tokens = None if model.draft is None else model.draft.draft_vocab_size, model.target.vocab_size
    if named not in (None, tokens) and divergence in ("kl", "js_fsd_code") and rule.threshold > 0:
        log.warning("%s is infinite for a drafter with %d of %d tokens: no draft token passes. Use js, tv or "
                    "reverse_kl", divergence, named, tokens)


def seeds_for(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """A seed for each prompt, drawn at random if `seed` is None."""
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
    """The tokens, checked against the target's vocabulary."""
    return frozenset(check_ids(list(stop_token_ids), model)) if stop_token_ids else frozenset()


def check_length(prompt_length: int, max_new_tokens: int, model: EagleModel) -> int:
    """`max_new_tokens`, or the number of positions after the prompt if that is smaller."""
    require_integer("max_new_tokens", max_new_tokens, 1)
    limit = model.target.position_limit(prompt_length)
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise ValueError(f"the prompt has {prompt_length} tokens, the target takes at most {limit - 1} and one new one")
    if prompt_length + max_new_tokens > limit:
        log.warning("max_new_tokens lowered from %d to the %d free positions", max_new_tokens, limit - prompt_length)
    return min(max_new_tokens, limit - prompt_length)


def end_tokens(model: EagleModel) -> frozenset[int]:
    """The target's end tokens, from its generation config."""
    config = model.target.model.generation_config
    ids = config.eos_token_id if config is not None else None
    return frozenset([ids] if isinstance(ids, int) else ids or ())
