"""Draft trees. B batch, N nodes (root included)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ORIGINS = ("head", "text", "grammar")  # of nodes; "head" stands for any `Drafter`


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees; parents precede their children.

    A node is a child of v iff its parent is v and its depth is not 0; siblings have distinct tokens.
    """

    tokens: Tensor  # [B, N] long; node 0, the root, is the last emitted token, which the target's cache lacks
    parents: Tensor  # [B, N] long, index of the parent; the root is its own parent
    depths: Tensor  # [B, N] long, root 0
    ancestors: Tensor  # [B, N, N] bool, ancestors[b, i, j]: j is i or an ancestor of i
    draft_rows: Tensor  # [B, N] long, its row of the draft logits at its depth; -1: the draft did not expand it
    scores: Tensor  # [B, N] float, log of the estimated probability of acceptance (root 0), see `growth.py`
    max_depth: int  # levels below the root
    origins: Tensor | None = None  # [B, N] long, index into `ORIGINS`; None: the drafter drafted all

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The trees of these rows."""
        parts = (self.tokens, self.parents, self.depths, self.ancestors, self.draft_rows, self.scores)
        origins = None if self.origins is None else self.origins[rows]
        return DraftTree(*(part[rows] for part in parts), max_depth=self.max_depth, origins=origins)

    @property
    def by_drafter(self) -> Tensor:
        """[B, N] bool: nodes that the drafter proposed, alone or together with other sources."""
        return torch.ones_like(self.depths, dtype=torch.bool) if self.origins is None else self.origins == 0

    def origin_names(self) -> list[list[str | None]]:
        """The origin of each node, of `ORIGINS`; None for roots. Waits for the device, once for all rows."""
        origins = torch.zeros_like(self.depths) if self.origins is None else self.origins
        return [[None if number < 0 else ORIGINS[number] for number in row]
                for row in origins.masked_fill(self.depths == 0, -1).tolist()]

    def without_drafts(self, rows: Sequence[int]) -> DraftTree:
        """The trees with all nodes of these rows replaced by repetitions of their root."""
        out = torch.zeros(len(self.tokens), 1, dtype=torch.bool, device=self.tokens.device)
        out[list(rows)] = True
        own = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        alone = torch.eye(len(own), dtype=torch.bool, device=own.device)
        return replace(
            self, tokens=torch.where(out, self.tokens[:, :1], self.tokens), parents=torch.where(out, own, self.parents),
            depths=self.depths.masked_fill(out, 0), ancestors=torch.where(out[..., None], alone, self.ancestors),
            draft_rows=self.draft_rows.masked_fill(out, -1), scores=self.scores.masked_fill(out, 0.0))


def ancestors_of(
    parents: Tensor,  # [B, N] long, the root its own parent
    max_depth: int,
) -> Tensor:  # [B, N, N] bool
    """Ancestors of each node, itself included: the transitive closure of `parents`, by repeated squaring."""
    nodes = parents.shape[1]
    reach = torch.eye(nodes, device=parents.device).expand(len(parents), -1, -1).clone()
    reach.scatter_(2, parents[..., None], 1.0)
    length = 1  # of the paths so far
    while length < max_depth:
        reach = reach @ reach
        length *= 2
    return reach > 0


def root_only(root: Tensor) -> DraftTree:  # root [B] long
    """Trees without draft tokens, whose cycle is a step of plain decoding."""
    index = torch.zeros_like(root)[:, None]
    visible = torch.ones_like(root, dtype=torch.bool)[:, None, None]
    return DraftTree(root[:, None], index, index, visible, index, index.float(), max_depth=0)
