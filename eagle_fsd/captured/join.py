"""`drafting.join` on a device: the drafter's trees and copies as one tree, in operations of fixed shapes.

R rows, W nodes of the drafter's trees, M copies (at most) of a row, N nodes of a joined tree. Joined nodes are numbered
as by `JoinedRow`: 0 to W - 1 the drafter's, then W + m the copy m, unless it is one of the drafter's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafting.copies import Copies
from ..drafting.join import log_prob_between
from ..drafting.tree import DraftTree, ancestors_of

SIZES = (64, 256)  # of M
NO_COPIES = Copies([], [], [], [], [])


def size_of(copies: Sequence[Copies | None]) -> int | None:
    """The smallest M for these copies; None: there are too many."""
    most = max(len(row.tokens) if row else 0 for row in copies)
    return next((size for size in SIZES if size >= most), None)


def packed(copies: Sequence[Copies | None], size: int) -> tuple[list[list[list[int]]], list[list[float]], int]:
    """Token, parent, depth and origin (0: there is no such copy) of each copy, [R, 4, M]; its log-probability after its
    parent, [R, M]; and the largest depth."""
    columns, log_probs, deepest = [], [], 0
    for row in copies:
        row = row or NO_COPIES
        rest, depths = [0] * (size - len(row.tokens)), row.depths
        columns.append([[*column, *rest] for column in (row.tokens, row.parents, depths, row.origins)])
        log_probs.append([log_prob_between(0.0 if parent < 0 else row.scores[parent], score)
                          for parent, score in zip(row.parents, row.scores, strict=True)] + [0.0] * len(rest))
        deepest = max([deepest, *depths])
    return columns, log_probs, deepest


def join(
    tree: DraftTree,  # the drafter's
    copies: Tensor,  # [R, 4, M] long, see `packed`
    copied_log_probs: Tensor,  # [R, M] float64
    count: int,  # N
    levels: int,  # of the drafter's trees, below the root
    deepest: int,  # levels of the joined tree, at least; deeper copies are left out
) -> DraftTree:
    """The N best nodes of both, as `drafting.join.join_drafts`. Repetitions of the root fill up shorter rows."""
    tokens, parents, depths, origins = copies.unbind(1)  # [R, M]
    rows, head, size = len(tokens), tree.tokens.shape[1], tokens.shape[1]
    numbers = torch.arange(head + size, device=tokens.device)

    # The drafter's node that each copy is, or -1: by token, and by a parent that is the same node.
    equal = (tree.tokens[:, None] == tokens[..., None]) & (tree.depths > 0)[:, None] & (origins > 0)[..., None]
    same = torch.full_like(tokens, -1)
    above = parents.clamp_min(0)
    for _ in range(levels):
        places = torch.where(parents < 0, 0, same.gather(1, above))
        hit = equal & (tree.parents[:, None] == places[..., None])  # [R, M, W]
        same = torch.where(hit.any(-1), hit.long().argmax(-1), -1)
    known = same.gather(1, above)
    own_parents = torch.where(parents < 0, 0, torch.where(known < 0, above + head, known))

    # Both as one list of nodes, of which those that are not `real` are left out.
    scores = tree.scores.double()
    change = (scores - scores.gather(1, tree.parents)).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    log_probs = torch.where(scores.isfinite(), change.clamp_max(0.0), -math.inf)
    taken = torch.where(same < 0, head, same)  # one more place for the others
    log_probs = torch.cat([log_probs, log_probs[:, :1]], 1).scatter_reduce(1, taken, copied_log_probs, "amax")[:, :head]
    log_probs = torch.cat([log_probs, copied_log_probs], 1)
    tokens, parents = torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, own_parents], 1)
    depths = torch.cat([tree.depths, depths], 1)
    draft_rows = torch.cat([tree.draft_rows, torch.full_like(same, -1)], 1)
    real = torch.cat([torch.ones_like(tree.tokens, dtype=torch.bool), (origins > 0) & (same < 0)], 1)
    real &= depths <= deepest
    origins = torch.cat([torch.zeros_like(tree.tokens), origins], 1)
    scores = torch.zeros_like(log_probs)
    for level in range(1, deepest + 1):
        scores = torch.where(depths == level, scores.gather(1, parents) + log_probs, scores)

    # The best first; if scores tie, parents before children. Then level by level.
    last = (~real).long().sort(dim=1, stable=True).indices
    comparable = torch.where(numbers > 0, scores, math.inf).masked_fill(~real, -math.inf).gather(1, last)
    order = last.gather(1, comparable.sort(dim=1, descending=True, stable=True).indices)[:, :count]
    key = torch.where(real, depths * len(numbers) + numbers, numbers + (deepest + 1) * len(numbers))
    kept = order.gather(1, key.gather(1, order).sort(1).indices)  # [R, N]
    real = real.gather(1, kept)
    place = torch.arange(count, device=kept.device)
    new = torch.zeros_like(parents).scatter_(1, kept, place.expand(rows, -1))
    parents = torch.where(real, new.gather(1, parents.gather(1, kept)), place)

    def chosen(column: Tensor) -> Tensor:
        return torch.where(real, column.gather(1, kept), 0)

    return DraftTree(
        torch.where(real, tokens.gather(1, kept), tree.tokens[:, :1]), parents, chosen(depths),
        ancestors_of(parents, deepest), chosen(draft_rows), chosen(scores).float(), deepest, chosen(origins))
