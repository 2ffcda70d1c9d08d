"""Growing the draft tree: expansion by confidence, then reranking (EAGLE-2, arXiv 2406.16858, section 4).

B batch, T tokens accepted in the last cycle (of each row), K children per node and nodes per level, N nodes verified,
E = 1 + K * (depth - 1) expanded nodes, S = K + (depth - 1) * K * K scored nodes, D hidden size, F width of the
target's features, V vocabulary, R the draft's.

Scored nodes are numbered level by level; within a level by the rank of the parent, then by their own rank. A parent's
number is thus smaller than its child's, and its cumulative log-probability is not lower.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .attention import tree_mask
from .cache import TreeCache
from .config import Confidence, TreeConfig
from .draft import DraftHead
from .parallel import tensor_of_first
from .target import TargetModel, prefill_rows
from .tree import DraftTree, ancestors_of, root_only


def extend_draft(
    head: DraftHead,
    features: Sequence[Tensor],  # B x [T, F] of the target, T of each row
    tokens: Sequence[Tensor],  # B x [T], each the token after its feature
    cache: TreeCache,
) -> Tensor:  # [B, 1, D]
    """Feed the accepted tokens with the target's features; returns the predicted feature of each row's last one."""
    rows = prefill_rows(tokens[0].device)
    while max(map(len, tokens)) > rows:  # a prompt is read in parts
        parts = [min(rows, len(each) - 1) for each in tokens]
        extend_draft(head, [each[:part] for each, part in zip(features, parts, strict=True)],
                     [each[:part] for each, part in zip(tokens, parts, strict=True)], cache)
        features = [each[part:] for each, part in zip(features, parts, strict=True)]
        tokens = [each[part:] for each, part in zip(tokens, parts, strict=True)]
    counts = [len(each) for each in tokens]
    lengths, prefix, device = cache.lengths, cache.length, tokens[0].device
    read, fed = pad_sequence(list(features), True), pad_sequence(list(tokens), True)  # [B, T, F], [B, T]
    batch, count = fed.shape
    ahead = torch.arange(count, device=device)
    positions = torch.tensor(lengths, device=device)[:, None] + ahead
    prefix_visible, mask = cache.visible(device), None
    if (prefix and count > 1) or prefix_visible is not None:
        causal = (ahead[:, None] >= ahead).expand(batch, -1, -1)
        mask = tree_mask(causal, prefix, head.dtype, prefix_visible)
    predicted = head(head.read(read), fed, positions, mask, cache)
    cache.commit(lengths, [range(prefix, prefix + own) for own in counts])
    last = (torch.tensor(counts, device=device) - 1).clamp_min(0)
    return predicted.gather(1, last[:, None, None].expand(-1, -1, predicted.shape[-1]))


def draft_tree(
    head: DraftHead,
    target: TargetModel,
    features: Sequence[Tensor],  # B x [T, F] of the target, of the positions before `tokens`
    tokens: Sequence[Tensor],  # B x [T], the last one being the root
    cache: TreeCache,
    config: TreeConfig,
    keep_logits: bool = True,
) -> tuple[DraftTree, Tensor]:
    """One draft tree per row, and the draft's raw logits [B, E, V] of its expanded nodes; [B, 0, V] without
    `keep_logits`: with large vocabularies it takes long to put them together.

    The draft's cache is left holding the accepted tokens only. With `least_reach` or `least_probability` a tree may be
    shallower or smaller than `config` says, down to the root alone; both wait for the device once per level.
    """
    k = config.top_k
    predicted = extend_draft(head, features, tokens, cache)  # [B, 1, D]
    base, root = cache.length, torch.stack([each[-1] for each in tokens])
    batch, device = len(root), root.device
    starts = torch.tensor(cache.lengths, device=device)[:, None]

    # Level 1: the root's K best children are all scored and all expanded.
    logits = head.own_logits(predicted, target.logits)  # [B, 1, R]
    draft_logits, scores, levels = [logits], [], []
    frontier_scores, frontier_tokens = _best_children(head, logits, config, target.group)
    frontier_scores, frontier_tokens = frontier_scores[:, 0], frontier_tokens[:, 0]  # [B, K]
    scores.append(frontier_scores)
    levels.append(frontier_tokens)
    frontier_features = predicted.expand(-1, k, -1)
    itself = tree_mask(torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1), 0, head.dtype)
    prefix = tree_mask(itself.new_zeros(batch, k, 0, dtype=torch.bool), base, head.dtype, cache.visible(device))
    visible = itself  # [B, 1, K, keys]: which expanded nodes each frontier node sees
    expanded = [torch.arange(k, device=device).expand(batch, -1)]  # scored numbers of each level's expanded nodes

    if not _worth_a_level(frontier_scores, config, target.group):
        return root_only(root), head.widen(logits[:, : int(keep_logits)])

    for level in range(2, config.depth + 1):
        positions = (starts + level - 2).expand(-1, k)
        mask = torch.cat([prefix, visible], -1)
        predicted = head(frontier_features, frontier_tokens, positions, mask, cache)  # [B, K, D]
        logits = head.own_logits(predicted, target.logits)
        if keep_logits:
            draft_logits.append(logits)
        child_scores, child_tokens = _best_children(head, logits, config, target.group)
        child_scores = (child_scores + frontier_scores[..., None]).flatten(1)  # [B, K * K], cumulative
        child_tokens = child_tokens.flatten(1)
        scores.append(child_scores)
        levels.append(child_tokens)
        if level < config.depth:
            frontier_scores, best = child_scores.topk(k)
            if not _worth_a_level(frontier_scores, config, target.group):
                break
            parents = best // k  # [B, K], ranks within the level above
            expanded.append(best + k + (level - 2) * k * k)
            frontier_tokens = child_tokens.gather(1, best)
            frontier_features = predicted.gather(1, parents[..., None].expand_as(predicted))
            inherited = visible.gather(2, parents[:, None, :, None].expand_as(visible))
            visible = torch.cat([inherited, itself], -1)
    cache.truncate(base)
    tree = rerank(root, torch.cat(levels, 1), torch.cat(scores, 1), torch.stack(expanded, 1), len(levels), config)
    return tree, head.widen(torch.cat(draft_logits, 1) if keep_logits else logits[:, :0])


def _best_children(
    head: DraftHead, logits: Tensor, config: TreeConfig, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, *, K] of the K best children of each node: what a step adds to a path's score."""
    logits = logits if config.draft_temperature == 1 else logits / config.draft_temperature
    best, tokens = logits.topk(config.top_k)
    log_probs = best - logits.logsumexp(-1, keepdim=True)
    scores = log_probs if config.confidence is None else apply_confidence(config.confidence, log_probs)
    return tensor_of_first(group, scores), tensor_of_first(group, head.named(tokens))


def apply_confidence(
    confidence: Confidence,
    log_probs: Tensor,  # [..., K], the children of each node in descending order
) -> Tensor:  # [..., K]
    """Log acceptance probabilities; linear between the knots, constant outside."""
    knots, rows, slopes, offsets = _lines(confidence, log_probs.shape[-1], log_probs.device)
    line = torch.bucketize(log_probs, knots) + rows
    return slopes[line] * log_probs + offsets[line]


@functools.lru_cache(maxsize=64)
def _lines(confidence: Confidence, children: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Knots; per child where its lines begin; slope and offset of the line left of each knot and right of the last."""
    knots = torch.tensor(confidence.knots, dtype=torch.float64)
    slopes, offsets = [], []
    for values in (confidence.first, confidence.others):
        heights = torch.tensor(values, dtype=torch.float64)
        slope = torch.nn.functional.pad(heights.diff() / knots.diff(), (1, 1))
        slopes.append(slope)
        offsets.append(torch.cat([heights[:1], heights]) - slope * torch.cat([knots[:1], knots]))
    rows = torch.tensor([0] + [len(knots) + 1] * (children - 1))
    tables = (knots.float(), rows, torch.cat(slopes).float(), torch.cat(offsets).float())
    knots, rows, slope, offset = (each.to(device) for each in tables)
    return knots, rows, slope, offset


def _worth_a_level(scores: Tensor, config: TreeConfig, group: dist.ProcessGroup | None) -> bool:
    """Whether nodes [B, K] of this level are likely enough to be accepted, over the rows, to draft behind them."""
    if not config.least_reach:
        return True
    return tensor_of_first(group, scores.exp().sum()).item() >= config.least_reach * len(scores)


def rerank(
    root: Tensor,  # [B]
    tokens: Tensor,  # [B, S]
    scores: Tensor,  # [B, S], cumulative log-probabilities
    expanded: Tensor,  # [B, depth - 1, K] or more levels, scored numbers of the expanded nodes below the root
    depth: int,  # levels that were scored
    config: TreeConfig,
) -> DraftTree:
    """The best N - 1 scored nodes and the root, as a tree.

    A cumulative log-probability never grows along a path, so the best nodes are connected; where one rounds to its
    parent's, the stable sort takes the parent first.
    """
    k, batch, device = config.top_k, len(root), root.device
    sorted_scores, order = scores.sort(dim=1, descending=True, stable=True)
    count = min(config.total_tokens - 1, scores.shape[1])
    if config.least_probability:
        likely = (sorted_scores >= math.log(config.least_probability)).sum().item()
        if not likely:
            return root_only(root)
        count = min(count, math.ceil(likely / batch))
    kept = order[:, :count].sort(1).values  # [B, N - 1], in the order of scored numbers
    expanded = expanded[:, : max(1, depth - 1)]

    # The parent of scored node j >= K at level l is expanded node (j - K) // K of levels 1, 2, ...
    rank = (kept - k).div(k, rounding_mode="floor")  # negative for children of the root
    parent_number = expanded.flatten(1).gather(1, rank.clamp(min=0))
    parents = torch.searchsorted(kept, parent_number) + 1  # node index of that scored number
    parents = torch.where(rank < 0, 0, parents)
    depths = torch.where(rank < 0, 1, rank.div(k, rounding_mode="floor") + 2)

    # Draft rows: 0 is the root's, 1 + r that of expanded node r; at depth 1 only the root was expanded.
    rows = torch.zeros_like(scores, dtype=torch.long)
    if depth > 1:
        expanded_rows = torch.arange(1, expanded[0].numel() + 1, device=device).expand(batch, -1)
        rows.scatter_(1, expanded.flatten(1), expanded_rows)

    def with_root(values: Tensor, root_value: Tensor | int) -> Tensor:
        column = root_value[:, None] if isinstance(root_value, Tensor) else values.new_full((batch, 1), root_value)
        return torch.cat([column, values], 1)

    parents = with_root(parents, 0)
    return DraftTree(
        tokens=with_root(tokens.gather(1, kept), root),
        parents=parents,
        depths=with_root(depths, 0),
        ancestors=ancestors_of(parents, depth),
        draft_rows=with_root(rows.gather(1, kept), 0),
        scores=with_root(scores.gather(1, kept), 0),
        max_depth=depth,
    )
