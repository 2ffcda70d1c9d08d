"""`generate`: one call from prompt to answer; `custom_generate`: the same inside `model.generate`."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .acceptance import Rule, make_rule
from .autotree import Choice
from .calibration import read_calibrations
from .checkpoint import load_head
from .config import TreeConfig
from .draft import DraftHead
from .generation import Output, Session, Settings, run
from .model import EagleModel, bundled_pair
from .parallel import of_first
from .sampling import build_processors, check_functions, check_processors, processors_of_row, require_integer

log = logging.getLogger(__name__)

# What `model.generate` prepares for a forward and the decode loop works out itself.
RECOMPUTED = ("attention_mask", "cache_position", "logits_to_keep", "past_key_values", "position_ids", "use_cache")
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


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


@ends_streamer
def generate(
    prompt: str | list | Tensor,
    model: EagleModel | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    acceptance: str | Rule | Callable = "fsd",
    threshold: float | None = None,
    divergence: str | None = None,
    quality: str | None = None,
    budget: float | None = None,
    tree: TreeConfig | None = None,
    logits_processor: Sequence[LogitsProcessor] | None = None,
    stopping_criteria: Sequence | None = None,
    streamer: BaseStreamer | None = None,
    session: Session | None = None,
) -> Output:
    """Generate an answer with EAGLE-2 draft trees and fuzzy acceptance.

    Args:
        prompt: text (tokenised as it is), a chat (list of {"role", "content"}, put through the tokenizer's chat
            template), or token ids (list of int, or tensor [L] or [1, L]). A list of such prompts is a batch: they are
            decoded together, each as it would be alone (docs/batches.md).
        model: from `load`; None: the bundled demo pair.
        max_new_tokens: never exceeded; lowered where the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling, with top_p, top_k (0: off) and min_p (0: off).
        repetition_penalty, min_new_tokens: as in `model.generate`.
        ignore_eos: go on past end tokens.
        seed: of the sampling noise; None draws one, reported in `out.seed`. With one seed, plain decoding, `exact`
            and any rule at its lossless end give the same tokens. For a batch a list of seeds, one for each prompt; one
            seed is that of the first prompt, and those after it get the numbers that follow.
        stop: strings that end the answer; not part of `out.text`.
        stop_token_ids: further tokens that end it.
        acceptance: a rule's name (exact, fsd, fsd_paper, tilt, typical, lenience, relaxed), a rule object, or a
            function from a `Verification` to log-weights [B, N, V].
        threshold: the rule's dial. None: for fsd the value of the strictest promise about accuracy that the head is
            calibrated for at this target, dtype, temperature and tree, where nothing else shapes the distribution
            (top_p, top_k, min_p, repetition_penalty, logits_processor); else 0 (lossless for fsd, tilt and lenience).
        divergence: for the rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the
            target's top k tokens such as js_top32.
        quality: a promise that the head is calibrated for (`eagle-fsd calibrate`), such as "accuracy_drop<=1%"; it
            chooses rule and threshold.
        budget: nats that fuzzy acceptance may cost in this answer: summed KL to the target when sampling, summed
            log-probability regret when greedy (see `eagle_fsd.budget`). When it is spent, or when the text starts to
            repeat, decoding is exact for the rest; `out.stats` says where. 0: exact; inf: only repetition counts.
        tree: size of the draft tree; None: as the model was loaded for (`load(tree=)`).
        logits_processor, stopping_criteria, streamer: those of `transformers`. Processors see each node's own path and
            must be functions of it and the scores (docs/processors.md). A streamer with a method
            `on_receipts(receipts)` gets the receipts of each cycle before its tokens, and every streamer is ended also
            where this call raises. Stop strings are streamed like all other text.
        session: a `Session` that several calls share: what the caches hold of the prompt since the last call is not
            processed again. `Chat` is made of it.

    Returns:
        `Output` with text, token_ids, finish_reason, seed, stats and receipts; for a batch, a list of them.

    Raises:
        ValueError, TypeError: a bad option, or a prompt that is empty, too long or of no accepted form, before any
            forward; while decoding, a rule, processor or criterion that returns something else than it must, or
            processors that leave no token to draw.

    What a rule, processor, criterion or streamer raises itself is passed on. No error changes the model: the next call
    gives what it would have given without.
    """
    model = bundled_pair() if model is None else model
    if not isinstance(model, EagleModel):
        raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}")
    prompts, batched = encode_prompts(prompt, model)
    rooms = [check_length(len(ids), max_new_tokens, model) for ids in prompts]
    eos_ids = end_tokens(model)
    processors = [build_processors(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, prompt_length=len(ids), eos_ids=sorted(eos_ids), custom=logits_processor,
        device=model.target.device,
    ) for ids in prompts]
    shaped = bool(top_k or top_p < 1 or min_p or repetition_penalty != 1 or logits_processor)
    if quality is None:
        rule = resolve_rule(acceptance, threshold, divergence, model, temperature=temperature, tree=tree, shaped=shaped)
    elif acceptance != "fsd" or threshold is not None or divergence is not None:
        raise ValueError(f"quality={quality!r} chooses the rule: leave acceptance, threshold and divergence out")
    else:
        rule = make_rule(**model.calibrated(quality, temperature, tree).options)
        if shaped:
            log.warning("%s was calibrated without top_k, top_p, min_p, repetition_penalty and processors of your own: "
                        "it may not hold", quality)
    seeds = of_first(model.target.group, lambda: check_seeds(seed, len(prompts)))
    if not isinstance(ignore_eos, bool):
        raise TypeError(f"ignore_eos must be a bool, got {ignore_eos!r}")
    check_functions("stopping_criteria", stopping_criteria)
    stops = check_stop_strings(stop, model)
    if session is not None and not isinstance(session, Session):
        raise TypeError(f"session must be a Session or None, got {session!r}")
    if len(prompts) > 1 and (session is not None or streamer is not None):
        name = "a session" if session is not None else "a streamer"
        raise ValueError(f"{name} serves one prompt at a time, got a batch of {len(prompts)}")
    shared = {
        "rule": rule,
        "greedy": temperature == 0,
        "eos_ids": frozenset() if ignore_eos else eos_ids,
        "stop_ids": check_stop_ids(stop_token_ids, model),
        "criteria": agreed_criteria(stopping_criteria or [], model),
        "budget": check_budget(budget, rule, greedy=temperature == 0),
    }
    together = [(numbers, resolve_tree(tree, rule, temperature, model, len(numbers)))
                for numbers in model.target.batches([len(ids) for ids in prompts])]
    of_rows = functools.partial(resolve_tree, tree, rule, temperature, model)
    if streamer is not None:
        streamer.put(torch.tensor(prompts))
    outputs: list[Output] = [None] * len(prompts)
    for numbers, choice in together:
        choose = of_rows if tree is None and len(numbers) > 1 else None
        settings = [Settings(
            **shared, tree=choice.tree, cost=choice.cost, processors=processors[number], seed=seeds[number],
            max_new_tokens=rooms[number], choose=choose,
            # Texts of a fuzzy rule depend on where drafting pauses, and must not depend on earlier requests.
            pause=model.pauses[temperature] if rule.is_lossless(temperature == 0) else None,
        ) for number in numbers]
        later = [] if choose is None else [choose(count).tree for count in range(1, len(numbers))]
        drafting = any([choice.tree, *later]) or session is not None  # as rows end, or in a later call
        answers = run(
            model.target, model.draft if drafting else None, [prompts[number] for number in numbers], settings,
            streamer=streamer, session=session, graphs=model.graphs,
            stop_check=(lambda new: any(s in decode(model, new) for s in stops)) if stops else None,
        )
        for number, output in zip(numbers, answers, strict=True):
            if choice.tree is None and output.stats.undrafted == output.stats.target_forwards:
                output.stats.plain_because = "no tree is expected to be faster than plain decoding"
            if model.tokenizer is not None:
                output.text = decode(model, output.token_ids)
                found = [at for s in stops if (at := output.text.find(s)) >= 0]
                output.text = output.text[: min(found)] if found else output.text
            outputs[number] = output
    return outputs if batched else outputs[0]


def decode(model: EagleModel, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=True)


def encode_prompts(prompt: object, model: EagleModel) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether they came as a batch.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if not (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple, Tensor))):
        return [encode_prompt(prompt, model)], False
    prompts = []
    for number, each in enumerate(prompt):
        try:
            prompts.append(encode_prompt(each, model))
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {number} of {len(prompt)}: {error}") from error
    return prompts, True


def encode_prompt(prompt: object, model: EagleModel) -> list[int]:
    """Token ids of a single prompt.

    Raises:
        ValueError, TypeError: see `generate`.
    """
    if isinstance(prompt, Tensor):
        integers = not (prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool)
        if not integers or prompt.is_meta or prompt.dim() not in (1, 2) or (prompt.dim() == 2 and len(prompt) != 1):
            raise ValueError(
                f"a prompt tensor must be integer [L] or [1, L] (a batch is a list of prompts, without padding), got "
                f"{prompt.dtype} {list(prompt.shape)}"
            )
        return _check_ids(prompt.flatten().tolist(), model)
    if isinstance(prompt, str):
        ids = _need_tokenizer(model)(_encodable("the prompt", prompt))["input_ids"]
    elif isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt) and prompt:
        ids = _encode_chat(list(prompt), model)
    elif isinstance(prompt, (list, tuple)):
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            raise TypeError("a list prompt must hold token ids, chat messages, or prompts, not a mixture or others")
        ids = [int(token) for token in prompt]
    else:
        raise TypeError(f"a prompt must be text, a chat, or token ids, got {type(prompt).__name__}")
    return _check_ids(ids, model)


def _check_ids(ids: list[int], model: EagleModel) -> list[int]:
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    wrong = next((token for token in ids if not 0 <= token < model.target.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary (0 to {model.target.vocab_size - 1})")
    return ids


def _need_tokenizer(model: EagleModel):
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    return model.tokenizer


def _encodable(what: str, text: str) -> str:
    """The text, refused where a lone surrogate in it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is no valid text: a lone surrogate {text[error.start]!r} at {error.start}") from error
    return text


def _encode_chat(messages: list[dict], model: EagleModel) -> list[int]:
    tokenizer = _need_tokenizer(model)
    for message in messages:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise ValueError(f'a chat message needs "role" and "content", both text, got {message!r}')
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give the prompt as text or token ids")
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise for roles or an order that they do not know
        raise ValueError(f"the tokenizer's chat template refuses the chat: {error}") from error
    return tokenizer(_encodable("the chat", rendered), add_special_tokens=False)["input_ids"]


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


def resolve_rule(
    acceptance: object, threshold: float | None, divergence: str | None, model: EagleModel, *, temperature: float,
    tree: TreeConfig | None, shaped: bool = False,
) -> Rule:
    """The rule of these options; without a threshold the head's calibrated one, else the lossless end.

    Args:
        shaped: whether more than the temperature shapes the distribution: no threshold was calibrated for that.
    """
    if threshold is None and acceptance == "fsd" and not shaped:
        threshold = model.default_threshold(divergence or "js", temperature, tree)
        if threshold is None:
            log.info("no threshold given and none calibrated for this head: decoding losslessly (threshold 0)")
    return warn_of_infinity(make_rule(acceptance, threshold=threshold, divergence=divergence), model)


def warn_of_infinity(rule: Rule, model: EagleModel) -> Rule:
    """The rule, with a warning where its divergence is infinite because the draft cannot name every token."""
    divergence = getattr(rule, "divergence", None)
    if divergence in ("kl", "js_fsd_code") and model.draft is not None:
        if rule.threshold > 0 and model.draft.draft_vocab_size < model.target.vocab_size:
            log.warning("%s is infinite with a draft that names %d of %d tokens: nothing passes; take js, tv or "
                        "reverse_kl", divergence, model.draft.draft_vocab_size, model.target.vocab_size)
    return rule


def check_seed(seed: object) -> int:
    require_integer("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return int(seed)


def check_seeds(seed: object, count: int) -> list[int]:
    """One for each prompt, drawn where none is given."""
    if seed is None:
        return [random.SystemRandom().getrandbits(48) for _ in range(count)]
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise ValueError(f"a list of seeds needs one for each prompt: {count}, got {len(seed)}")
        return [check_seed(each) for each in seed]
    return [check_seed(check_seed(seed) + number) for number in range(count)]


def check_streamer(streamer: object) -> None:
    """Raise unless it is None or has the methods of the streamers of `transformers`."""
    if streamer is not None and not (callable(getattr(streamer, "put", None))
                                     and callable(getattr(streamer, "end", None))):
        raise TypeError(f"streamer must have the methods put and end, got {streamer!r}")


def check_budget(budget: float | None, rule: Rule, greedy: bool) -> float | None:
    """The budget, refused where the rule's cost cannot be known."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"budget must be a number of nats, got {budget!r}")
    if not budget >= 0:
        raise ValueError(f"budget must be at least 0 nats, got {budget!r}")
    if not greedy and not rule.knows_kl:
        raise ValueError(f"a budget needs a rule whose KL is known when sampling; that of {rule!r} is not")
    return float(budget)


def resolve_tree(
    tree: TreeConfig | None, rule: Rule, temperature: float, model: EagleModel, rows: int = 1
) -> Choice:
    """The tree given, else the one chosen for the rule, temperature and batch, else the model's default."""
    if tree is None and model.trees is not None and model.draft is not None:
        return model.trees.of(rule, temperature, rows)
    return Choice(check_tree(model.default_tree if tree is None else tree, model))


def check_tree(tree: TreeConfig, model: EagleModel) -> TreeConfig:
    """The tree, with a warning where it asks for more nodes than can be scored."""
    if not isinstance(tree, TreeConfig):
        raise TypeError(f"tree must be a TreeConfig or None (what load(tree=...) said), got {tree!r}")
    vocabulary = model.target.vocab_size if model.draft is None else model.draft.draft_vocab_size
    if tree.top_k > vocabulary:
        raise ValueError(f"TreeConfig.top_k {tree.top_k} exceeds the draft's vocabulary ({vocabulary} tokens)")
    if tree.total_tokens > tree.nodes:
        log.warning(
            "TreeConfig.total_tokens lowered from %d to %d: depth %d with top_k %d scores no more nodes",
            tree.total_tokens, tree.nodes, tree.depth, tree.top_k,
        )
    return tree


def check_stop_strings(stop: str | Sequence[str] | None, model: EagleModel) -> list[str]:
    if not (stop is None or isinstance(stop, (str, list, tuple))):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    for string in stops:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}")
        _encodable("stop", string)
    if stops:
        _need_tokenizer(model)
    return stops


def check_stop_ids(stop_token_ids: Sequence[int] | None, model: EagleModel) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset()
    if not isinstance(stop_token_ids, Iterable) or isinstance(stop_token_ids, (str, bytes)):
        raise TypeError(f"stop_token_ids must be a sequence of token ids, got {stop_token_ids!r}")
    ids = list(stop_token_ids)
    for token in ids:
        require_integer("stop_token_ids", token, 0)
    return frozenset(_check_ids(ids, model)) if ids else frozenset()


def end_tokens(model: EagleModel) -> frozenset[int]:
    """The target's end tokens, from its generation config."""
    config = model.target.model.generation_config
    ids = config.eos_token_id if config is not None else None
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    draft: DraftHead | str | None = None,
    acceptance: str | Rule | Callable = "fsd",
    threshold: float | None = None,
    divergence: str | None = None,
    budget: float | None = None,
    tree: TreeConfig | None = None,
    seed: int | Sequence[int] | None = None,
    **model_kwargs,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode inside the target's own `generate`:

        target.generate(**inputs, custom_generate=eagle_fsd.custom_generate, draft=head, threshold=0.2)

    Generation config, logits processors, stopping criteria and streamer are those that `generate` prepared. It keeps
    its `tokenizer` from callables: for stop strings pass a `StopStringCriteria` in `stopping_criteria`.

    Args:
        draft: a `DraftHead` (from `load_head`) or where to load one from.
        acceptance, threshold, divergence, budget, tree, seed: as in `eagle_fsd.generate`.

    Returns:
        sequences [B, prompt + new tokens], a short one with pad tokens behind its end, or an output object where the
        config asks for a dict. Prompts may be padded on the left.

    Raises:
        ValueError, TypeError: padding elsewhere, beams, inputs other than tokens, outputs other than tokens, or a bad
            option.
    """
    if generation_config is None:
        raise TypeError("custom_generate is called by generate: model.generate(..., custom_generate=custom_generate)")
    if draft is None:
        raise ValueError("draft= is missing: a DraftHead or the directory or hub id of one")
    if generation_config.num_beams > 1:
        raise ValueError(f"num_beams must be 1 with custom_generate, got {generation_config.num_beams}")
    foreign = [name for name, value in model_kwargs.items() if value is not None and name not in RECOMPUTED]
    if foreign:
        raise ValueError(f"only input_ids are supported with custom_generate, got {', '.join(foreign)}")
    padding = left_padding(input_ids, model_kwargs.get("attention_mask"))
    wanted = [name for name in EXTRA_OUTPUTS if getattr(generation_config, name, None)]
    if wanted:
        raise ValueError(f"custom_generate returns sequences only, not {', '.join(wanted)}")
    if streamer is None:
        streamer = streamer_of_caller()
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer serves one prompt at a time, got a batch of {len(input_ids)}")
    # Where a model has no pad token, `generate` takes its first end token and notes that here only.
    pad = getattr(generation_config, "_pad_token_tensor", None)
    pad = generation_config.pad_token_id if pad is None else pad.item()
    if pad is None and len(input_ids) > 1:
        raise ValueError("a batch, whose answers may differ in length, needs a pad_token_id in the generation config")
    pair = EagleModel.from_parts(model, draft if isinstance(draft, DraftHead) else load_head(draft))
    if not isinstance(draft, DraftHead):
        pair.calibrations = read_calibrations(draft)
    criteria, eos_ids, max_length = split_criteria(stopping_criteria or StoppingCriteriaList())
    prompts = [_check_ids(row[count:].tolist(), pair) for row, count in zip(input_ids, padding, strict=True)]
    limit = (max_length if max_length is not None else generation_config.max_length) - input_ids.shape[1]
    greedy = not generation_config.do_sample
    # Without a seed the noise follows torch's global generator, as model.generate does.
    drawn = of_first(pair.target.group, lambda: torch.randint(2**62, (len(prompts),)).tolist())
    seeds = drawn if seed is None else check_seeds(seed, len(prompts))
    temperature = 0.0 if greedy else generation_config.temperature or 1.0
    processors = check_processors(logits_processor)
    shaped = any(not isinstance(each, TemperatureLogitsWarper) for each in processors)
    rule = resolve_rule(acceptance, threshold, divergence, pair, temperature=temperature, tree=tree, shaped=shaped)
    shared = {
        "rule": rule,
        "tree": resolve_tree(tree, rule, temperature, pair).tree,
        "greedy": greedy,
        "eos_ids": eos_ids,
        "budget": check_budget(budget, rule, greedy=greedy),
    }
    settings = [Settings(
        **shared, processors=processors_of_row(processors, number), seed=seeds[number],
        max_new_tokens=check_length(len(ids), limit, pair), padding=input_ids[number, : padding[number]].tolist(),
        criteria=agreed_criteria(criteria_of_row(criteria, number, len(prompts)), pair),
    ) for number, ids in enumerate(prompts)]
    answers: dict[int, list[int]] = {}
    with ending(streamer):
        for numbers in pair.target.batches([len(ids) for ids in prompts]):
            outputs = run(pair.target, pair.draft, [prompts[number] for number in numbers],
                          [settings[number] for number in numbers], streamer=streamer)
            answers |= {number: output.token_ids for number, output in zip(numbers, outputs, strict=True)}
    new = pad_tokens([answers[number] for number in range(len(prompts))], pad)
    sequences = torch.cat([input_ids, input_ids.new_tensor(new)], 1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def agreed_criteria(criteria: Sequence[Callable], model: EagleModel) -> StoppingCriteriaList:
    """Criteria that say in all processes what they say in the first: some go by a clock, or by Ctrl-C."""
    group = model.target.group

    def agreed(criterion: Callable) -> Callable:
        return lambda ids, scores: of_first(group, lambda: criterion(ids, scores))

    return StoppingCriteriaList(criteria if group is None else map(agreed, criteria))


def criteria_of_row(criteria: StoppingCriteriaList, row: int, rows: int) -> StoppingCriteriaList:
    """Criteria made for a batch as those of one row.

    Some keep count of their rows in a list or tensor: each row gets a copy of that, and is shown in every place.
    """
    if rows == 1:
        return criteria

    def of_row(criterion: Callable) -> Callable:
        own = copy.copy(criterion)
        for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
            if isinstance(value, (list, dict, set, Tensor)):  # not a tokenizer, or a flag that is set from outside
                setattr(own, name, copy.copy(value) if not isinstance(value, Tensor) else value.clone())

        def met(ids: Tensor, scores: object) -> object:
            found = own(ids.expand(rows, -1), scores)
            return found[row] if isinstance(found, Tensor) and found.numel() == rows else found

        return met

    return StoppingCriteriaList([of_row(criterion) for criterion in criteria])


def left_padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """How many pad tokens each row of input_ids [B, L] begins with.

    Raises:
        ValueError: an attention mask [B, L] with zeros elsewhere.
    """
    if mask is None:  # newer versions of transformers pass None for all ones
        return [0] * len(input_ids)
    counts = (mask == 0).sum(-1)
    expected = torch.arange(mask.shape[-1], device=mask.device) >= counts[..., None]
    if mask.shape != input_ids.shape or not torch.equal(mask == 1, expected):
        raise ValueError("prompts may be padded on the left only: the attention mask must be zeros, then ones")
    return counts.tolist()


def pad_tokens(rows: list[list[int]], pad: int | None) -> list[list[int]]:
    """The rows at the length of the longest."""
    longest = max(map(len, rows))
    return [row + [pad] * (longest - len(row)) for row in rows]


def streamer_of_caller() -> BaseStreamer | None:
    """The streamer of the `generate` call that `custom_generate` runs in.

    `transformers` 5.17 to 5.23 gives it the prompt but does not hand it on to a callable.
    """
    caller = sys._getframe(2)
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


def split_criteria(given: StoppingCriteriaList) -> tuple[StoppingCriteriaList, frozenset[int], int | None]:
    """Length limit and end tokens, which the loop knows, and the criteria that it must call."""
    others, eos_ids, max_length = StoppingCriteriaList(), frozenset(), None
    for criterion in given:
        if isinstance(criterion, MaxLengthCriteria):
            max_length = criterion.max_length
        elif isinstance(criterion, EosTokenCriteria):
            eos_ids |= frozenset(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    return others, eos_ids, max_length
