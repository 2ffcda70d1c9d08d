"""Growing the draft tree: expansion by confidence, then reranking (EAGLE-2, arXiv 2406.16858, section 4).

B batch, T tokens accepted in the last cycle (of each row), K children per node and nodes per level, N nodes verified,
E = 1 + K * (depth - 1) expanded nodes, S = 1 + K + (depth - 1) * K * K scored nodes, D size of the drafter's states,
F width of the target's features, R vocabulary of the draft.

Scored nodes are numbered level by level from the root, 0, on; within a level by the rank of the parent, then by their
own rank. A parent's number is thus smaller than its child's, and its cumulative log-probability is not lower. Expanded
nodes are numbered in the same order; expanded node e has children 1 + e * K to K + e * K.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models.cache import TreeCache
from ..models.masks import visible_keys
from ..models.target import TargetModel, prefill_rows
from .config import TreeConfig
from .coupling import Coupling
from .curves import Curves
from .drafter import Drafter
from .largest import largest
from .sizing import Plan
from .tree import DraftTree, ancestors_of, root_only


def extend_draft(
    drafter: Drafter,
    features: Sequence[Tensor] | None,  # B x [T, F] of the target, T of each row; None: the drafter reads none
    tokens: Sequence[Tensor],  # B x [T], each the one after its feature
    cache: TreeCache,
) -> Tensor:  # [B, 1, D]
    """Feed the accepted tokens with the target's features; returns the state after each row's last one."""
    rows = prefill_rows(tokens[0].device)
    while max(map(len, tokens)) > rows:  # a prompt is read in parts
        parts = [min(rows, len(each) - 1) for each in tokens]
        (begun, features), (first, tokens) = _split(features, parts), _split(tokens, parts)
        extend_draft(drafter, begun, first, cache)
    counts = [len(each) for each in tokens]
    lengths, prefix, device = cache.lengths, cache.length, tokens[0].device
    fed, states = _padded(tokens), None if features is None else drafter.read(_padded(features))  # [B, T], [B, T, D]
    batch, count = fed.shape
    ahead = torch.arange(count, device=device)
    positions = torch.tensor(lengths, device=device)[:, None] + ahead
    prefix_visible, visible = cache.visible(device), None
    if (prefix and count > 1) or prefix_visible is not None:
        causal = (ahead[:, None] >= ahead).expand(batch, -1, -1)
        visible = visible_keys(causal, prefix, prefix_visible)
    predicted = drafter.predict(states, fed, positions, visible, cache)
    cache.commit(lengths, [range(prefix, prefix + own) for own in counts])
    if min(counts) == count:
        return predicted[:, -1:]
    last = (torch.tensor(counts, device=device) - 1).clamp_min(0)  # of a prompt in parts a short row may have none left
    return predicted.gather(1, last[:, None, None].expand(-1, -1, predicted.shape[-1]))


def _split(rows: Sequence[Tensor] | None, parts: Sequence[int]) -> tuple[Sequence[Tensor] | None, ...]:
    """The first part of each row, and the rest."""
    if rows is None:
        return None, None
    return tuple(zip(*(each.tensor_split([part]) for each, part in zip(rows, parts, strict=True)), strict=True))


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
    """One draft tree per row, and the draft's raw logits of each level's expanded nodes: [B, 1, R] of the root, then
    [B, K, R] of each depth that was expanded.

    Args:
        nodes: of the tree at least, likely or not, as far as they were scored: some will be chosen from them.
        coupling: the target's draws, by which rows that sample choose children; None: the most probable ones.
        plan: says how many levels and nodes pay, down to the root alone, and waits for the device at each level;
            None: as many as `config` says.

    The draft's cache is left holding the accepted tokens only.
    """
    predicted, named = extend_draft(drafter, features, tokens, cache), drafter.draft_tokens  # [B, 1, D], [R]
    root = torch.stack([each[-1] for each in tokens])  # [B]
    k, depth, base = config.top_k, config.depth, cache.length
    batch, device = len(root), root.device
    stops = plan is not None and plan.stops
    lines = curve_lines(plan.choice.curves, k, device) if stops else None

    # Level 1: the root's K best children are all scored and all expanded.
    logits = drafter.own_logits(predicted, target.logits)  # [B, 1, R]
    draft_logits = [logits]
    child_scores, child_tokens = _best_children(logits, named, config, lines, coupling, depth=0)
    frontier_scores, frontier_tokens = child_scores[:, 0], child_tokens[:, 0]  # [B, K]
    scores = [torch.zeros_like(frontier_scores[:, :1]), frontier_scores]
    levels = [root[:, None], frontier_tokens]
    if stops and not plan.goes_on(frontier_scores.tolist()):
        depth = 1
    expanded = [torch.arange(1 + (k if depth > 1 else 0), device=device).expand(batch, -1)]  # their scored numbers
    frontier_states = predicted.expand(-1, k, -1)
    positions = torch.tensor(cache.lengths, device=device)[:, None].expand(-1, k)
    itself = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
    visible = visible_keys(itself, base, cache.visible(device))  # [B, K, keys]

    for level in range(2, depth + 1):
        predicted = drafter.predict(frontier_states, frontier_tokens, positions, visible, cache)  # [B, K, D]
        logits = drafter.own_logits(predicted, target.logits)
        draft_logits.append(logits)
        child_scores, child_tokens = _best_children(logits, named, config, lines, coupling, level - 1)
        child_scores = (child_scores + frontier_scores[..., None]).flatten(1)  # [B, K * K], cumulative
        child_tokens = child_tokens.flatten(1)
        scores.append(child_scores)
        levels.append(child_tokens)
        if level < depth:
            frontier_scores, best = child_scores.topk(k)
            if stops and not plan.goes_on(frontier_scores.tolist()):
                break
            expanded.append(best + (1 + k + (level - 2) * k * k))
            parents = best // k  # [B, K], ranks within the level above
            frontier_tokens = child_tokens.gather(1, best)
            frontier_states = predicted.gather(1, parents[..., None].expand_as(predicted))
            positions = positions + 1
            visible = torch.cat([visible.gather(1, parents[..., None].expand_as(visible)), itself], -1)
    cache.truncate(base)
    scored = [torch.cat(columns, 1) for columns in (levels, scores, expanded)]
    return rerank(*scored, len(levels) - 1, config, nodes, plan), draft_logits


def _best_children(
    logits: Tensor, named: Tensor | None, config: TreeConfig, lines: Lines | None, coupling: Coupling | None, depth: int
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, *, K] of the K best children of each node of a depth: what a step adds to a path's score,
    which is never above 0."""
    logits = logits if coupling is None else coupling.perturb(logits, depth)
    logits = logits if config.draft_temperature == 1 else logits / config.draft_temperature
    tokens = largest(logits, config.top_k)
    scores = logits.log_softmax(-1).gather(-1, tokens).clamp_min(IMPOSSIBLE)
    if lines is not None:
        scores = apply_curves(lines, scores)
    return scores, tokens if named is None else named[tokens]


def rerank(
    tokens: Tensor,  # [B, S], the root's first
    scores: Tensor,  # [B, S], cumulative log-probabilities, 0 for the root
    expanded: Tensor,  # [B, E], scored numbers of the expanded nodes, the root's first
    depth: int,  # levels below the root that were scored
    config: TreeConfig,
    nodes: int = 0,
    plan: Plan | None = None,
) -> DraftTree:
    """The N best scored nodes as a tree: as many as `config` says, or `nodes` if that is more, or as the plan says.

    A cumulative log-probability never grows along a path, so the best nodes are connected; where one rounds to its
    parent's, the stable sort takes the parent first. What a broken head makes NaN comes last, the root stays.
    """
    k, batch = config.top_k, len(tokens)
    comparable = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
    comparable[:, 0] = math.inf  # a sum of confidences can round to above 0
    sorted_scores, order = comparable.sort(dim=1, descending=True, stable=True)
    count = min(max(config.total_tokens, nodes), scores.shape[1])
    if plan is not None and plan.sized and not nodes:
        sorted_scores[:, 0] = 0.0
        count = plan.nodes(sorted_scores[:, :count].tolist())
        if count == 1:
            return root_only(tokens[:, 0])
    kept = order[:, :count].sort(1).values  # [B, N], in the order of scored numbers
    parent = ((kept - 1) // k).clamp_min(0)  # as expanded node; the root is its own
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


IMPOSSIBLE = -1e4  # log-probability of a token that truncation rules out; finite, for sums and lines


class Lines(NamedTuple):
    """Acceptance rates of M knots as lines y = slope * x + offset, for each child those left of a knot and the last."""

    knots: Tensor  # [M]
    first: Tensor  # [K], where a child's lines begin
    slopes: Tensor  # [2 * (M + 1)]
    offsets: Tensor  # [2 * (M + 1)]


def apply_curves(
    lines: Lines,
    log_probs: Tensor,  # [..., K], the children of each node in descending order
) -> Tensor:  # [..., K]
    """Log acceptance probabilities; linear between the knots, constant outside."""
    line = torch.bucketize(log_probs, lines.knots) + lines.first
    return torch.addcmul(lines.offsets.take(line), lines.slopes.take(line), log_probs)


@functools.lru_cache(maxsize=64)
def curve_lines(curves: Curves, children: int, device: torch.device) -> Lines:
    """The lines of K = `children` children."""
    knots = torch.tensor(curves.knots, dtype=torch.float64)
    slopes, offsets = [], []
    for values in (curves.first, curves.others):
        heights = torch.tensor(values, dtype=torch.float64)
        slope = torch.nn.functional.pad(heights.diff() / knots.diff(), (1, 1))
        slopes.append(slope)
        offsets.append(torch.cat([heights[:1], heights]) - slope * torch.cat([knots[:1], knots]))
    first = torch.tensor([0] + [len(knots) + 1] * (children - 1))
    tables = (knots.float(), first, torch.cat(slopes).float(), torch.cat(offsets).float())
    return Lines(*(each.to(device) for each in tables))
