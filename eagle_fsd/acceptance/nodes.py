"""The input of an acceptance rule, `Nodes`, and its result, `Weights` or `TokenWeights`.

B rows of a batch, C columns of a draft tree (all of its nodes), K nodes expanded at a depth, V vocabulary, R tokens
that the draft can name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.topk import first_largest
from .divergence import get_divergence


class Weights(NamedTuple):
    """A rule's result at the rows' current nodes: log-weights of the children, up to a constant per row.

    The walk compares the children with one other token, the target's own. So no child's logit may be reduced by more
    than the other tokens' are. `TokenWeights` has no such limit.
    """

    children: Tensor | None = None  # [B, C] log-weight of each child; None: the target's own choice
    others: Tensor | float = 0.0  # [B], at most 0, added to the warped logits of all other tokens
    stop: Tensor | None = None  # [B] bool: the token drawn here ends the cycle, even if it is a child
    divergence: Tensor | None = None  # [B], of rules that compare distributions; NaN where nothing was drafted

    def draw(self, nodes: Nodes) -> Tensor:  # [B] long
        """The token with the largest log-weight plus noise, the first if several are equal."""
        exact, tokens, children = nodes.exact, nodes.tokens, nodes.children
        if self.children is None:
            return exact
        weights = self.children.masked_fill(~children, -math.inf)
        own = nodes.warped.gather(1, exact[:, None])[:, 0] + self.others  # of the best other token
        if nodes.noise is not None:
            weights = weights + nodes.noise.gather(1, tokens)
            own = own + nodes.noise.gather(1, exact[:, None])[:, 0]
        best = weights.amax(-1)
        none = nodes.warped.shape[-1]
        first = tokens.masked_fill(~children | (weights != best[:, None]), none).amin(-1)
        return torch.where((best > own) | (best == own) & (first < exact), first, exact)


class TokenWeights(NamedTuple):
    """A rule's result at the rows' current nodes: log-weights of all tokens. See `Weights`."""

    tokens: Tensor  # [B, V]
    stop: Tensor | None = None
    divergence: Tensor | None = None

    def draw(self, nodes: Nodes) -> Tensor:  # [B] long
        return first_largest(self.tokens if nodes.noise is None else self.tokens + nodes.noise)


@dataclass(frozen=True, eq=False)
class Nodes:
    """The current node of each row of a batch, all at one depth, and their children.

    Children are columns of the tree: `tokens[b, c]` is a child of row b's node iff `children[b, c]`.
    """

    raw: Tensor  # [B, V] float32, the target's logits at temperature 1, for gates and divergences
    warped: Tensor  # [B, V] float32, after all processors and, when sampling, temperature, top-k, ...
    noise: Tensor | None  # [B, V] Gumbel noise; None: greedy
    exact: Tensor  # [B] long, the target's own token: argmax(warped + noise)
    tokens: Tensor  # [B, C] long
    children: Tensor  # [B, C] bool
    by_drafter: Tensor  # [B, C] bool: proposed by the drafter, not by the text or a grammar alone
    scores: Tensor  # [B, C], cumulative log-probability of the draft
    level_logits: Tensor | None  # [B, K, R], the draft's raw logits at this depth; None: it expanded no node here
    draft_row: Tensor  # [B] long, the node's row of `level_logits`; -1: the drafter did not expand it
    draft_tokens: Tensor | None  # [R] long, the token ids of `level_logits`; None: 0 to R - 1
    threshold: Tensor  # [B] float64
    left: Tensor | None  # [B] float64, the rest of each row's budget, for users' rules; None: no row has one
    going: Tensor  # [B] bool: rows whose walk goes on; results of other rows are ignored
    errors: dict[int, Exception]  # by row, raised by a user's function

    @property
    def greedy(self) -> bool:
        """For users' rules, as `left`."""
        return self.noise is None

    @property
    def draft_logits(self) -> Tensor | None:
        """[B, R]: the draft's raw logits for the children; meaningless where `draft_row` is -1."""
        if self.level_logits is None:
            return None
        return self.level_logits[torch.arange(len(self.raw), device=self.raw.device), self.draft_row]

    def row(self, row: int) -> Nodes:
        """A single row, as a batch of one."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        mine = {name: part[row : row + 1] for name, part in parts.items()
                if isinstance(part, Tensor) and name != "draft_tokens"}
        return Nodes(**{**parts, **mine})

    @property
    def child_logits(self) -> Tensor:
        """[B, C]: warped logit of each child's token, -inf for other columns."""
        return self.warped.gather(1, self.tokens).masked_fill(~self.children, -math.inf)

    @property
    def is_exact(self) -> Tensor:
        """[B, C] bool: the child with the target's own token."""
        return self.children & (self.tokens == self.exact[:, None])

    def known_empty(self, columns: Tensor) -> bool:
        """Whether these columns [B, C] bool are empty in all rows; False on a GPU, for which a check would wait."""
        return self.raw.is_cpu and not columns.any()

    def inside_guard(
        self,
        head_guard: float | None,  # alpha in [0, 1]; None: no guard
    ) -> Tensor:  # [B, C] bool
        """Children with a target probability >= (1 - alpha) times that of the target's best token, at temperature 1."""
        if head_guard is None:
            return self.children
        slack = math.log1p(-head_guard) if head_guard < 1 else -math.inf
        least = self.raw.amax(-1, keepdim=True) + slack
        return self.children & (self.raw.gather(1, self.tokens) >= least)

    def divergence(self, name: str) -> Tensor:
        """[B]: the divergence of the target's and the draft's next-token distributions; NaN, which passes no gate, at
        nodes without children and at nodes that the draft did not expand."""
        if self.level_logits is None:
            return self.raw.new_full((len(self.raw),), math.nan)
        measure = get_divergence(name, self.draft_tokens)
        found = measure(self.raw, self.draft_logits)
        return torch.where(self.children.any(-1) & (self.draft_row >= 0), found, math.nan)
