"""Draft trees: the type; growing by confidence and reranking (EAGLE-2, arXiv 2406.16858, section 4); and joining with
copies from the text and tokens that a grammar forces.

B batch, T tokens that the drafter has not processed (the most of any row): of the last cycle, of several, or of a part
of a prompt, K children per node and nodes per level, E = 1 + K * (depth - 1) expanded nodes, S = 1 + K + (depth - 1) *
K * K scored nodes, N nodes of a tree (root included), D size of the drafter's states, F width of the target's features,
R vocabulary of the draft. W nodes of the drafter's trees, M copies (at most) of a row, C = W + M candidates.

Scored nodes are numbered level by level, starting with the root, 0; within a level by the rank of the parent, then by
their own rank. A parent's number is therefore smaller than its child's, and its cumulative log-probability is not
lower. Expanded nodes are numbered in the same order; expanded node e has children 1 + e * K to K + e * K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.cache import BucketCache, TreeCache
from ..models.target import TargetModel, prefill_part
from ..utils.topk import largest
from .config import TreeConfig
from .copies import ORIGINS, Copies
from .drafter import Drafter
from .noise import Coupling
from .sizing import Plan, log_rates

IMPOSSIBLE = -1e4  # log-probability of a truncated token; finite, so that sums and the results of `log_rates` are


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
    scores: Tensor  # [B, N] float, log of the estimated probability of acceptance (root 0), see `rerank`
    max_depth: int  # levels below the root
    origins: Tensor | None = None  # [B, N] long, index into `ORIGINS`; None: the drafter drafted all

    def each(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        """The trees with a change of every tensor."""
        return replace(self, **{name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)})

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


# Growing -----------------------------------------------------------------------------------------------------------


class Unread(NamedTuple):
    """The tokens that the drafter has not processed, the root last: at most T of each row."""

    tokens: Tensor  # [B, T] long
    features: Tensor | None  # [B, T, F] of the target, of the positions before the tokens; None: the drafter reads none
    counts: Tensor  # [B] long; further columns are padding
    ends: Sequence[int] | Tensor  # [B], positions of each row in the drafter's cache once it has processed them

    @classmethod
    def of(cls, features: Sequence[Tensor] | None, tokens: Sequence[Tensor], cache: TreeCache) -> Unread:
        """Of rows [T, F] and [T], where T varies."""
        counts, device = [len(row) for row in tokens], tokens[0].device
        ends = [length + count for length, count in zip(cache.lengths, counts, strict=True)]
        return cls(_padded(tokens), None if features is None else _padded(features),
                   torch.tensor(counts, device=device), ends)


def catch_up(
    drafter: Drafter,
    unread: Unread,
    cache: TreeCache | BucketCache,  # of the drafter
) -> tuple[Tensor, Tensor]:  # [B], [B, 1, D]
    """The drafter processes the tokens. Returns the last one of each row, and the drafter's state there."""
    count, device = unread.tokens.shape[1], unread.tokens.device
    starts = torch.as_tensor(unread.ends, device=device) - unread.counts
    positions = starts[:, None] + torch.arange(count, device=device)  # [B, T]
    features = None if unread.features is None else drafter.to_states(unread.features)  # [B, T, D]
    states = drafter.predict(features, unread.tokens, positions, None, cache)
    cache.lengths = unread.ends
    last = unread.counts[:, None] - 1
    return unread.tokens.gather(1, last)[:, 0], states.gather(1, last[..., None].expand(-1, -1, states.shape[-1]))


def catch_up_in_parts(
    drafter: Drafter,
    features: Tensor | None,  # [T, F]
    tokens: Tensor,  # [T]
    cache: TreeCache,  # restricted to a single row
) -> None:
    """The drafter processes a part of a prompt, at most `prefill_part` tokens at a time."""
    parts = tokens.split(prefill_part(tokens.device))
    own = [None] * len(parts) if features is None else features.split(prefill_part(tokens.device))
    for part, feature in zip(parts, own, strict=True):
        catch_up(drafter, Unread.of(None if feature is None else [feature], [part], cache), cache)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


class Scored(NamedTuple):
    """The scored nodes of grown trees, see `rerank`."""

    tokens: Tensor  # [B, S], the root's first
    scores: Tensor  # [B, S], cumulative log-probabilities, 0 for the root
    expanded: Tensor  # [B, E], numbers of the expanded nodes among the scored ones, the root's first
    depth: int  # scored levels below the root


def grow(
    drafter: Drafter, target: TargetModel, unread: Unread, cache: TreeCache | BucketCache, plan: Plan,
    coupling: Coupling | None = None,
) -> tuple[Scored, list[Tensor]]:
    """The drafter processes the accepted tokens, and scores the nodes of one tree per row.

    Args:
        cache: of the drafter; afterwards it contains the accepted tokens only.
        plan: if it has curves, levels end where they do not pay, which waits for the device at each.
        coupling: lets rows that sample draft the target's likely draws; None: the most probable tokens in every row.

    Returns:
        The nodes, and the draft's raw logits at the expanded nodes of each level: [B, 1, R] at the root, then [B, K, R]
        for each expanded depth.
    """
    root, predicted = catch_up(drafter, unread, cache)  # [B], [B, 1, D]
    config, named, batch, device = plan.tree, drafter.draft_tokens, len(root), root.device
    k, depth, limited = config.top_k, config.depth, plan.curves is not None
    lengths = torch.as_tensor(unread.ends, device=device)
    estimate = log_rates(plan.curves, k, device) if limited else None

    # Level 1: the root's K best children are all scored and all expanded.
    logits = drafter.own_logits(predicted, target.logits)  # [B, 1, R]
    draft_logits = [logits]
    child_scores, child_tokens = _best_children(logits, named, config, estimate, coupling, depth=0)
    frontier_scores, frontier_tokens = child_scores[:, 0], child_tokens[:, 0]  # [B, K]
    scores = [torch.zeros_like(frontier_scores[:, :1]), frontier_scores]
    levels = [root[:, None], frontier_tokens]
    if limited and not plan.level_pays(frontier_scores.tolist()):
        depth = 1
    expanded = [torch.arange(1 + (k if depth > 1 else 0), device=device).expand(batch, -1)]  # numbers of scored nodes
    frontier_states = predicted.expand(-1, k, -1)
    itself = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
    ancestors = itself  # [B, K, K * levels], of the frontier among the expanded nodes below the root

    for level in range(2, depth + 1):
        positions = (lengths[:, None] + (level - 2)).expand(-1, k)
        predicted = drafter.predict(frontier_states, frontier_tokens, positions, ancestors, cache)  # [B, K, D]
        logits = drafter.own_logits(predicted, target.logits)
        draft_logits.append(logits)
        child_scores, child_tokens = _best_children(logits, named, config, estimate, coupling, level - 1)
        child_scores = (child_scores + frontier_scores[..., None]).flatten(1)  # [B, K * K], cumulative
        child_tokens = child_tokens.flatten(1)
        scores.append(child_scores)
        levels.append(child_tokens)
        if level < depth:
            frontier_scores, best = child_scores.topk(k)
            if limited and not plan.level_pays(frontier_scores.tolist()):
                break
            expanded.append(best + (1 + k + (level - 2) * k * k))
            parents = best // k  # [B, K], ranks within the level above
            frontier_tokens = child_tokens.gather(1, best)
            frontier_states = predicted.gather(1, parents[..., None].expand_as(predicted))
            ancestors = torch.cat([ancestors.gather(1, parents[..., None].expand_as(ancestors)), itself], -1)
    cache.lengths = unread.ends
    return Scored(*(torch.cat(columns, 1) for columns in (levels, scores, expanded)), len(levels) - 1), draft_logits


def _best_children(
    logits: Tensor, named: Tensor | None, config: TreeConfig, estimate: Callable[[Tensor], Tensor] | None,
    coupling: Coupling | None, depth: int,
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, *, K] of the K best children of each node of a depth. A score is the log-probability of the
    step from the parent, at most 0, or what `estimate` makes of it."""
    logits = logits if coupling is None else coupling.perturb(logits, depth)
    logits = logits if config.draft_temperature == 1 else logits / config.draft_temperature
    tokens = largest(logits, config.top_k)
    scores = logits.log_softmax(-1).gather(-1, tokens).clamp_min(IMPOSSIBLE)
    if estimate is not None:
        scores = estimate(scores)
    return scores, tokens if named is None else named[tokens]


def rerank(scored: Scored, plan: Plan, *, wide: bool = False) -> DraftTree:
    """The N best scored nodes as a tree.

    Args:
        wide: N is `TreeConfig.wide`, for copies that join; else it is the plan's.

    A cumulative log-probability never increases along a path, so the best nodes are connected. If it rounds to the
    parent's, the stable sort keeps the parent first. NaN scores of a broken head sort last; the root stays first.
    """
    tokens, scores, expanded, depth = scored
    k, batch = plan.tree.top_k, len(tokens)
    comparable = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
    comparable[:, 0] = math.inf  # rounding can raise other scores above 0
    sorted_scores, order = comparable.sort(dim=1, descending=True, stable=True)
    count = min(plan.tree.wide if wide else plan.tree.nodes, scores.shape[1])
    if plan.prices is not None and not wide:
        sorted_scores[:, 0] = 0.0
        count = plan.nodes(sorted_scores[:, :count].tolist())
        if count == 1:
            return root_only(tokens[:, 0])
    kept = order[:, :count].sort(1).values  # [B, N], in the order of scored numbers
    parent = ((kept - 1) // k).clamp_min(0)  # its number as an expanded node; the root is its own parent
    parents = torch.searchsorted(kept, expanded.gather(1, parent))
    depths = ((parent - 1) // k + 2).minimum(kept)  # 0 for the root, scored node 0
    rows = (torch.arange(expanded.shape[1], device=tokens.device) - 1).clamp_min(0) % k  # within their levels
    draft_rows = torch.full_like(tokens, -1).scatter_(1, expanded, rows.expand(batch, -1))
    return DraftTree(
        tokens=tokens.gather(1, kept),
        parents=parents,
        depths=depths,
        ancestors=ancestors_of(parents, depth),
        draft_rows=draft_rows.gather(1, kept),
        scores=scores.gather(1, kept),
        max_depth=depth,
    )


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
                               torch.tensor(scores, dtype=torch.float64, device=device), deepest)
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
    for _ in range(tree.max_depth):
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
    for level in range(1, tree.max_depth + 1):
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
