"""`custom_generate`: our decoding as a method of the target's own `model.generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .api import decode_requests, ending
from .drafting.drafter import Drafter
from .heads.checkpoint import is_causal_lm, load_head
from .heads.eagle import DraftHead
from .inputs.prompts import check_ids
from .inputs.requests import make_requests
from .loading.pair import EagleModel
from .models.loading import load_target
from .options.generate import GenerateKeywords, GenerateOptions, as_list
from .options.option import lists_options

# Keyword arguments that `model.generate` passes on and that do not affect the text.
NEUTRAL = ("attention_mask", "logits_to_keep", "position_ids", "use_cache")
OTHER_METHODS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "dola_layers", "penalty_alpha",
                 "constraints", "force_words_ids")
# Our options that `model.generate` does not take itself, for prompts of token ids.
OPTIONS = [name for name in GenerateOptions.declared
           if name not in ("generation_config", "chat_template_kwargs") and not hasattr(GenerationConfig(), name)]
ATTRIBUTE = "eagle_fsd_pair"  # of a model, see `CachedPair`
REFUSED = {  # fields of a generation config that say how an assistant drafts or is verified, and what to use instead
    "assistant_ensemble_weight": 'acceptance="fsd" with a threshold loosens verification instead',
    "speculation_type": "pass a head or a causal LM as draft=",
}
NOT_SYNCED = ("custom_generate does not keep processes in step, got synced_gpus=True: leave it out, and load the whole "
              "model in each process")
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
# Keywords of `model.generate` that say where a repository's files are; transformers passes them on to its function.
PLACES = ("cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision", "token")


@lists_options(GenerateKeywords, names=OPTIONS)
def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    assistant_model: object | None = None,
    draft: Drafter | PreTrainedModel | str | None = None,
    text_streamer: BaseStreamer | None = None,
    text_tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode inside the target's own `generate`:

        target.generate(**inputs, custom_generate=eagle_fsd.custom_generate, draft=head, threshold=0.2)

    Generation config, logits processors and stopping criteria are those that `generate` prepared.

    Args:
        draft: a `DraftHead` (from `load_head`), a smaller causal LM with the same tokens, or the directory or hub id of
            one of them; None: drafts are only copied from the text. The model keeps a drafter that a call has loaded,
            and on CUDA the last drafter with its CUDA graphs and caches, for later calls with the same draft and
            text_tokenizer. `del model.eagle_fsd_pair` frees them, and the next call loads the files again. Do so before
            you delete the model as well: otherwise its memory is freed only by a later garbage collection.
        text_streamer: receives the prompt and the tokens, and is ended. `generate` passes its own `streamer=` to no
            callable: it sends the prompt there, and never ends it.
        streamer: the same, for a caller that has sent the prompt itself.
        text_tokenizer: the tokenizer, for options with text: `stop`, `reference`, `response_format` and marks of
            `fuzzy_within`. `generate` does not pass its `tokenizer=` on, and with `stop_strings=` asks for one even if
            it is there.
        model_kwargs: the other fields of `GenerateOptions` that are no fields of a generation config, such as
            `threshold`, and what else `generate` passes on.

    Returns:
        Sequences [B, prompt + new tokens], padded on the right with pad tokens, or an output object if the config asks
        for a dict. Prompts may be padded on the left.

    Raises:
        ValueError, TypeError: padding elsewhere, beams, another generation method, inputs other than tokens (a cache
            that is not empty included), outputs other than tokens, or a bad option.
    """
    with ending(streamer), ending(text_streamer):
        if streamer is not None and text_streamer is not None:
            raise ValueError("custom_generate takes one streamer, got streamer= and text_streamer=")
        if assistant_model is not None:
            raise ValueError("custom_generate cannot take an assistant_model as well: pass it as draft=")
        if synced_gpus:
            raise ValueError(NOT_SYNCED)
        has_prompt = streamer is not None
        streamer = text_streamer if streamer is None else streamer
        given = {name: model_kwargs.pop(name) for name in OPTIONS if name in model_kwargs}
        pad = check_call(input_ids, generation_config, streamer, model_kwargs)
        criteria, eos_ids, max_length = split_criteria(stopping_criteria or StoppingCriteriaList())
        options = GenerateOptions(
            max_new_tokens=(generation_config.max_length if max_length is None else max_length) - input_ids.shape[1],
            temperature=float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0, **given)
        texts = {"stop": options.stop, "reference": options.reference, "response_format": options.response_format,
                 "fuzzy_within": any(isinstance(mark, str) for mark in options.fuzzy_within or ())}
        if text_tokenizer is None and (name := next(filter(texts.get, texts), None)) is not None:
            raise ValueError(f"{name}= needs text_tokenizer=: model.generate does not pass its tokenizer= on")
        padding = left_padding(input_ids, model_kwargs.get("attention_mask"))
        check_positions(model_kwargs.get("position_ids"), padding, input_ids.shape[1])
        pair = pair_of(model, draft, text_tokenizer)
        prompts = [check_ids(row[count:].tolist(), pair) for row, count in zip(input_ids, padding, strict=True)]
        least = max(generation_config.min_new_tokens or 0, (generation_config.min_length or 0) - input_ids.shape[1])
        if options.stop_token_ids and least > 0:  # `generate` knows its own end tokens only
            logits_processor = [MinNewTokensLengthLogitsProcessor(
                input_ids.shape[1], least, list(options.stop_token_ids), input_ids.device), *(logits_processor or [])]
        prepared = [{"processors": processors_of_row(logits_processor or [], number), "eos_ids": eos_ids,
                     "criteria": criteria_of_row(criteria, number, len(prompts)),
                     "padding": input_ids[number, : padding[number]].tolist()} for number in range(len(prompts))]
        if options.seed is None:  # torch's global generator decides, as in model.generate
            for fields in prepared:
                fields["seed"] = int(torch.randint(2**62, ()))
        requests = make_requests(pair, prompts, options, prepared=prepared)
        if streamer is not None and not has_prompt:
            streamer.put(input_ids.cpu())
        decode_requests(pair, requests, streamer=streamer)
    answers = [request.answer for request in requests]
    longest = max(map(len, answers))
    new = [answer + [pad] * (longest - len(answer)) for answer in answers]
    sequences = torch.cat([input_ids, input_ids.new_tensor(new)], 1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def hub_generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    draft: Drafter | PreTrainedModel | str | None = None,
    assistant_model: Drafter | PreTrainedModel | str | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop: str | Sequence[str] | None = None,
    streamer: BaseStreamer | None = None,
    text_streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    **options,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode for a hub repository, as the function of the folder `hub/` does:

        target.generate(**inputs, custom_generate="user/eagle-fsd", trust_remote_code=True, threshold=0.3)

    transformers hands the function of a repository all arguments of `generate` as they are. This one calls `generate`
    again, with `custom_generate`, so that the generation config, processors and criteria have the same meaning there.

    Args:
        draft, assistant_model: the drafter, see `custom_generate`, under either name.
        tokenizer: the target's, for stop_strings=, stop= and reference=.
        stop: strings that end an answer, like stop_strings= of `generate`.
        streamer, text_streamer: a streamer, under either name.
        options: other arguments of `generate` and `custom_generate`.

    Raises:
        ValueError, TypeError: see `custom_generate`; an assistant with other tokens, or an option of transformers'
            assisted generation.
    """
    options = {name: value for name, value in options.items() if name not in PLACES}
    method = options.pop("custom_generate", None)  # only if the model's own repository has this function
    assisted = [name for name, value in options.items()
                if name.startswith(("assistant_", "num_assistant_")) and name not in REFUSED and value is not None]
    problem = None
    if method is not None:
        problem = f"the model's own generate decodes with eagle_fsd, got custom_generate={method!r}: leave it out"
    elif draft is not None and assistant_model is not None:
        problem = "draft= and assistant_model= both name the drafter: pass one of them"
    elif assistant_tokenizer is not None:
        problem = "the drafter must have the target's tokens, got assistant_tokenizer=: leave it out"
    elif assisted:
        problem = f"{', '.join(assisted)}: an option of transformers' assisted generation; use tree= instead"
    elif synced_gpus:
        problem = NOT_SYNCED
    elif streamer is not None and text_streamer is not None:
        problem = "streamer= and text_streamer= are the same: pass one of them"
    if problem is not None:
        with ending(streamer), ending(text_streamer):  # as where `custom_generate` refuses a call
            raise ValueError(problem)
    if tokenizer is not None:
        options.setdefault("text_tokenizer", tokenizer)
        configs = (options.get("generation_config"), model.generation_config)
        strings = [options.get("stop_strings"), *(getattr(config, "stop_strings", None) for config in configs)]
        if (found := next((found for found in strings if found is not None), None)) is not None:
            stop, options["stop_strings"] = [*as_list(stop), *as_list(found)], None
    # Not `model.generate`, which is this function if the model's own repository has it.
    return type(model).generate(
        model, inputs, custom_generate=custom_generate, stop=stop,
        text_streamer=text_streamer if streamer is None else streamer,
        draft=assistant_model if draft is None else draft, **options)


class CachedPair:
    """A pair as an attribute of its target, for later calls: drafter, graphs and caches live as long as the target. In
    a dictionary with weak keys they would live for ever, since a pair holds its target. Copies of the target, pickled
    ones included, have None as the attribute.

    Args:
        parts: the drafter, the tokenizer, and where and in which dtypes the models are.
    """

    def __init__(self, pair: EagleModel, parts: Sequence[object]) -> None:
        self.pair, self.parts = pair, parts

    def __reduce__(self) -> tuple:
        return type(None), ()


def pair_of(
    model: PreTrainedModel, draft: Drafter | PreTrainedModel | str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> EagleModel:
    """The pair of an earlier call with the same parts, if its drafter was loaded or its cycles are captured; else a new
    one. The pair itself notices replaced modules, hooks and weights, see `EagleModel.refresh` and `captured.cycle`."""
    cached = vars(model).pop(ATTRIBUTE, None)
    models = [part for part in (model, draft) if isinstance(part, PreTrainedModel)]
    parts = [draft, tokenizer, *((part.device, part.dtype) for part in models)]
    if cached is not None and cached.parts == parts:
        cached.pair.refresh()
        cached.pair.fit()
    else:
        cached, named = None, isinstance(draft, (str, Path))  # what was cached is freed before there is another
        pair = EagleModel.from_parts(model, load_drafter(draft, model) if named else draft, tokenizer)
        if pair.captured is None and not named:
            return pair
        cached = CachedPair(pair, parts)
    vars(model)[ATTRIBUTE] = cached
    return cached.pair


def load_drafter(place: str | Path, model: PreTrainedModel) -> DraftHead | PreTrainedModel:
    """Load a head, or a causal LM with the dtype and device of the target."""
    if is_causal_lm(place):
        return load_target(place, dtype=model.dtype, device=model.device)[0]
    return load_head(place)


def left_padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """The number of pad tokens at the beginning of each row of input_ids [B, L].

    Raises:
        ValueError: an attention mask [B, L] with zeros elsewhere.
    """
    if mask is None:  # newer versions of transformers pass None for all ones
        return [0] * len(input_ids)
    counts = (mask == 0).sum(-1)
    expected = torch.arange(mask.shape[-1], device=mask.device) >= counts[..., None]
    if mask.shape != input_ids.shape or not torch.equal(mask == 1, expected):
        raise ValueError("prompts may be padded on the left only: the attention mask must be zeros, then ones; without "
                         "attention_mask=, model.generate treats each pad token in a prompt as padding")
    return counts.tolist()


def check_call(
    input_ids: Tensor, config: GenerationConfig | None, streamer: BaseStreamer | None,
    model_kwargs: Mapping[str, object],
) -> int | None:
    """Check that the call is supported, and return its pad token.

    Raises:
        TypeError, ValueError: the caller is not `generate`, or something in the call is not supported.
    """
    if config is None:
        raise TypeError("custom_generate is called by generate: model.generate(..., custom_generate=custom_generate)")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams must be 1 with custom_generate, got {config.num_beams}")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        values = {name: getattr(config, name, None) for name in OTHER_METHODS}
        wrong = [f"{name}={value}" for name, value in values.items() if value is not None and value is not False]
        raise ValueError(f"custom_generate is a method of its own and cannot be {mode.value} as well: leave "
                         f"{', '.join(wrong) or 'its options'} out of the generation config")
    for name, instead in REFUSED.items():
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"{name}={value!r} belongs to transformers' assisted generation: {instead}")
    unsupported = [name for name, value in model_kwargs.items() if name not in NEUTRAL and not is_neutral(value)]
    if unsupported:
        raise ValueError(f"only input_ids are supported with custom_generate, got {', '.join(unsupported)}")
    outputs = [name for name in EXTRA_OUTPUTS if getattr(config, name, None)]
    if outputs:
        raise ValueError(f"custom_generate returns sequences only, not {', '.join(outputs)}")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer serves one prompt at a time, got a batch of {len(input_ids)}")
    # For a model without a pad token `generate` uses the first end token, and stores it in this attribute only.
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad.item()
    if pad is None and len(input_ids) > 1:
        raise ValueError("a batch, whose answers may differ in length, needs a pad_token_id in the generation config")
    return pad


def check_positions(positions: Tensor | None, padding: Sequence[int], length: int) -> None:
    """Raise ValueError unless `position_ids` [..., 1 or B, L] number the tokens of each row after its padding."""
    if positions is None:
        return
    counted = torch.arange(length) - torch.tensor(padding)[:, None]  # [B, L]
    fits = positions.shape[-1] == length and positions.dim() > 1 and positions.shape[-2] in (1, len(padding))
    if not fits or not ((positions.cpu() == counted) | (counted < 0)).all():
        raise ValueError(f"custom_generate counts positions itself, from 0 in each row, got position_ids {positions}")


def is_neutral(value: object) -> bool:
    """Whether a keyword of this value means the same as no keyword: newer versions of transformers pass such ones."""
    if isinstance(value, Cache):
        return not value.is_initialized or int(value.get_seq_length()) == 0
    return value is None or value is False


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of one row, from those that `model.generate` made for a padded batch."""
    own = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)  # length of each row's padding
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[row]))
        own.append(processor)
    return own


def criteria_of_row(criteria: StoppingCriteriaList, row: int, rows: int) -> StoppingCriteriaList:
    """Criteria for one row, from those that were made for a batch.

    Some criteria keep state per row in a list or tensor. Each row gets a copy of it, and its text is repeated for every
    row of the batch.
    """
    if rows == 1:
        return criteria

    def of_row(criterion: Callable) -> Callable:
        own = copy.copy(criterion)
        for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
            if isinstance(value, (list, dict, set, Tensor)):  # state per row; a tokenizer or a flag stays shared
                setattr(own, name, copy.copy(value) if not isinstance(value, Tensor) else value.clone())

        def met(ids: Tensor, scores: object) -> object:
            ends = own(ids.expand(rows, -1), scores)
            return ends[row] if isinstance(ends, Tensor) and ends.numel() == rows else ends

        return met

    return StoppingCriteriaList([of_row(criterion) for criterion in criteria])


def split_criteria(criteria: StoppingCriteriaList) -> tuple[StoppingCriteriaList, frozenset[int], int | None]:
    """The criteria that have to be called, the end tokens, and the length limit."""
    others, eos_ids, max_length = StoppingCriteriaList(), frozenset(), None
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            max_length = criterion.max_length
        elif isinstance(criterion, EosTokenCriteria):
            eos_ids |= frozenset(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(criterion)
    return others, eos_ids, max_length
