"""The options of a request, checked against the pair that decodes it."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .acceptance import Rule, make_rule
from .acceptance.prose import Marks, Prose
from .checks import check_functions, require_integer
from .drafting.config import Choice, TreeConfig
from .engine.request import BatchSettings, RequestSettings
from .engine.sampling import build_processors
from .measure.judges import equip
from .models.parallel import of_first
from .options import AcceptanceOptions, SamplingOptions
from .pair import EagleModel
from .prompts import check_ids, check_length, encodable, end_tokens, need_tokenizer
from .text import StopStrings

log = logging.getLogger(__name__)


def resolve(
    model: EagleModel, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, acceptance: AcceptanceOptions,
    logits_processor: Sequence[LogitsProcessor] | None, stopping_criteria: Sequence[Callable] | None,
) -> tuple[BatchSettings, list[RequestSettings]]:
    """What the prompts have in common, and what each of them asks for.

    Raises:
        ValueError, TypeError: options that this pair or these prompts cannot be decoded with.
    """
    eos_ids, greedy = end_tokens(model), sampling.greedy
    rooms = [check_length(len(ids), sampling.max_new_tokens, model) for ids in prompts]
    processors = [build_processors(
        sampling, logits_processor, prompt_length=len(ids), eos_ids=sorted(eos_ids), device=model.target.device,
    ) for ids in prompts]
    shaped = sampling.shapes_distribution or bool(logits_processor)
    rule = resolve_rule(acceptance, model, sampling.temperature, shaped=shaped)
    seeds = seeds_of(sampling.seed, len(prompts), model)
    check_functions("stopping_criteria", stopping_criteria)
    strings = check_stop_strings(sampling.stop_strings, model)
    stop_ids = check_stop_ids(sampling.stop_token_ids, model)
    alike = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
             *map(id, logits_processor or []))
    settings = [RequestSettings(
        processors=own, seed=seed, max_new_tokens=room,
        eos_ids=frozenset() if sampling.ignore_eos else eos_ids,
        stop_ids=stop_ids,
        text_ends=StopStrings(model.tokenizer, strings) if strings else None,
        criteria=agreed_criteria(stopping_criteria or [], model),
        budget=check_budget(acceptance.budget, rule, greedy),
        rule=rule, greedy=greedy, alike=alike,
    ) for own, seed, room in zip(processors, seeds, rooms, strict=True)]
    # Texts of a fuzzy rule depend on where drafting pauses, and must not depend on earlier requests. With a given tree
    # nothing pauses.
    pause = model.pauses[sampling.temperature] if acceptance.tree is None and rule.is_lossless(greedy) else None
    choose = tree_chooser(acceptance.tree, rule, sampling.temperature, model)
    return BatchSettings(choose, pause), settings


def resolve_rule(
    options: AcceptanceOptions, model: EagleModel, temperature: float, *, shaped: bool = False
) -> Rule:
    """The rule of these options; without a threshold the head's calibrated one, else the lossless end.

    Args:
        shaped: whether more than the temperature shapes the distribution: nothing was calibrated for that.
    """
    threshold = options.threshold
    if options.quality is not None:
        found = model.calibrated(options.quality, temperature, options.tree)
        if shaped and not found.holds_anywhere(temperature == 0):
            log.warning("%s was calibrated without top_k, top_p, min_p, repetition_penalty and processors of your own: "
                        "it may not hold", options.quality)
        return equipped(make_rule(**found.options), model)
    if threshold is None and options.acceptance == "fsd" and not shaped:
        threshold = model.default_threshold(options.divergence or "js", temperature, options.tree)
        if threshold is None:
            log.info("no threshold given and none calibrated for this head: decoding losslessly (threshold 0)")
    rule = make_rule(**options.rule | {"threshold": threshold})
    warn_of_infinity(rule, model)
    return equipped(rule, model)


def equipped(rule: Rule, model: EagleModel) -> Rule:
    """The rule, with this pair's judge, and what its tokens do, where it wants them.

    Raises:
        ValueError: the pair has none, or what is given is of another target.
    """
    rule = equip(rule, model.judge, model.target, model.draft)
    given = [part.marks for part in rule.parts if isinstance(part, Prose)]
    for marks in filter(None, given):
        if len(marks.ticked) < model.target.vocab_size:
            raise ValueError(f"the marks of rule {rule.name!r} are of {len(marks.ticked)} tokens, the target has "
                             f"{model.target.vocab_size}")
    if None not in given or all(map(rule.is_lossless, (True, False))):
        return rule
    if model.tokenizer is None:
        raise ValueError(f"rule {rule.name!r} looks for code in the text, and there is no tokenizer (custom_generate "
                         "has none): give make_rule marks=eagle_fsd.settings.marks_of(tokenizer, vocab_size, device)")
    marks = marks_of(model.tokenizer, model.target.vocab_size, model.target.output_device)
    if not marks.ticked.any():
        log.warning("rule %r finds no code: the tokenizer has no token with a backtick", rule.name)

    def with_marks(part: Rule) -> Rule:
        return replace(part, marks=marks) if isinstance(part, Prose) and part.marks is None else part

    return rule.each_part(with_marks)


@functools.lru_cache(maxsize=4)
def marks_of(tokenizer: PreTrainedTokenizerBase, size: int, device: torch.device | None = None) -> Marks:
    """What each of `size` tokens does, by what the vocabulary has for it: all kinds write backticks as themselves, but
    where a piece of SentencePiece is a byte."""
    written = {"<0x60>": "`"}
    return Marks.of(((token, written.get(text, text)) for text, token in tokenizer.get_vocab().items()), size, device)


def warn_of_infinity(rule: Rule, model: EagleModel) -> None:
    """Warn where a divergence of the rule is infinite because the draft cannot name every token."""
    if model.draft is None or model.draft.draft_vocab_size == model.target.vocab_size:
        return
    for part in rule.parts:
        divergence = getattr(part, "divergence", None)
        if divergence in ("kl", "js_fsd_code") and part.threshold > 0:
            log.warning("%s is infinite with a draft that names %d of %d tokens: nothing passes; take js, tv or "
                        "reverse_kl", divergence, model.draft.draft_vocab_size, model.target.vocab_size)


def tree_chooser(
    tree: TreeConfig | None, rule: Rule, temperature: float, model: EagleModel
) -> Callable[[int], Choice]:
    """Tree and cost for so many requests: the tree given, else the one chosen for the rule, temperature and number of
    requests, else the model's default."""
    if tree is None and model.trees is not None and model.draft is not None:
        return functools.partial(model.trees.of, rule, temperature)
    choice = Choice(check_tree(model.default_tree if tree is None else tree, model))
    return lambda requests: choice


def check_tree(tree: TreeConfig, model: EagleModel) -> TreeConfig:
    """The tree, with a warning where it asks for more nodes than can be scored."""
    vocabulary = model.target.vocab_size if model.draft is None else model.draft.draft_vocab_size
    if tree.top_k > vocabulary:
        raise ValueError(f"TreeConfig.top_k {tree.top_k} exceeds the draft's vocabulary ({vocabulary} tokens)")
    if tree.total_tokens > tree.nodes:
        log.warning(
            "TreeConfig.total_tokens lowered from %d to %d: depth %d with top_k %d scores no more nodes",
            tree.total_tokens, tree.nodes, tree.depth, tree.top_k,
        )
    return tree


def seeds_of(seed: int | Sequence[int] | None, count: int, model: EagleModel) -> list[int]:
    """One for each prompt; drawn where none is given, in all processes the same."""
    if seed is None:
        generator = random.SystemRandom()
        return of_first(model.target.group, lambda: [generator.getrandbits(48) for _ in range(count)])
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise ValueError(f"a list of seeds needs one for each prompt: {count}, got {len(seed)}")
        return list(map(int, seed))
    if int(seed) + count > 2**63:
        raise ValueError(f"seed must be below 2**63, got {int(seed) + count - 1}")
    return [int(seed) + number for number in range(count)]


def check_budget(budget: float | None, rule: Rule, greedy: bool) -> float | None:
    """The budget, refused where the rule's cost cannot be known."""
    if budget is not None and not greedy and not rule.knows_kl:
        raise ValueError(f"a budget needs a rule whose KL is known when sampling; that of {rule!r} is not")
    return None if budget is None else float(budget)


def check_stop_strings(strings: list[str], model: EagleModel) -> list[str]:
    """The strings, refused where they cannot be compared with the model's text."""
    for string in strings:
        encodable("stop", string)
    if strings:
        need_tokenizer(model)
    return strings


def check_stop_ids(stop_token_ids: Sequence[int] | None, model: EagleModel) -> frozenset[int]:
    """The tokens, refused where the target has no such ones."""
    ids = [] if stop_token_ids is None else list(stop_token_ids)
    for token in ids:
        require_integer("stop_token_ids", token, 0)
    return frozenset(check_ids(ids, model)) if ids else frozenset()


def agreed_criteria(criteria: Sequence[Callable], model: EagleModel) -> StoppingCriteriaList:
    """Criteria that say in all processes what they say in the first: some go by a clock, or by Ctrl-C."""
    group = model.target.group

    def agreed(criterion: Callable) -> Callable:
        return lambda ids, scores: of_first(group, lambda: criterion(ids, scores))

    return StoppingCriteriaList(criteria if group is None else map(agreed, criteria))


def check_streamer(streamer: object) -> None:
    """Raise unless it is None or has the methods of the streamers of `transformers`."""
    if streamer is not None and not (callable(getattr(streamer, "put", None))
                                     and callable(getattr(streamer, "end", None))):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends the streamer also where decoding fails: who reads it in another thread would wait for ever.

    Raises:
        TypeError: it is no streamer.
    """
    check_streamer(streamer)
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def ends_streamer(function: Callable) -> Callable:
    """The function, inside `ending` for its keyword `streamer`."""

    @functools.wraps(function)
    def wrapped(*args, streamer: BaseStreamer | None = None, **options):
        with ending(streamer):
            return function(*args, streamer=streamer, **options)

    return wrapped
