"""Logits processing: the processors and warpers of `transformers`, applied to the nodes of a tree.

B batch, N nodes, L length of the emitted context (prompt and tokens before the root), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .tree import DraftTree

# Processors whose result does not depend on the tokens before: one call serves all nodes.
CONTEXT_FREE = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper,
    EpsilonLogitsWarper, EtaLogitsWarper, SuppressTokensLogitsProcessor, InfNanRemoveLogitsProcessor,
    LogitNormalization,
)


LEAST_TEMPERATURE = 1e-6  # below, quotients leave the range of float32


def check_functions(name: str, given: object) -> None:
    """Raise unless `given` is None or a list of functions."""
    if given is None:
        return
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list, got {given!r}")
    for each in given:
        if isinstance(each, type) or not callable(each):
            raise TypeError(f"{name} must hold functions or objects that can be called, got {each!r}")


def require_integer(name: str, value: object, least: int) -> None:
    """Raise for an option that is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def build_processors(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    min_new_tokens: int,
    prompt_length: int,
    eos_ids: Sequence[int],
    custom: Sequence[LogitsProcessor] | None,
    device: torch.device,
) -> LogitsProcessorList:
    """The processors of these options in the order of `model.generate`; temperature 0 means greedy, no warpers.

    Raises:
        TypeError, ValueError: an option of the wrong type or range.
    """
    check_functions("logits_processor", custom)
    for name, value, accepted, valid in (
        ("temperature", temperature, f"0 (greedy) or a number >= {LEAST_TEMPERATURE:g}",
         lambda x: x == 0 or LEAST_TEMPERATURE <= x < math.inf),
        ("top_p", top_p, "a number in (0, 1]", lambda x: 0 < x <= 1),
        ("repetition_penalty", repetition_penalty, "a positive number", lambda x: 0 < x < math.inf),
    ):
        if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
            raise ValueError(f"{name} must be {accepted}, got {value!r}")
    require_integer("top_k", top_k, 0)
    require_integer("min_new_tokens", min_new_tokens, 0)
    processors = LogitsProcessorList()
    if repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if min_new_tokens and eos_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, min_new_tokens, list(eos_ids), device=device)
        )
    processors.extend(custom or [])
    if temperature > 0:
        if temperature != 1:
            processors.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(TopPLogitsWarper(float(top_p)))
    return processors


def warp_tree(
    processors: LogitsProcessorList,
    context: Sequence[int],  # the L emitted tokens before the root
    tree: DraftTree,
    logits: Tensor,  # [B, N, V] float32
) -> Tensor:  # [B, N, V]
    """Processed logits of every node, each with its own path as context.

    Raises:
        ValueError: a processor that returns something other than scores for each node.
    """
    if not processors:
        return logits
    if all(type(processor) in CONTEXT_FREE for processor in processors):
        return processors(None, logits.flatten(0, 1).clone()).view_as(logits)
    assert len(logits) == 1, "contexts of different lengths need one call per row"
    warped = torch.empty_like(logits)
    before = torch.tensor(context, dtype=torch.long, device=logits.device)
    for depth in range(tree.max_depth + 1):  # nodes of one level have contexts of one length
        nodes = (tree.depths[0] == depth).nonzero()[:, 0]
        if not len(nodes):
            break
        path_nodes = tree.ancestors[0, nodes].nonzero()[:, 1].view(len(nodes), depth + 1)
        contexts = torch.cat([before.expand(len(nodes), -1), tree.tokens[0][path_nodes]], 1)
        processed = processors(contexts, logits[0, nodes])  # a copy: indexed by a tensor
        if not isinstance(processed, Tensor) or processed.shape != (len(nodes), logits.shape[-1]):
            got = list(processed.shape) if isinstance(processed, Tensor) else repr(processed)
            raise ValueError(f"logits processors must return scores {[len(nodes), logits.shape[-1]]}, got {got}")
        warped[0, nodes] = processed.float()
    return warped
