"""Growing the draft tree: expansion by confidence, then reranking (EAGLE-2, arXiv 2406.16858, section 4).

B batch, T tokens accepted in the last cycle (of each row), K children per node and nodes per level, N nodes verified,
E = 1 + K * (depth - 1) expanded nodes, S = 1 + K + (depth - 1) * K * K scored nodes, D size of the drafter's states,
F width of the target's features, R vocabulary of the draft.

Scored nodes are numbered level by level, starting with the root, 0; within a level by the rank of the parent, then by
their own rank. A parent's number is therefore smaller than its child's, and its cumulative log-probability is not
lower. Expanded nodes are numbered in the same order; expanded node e has children 1 + e * K to K + e * K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.cache import BucketCache, TreeCache
from ..models.causal_lm import prefill_part
from ..models.target import TargetModel
from .config import TreeConfig
from .coupling import Coupling
from .curves import apply_curves, curve_segments
from .drafter import Drafter
from .largest import largest
from .sizing import Plan
from .tree import DraftTree, ancestors_of, root_only

IMPOSSIBLE = -1e4  # log-probability of a truncated token; finite, so that sums and the results of `apply_curves` are


def extend_draft(
    drafter: Drafter,
    features: Sequence[Tensor] | None,  # B x [T, F], the target's, T varies; None: the drafter reads none
    tokens: Sequence[Tensor],  # B x [T], each follows its feature
    cache: TreeCache,
) -> Tensor:  # [B, 1, D]
    """Feed the accepted tokens and their features to the drafter; returns its state at each row's last token."""
    most = prefill_part(tokens[0].device)
    while max(map(len, tokens)) > most:  # read a prompt in parts
        parts = [min(most, len(row) - 1) for row in tokens]
        (first_features, features), (first, tokens) = _split(features, parts), _split(tokens, parts)
        extend_draft(drafter, first_features, first, cache)
    counts = [len(row) for row in tokens]
    lengths, device = cache.lengths, tokens[0].device
    fed, states = _padded(tokens), None if features is None else drafter.read(_padded(features))  # [B, T], [B, T, D]
    count = fed.shape[1]
    positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(count, device=device)
    predicted = drafter.predict(states, fed, positions, None, cache)
    cache.commit(lengths, [range(own) for own in counts])
    if min(counts) == count:
        return predicted[:, -1:]
    last = (torch.tensor(counts, device=device) - 1).clamp_min(0)  # a short row's last part of a prompt may be empty
    return predicted.gather(1, last[:, None, None].expand(-1, -1, predicted.shape[-1]))


def _split(rows: Sequence[Tensor] | None, parts: Sequence[int]) -> tuple[Sequence[Tensor] | None, ...]:
    """The first part of each row, and the rest."""
    if rows is None:
        return None, None
    return tuple(zip(*(row.tensor_split([part]) for row, part in zip(rows, parts, strict=True)), strict=True))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def draft_tree(
    drafter: Drafter,
    target: TargetModel,
    features: Sequence[Tensor] | None,  # B x [T, F] of the target, of the positions before `tokens`; see `extend_draft`
    tokens: Sequence[Tensor],  # B x [T], the last one being the root
    cache: TreeCache,
    config: TreeConfig,
    nodes: int = 0,
    coupling: Coupling | None = None,
    plan: Plan | None = None,
) -> tuple[DraftTree, list[Tensor]]:
    """Draft one tree per row.

    Args:
        nodes: minimum number of nodes, if so many were scored, for a caller that selects from them; above 0 the plan
            does not limit nodes.
        coupling: lets rows that sample draft the target's likely draws; None: the most probable tokens in every row.
        plan: limits levels and nodes to those that pay, possibly to the root alone, and waits for the device at each
            level; None: there are as many as `config` allows.

    Returns:
        The trees, and the draft's raw logits at the expanded nodes of each level: [B, 1, R] at the root, then [B, K, R]
        for each expanded depth. The drafter's cache then contains the accepted tokens only.
    """
    predicted = extend_draft(drafter, features, tokens, cache)  # [B, 1, D]
    root, lengths = torch.stack([row[-1] for row in tokens]), cache.lengths
    scored, depth, draft_logits = grow(
        drafter, target, predicted, root, torch.tensor(lengths, device=root.device), cache, config, coupling, plan)
    cache.lengths = lengths
    return rerank(*scored, depth, config, nodes, plan), draft_logits


def grow(
    drafter: Drafter,
    target: TargetModel,
    predicted: Tensor,  # [B, 1, D], state at the root
    root: Tensor,  # [B] long
    lengths: Tensor,  # [B] long, positions in the drafter's cache, the root's included
    cache: TreeCache | BucketCache,  # each expanded level is appended
    config: TreeConfig,
    coupling: Coupling | None,
    plan: Plan | None = None,  # see `draft_tree`
) -> tuple[tuple[Tensor, Tensor, Tensor], int, list[Tensor]]:
    """Score all levels. Does not wait for the device, unless the plan limits levels.

    Returns:
        Tokens [B, S], scores [B, S] and expanded nodes [B, E], see `rerank`; the number of levels; and the draft's
        logits, see `draft_tree`.
    """
    k, depth, named = config.top_k, config.depth, drafter.draft_tokens  # [R]
    batch, device = len(root), root.device
    curves = None if plan is None else plan.curves
    limited = curves is not None
    estimate = partial(apply_curves, curve_segments(curves, k, device)) if limited else None

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
    scored = tuple(torch.cat(columns, 1) for columns in (levels, scores, expanded))
    return scored, len(levels) - 1, draft_logits


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


def rerank(
    tokens: Tensor,  # [B, S] of the scored nodes, the root's first
    scores: Tensor,  # [B, S], cumulative log-probabilities, 0 for the root
    expanded: Tensor,  # [B, E], numbers of the expanded nodes among the scored ones, the root's first
    depth: int,  # scored levels below the root
    config: TreeConfig,
    nodes: int = 0,
    plan: Plan | None = None,
) -> DraftTree:
    """The N best scored nodes as a tree. N is `config.total_tokens`, or `nodes` if that is larger, or the plan's.

    A cumulative log-probability never increases along a path, so the best nodes are connected. If it rounds to the
    parent's, the stable sort keeps the parent first. NaN scores of a broken head sort last; the root stays first.
    """
    k, batch = config.top_k, len(tokens)
    comparable = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
    comparable[:, 0] = math.inf  # rounding can raise other scores above 0
    sorted_scores, order = comparable.sort(dim=1, descending=True, stable=True)
    count = min(max(config.total_tokens, nodes), scores.shape[1])
    if plan is not None and plan.decided_by_scores and not nodes:
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
