"""Growing the draft tree: expansion by confidence, then reranking (EAGLE-2, arXiv 2406.16858, section 4).

B batch, T tokens that the drafter has not processed (the most of any row): of the last cycle, of several, or of a part
of a prompt, K children per node and nodes per level, N nodes verified, E = 1 + K * (depth - 1) expanded nodes,
S = 1 + K + (depth - 1) * K * K scored nodes, D size of the drafter's states, F width of the target's features,
R vocabulary of the draft.

Scored nodes are numbered level by level, starting with the root, 0; within a level by the rank of the parent, then by
their own rank. A parent's number is therefore smaller than its child's, and its cumulative log-probability is not
lower. Expanded nodes are numbered in the same order; expanded node e has children 1 + e * K to K + e * K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.cache import BucketCache, TreeCache
from ..models.target import TargetModel, prefill_part
from ..utils.topk import largest
from .config import TreeConfig
from .curves import log_rates
from .drafter import Drafter
from .noise import Coupling
from .sizing import Plan
from .tree import DraftTree, ancestors_of, root_only

IMPOSSIBLE = -1e4  # log-probability of a truncated token; finite, so that sums and the results of `log_rates` are


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


def draft(
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


def rerank(scored: Scored, plan: Plan, keep_at_least: int = 0) -> DraftTree:
    """The N best scored nodes as a tree.

    Args:
        keep_at_least: not 0: N is this number or `total_tokens`, whichever is larger, for a caller that selects from
            them; 0: N is the plan's.

    A cumulative log-probability never increases along a path, so the best nodes are connected. If it rounds to the
    parent's, the stable sort keeps the parent first. NaN scores of a broken head sort last; the root stays first.
    """
    tokens, scores, expanded, depth = scored
    k, batch = plan.tree.top_k, len(tokens)
    comparable = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
    comparable[:, 0] = math.inf  # rounding can raise other scores above 0
    sorted_scores, order = comparable.sort(dim=1, descending=True, stable=True)
    count = min(max(plan.tree.total_tokens, keep_at_least), scores.shape[1])
    if plan.prices is not None and not keep_at_least:
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
