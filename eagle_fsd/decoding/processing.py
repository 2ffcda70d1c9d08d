"""Logits processing: the processors and warpers of `transformers`, applied to the nodes of a tree.

Shapes: B batch, N nodes, K expanded nodes of a level, M rows of a call, L tokens of the context, V vocabulary, R the
draft's.

A processor that may depend on the text, or is the user's, is called row by row. Its exception becomes the error of this
row, in `errors`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..acceptance import Rule
from ..drafting.largest import largest
from ..drafting.noise import Coupling, gumbel_noise, position_after
from ..drafting.tree import DraftTree
from ..options.generate import FOLLOWED, GenerateOptions
from ..utils.checks import check_functions
from .grammar import Grammar
from .request import Request


class CountPenalty(LogitsProcessor):
    """OpenAI's penalties: one for each occurrence of a token in the answer, one for each token that occurs in it.

    Args:
        start: length of the prompt, where occurrences do not count.
    """

    def __init__(self, frequency: float, presence: float, start: int) -> None:
        self.frequency, self.presence, self.start = frequency, presence, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [M, L], [M, V]
        answer = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class TopP(LogitsProcessor):
    """A faster `TopPLogitsWarper`: it sorts only the best tokens if they are enough (0.3 ms), and not the whole
    vocabulary (13 ms for 151,936 tokens on two cores). It keeps all tokens that are as likely as the last kept one.
    """

    ENOUGH = 128

    def __init__(self, top_p: float) -> None:
        self.top_p = top_p

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:  # [M, V]
        total, size = scores.logsumexp(-1, keepdim=True), scores.shape[-1]
        for count in (min(self.ENOUGH, size), size) if scores.is_cpu else (size,):  # a check would wait for a GPU
            best = scores.gather(-1, largest(scores, count))  # descending
            probs = (best - total).exp()
            mass = probs.cumsum(-1)
            if count == size or (mass[:, -1] >= self.top_p).all():
                break
        last = (mass - probs < self.top_p).sum(-1, keepdim=True).clamp_min(1) - 1
        return scores.masked_fill(scores < best.gather(-1, last), -math.inf)


# Temperature and truncation. They do not depend on token ids, so that they apply to a draft's logits as well.
WARPERS = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopP, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper,
    EpsilonLogitsWarper, EtaLogitsWarper,
)
# Those that captured cycles apply to both.
CAPTURABLE = (TemperatureLogitsWarper, TopKLogitsWarper, TopP, TopPLogitsWarper, MinPLogitsWarper)
# Processors whose result does not depend on earlier tokens: one call serves all rows.
CONTEXT_FREE = (*WARPERS, SuppressTokensLogitsProcessor, InfNanRemoveLogitsProcessor, LogitNormalization)
# Processors with a state, which expect one call per token in the order of the text.
STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def check_processors(processors: Sequence[LogitsProcessor] | None) -> LogitsProcessorList:
    """The processors as a list. Raise for one that is not a function of its arguments."""
    checked = LogitsProcessorList(
        TopP(processor.top_p) if type(processor) is TopPLogitsWarper and processor.min_tokens_to_keep == 1
        and processor.filter_value == -math.inf else processor for processor in processors or [])
    for processor in checked:
        if isinstance(processor, STATEFUL):
            raise ValueError(
                f"{type(processor).__name__} is not supported: it keeps a state between calls, and decoding may go "
                "back to an earlier text; a processor must be a function of input_ids and scores"
            )
    return checked


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
    processors = check_processors(processors)
    at = next((at for at, processor in enumerate(processors) if isinstance(processor, WARPERS)), len(processors))
    return LogitsProcessorList([*processors[:at], *own, *processors[at:]])


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of one row, from those that `model.generate` made for a padded batch."""
    own = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)  # length of each row's padding
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[row]))
        own.append(processor)
    return own


def is_context_free(processors: LogitsProcessorList) -> bool:
    """Whether the result depends on the scores only, so that one call serves all nodes."""
    return all(type(processor) in CONTEXT_FREE for processor in processors)


@dataclass
class VerifiedTrees:
    """The draft trees of rows that share a rule, with the logits of draft and target: `acceptance.walk.Verified`.

    Args:
        raw: [B, N, V] float32, the target's logits. draft_logits: for each drafted level [B, K, R], raw logits.
        draft_tokens: [R] long; None: the draft has all tokens.
        seeds, lengths: [B] long, of each row; the position of its root.
        processors: of all rows; None: each of the `requests` has its own.
    """

    tree: DraftTree
    raw: Tensor
    draft_logits: Sequence[Tensor]
    draft_tokens: Tensor | None
    greedy: bool
    seeds: Tensor
    lengths: Tensor
    processors: LogitsProcessorList | None
    requests: Sequence[Request] = ()
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(
        cls, requests: Sequence[Request], lengths: Sequence[int], tree: DraftTree, raw: Tensor,
        draft_logits: Sequence[Tensor] = (), draft_tokens: Tensor | None = None,
    ) -> VerifiedTrees:
        """Those of requests."""
        seeds = [request.seed for request in requests]
        processors = requests[0].processors if share_processors(requests) else None
        return cls(tree, raw, draft_logits, draft_tokens, requests[0].options.greedy,
                   *torch.tensor([seeds, lengths], device=raw.device), processors, requests)

    def take(self, rows: Sequence[int]) -> VerifiedTrees:
        """Some of the rows (ascending)."""
        if len(rows) == len(self.requests):
            return self
        requests = [self.requests[row] for row in rows]
        return replace(
            self, tree=self.tree.select(rows), raw=self.raw[rows], draft_logits=[level[rows] for level in
            self.draft_logits], seeds=self.seeds[rows], lengths=self.lengths[rows], requests=requests, errors={},
            greedy=requests[0].options.greedy,
            processors=requests[0].processors if share_processors(requests) else None)

    def noise(self, depth: int) -> Tensor | None:
        """Noise [B, V] for the tokens after nodes of this depth, by seed and absolute position; None: greedy."""
        if self.greedy:
            return None
        return gumbel_noise(self.seeds, position_after(self.lengths[:, None], depth), self.raw.shape[-1])[:, 0]

    def warp(self, raw: Tensor, node: Tensor, path: Sequence[Tensor], going: Tensor) -> Tensor:
        """Processed logits [B, V], with the path of each row as context."""
        if self.processors is not None:
            return self.processors(None, raw.clone()) if self.processors else raw
        warped, paths = raw.clone(), torch.stack(list(path), 1)  # [B, depth + 1]
        for row in going.nonzero()[:, 0].tolist():
            request = self.requests[row]
            if row in self.errors or not request.processors:
                continue
            try:
                if request.complete_with(paths[row, 1:].tolist()):
                    continue
                before = torch.tensor([request.context], dtype=torch.long, device=raw.device)
                context = torch.cat([before, paths[row, None]], 1)
                warped[row] = _processed(request.processors, context, raw[row, None].clone())[0]
            except Exception as error:
                self.errors[row] = error
        return warped


def couple(
    requests: Sequence[Request],
    rules: Sequence[Rule],  # of this cycle
    lengths: Sequence[int],  # positions of the roots
    tokens: int | Tensor,  # [R], the draft's vocabulary, or its size if it has all tokens
    device: torch.device,
) -> Coupling | None:
    """Couples drafts to the target's draws; None: no row is coupled."""
    weights = [request.noise_weight(rule) for request, rule in zip(requests, rules, strict=True)]
    if not any(weights):
        return None
    own = [LogitsProcessorList(processor for processor in request.processors if type(processor) in WARPERS)
           for request in requests]
    if share_processors(requests):
        own = own[:1] * len(own)
    seeds, positions = torch.tensor([[request.seed for request in requests], list(lengths)], device=device)
    temperatures, scales = torch.tensor(
        [[request.options.temperature for request in requests], weights], dtype=torch.float32, device=device)
    return Coupling(seeds, positions, temperatures, scales, [
        warpers if weight else None for warpers, weight in zip(own, weights, strict=True)], tokens)


def share_processors(requests: Sequence[Request]) -> bool:
    """Whether one call serves all rows."""
    if not any(request.processors for request in requests):
        return True
    key = requests[0].processors_key
    return key is not None and all(request.processors_key == key for request in requests)


def _processed(processors: LogitsProcessorList, context: Tensor, scores: Tensor) -> Tensor:
    """Processed scores [1, V] of one text [1, L]: some processors index by row, or have tensors for a single row.

    Raises:
        ValueError: a processor returned something other than scores.
    """
    for processor in processors:
        processed = processor(context, scores)
        if not isinstance(processed, Tensor) or processed.shape != scores.shape:
            got = list(processed.shape) if isinstance(processed, Tensor) else repr(processed)
            raise ValueError(f"logits processors must return scores {list(scores.shape)}, got {got}")
        scores = processed.float()
    return scores
