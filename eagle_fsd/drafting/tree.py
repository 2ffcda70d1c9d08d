"""Draft trees: the type, and the merging of the drafter's nodes, copies from the text and tokens that a grammar forces.

B batch, N nodes (root included), W nodes of the drafter's trees, M copies (at most) of a row, C = W + M candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .copies import ORIGINS, Copies
from .sizing import Plan


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

    def cut(self, levels: Sequence[int]) -> DraftTree:
        """The trees with at most this many levels below the root in each row: all nodes below are replaced by
        repetitions of their root."""
        if min(levels) >= self.max_depth:
            return self
        deepest = torch.tensor(levels, device=self.tokens.device)[:, None]
        out = self.depths > deepest
        own = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        alone = torch.eye(len(own), dtype=torch.bool, device=own.device)
        return replace(
            self, tokens=torch.where(out, self.tokens[:, :1], self.tokens), parents=torch.where(out, own, self.parents),
            depths=self.depths.masked_fill(out, 0), ancestors=torch.where(out[..., None], alone, self.ancestors),
            draft_rows=self.draft_rows.masked_fill(self.depths >= deepest, -1),
            scores=self.scores.masked_fill(out, 0.0))


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


# Joining -----------------------------------------------------------------------------------------------------------


def join_copies(
    tree: DraftTree,  # the drafter's, larger than what will be verified; or roots alone
    copies: Sequence[Copies | None],
    plan: Plan,  # chooses the number of nodes, which waits for the device
) -> DraftTree:
    """Best nodes of all sources, the same number in each row. Repetitions of the root fill up shorter rows."""
    columns, scores, deepest = columns_of(copies, max(len(row.tokens) if row else 0 for row in copies))
    device, deepest = tree.tokens.device, max(deepest, tree.max_depth)
    candidates = candidates_of(tree, torch.tensor(columns, device=device),
                               torch.tensor(scores, dtype=torch.float64, device=device), tree.max_depth, deepest)
    scores = candidates.scores.gather(1, candidates.order).tolist()
    count = plan.nodes([row[:real] for row, real in zip(scores, candidates.real.sum(1).tolist(), strict=True)])
    return candidates.best(count, deepest)


def columns_of(copies: Sequence[Copies | None], size: int) -> tuple[list[list[list[int]]], list[list[float]], int]:
    """Token, parent, depth and origin (0: there is no such copy) of each copy, [B, 4, M]; its score [B, M]; and the
    largest depth."""
    columns, scores, deepest = [], [], 0
    for row in copies:
        row = row or Copies([], [], [], [], [])
        rest, depths = [0] * (size - len(row.tokens)), row.depths
        columns.append([[*column, *rest] for column in (row.tokens, row.parents, depths, row.origins)])
        scores.append([*row.scores, *map(float, rest)])
        deepest = max([deepest, *depths])
    return columns, scores, deepest


class Candidates(NamedTuple):
    """Nodes of both sources: 0 to W - 1 are the drafter's, W + m is the copy m."""

    columns: Tensor  # [5, B, C] long: token, parent, depth, draft row, origin
    scores: Tensor  # [B, C] float64
    real: Tensor  # [B, C] bool; others are none, or copies of a node of the drafter's
    order: Tensor  # [B, C] long: the best first; if scores tie, parents before children; last, what is not real

    def best(self, count: int, deepest: int) -> DraftTree:
        """The N = `count` best, level by level. Repetitions of the root, each its own parent, fill up shorter rows."""
        real, order = self.real, self.order[:, :count]
        numbers, place = (torch.arange(size, device=order.device) for size in (real.shape[1], order.shape[1]))
        key = torch.where(real, self.columns[2], deepest + 1) * len(numbers) + numbers
        kept = order.gather(1, key.gather(1, order).sort(1).indices)  # [B, N]
        real = real.gather(1, kept)
        new = torch.zeros_like(self.order).scatter_(1, kept, place.expand(len(kept), -1))
        tokens, parents, *others = self.columns.gather(2, kept.expand(5, -1, -1)).unbind()
        parents = torch.where(real, new.gather(1, parents), place)
        depths, draft_rows, origins = (column.where(real, 0) for column in others)
        return DraftTree(tokens.where(real, self.columns[0, :, :1]), parents, depths, ancestors_of(parents, deepest),
                         draft_rows, self.scores.gather(1, kept).where(real, 0.0).float(), deepest, origins)


def candidates_of(
    tree: DraftTree,  # the drafter's
    copies: Tensor,  # [B, 4, M] long, see `columns_of`
    copied_scores: Tensor,  # [B, M] float64
    levels: int,  # of the drafter's trees, below the root
    deepest: int,  # level: deeper copies are left out
) -> Candidates:
    """The nodes of the drafter and of copies. A token that both propose at the same place is one node with the better
    score; its descendants in the drafter's tree add their own log-probabilities to that score. Does not wait for the
    device."""
    tokens, parents, depths, origins = copies.unbind(1)  # [B, M]
    head, size, exists = tree.tokens.shape[1], tokens.shape[1], origins > 0
    above = parents.clamp_min(0)

    # The drafter's node that each copy is, or -1: by token, and by a parent that is the same node.
    equal = (tree.tokens[:, None] == tokens[..., None]) & (tree.depths > 0)[:, None] & exists[..., None]  # [B, M, W]
    same = torch.full_like(tokens, -1)
    for _ in range(levels):
        places = torch.where(parents < 0, 0, same.gather(1, above))
        hit = equal & (tree.parents[:, None] == places[..., None])
        same = torch.where(hit.any(-1), hit.long().argmax(-1), -1)
    shared = same >= 0

    # The drafter's scores, as what a node adds to its parent's; copies may raise it.
    start = torch.where(parents < 0, 0.0, copied_scores.gather(1, above))
    scores = tree.scores.double()
    steps = _between(scores.gather(1, tree.parents), scores)
    steps = torch.cat([steps, steps[:, :1]], 1).scatter_reduce(  # one more place, for copies that are not shared
        1, torch.where(shared, same, head), _between(start, copied_scores), "amax")[:, :head]
    scores = torch.zeros_like(scores)
    for level in range(1, levels + 1):
        scores = torch.where(tree.depths == level, scores.gather(1, tree.parents) + steps, scores)

    # The others' scores: what the copy adds to that of the last shared one above it.
    last = torch.where(shared | (parents < 0), torch.arange(size, device=tokens.device), parents)
    for _ in range(max(1, deepest - 1).bit_length()):
        last = last.gather(1, last)
    known, root = same.gather(1, last), ~shared.gather(1, last)
    base = torch.where(root, 0.0, copied_scores.gather(1, last))
    own = torch.where(root, 0.0, scores.gather(1, known.clamp_min(0))) + _between(base, copied_scores)

    numbers, beside = torch.arange(head + size, device=tokens.device), same.gather(1, above)
    parents = torch.where(parents < 0, 0, torch.where(beside < 0, above + head, beside))
    columns = torch.stack([
        torch.cat(both, 1) for both in ((tree.tokens, tokens), (tree.parents, parents), (tree.depths, depths),
                                        (tree.draft_rows, torch.full_like(same, -1)),
                                        (torch.zeros_like(tree.tokens), origins))])
    real = torch.cat([(tree.depths > 0) | (numbers[:head] == 0), exists & ~shared & (depths <= deepest)], 1)
    scores = torch.cat([scores, own], 1)
    comparable = torch.where(numbers > 0, scores, math.inf).masked_fill(~real, -math.inf)
    order = (~real).long().sort(dim=1, stable=True).indices  # what is not real comes last, after a score of -inf too
    order = order.gather(1, comparable.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    return Candidates(columns, scores, real, order)


def _between(above: Tensor, score: Tensor) -> Tensor:
    """The log-probability that nodes add to their parents'; -inf for a broken head's NaN."""
    change = (score - above).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return change.clamp_max(0.0).masked_fill(~score.isfinite(), -math.inf)
