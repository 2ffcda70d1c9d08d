"""From options to requests. Everything that depends on model and prompt is checked here, before any forward."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from ..acceptance import FuzzyRule
from ..decoding.grammar import Grammar
from ..decoding.processing import WARPERS, CountPenalty, own_forms
from ..decoding.request import Request
from ..drafting.copies import TextDrafts, TextIndex, TextSource
from ..loading.pair import EagleModel
from ..options.generate import FOLLOWED, GenerateOptions, as_list
from ..utils.checks import OptionError, check_functions
from ..utils.text import StreamedText
from .prompts import ChatTokens, end_of_turn, require_encodable, tokenised


def make_requests(
    model: EagleModel, prompts: Sequence[Sequence[int]], options: GenerateOptions,
    logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
    prepared: Sequence[Mapping[str, object]] | None = None,
) -> list[Request]:
    """One request for each prompt.

    Args:
        prompts: token ids.
        prepared: for each prompt, fields of `Request` that `model.generate` has made of its own options and of the
            model's generation config: `processors`, `eos_ids` and others.

    Raises:
        ValueError, TypeError: options that do not suit this pair or these prompts.
    """
    check_functions("stopping_criteria", stopping_criteria)
    if options.tree is not None or model.sizing is None:
        model.check_tree(options.tree or model.default_tree)
    warn_about_threshold(model, options)
    warn_without_effect(model, options)
    target, tokenizer = model.target, model.tokenizer
    followed = followed_fields(target.model, options) if prepared is None else {}
    strings = options.stop_strings or as_list(followed.get("stop_strings"))
    named = [mark for mark in options.fuzzy_within or () if isinstance(mark, str)]
    for name, texts in (("stop", strings), ("reference", options.references), ("fuzzy_within", named)):
        if texts and tokenizer is None:
            raise OptionError(name, problem="needs a tokenizer, and this model has none")
    for string in strings:
        require_encodable("stop", string)
    check_tokens("logit_bias", options.logit_bias, model)
    limits = [check_length(len(ids), options.max_new_tokens, model) for ids in prompts]
    seeds = seeds_for(options.seed, len(prompts))
    stop_ids = check_tokens("stop_token_ids", options.stop_token_ids, model)
    ends = check_tokens("eos_token_id", options.eos_token_id, model)
    marks = tuple(mark_token(mark, model) for mark in options.fuzzy_within or ()) or None
    texts = [tokenised("reference", text, model, add_special_tokens=False) for text in options.references if text]
    check_tokens("reference", itertools.chain(*texts), model)
    references = [TextIndex(ids) for ids in texts if ids]
    text_drafts = TextDrafts() if options.text_drafts == "auto" else options.text_drafts
    copying = options.speculative and text_drafts != "off"
    requests = []
    for number, (ids, limit, seed) in enumerate(zip(prompts, limits, seeds, strict=True)):
        fields = {"seed": seed, "eos_ids": ends or end_tokens(model, chat=isinstance(ids, ChatTokens)), "padding": (),
                  "criteria": list(stopping_criteria or []), **({} if prepared is None else prepared[number])}
        if options.ignore_eos:
            fields["eos_ids"] = frozenset()
        eos_ids, start = sorted(fields["eos_ids"]), len(fields["padding"]) + len(ids)
        grammar = None if options.response_format is None else Grammar(
            options.response_format, tokenizer, vocab_size=target.vocab_size, eos_ids=eos_ids, start=start)
        if prepared is None:
            fields["processors"] = processors_of_model(
                target.model, options, followed, logits_processor, prompt=ids, max_new_tokens=limit,
                eos_ids=sorted(stop_ids.union(eos_ids)), device=target.output_device)
        fields["processors"] = with_own_processors(fields["processors"], options, grammar, start)
        requests.append(Request(
            ids, options, max_new_tokens=limit, stop_ids=stop_ids, marks=marks, grammar=grammar, followed=followed,
            watched=StreamedText(tokenizer, strings) if strings else None,
            text_source=TextSource(ids, text_drafts, references) if copying else None, **fields))
    return requests


def followed_fields(model: PreTrainedModel, options: GenerateOptions) -> dict[str, object]:
    """The fields of the model's generation config that apply besides these options, as in `model.generate`: those that
    affect greedy tokens and that no option overrides. Sampling fields never make a request sample.
    """
    own, given = model.generation_config, options.generation_config
    if own is None:
        return {}
    overridden = {name for name in FOLLOWED if getattr(given, name, None) is not None}
    for name, value in (("repetition_penalty", options.repetition_penalty), ("stop_strings", options.stop)):
        if value not in (None, ()):  # the command line's default for `stop` is ()
            overridden.add(name)
    if sets_least(options):
        overridden |= {"min_new_tokens", "min_length"}
    neutral = own._get_default_generation_params()
    names = (*FOLLOWED, "min_new_tokens", "repetition_penalty", "stop_strings")
    return {name: value for name in names if name not in overridden
            and (value := getattr(own, name, None)) not in (None, False, neutral.get(name))}


def sets_least(options: GenerateOptions) -> bool:
    """Whether the options override the minimum lengths of generation configs: with one of their own, or with a grammar,
    which decides where an answer ends.
    """
    return options.min_new_tokens is not None or options.response_format is not None


def processors_of_model(
    model: PreTrainedModel, options: GenerateOptions, followed: Mapping[str, object],
    custom: Sequence[LogitsProcessor] | None, *, prompt: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int],
    device: torch.device,
) -> LogitsProcessorList:
    """The processors that `model.generate` makes: for the model's generation config, overridden by the options, then
    the user's own, then the warpers. Greedy decoding has no warpers.

    Args:
        followed: see `followed_fields`.
        custom: the user's own.
        eos_ids: tokens that end the answer. device: that of the logits.
    """
    check_functions("logits_processor", custom)
    config, given = GenerationConfig(), options.generation_config
    fields = {**followed, **{name: getattr(given, name, None) for name in FOLLOWED if name not in followed},
              "max_length": len(prompt) + max_new_tokens, "do_sample": not options.greedy,
              "temperature": float(options.temperature), "top_k": options.top_k, "top_p": float(options.top_p),
              "min_p": float(options.min_p) or None,
              "_eos_token_tensor": torch.tensor(eos_ids, device=device) if eos_ids else None}
    for name in ("repetition_penalty", "min_new_tokens"):
        fields.setdefault(name, getattr(options, name))
    if sets_least(options):
        fields["min_length"] = None
    for name, value in fields.items():
        setattr(config, name, copy.deepcopy(value))
    reads_prompt = config.encoder_repetition_penalty or config.encoder_no_repeat_ngram_size
    return model._get_logits_processor(
        config, len(prompt), torch.tensor([prompt], device=device) if reads_prompt else None,
        logits_processor=LogitsProcessorList(custom or []), device=device)


def with_own_processors(
    processors: LogitsProcessorList, options: GenerateOptions, grammar: Grammar | None, start: int
) -> LogitsProcessorList:
    """The processors of `model.generate`, and before its warpers those that it does not have.

    Args:
        start: length of the prompt.
    """
    own: list[LogitsProcessor] = []
    if options.frequency_penalty or options.presence_penalty:
        own.append(CountPenalty(options.frequency_penalty, options.presence_penalty, start))
    if options.logit_bias:
        own.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in options.logit_bias.items()}))
    if grammar is not None:
        own.append(grammar)
    processors = own_forms(processors)
    at = next((at for at, processor in enumerate(processors) if isinstance(processor, WARPERS)), len(processors))
    return LogitsProcessorList([*processors[:at], *own, *processors[at:]])


def mark_token(mark: str | int, model: EagleModel) -> int:
    """The token of a mark of `fuzzy_within`.

    Raises:
        ValueError: the mark is not exactly one token of the target.
    """
    ids = [mark] if isinstance(mark, int) else tokenised("fuzzy_within", mark, model, add_special_tokens=False)
    if len(ids) != 1:
        raise OptionError("fuzzy_within", problem=f"needs marks of one token each, but {mark!r} is {len(ids)} tokens "
                          "of this model")
    check_tokens("fuzzy_within", ids, model)
    return ids[0]


def warn_without_effect(model: EagleModel, options: GenerateOptions) -> None:
    """Warn of options that have no effect because of others, once for each model."""
    for without_effect, names, why in (
        (options.greedy, ("top_p", "top_k", "min_p"), "at temperature 0: decoding is greedy"),
        (options.lossless, ("budget", "head_guard", "divergence", "fuzzy_within"),
         "without a threshold: decoding is lossless"),
        (not options.speculative, ("tree", "text_drafts", "reference"),
         "with speculative=False: nothing is drafted"),
    ):
        given = [name for name in names if getattr(options, name) not in (getattr(GenerateOptions, name), None, "off")]
        if without_effect and given:
            model.warn_once("%s %s nothing %s", " and ".join(f"{name}=" for name in given),
                            "change" if len(given) > 1 else "changes", why)


def warn_about_threshold(model: EagleModel, options: GenerateOptions) -> None:
    """Warn if the threshold has no effect, if no divergence can exceed it, or if the divergence is infinite because the
    drafter lacks some tokens."""
    rule = options.rule
    if options.lossless or not isinstance(rule, FuzzyRule):
        return
    if model.draft is None or not options.speculative:
        model.warn_once("%s with threshold %g changes nothing %s: decoding is lossless", rule.name, rule.threshold,
                        "without a drafter, because copies from the text are accepted exactly" if options.speculative
                        else "with speculative=False, because nothing is drafted")
        return
    budget, divergence = options.budget, getattr(rule, "divergence", None)
    most = {"js": math.log(2), "tv": 1.0}.get(str(divergence).partition("_top")[0])
    if most is not None and most <= rule.threshold < math.inf and budget is None:
        model.warn_once("a threshold of %g accepts every token of the drafter that the guard allows: %s is at most "
                        "%.3g", rule.threshold, divergence, most)
    named, tokens = None if model.draft is None else model.draft.draft_vocab_size, model.target.vocab_size
    if named not in (None, tokens) and divergence in ("kl", "js_fsd_code"):
        model.warn_once("%s is infinite for a drafter with %d of %d tokens: no draft token passes. Use js, tv or "
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


def check_tokens(name: str, tokens: Iterable[int] | None, model: EagleModel) -> frozenset[int]:
    """The tokens of an option.

    Raises:
        ValueError: one is not in the target's vocabulary.
    """
    size = model.target.vocab_size
    ids = frozenset(tokens or ())
    if (wrong := next((token for token in ids if not 0 <= token < size), None)) is not None:
        raise OptionError(name, problem=f"has token id {wrong}, which is outside the vocabulary (0 to {size - 1})")
    return ids


def check_length(prompt_length: int, max_new_tokens: int, model: EagleModel) -> int:
    """`max_new_tokens`, or the number of tokens that the text can still have if that is smaller."""
    limit = model.target.text_limit(prompt_length)
    if limit is None:
        return max_new_tokens
    if prompt_length >= limit:
        raise ValueError(f"the prompt has {prompt_length} tokens, the target takes at most {limit - 1} and one new one")
    if prompt_length + max_new_tokens > limit:
        model.warn_once("max_new_tokens lowered from %d to the %d free positions", max_new_tokens,
                        limit - prompt_length)
    return min(max_new_tokens, limit - prompt_length)


def end_tokens(model: EagleModel, *, chat: bool = False) -> frozenset[int]:
    """The target's end tokens: those of its generation config, and for a chat the token that ends a turn."""
    config = model.target.model.generation_config
    ids = config.eos_token_id if config is not None else None
    ends = {ids} if isinstance(ids, int) else set(ids or ())
    turn = end_of_turn(model.tokenizer) if chat and model.tokenizer is not None else None
    return frozenset(ends if turn is None or turn >= model.target.vocab_size else {*ends, turn})
