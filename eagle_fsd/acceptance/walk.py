"""The walk: from the root down while the token that is drawn is a child, level by level, for all rows at once.

B rows, N tree nodes, C = N columns of it, K expanded nodes of a level, V vocabulary, R the draft's.

At every node the walk draws `argmax(log_weights + noise)`. If that token is a child it descends, else it emits the
token and stops; at a leaf it emits. A token is *exact* where the target itself draws it with the same noise,
`argmax(warped_logits + noise)`, and *fuzzy* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.largest import first_largest
from ..drafting.tree import DraftTree
from .nodes import Nodes, Weights
from .rule import Ahead, Rule


class Step(NamedTuple):
    """What was drawn at a node of the path."""

    node: int
    token: int
    exact: bool  # whether the target itself draws it
    divergence: float  # NaN: none was computed
    logprob: float  # of the token, under the target at temperature 1
    regret: float  # that of the target's best token, less this
    drawn: float  # the token's logit after processors
    closed: bool  # whether the budget was spent, here or before


class Target(NamedTuple):
    """What the target says of a verified batch of trees."""

    logits: Tensor  # [B, N, V] float32, raw
    warp: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], Tensor]
    # warp(raw [B, V], node [B], tokens from the root on, each [B], going [B]) -> [B, V] after all processors
    noise: Callable[[int], Tensor] | None  # noise(depth) -> [B, V] for the tokens after its nodes; None: greedy
    warp_tree: Callable[[], Tensor]  # [B, N, V], the same for all nodes


def walk(
    rule: Rule,
    tree: DraftTree,
    draft: Sequence[Tensor],  # per drafted level [B, K, R], the draft's raw logits; rows are `tree.draft_rows`
    target: Target,
    threshold: Tensor,  # [B] float64
    left: Tensor,  # [B] float64, of each row's budget: nats of regret that fuzzy tokens may still cost
    draft_tokens: Tensor | None = None,  # [R] long; None: the draft names all tokens
    errors: dict[int, Exception] | None = None,  # takes what a user's function raises, by row
) -> list[list[Step]]:
    """The steps of each row, the last of which is the target's own token; one copy to the host, at the end.

    A fuzzy token dearer than what is left is refused: the target's own is taken, and all after it.
    """
    batch, device = len(tree.tokens), tree.tokens.device
    rows = torch.arange(batch, device=device)
    lossless = rule.is_lossless(target.noise is None)
    ahead = None
    if rule.look_ahead is not None and not lossless:
        whole = target.warp_tree()
        target = target._replace(warp=lambda raw, node, said, going: whole[rows, node])
        ahead = rule.look_ahead(_ahead(rule, tree, target, whole, threshold))
    node = torch.zeros_like(rows)
    going, closed = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    said, columns = [tree.tokens[:, 0]], []
    for depth in range(tree.max_depth + 1):
        raw = target.logits[rows, node]
        warped = target.warp(raw, node, said, going)
        noise = None if target.noise is None else target.noise(depth)
        exact = first_largest(warped if noise is None else warped + noise)
        children = (tree.parents == node[:, None]) & (tree.depths > 0)
        token, weights = exact, None
        if not lossless:
            expanded = draft[depth][rows, tree.draft_rows[rows, node]] if depth < len(draft) else None
            nodes = Nodes(raw, warped, noise, exact, tree.tokens, children, tree.scores, expanded, draft_tokens,
                          threshold, left, going, {} if errors is None else errors, ahead)
            weights = rule.weigh(nodes)
            token = draw(nodes, weights)
        best, given_up = raw.amax(-1), raw.gather(1, token[:, None])[:, 0]
        fuzzy, regret = token != exact, (best - given_up).double()
        closed = closed | fuzzy & (regret > left)
        token = torch.where(closed, exact, token)
        left = left - torch.where(fuzzy & ~closed, regret, 0.0)
        taken = raw.gather(1, token[:, None])[:, 0]
        columns.append(torch.stack([
            node.double(), token.double(), (token == exact).double(),
            _divergence(weights, raw), (taken - raw.logsumexp(-1)).double(), (best - taken).double(),
            warped.gather(1, token[:, None])[:, 0].double(), closed.double(), going.double(),
        ]))
        found = children & (tree.tokens == token[:, None])  # at most one: siblings differ in their token
        descends = found.any(-1) & going
        if weights is not None and weights.stop is not None:
            descends = descends & ~(weights.stop & ~closed)
        node, going = torch.where(descends, found.long().argmax(-1), node), descends
        said.append(token)
        if device.type == "cpu" and not going.any():
            break
    levels = torch.stack(columns, -1).permute(1, 2, 0).tolist()  # [B, depth, 9]
    return [[Step(int(node), int(token), bool(exact), *numbers, bool(closed))
             for node, token, exact, *numbers, closed, went in steps if went] for steps in levels]


def draw(nodes: Nodes, weights: Weights) -> Tensor:  # [B] long
    """The token of the largest log-weight plus noise, the first of equal ones."""
    if weights.tokens is not None:
        return first_largest(weights.tokens if nodes.noise is None else weights.tokens + nodes.noise)
    exact, is_exact = nodes.exact, nodes.is_exact
    steps = weights.children.masked_fill(~nodes.children, -math.inf)
    own = nodes.warped.gather(1, exact[:, None])[:, 0] + weights.others
    if nodes.noise is not None:
        steps = steps + nodes.noise.gather(1, nodes.tokens)
        own = own + nodes.noise.gather(1, exact[:, None])[:, 0]
    own = torch.where(is_exact.any(-1), -math.inf, own)  # it has a step
    best = steps.amax(-1)
    none = nodes.warped.shape[-1]
    first = nodes.tokens.masked_fill(~nodes.children | (steps != best[:, None]), none).amin(-1)
    return torch.where((best > own) | (best == own) & (first < exact), first, exact)


def _divergence(weights: Weights | None, raw: Tensor) -> Tensor:
    """[B] float64, of receipts."""
    if weights is None or weights.divergence is None:
        return raw.new_full((len(raw),), math.nan, dtype=torch.float64)
    return weights.divergence.double()


def _ahead(rule: Rule, tree: DraftTree, target: Target, warped: Tensor, threshold: Tensor) -> Ahead:
    """What a rule that looks ahead sees, from the processed logits [B, N, V] of the whole tree."""
    at = tree.parents * warped.shape[-1] + tree.tokens  # where (parent, token) lies in a flattened [N, V]
    raw_steps, steps = (logits.flatten(1).gather(1, at) for logits in (target.logits, warped))

    def of_parent(values: Tensor) -> Tensor:
        return values.gather(1, tree.parents)

    guard = getattr(rule, "head_guard", None)
    slack = 0.0 if guard is None else math.log1p(-guard) if guard < 1 else -math.inf
    in_head = torch.ones_like(tree.depths, dtype=torch.bool)
    if guard is not None:
        in_head = raw_steps >= of_parent(target.logits.amax(-1) + slack)
    return Ahead(
        tree, steps, steps.double() - of_parent(warped.logsumexp(-1)).double(), of_parent(warped.amax(-1)),
        tree.tokens == of_parent(first_largest(warped)), in_head, threshold[:, None], target.noise is None)
