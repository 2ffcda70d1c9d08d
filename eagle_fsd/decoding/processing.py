"""Logits processing: processors and warpers of `transformers`, applied to the nodes of a tree.

Shapes: B batch, N nodes, K expanded nodes of a level, M rows of a call, L tokens of the context, V vocabulary, R the
draft's.

A processor that may depend on the text, or is the user's, is called row by row. Its exception becomes the error of this
row, in `errors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..acceptance import Rule
from ..drafting.noise import Coupling, gumbel_noise, position_after
from ..drafting.tree import DraftTree
from ..utils.topk import largest
from .request import Request


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
        return cls(tree, raw, draft_logits, draft_tokens, requests[0].options.greedy,
                   *torch.tensor([seeds, lengths], device=raw.device), shared_processors(requests), requests)

    def select(self, rows: Sequence[int]) -> VerifiedTrees:
        """Some of the rows (ascending)."""
        if len(rows) == len(self.requests):
            return self
        requests = [self.requests[row] for row in rows]
        return replace(
            self, tree=self.tree.select(rows), raw=self.raw[rows], draft_logits=[level[rows] for level in
            self.draft_logits], seeds=self.seeds[rows], lengths=self.lengths[rows], requests=requests, errors={},
            greedy=requests[0].options.greedy, processors=shared_processors(requests))

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
    if shared_processors(requests) is not None:
        own = own[:1] * len(own)
    seeds, positions = torch.tensor([[request.seed for request in requests], list(lengths)], device=device)
    temperatures, scales = torch.tensor(
        [[request.options.temperature for request in requests], weights], dtype=torch.float32, device=device)
    return Coupling(seeds, positions, temperatures, scales, [
        warpers if weight else None for warpers, weight in zip(own, weights, strict=True)], tokens)


def shared_processors(requests: Sequence[Request]) -> LogitsProcessorList | None:
    """The processors of all rows, if one call serves them; None: each row has calls of its own."""
    first = requests[0]
    if not any(request.processors for request in requests):
        return first.processors
    same = first.processors_key is not None and all(
        request.processors_key == first.processors_key for request in requests)
    return first.processors if same else None


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
