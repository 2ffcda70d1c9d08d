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
from .rule import Rule


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
    top: list[tuple[int, float]] | None = None  # the target's best tokens with their log-probabilities


class Within(NamedTuple):
    """Where the rule decides: after one token and up to another, the target's own tokens being taken elsewhere."""

    inside: Tensor  # [B] bool, whether the next token is there
    opening: Tensor  # [B] long; -1: there is no such token
    closing: Tensor  # [B] long


class Target(NamedTuple):
    """What the target says of a verified batch of trees."""

    logits: Tensor  # [B, N, V] float32, raw
    warp: Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], Tensor]
    # warp(raw [B, V], node [B], tokens from the root on, each [B], going [B]) -> [B, V] after all processors
    noise: Callable[[int], Tensor] | None  # noise(depth) -> [B, V] for the tokens after its nodes; None: greedy


def walk(
    rule: Rule,
    tree: DraftTree,
    draft: Sequence[Tensor],  # per drafted level [B, K, R], the draft's raw logits; rows are `tree.draft_rows`
    target: Target,
    threshold: Tensor,  # [B] float64
    left: Tensor | None,  # [B] float64, of each row's budget: nats of regret that fuzzy tokens may still cost
    draft_tokens: Tensor | None = None,  # [R] long; None: the draft names all tokens
    errors: dict[int, Exception] | None = None,  # takes what a user's function raises, by row
    top: int = 0,  # tokens that are told beside each
    within: Within | None = None,  # None: everywhere
) -> list[list[Step]]:
    """The steps of each row, the last of which is the target's own token; one copy to the host, at the end.

    A fuzzy token dearer than what is left is refused: the target's own is taken, and all after it.
    """
    batch, device = len(tree.tokens), tree.tokens.device
    rows = torch.arange(batch, device=device)
    parents = tree.parents.masked_fill(tree.depths == 0, -1)  # the root is nobody's child
    lossless, errors = rule.is_lossless(target.noise is None), {} if errors is None else errors
    node = torch.zeros_like(rows)
    going, closed = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    said, path, judged, drawn = [tree.tokens[:, 0]], [], [], []
    for depth in range(tree.max_depth + 1):
        raw = target.logits[rows, node]
        warped = target.warp(raw, node, said, going)
        noise = None if target.noise is None else target.noise(depth)
        exact = first_largest(warped if noise is None else warped + noise)
        token, children, weights = exact, parents == node[:, None], Weights()
        if not lossless:
            nodes = Nodes(raw, warped, noise, exact, tree.tokens, children, tree.by_head, tree.scores,
                          draft[depth] if depth < len(draft) else None, tree.draft_rows[rows, node], draft_tokens,
                          threshold, left, going, errors)
            weights = rule.weigh(nodes)
            token = draw(nodes, weights)
            if within is not None:
                token = torch.where(within.inside, token, exact)
            if left is not None:
                regret = (raw.amax(-1) - raw.gather(1, token[:, None])[:, 0]).double()
                closed = closed | (token != exact) & (regret > left)  # dearer than what is left: exact from here
                token = torch.where(closed, exact, token)
                left = left - torch.where(token != exact, regret, 0.0)
        path.append((node, token, going))
        if not lossless:
            unknown = torch.full_like(threshold, math.nan)
            judged.append((exact, closed, unknown if weights.divergence is None else weights.divergence.double()))
        if warped is not raw:
            drawn.append(warped.gather(1, token[:, None])[:, 0])
        found = children & (tree.tokens == token[:, None])  # at most one: siblings differ in their token
        going = found.any(-1) & going
        if weights.stop is not None:
            going = going & ~(weights.stop & ~closed & (True if within is None else within.inside))
        if within is not None:
            within = within._replace(inside=(within.inside | (token == within.opening)) & (token != within.closing))
        if device.type == "cpu" and not going.any():
            break
        node = torch.where(going, found.long().argmax(-1), node)
        said.append(token)
    return _steps(path, judged, drawn, target.logits, top)


def _steps(
    path: Sequence[tuple[Tensor, ...]],  # of each level: node, token and going [B]
    judged: Sequence[tuple[Tensor, ...]],  # the target's own token, closed and divergence [B]; none: lossless
    drawn: Sequence[Tensor],  # processed logits of the tokens [B]; none: there are no processors
    logits: Tensor,  # [B, N, V]
    top: int,
) -> list[list[Step]]:
    """The steps of each row, with what receipts say of them, in one copy to the host."""
    node, token, going = (torch.stack(column, 1) for column in zip(*path, strict=True))  # [B, P] each
    exact, closed, divergence = token, torch.zeros_like(token), torch.full(token.shape, math.nan, device=token.device)
    if judged:
        exact, closed, divergence = (torch.stack(column, 1) for column in zip(*judged, strict=True))
    rows = torch.arange(len(node), device=node.device)[:, None]
    raw = logits[rows, node]  # [B, P, V]
    best, taken = raw.amax(-1), raw.gather(-1, token[..., None])[..., 0]
    logprobs = raw.log_softmax(-1)
    logprob = logprobs.gather(-1, token[..., None])[..., 0]
    best_of = [[list(zip(*place, strict=True)) for place in zip(*row, strict=True)] for row in zip(
        *(part.tolist() for part in reversed(logprobs.topk(top))), strict=True)] if top else None
    processed = torch.stack(drawn, 1) if drawn else taken
    columns = (node, token, token == exact, divergence, logprob, best - taken, processed, closed, going)
    table = torch.stack([column.double() for column in columns], -1).tolist()  # [B, P, 9]
    return [[Step(int(node), int(token), bool(exact), *numbers, bool(closed), best_of[row][place] if top else None)
             for place, (node, token, exact, *numbers, closed, went) in enumerate(steps) if went]
            for row, steps in enumerate(table)]


def draw(nodes: Nodes, weights: Weights) -> Tensor:  # [B] long
    """The token of the largest log-weight plus noise, the first of equal ones."""
    if weights.tokens is not None:
        return first_largest(weights.tokens if nodes.noise is None else weights.tokens + nodes.noise)
    exact = nodes.exact
    if weights.children is None:
        return exact
    steps = weights.children.masked_fill(~nodes.children, -math.inf)
    own = nodes.warped.gather(1, exact[:, None])[:, 0] + weights.others  # the best of all other tokens
    if nodes.noise is not None:
        steps = steps + nodes.noise.gather(1, nodes.tokens)
        own = own + nodes.noise.gather(1, exact[:, None])[:, 0]
    best = steps.amax(-1)
    none = nodes.warped.shape[-1]
    first = nodes.tokens.masked_fill(~nodes.children | (steps != best[:, None]), none).amin(-1)
    return torch.where((best > own) | (best == own) & (first < exact), first, exact)
