"""Draft trees. B batch, N nodes (root included)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees, nodes ordered so that a parent always precedes its children (by level).

    A node is a child of v iff its parent is v and it is not the root; siblings carry distinct tokens.
    """

    tokens: Tensor  # [B, N] long, node 0 = root (last emitted token, not yet in the target's cache)
    parents: Tensor  # [B, N] long, index of the parent; the root is its own parent
    depths: Tensor  # [B, N] long, root 0
    ancestors: Tensor  # [B, N, N] bool, ancestors[b, i, j]: j is i or an ancestor of i
    draft_rows: Tensor  # [B, N] long, row of the draft logits of its depth that are its own; -1: the head read it not
    scores: Tensor  # [B, N] float, cumulative draft log-probability (root 0)
    max_depth: int  # levels below the root
    from_text: Tensor | None = None  # [B, N] bool, nodes that the head did not propose; None: there are none

    def take(self, rows: slice | Sequence[int]) -> DraftTree:
        """Those of some sequences of the batch."""
        parts = (self.tokens, self.parents, self.depths, self.ancestors, self.draft_rows, self.scores)
        from_text = None if self.from_text is None else self.from_text[rows]
        return DraftTree(*(part[rows] for part in parts), max_depth=self.max_depth, from_text=from_text)


def ancestors_of(
    parents: Tensor,  # [B, N] long, the root its own parent
    max_depth: int,
) -> Tensor:  # [B, N, N] bool
    """Which node is an ancestor of which, itself included: powers of the parent relation by repeated squaring."""
    nodes = parents.shape[1]
    reach = torch.eye(nodes, device=parents.device).expand(len(parents), -1, -1).clone()
    reach.scatter_(2, parents[..., None], 1.0)
    steps = 1
    while steps < max_depth:
        reach = reach @ reach
        steps *= 2
    return reach > 0


def root_only(root: Tensor) -> DraftTree:  # root [B] long
    """Trees without draft tokens: one target forward then decodes one token, plainly."""
    index = torch.zeros_like(root)[:, None]
    visible = torch.ones_like(root, dtype=torch.bool)[:, None, None]
    return DraftTree(root[:, None], index, index, visible, index, index.float(), max_depth=0)
