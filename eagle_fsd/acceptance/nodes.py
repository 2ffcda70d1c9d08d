"""What an acceptance rule sees, and what it answers.

B rows of a batch, C columns of a draft tree (all of its nodes), K nodes expanded at a depth, V vocabulary, R tokens
that the draft can name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from .divergence import get_divergence


class Weights(NamedTuple):
    """A rule's answer at the nodes that the walks stand on; log-weights count up to a constant per row.

    By `children` and `others` a child is drawn or the token that the target itself draws, so no child may lose more
    than the other tokens do; `tokens` may say anything.
    """

    children: Tensor | None = None  # [B, C] log-weight of each child; None, and no `tokens`: the target's own choice
    others: Tensor | float = 0.0  # [B], at most 0, added to the warped logits of all other tokens
    stop: Tensor | None = None  # [B] bool: the cycle ends with what is drawn here, even if it is a child
    divergence: Tensor | None = None  # [B], for rules that gate on one; NaN where nothing was drafted
    tokens: Tensor | None = None  # [B, V] log-weights of all tokens, instead of `children` and `others`


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes that the walks of a batch stand on, one for each row, all of one depth, and their children.

    Children are columns of the tree: `tokens[b, c]` is a child of row b's node iff `children[b, c]`.
    """

    raw: Tensor  # [B, V] float32, the target's logits: gates and divergences use these, at temperature 1
    warped: Tensor  # [B, V] float32, after all processors; sampling: also temperature, top-k...
    noise: Tensor | None  # [B, V] Gumbel noise; None: greedy
    exact: Tensor  # [B] long, the token that the target itself draws: argmax(warped + noise)
    tokens: Tensor  # [B, C] long
    children: Tensor  # [B, C] bool
    by_head: Tensor  # [B, C] bool: proposed by the draft head, not by the text or a grammar alone
    scores: Tensor  # [B, C], cumulative log-probability of the draft
    drafted: Tensor | None  # [B, K, R], the draft's raw logits at this depth; None: nothing was drafted so deep
    draft_row: Tensor  # [B] long, the row of `drafted` that is the node's; -1: the draft said nothing there
    draft_tokens: Tensor | None  # [R] long, the tokens that `drafted` is of; None: all, R = V
    threshold: Tensor  # [B] float64
    left: Tensor | None  # [B] float64, of the budget; None: no row has one
    going: Tensor  # [B] bool: rows whose walk has not ended; what is answered of others is not read
    errors: dict[int, Exception]  # of rows: what a user's function raised there

    @property
    def greedy(self) -> bool:
        return self.noise is None

    @property
    def draft(self) -> Tensor | None:
        """[B, R]: the draft's raw logits for the children; another node's where `draft_row` is -1, not to be read."""
        if self.drafted is None:
            return None
        return self.drafted[torch.arange(len(self.raw), device=self.raw.device), self.draft_row]

    def row(self, row: int) -> Nodes:
        """One row, as a batch of one."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        mine = {name: part[row : row + 1] for name, part in parts.items()
                if isinstance(part, Tensor) and name != "draft_tokens"}
        return Nodes(**{**parts, **mine})

    @property
    def steps(self) -> Tensor:
        """[B, C]: warped logit of each child's token, -inf for other columns."""
        return self.warped.gather(1, self.tokens).masked_fill(~self.children, -math.inf)

    @property
    def is_exact(self) -> Tensor:
        """[B, C] bool: the child that the target itself draws."""
        return self.children & (self.tokens == self.exact[:, None])

    def nowhere(self, columns: Tensor) -> bool:
        """Whether no row has any of these columns [B, C], as far as that can be known without waiting for a device."""
        return self.raw.is_cpu and not columns.any()

    def in_head(
        self,
        head_guard: float | None,  # alpha in [0, 1]; None: no guard
    ) -> Tensor:  # [B, C] bool
        """Children with target probability >= (1 - alpha) * the target's best, at temperature 1."""
        if head_guard is None:
            return self.children
        slack = math.log1p(-head_guard) if head_guard < 1 else -math.inf
        least = self.raw.amax(-1, keepdim=True) + slack
        return self.children & (self.raw.gather(1, self.tokens) >= least)

    def divergence(self, name: str) -> Tensor:
        """[B]: between the target's and the draft's distribution of the next token; NaN, which no gate lets pass,
        without children, and where all children are copies from the text and the draft said nothing."""
        if self.drafted is None:
            return self.raw.new_full((len(self.raw),), math.nan)
        measure = get_divergence(name, self.draft_tokens)
        return torch.where(self.children.any(-1) & (self.draft_row >= 0), measure(self.raw, self.draft), math.nan)
