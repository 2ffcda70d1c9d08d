"""`VerifiedTrees`, which a walk goes down, and `couple`, the coupling of drafts to the draws of the walk.

Shapes: B batch, N nodes, K expanded nodes of a level, L tokens of the context, V vocabulary, R the draft's.

A processor that may depend on the text, or is the user's, is called row by row. Its exception becomes the error of this
row, in `errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import Rule
from ..drafting.noise import Coupling, gumbel_noise, position_after
from ..drafting.tree import DraftTree
from .processing import WARPERS, processed
from .request import Request


@dataclass
class VerifiedTrees:
    """The draft trees of rows that share a rule, with the logits of draft and target: `acceptance.walk.Verified`.

    Args:
        raw: [B, N, V] float32, the target's logits. draft_logits: for each drafted level [B, K, R], raw logits.
        draft_tokens: [R] long; None: 0 to R - 1.
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
                warped[row] = processed(request.processors, context, raw[row, None].clone())[0]
            except Exception as error:
                self.errors[row] = error
        return warped


def shared_processors(requests: Sequence[Request]) -> LogitsProcessorList | None:
    """The processors of all rows, if one call serves them; None: each row has calls of its own."""
    key, *others = [request.processors_key for request in requests]
    return None if key is None or any(other != key for other in others) else requests[0].processors


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
