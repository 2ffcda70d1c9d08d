"""The walk from the root down the tree, level by level, for all rows at once, while the drawn token is a child.

B rows, N tree nodes, K expanded nodes of a level, P steps of the longest path, V vocabulary, R the draft's vocabulary.

At every node the walk draws `argmax(log_weights + noise)` and emits that token. If the token is a child, the walk
descends to it; otherwise it stops. A token is *exact* if it is the target's own, `argmax(warped_logits + noise)` with
the same noise, and *fuzzy* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..drafting.largest import first_largest
from ..drafting.tree import DraftTree
from .nodes import Nodes, Weights
from .rule import Rule


class Verified(Protocol):
    """A batch of draft trees with the logits of draft and target."""

    tree: DraftTree
    draft_logits: Sequence[Tensor]  # [B, K, R] of each drafted level, the draft's raw logits; see `tree.draft_rows`
    draft_tokens: Tensor | None  # [R] long, the draft's token ids; None: all, R = V
    raw: Tensor  # [B, N, V] float32, the target's logits
    greedy: bool
    errors: dict[int, Exception]  # by row, raised by a processor or a user's rule at the last node of the row's path

    def warp(
        self,
        raw: Tensor,  # [B, V], logits at one node of each row
        node: Tensor,  # [B] long
        path: Sequence[Tensor],  # tokens [B] from the root to that node
        going: Tensor,  # [B] bool, rows whose walk goes on; results of other rows are ignored
    ) -> Tensor:  # [B, V]
        """The logits after all processors."""

    def noise(self, depth: int) -> Tensor | None:
        """[B, V] Gumbel noise of the tokens after nodes of this depth; None: greedy."""


class Step(NamedTuple):
    """The token drawn at a node of the path."""

    node: int
    token: int
    is_exact: bool  # whether it is the target's own
    divergence: float  # NaN: not computed
    logprob: float  # of the token, under the target at temperature 1
    regret: float  # the log-probability of the target's best token, less this one's
    logit: float  # the token's logit after all processors; the draft's if that is larger and the rule mixes it in
    # Whether a fuzzy token was rejected here or before because it cost more than was left.
    closed: bool
    top: Sequence[tuple[int, float]] = ()  # the target's best tokens with their log-probabilities


class Within(NamedTuple):
    """Marks between which a row's rule decides: after an opening token, until a closing one."""

    inside_marks: Tensor  # [B] bool, whether the rule decides the next token
    opening: Tensor  # [B] long; -1: no token opens
    closing: Tensor  # [B] long

    def after(self, token: Tensor) -> Within:
        return self._replace(inside_marks=(self.inside_marks | (token == self.opening)) & (token != self.closing))


class Permission:
    """Permits or rejects the tokens that the rule draws in one walk; rejected ones are replaced by the target's own.

    Once a fuzzy token costs more than the rest of the budget, it and all later fuzzy tokens are rejected. If the rule
    has a window (`Rule.window`), a fuzzy token is tentative: it is accepted if the target's next `window` own tokens
    were drafted. Until then every token is the target's own. A path that ends earlier is cut back to the tentative
    step, where the target's own token is emitted. So budget and marks count only emitted tokens.

    Args:
        threshold: [B] float64.
        left: [B] float64, the rest of each row's budget: the regret, in nats, that fuzzy tokens may still cost.
            None: no row has a budget.
        within: None: the rules decide everywhere.
        fuzzy: [B] bool, rows for which the rule decides; the others are exact. None: all.
    """

    def __init__(
        self, threshold: Tensor, left: Tensor | None = None, within: Within | None = None, fuzzy: Tensor | None = None
    ) -> None:
        self.threshold, self.left, self.within, self.fuzzy = threshold, left, within, fuzzy
        self.closed = torch.zeros_like(threshold, dtype=torch.bool)  # [B], see `Step.closed`
        self.decided = ~self.closed  # [B] bool, whether the rule decided the last token
        self.step = 0
        self.tentative = self.until = torch.zeros_like(threshold, dtype=torch.long)  # [B], steps; see `cut`

    def settle(
        self,
        token: Tensor,  # [B] long, drawn by the rule
        exact: Tensor,  # [B] long, the target's own
        raw: Tensor,  # [B, V]
        going: Tensor,  # [B] bool
        window: int,
    ) -> Tensor:  # [B] long
        """The tokens to emit."""
        if self.left is None and self.within is None and self.fuzzy is None and not window:
            return token
        decided = ~self.closed & (self.step >= self.until)
        if self.fuzzy is not None:
            decided = decided & self.fuzzy
        if self.within is not None:
            decided = decided & self.within.inside_marks
        token = torch.where(decided, token, exact)
        if self.left is not None:
            regret = (raw.amax(-1) - raw.gather(1, token[:, None])[:, 0]).double()
            costly = (token != exact) & (regret > self.left)
            self.closed, decided = self.closed | costly, decided & ~costly
            token = torch.where(costly, exact, token)
            self.left = self.left - torch.where(token != exact, regret, 0.0)
        if self.within is not None:
            self.within = self.within.after(token)
        if window:
            fuzzy = going & (token != exact)
            self.tentative = torch.where(fuzzy, self.step, self.tentative)
            self.until = torch.where(fuzzy, self.step + window + 1, self.until)
        self.step, self.decided = self.step + 1, decided
        return token

    def cut(self, lengths: Tensor) -> Tensor:
        """[B] long: the tentative step of paths of these lengths [B] whose window is incomplete; else the length."""
        return torch.where(lengths > self.until, lengths, self.tentative)


class Level(NamedTuple):
    """The walk at one depth, [B] each; stacked over all depths [B, P]."""

    node: Tensor  # long
    token: Tensor  # long
    exact: Tensor  # long, the target's own token
    logits: Tensor | None  # [B, 2], logits of `token` and `exact` after all processors; None: the raw ones
    divergence: Tensor  # float64
    closed: Tensor  # bool
    going: Tensor  # bool, rows that reached this depth


def walk(rule: Rule, verified: Verified, permission: Permission, top: int = 0) -> list[list[Step]]:
    """The steps of each row; the last one emits a token that is no child, or ends the cycle. Waits for the device once.

    Args:
        top: number of the target's best tokens to report at each step.
    """
    walked = descend(rule, verified, permission, verified.tree.max_depth + 1, early=verified.raw.is_cpu)
    lengths = walked.going.sum(1)
    cut = permission.cut(lengths)
    for row in [row for row in verified.errors if cut[row] < lengths[row]]:
        del verified.errors[row]  # at a node after a tentative token: its text is not emitted
    integers, numbers, logprobs = emitted(walked, cut, verified.raw)
    # The only wait: two small copies, of integers and flags, and of numbers.
    parts = integers.tolist(), numbers.tolist()
    return steps_of(*parts, *([part.tolist() for part in reversed(logprobs.topk(top))] if top else ()))


def descend(
    rule: Rule, verified: Verified, permission: Permission, levels: int, *, early: bool = False
) -> Level:  # [B, P]
    """The walk at this many depths. Does not wait for the device, unless it may end `early`, with the last row."""
    tree, lossless = verified.tree, rule.is_lossless(verified.greedy)
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    parents = tree.parents.masked_fill(tree.depths == 0, -1)  # the root is not its own child
    node, going = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    unknown = torch.full_like(permission.threshold, math.nan)
    path, walked = [tree.tokens[:, 0]], []
    for depth in range(levels):
        raw, children = verified.raw[rows, node], parents == node[:, None]
        warped, noise = verified.warp(raw, node, path, going), verified.noise(depth)
        exact = first_largest(warped if noise is None else warped + noise)
        token, weights, drawable = exact, Weights(), warped
        if not lossless:
            level_logits = verified.draft_logits[depth] if depth < len(verified.draft_logits) else None
            nodes = Nodes(raw, warped, noise, exact, tree.tokens, children, tree.by_head, tree.scores, level_logits,
                          tree.draft_rows[rows, node], verified.draft_tokens, permission.threshold, permission.left,
                          going, verified.errors)
            if rule.mixes_draft and level_logits is not None:
                predicted = going & (nodes.draft_row >= 0)
                known = torch.where(predicted[:, None], nodes.draft_of_all, raw)  # processors need a token to draw
                known = verified.warp(known, node, path, predicted).masked_fill(~predicted[:, None], -math.inf)
                nodes = replace(nodes, warped_draft=known)
                drawable = warped.maximum(nodes.warped_draft)
            weights = rule.weigh(nodes)
            token = permission.settle(draw(nodes, weights), exact, raw, going, rule.window)
        divergence = unknown if weights.divergence is None else weights.divergence.double()
        if permission.fuzzy is not None:
            divergence = torch.where(permission.fuzzy, divergence, math.nan)
        logits = None if warped is raw and not rule.mixes_draft else drawable.gather(1, torch.stack([token, exact], 1))
        walked.append(Level(node, token, exact, logits, divergence, permission.closed, going))
        child = children & (tree.tokens == token[:, None])  # at most one: siblings differ in their token
        going = going & child.any(-1)
        if weights.stop is not None:
            going = going & ~(weights.stop & permission.decided)
        if verified.errors:
            going[list(verified.errors)] = False
        if early and not going.any():
            break
        node = torch.where(going, child.long().argmax(-1), node)
        path.append(token)
    columns = zip(*walked, strict=True)
    return Level(*(None if column[0] is None else torch.stack(column, 1) for column in columns))


def emitted(
    walked: Level,  # [B, P]
    cut: Tensor,  # [B] long, see `Permission.cut`
    logits: Tensor,  # [B, N, V]
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of `Step`: node, token, is_exact, closed and whether the path has this step, [B, P, 5] long;
    divergence, logprob, regret and logit, [B, P, 4] float64; and the target's log-probabilities [B, P, V]."""
    place = torch.arange(walked.node.shape[1], device=cut.device)
    token = torch.where(place == cut[:, None], walked.exact, walked.token)
    going = walked.going & (place <= cut[:, None])
    raw = logits[torch.arange(len(cut), device=cut.device)[:, None], walked.node]  # [B, P, V]
    logprobs, own = raw.log_softmax(-1), raw.gather(-1, token[..., None])[..., 0]
    regret, logprob = raw.amax(-1) - own, logprobs.gather(-1, token[..., None])[..., 0]
    logit = own if walked.logits is None else torch.where(token == walked.token, *walked.logits.unbind(-1))
    integers = torch.stack([walked.node, token, token == walked.exact, walked.closed, going], -1)
    return integers, torch.stack([walked.divergence, logprob.double(), regret.double(), logit.double()], -1), logprobs


def steps_of(
    integers: Sequence[Sequence[Sequence[float]]],  # [B, P, 5], see `emitted`
    numbers: Sequence[Sequence[Sequence[float]]],  # [B, P, 4]
    tokens: Sequence[Sequence[Sequence[int]]] | None = None,  # [B, P, top], the target's best; None: not reported
    values: Sequence[Sequence[Sequence[float]]] | None = None,  # [B, P, top], their log-probabilities
) -> list[list[Step]]:
    """The steps of each row."""
    return [
        [Step(int(node), int(token), bool(is_exact), *numbers[row][at], bool(closed),
              () if tokens is None else list(zip(tokens[row][at], values[row][at], strict=True)))
         for at, (node, token, is_exact, closed, reached) in enumerate(steps) if reached]
        for row, steps in enumerate(integers)
    ]


def draw(nodes: Nodes, weights: Weights) -> Tensor:  # [B] long
    """The token with the largest log-weight plus noise, the first if several are equal."""
    if weights.tokens is not None:
        return first_largest(weights.tokens if nodes.noise is None else weights.tokens + nodes.noise)
    exact = nodes.exact
    if weights.children is None:
        return exact
    steps = weights.children.masked_fill(~nodes.children, -math.inf)
    own = nodes.warped.gather(1, exact[:, None])[:, 0] + weights.others  # of the best other token
    if nodes.noise is not None:
        steps = steps + nodes.noise.gather(1, nodes.tokens)
        own = own + nodes.noise.gather(1, exact[:, None])[:, 0]
    best = steps.amax(-1)
    none = nodes.warped.shape[-1]
    first = nodes.tokens.masked_fill(~nodes.children | (steps != best[:, None]), none).amin(-1)
    return torch.where((best > own) | (best == own) & (first < exact), first, exact)
