"""Logits processors: our own beside those of `transformers`, which of them can do what, and their calls.

Shapes: M rows of a call, L tokens of the context, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..utils.topk import largest


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
# Processors whose result does not depend on earlier tokens.
CONTEXT_FREE = (*WARPERS, SuppressTokensLogitsProcessor, InfNanRemoveLogitsProcessor, LogitNormalization)
# Processors with a state, which expect one call per token in the order of the text.
STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def own_forms(processors: Sequence[LogitsProcessor] | None) -> LogitsProcessorList:
    """The processors, with `TopP` for `TopPLogitsWarper`.

    Raises:
        ValueError: one is not a function of its arguments.
    """
    own = LogitsProcessorList(
        TopP(processor.top_p) if type(processor) is TopPLogitsWarper and processor.min_tokens_to_keep == 1
        and processor.filter_value == -math.inf else processor for processor in processors or [])
    for processor in own:
        if isinstance(processor, STATEFUL):
            raise ValueError(
                f"{type(processor).__name__} is not supported: it keeps a state between calls, and decoding may go "
                "back to an earlier text; a processor must be a function of input_ids and scores"
            )
    return own


def key_of(processors: LogitsProcessorList) -> tuple | None:
    """Their kinds and numbers: one call serves all rows with an equal key. None: results may depend on earlier tokens,
    and each row has calls of its own."""
    if not all(type(processor) in CONTEXT_FREE for processor in processors):
        return None
    return tuple((type(processor), *((name, value.tolist() if isinstance(value, Tensor) else value)
                                     for name, value in vars(processor).items())) for processor in processors)


def processed(processors: LogitsProcessorList, context: Tensor, scores: Tensor) -> Tensor:
    """Processed scores [1, V] of one text [1, L]: some processors index by row, or have tensors for a single row.

    Raises:
        ValueError: a processor returned something other than scores.
    """
    for processor in processors:
        result = processor(context, scores)
        if not isinstance(result, Tensor) or result.shape != scores.shape:
            got = list(result.shape) if isinstance(result, Tensor) else repr(result)
            raise ValueError(f"logits processors must return scores {list(scores.shape)}, got {got}")
        scores = result.float()
    return scores
