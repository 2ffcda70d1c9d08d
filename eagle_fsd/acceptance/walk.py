"""The walk: from the root down while the token that is drawn is a child, level by level, for all rows at once.

B rows, N tree nodes, K expanded nodes of a level, P steps of the longest path, V vocabulary, R the draft's.

At every node the walk draws `argmax(log_weights + noise)`. If that token is a child it descends, else it emits the
token and stops; at a leaf it emits. A token is *exact* where the target itself draws it with the same noise,
`argmax(warped_logits + noise)`, and *fuzzy* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    draft: Sequence[Tensor]  # per drafted level [B, K, R], the draft's raw logits; rows are `tree.draft_rows`
    draft_tokens: Tensor | None  # [R] long; None: the draft names all tokens
    raw: Tensor  # [B, N, V] float32, the target's logits
    greedy: bool
    errors: dict[int, Exception]  # by row, what a processor or a user's rule raised

    def warp(
        self,
        raw: Tensor,  # [B, V], of one node of each row
        node: Tensor,  # [B] long
        path: Sequence[Tensor],  # the tokens from the root to that node, [B] each
        going: Tensor,  # [B] bool, the rows that are still walking; the others' results are not read
    ) -> Tensor:  # [B, V]
        """The logits after all processors."""

    def noise(self, depth: int) -> Tensor | None:
        """[B, V] Gumbel noise for the tokens after nodes of this depth; None: greedy."""


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
    top: Sequence[tuple[int, float]] = ()  # the target's best tokens with their log-probabilities


class Within(NamedTuple):
    """The marks of each row: its rule decides after one token and up to another."""

    inside: Tensor  # [B] bool, whether the rule decides the next token
    opening: Tensor  # [B] long; -1: there is no such token
    closing: Tensor  # [B] long

    def after(self, token: Tensor) -> Within:
        return self._replace(inside=(self.inside | (token == self.opening)) & (token != self.closing))


class Permission:
    """Which of its rule's tokens each row may take in one walk; the target's own are taken elsewhere.

    A fuzzy token dearer than what is left of the budget is refused, and all after it. Where the rule has a window
    (`Rule.window`), a fuzzy token is tentative: it stays if the next `window` tokens of the target itself were drafted.
    Until then the rule does not decide. A path that ends before is cut back to the tentative step, where the target's
    own token is taken. So budget and marks never depend on what was cut: they count the tokens that are emitted.

    Args:
        threshold: [B] float64.
        left: [B] float64, of each row's budget: nats of regret that fuzzy tokens may still cost. None: no row has one.
        within: None: the rules decide everywhere.
    """

    def __init__(self, threshold: Tensor, left: Tensor | None = None, within: Within | None = None) -> None:
        self.threshold, self.left, self.within = threshold, left, within
        self.closed = torch.zeros_like(threshold, dtype=torch.bool)  # [B], whether the budget is spent
        self.decided = ~self.closed  # [B] bool, whether the rule decided the last token
        self.step = 0
        self.tentative = self.until = torch.zeros_like(threshold, dtype=torch.long)  # [B], steps; see `cut`

    def settle(
        self,
        token: Tensor,  # [B] long, drawn by the rule
        exact: Tensor,  # [B] long, drawn by the target
        raw: Tensor,  # [B, V]
        going: Tensor,  # [B] bool
        window: int,
    ) -> Tensor:  # [B] long
        """The tokens that are taken."""
        if self.left is self.within is None and not window:
            return token
        decided = ~self.closed & (self.step >= self.until)
        if self.within is not None:
            decided = decided & self.within.inside
        token = torch.where(decided, token, exact)
        if self.left is not None:
            regret = (raw.amax(-1) - raw.gather(1, token[:, None])[:, 0]).double()
            dear = (token != exact) & (regret > self.left)
            self.closed, decided = self.closed | dear, decided & ~dear
            token = torch.where(dear, exact, token)
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
        """[B] long: the tentative step that each path of this length [B] is cut back to; without one its own end."""
        return torch.where(lengths > self.until, lengths, self.tentative)


class Level(NamedTuple):
    """What the walk did at one depth, [B] each; of all depths [B, P]."""

    node: Tensor  # long
    token: Tensor  # long
    exact: Tensor  # long, the token that the target draws
    drawn: Tensor | None  # [B, 2], processed logits of the two; None: they are the raw ones
    divergence: Tensor  # float64
    closed: Tensor  # bool
    going: Tensor  # bool, rows that have come to this depth


def walk(rule: Rule, verified: Verified, permission: Permission, top: int = 0) -> list[list[Step]]:
    """The steps of each row, the last of which is the target's own token; the host waits once, at the end.

    Args:
        top: so many of the target's best tokens are reported at each step.
    """
    tree, lossless = verified.tree, rule.is_lossless(verified.greedy)
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    parents = tree.parents.masked_fill(tree.depths == 0, -1)  # the root is nobody's child
    node, going = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    unknown = torch.full_like(permission.threshold, math.nan)
    path, levels = [tree.tokens[:, 0]], []
    for depth in range(tree.max_depth + 1):
        raw, children = verified.raw[rows, node], parents == node[:, None]
        warped, noise = verified.warp(raw, node, path, going), verified.noise(depth)
        exact = first_largest(warped if noise is None else warped + noise)
        token, weights = exact, Weights()
        if not lossless:
            drafted = verified.draft[depth] if depth < len(verified.draft) else None
            nodes = Nodes(raw, warped, noise, exact, tree.tokens, children, tree.by_head, tree.scores, drafted,
                          tree.draft_rows[rows, node], verified.draft_tokens, permission.threshold, permission.left,
                          going, verified.errors)
            weights = rule.weigh(nodes)
            token = permission.settle(draw(nodes, weights), exact, raw, going, rule.window)
        divergence = unknown if weights.divergence is None else weights.divergence.double()
        drawn = None if warped is raw else warped.gather(1, torch.stack([token, exact], 1))
        levels.append(Level(node, token, exact, drawn, divergence, permission.closed, going))
        child = children & (tree.tokens == token[:, None])  # at most one: siblings differ in their token
        going = going & child.any(-1)
        if weights.stop is not None:
            going = going & ~(weights.stop & permission.decided)
        if rows.is_cpu and not going.any():
            break
        node = torch.where(going, child.long().argmax(-1), node)
        path.append(token)
    columns = zip(*levels, strict=True)
    walked = Level(*(None if column[0] is None else torch.stack(column, 1) for column in columns))
    return _steps(walked, permission.cut(walked.going.sum(1)), verified.raw, top)


def _steps(
    walked: Level,  # [B, P]
    cut: Tensor,  # [B] long, see `Permission.cut`
    logits: Tensor,  # [B, N, V]
    top: int,
) -> list[list[Step]]:
    """The steps of each row, with what receipts report."""
    place = torch.arange(walked.node.shape[1], device=cut.device)
    token = torch.where(place == cut[:, None], walked.exact, walked.token)
    going = walked.going & (place <= cut[:, None])
    raw = logits[torch.arange(len(cut), device=cut.device)[:, None], walked.node]  # [B, P, V]
    logprobs, taken = raw.log_softmax(-1), raw.gather(-1, token[..., None])[..., 0]
    regret, logprob = raw.amax(-1) - taken, logprobs.gather(-1, token[..., None])[..., 0]
    drawn = taken if walked.drawn is None else torch.where(token == walked.token, *walked.drawn.unbind(-1))
    # After one wait two small copies: integers and flags, and numbers.
    integers = torch.stack([walked.node, token, token == walked.exact, walked.closed, going], -1).tolist()
    numbers = torch.stack([walked.divergence, logprob.double(), regret.double(), drawn.double()], -1).tolist()
    tokens, values = (part.tolist() for part in reversed(logprobs.topk(top))) if top else (None, None)
    return [
        [Step(node, token, bool(exact), *numbers[row][at], bool(closed),
              list(zip(tokens[row][at], values[row][at], strict=True)) if top else ())
         for at, (node, token, exact, closed, reached) in enumerate(steps) if reached]
        for row, steps in enumerate(integers)
    ]


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
