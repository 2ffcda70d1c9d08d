"""The walk from the root down the tree, level by level, for all rows at once, while the drawn token is a child.

B rows, N tree nodes, K expanded nodes of a level, P steps of the longest path, V vocabulary, R the draft's vocabulary.

At every node the walk draws `argmax(log_weights + noise)` and emits that token. If the token is a child, the walk
descends to it; otherwise it stops. A token is *exact* if it is the target's own, `argmax(warped_logits + noise)` with
the same noise, and *fuzzy* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..drafting.tree import DraftTree
from ..utils.topk import first_largest
from .nodes import Nodes, Weights
from .rule import Rule


class Verified(Protocol):
    """A batch of draft trees with the logits of draft and target: `decoding.cycle.VerifiedTrees`, and the chains of
    `serve.vllm`."""

    tree: DraftTree
    draft_logits: Sequence[Tensor]  # [B, K, R] of each drafted level, the draft's raw logits; see `tree.draft_rows`
    draft_tokens: Tensor | None  # [R] long, the draft's token ids; None: 0 to R - 1
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
    logit: float  # of the token, after all processors
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


class Budget(NamedTuple):
    """What fuzzy tokens may still cost. Once one costs more, it and all later ones are rejected."""

    left: Tensor | None  # [B] float64, regret in nats; None: no row has a budget
    closed: Tensor  # [B] bool, whether one was rejected

    def after(self, fuzzy: Tensor, regret: Tensor) -> Budget:
        """Pay the regret [B] of tokens that are `fuzzy` [B] unless they are rejected."""
        closed = self.closed | fuzzy & (regret > self.left)
        return Budget(self.left - torch.where(fuzzy & ~closed, regret, 0.0), closed)


class Level(NamedTuple):
    """The walk at one depth, [B] each; stacked over all depths [B, P]."""

    node: Tensor  # long
    token: Tensor  # long
    exact: Tensor  # long, the target's own token
    logit: Tensor | None  # of `token`, after all processors; None: the raw one
    divergence: Tensor  # float64
    closed: Tensor  # bool
    going: Tensor  # bool, rows that reached this depth


def walk(
    rule: Rule, verified: Verified, threshold: Tensor, left: Tensor | None = None, within: Within | None = None,
    top: int = 0,
) -> list[list[Step]]:
    """The steps of each row; the last one emits a token that is no child, or ends the cycle. Waits for the device once.

    Args:
        threshold, left, within: see `descend`. top: number of the target's best tokens to report at each step.
    """
    levels = verified.tree.max_depth + 1
    walked = descend(rule, verified, threshold, left, within, levels, early=verified.raw.is_cpu)
    integers, numbers, logprobs = emitted(walked, verified.raw)
    # The only wait: two small transfers, of integers and flags, and of numbers.
    parts = integers.tolist(), numbers.tolist()
    return steps_of(*parts, *([part.tolist() for part in reversed(logprobs.topk(top))] if top else ()))


def descend(
    rule: Rule, verified: Verified, threshold: Tensor, left: Tensor | None, within: Within | None, levels: int, *,
    early: bool = False,
) -> Level:  # [B, P]
    """The walk at this many depths. Does not wait for the device, unless it may end `early`, with the last row.

    Where the rule does not decide, the target's own token is emitted.

    Args:
        threshold: [B] float64.
        left: of `Budget`.
        within: None: the rule decides everywhere.
    """
    tree, lossless = verified.tree, rule.is_lossless(verified.greedy)
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    parents = tree.parents.masked_fill(tree.depths == 0, -1)  # the root is not its own child
    node, going = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    unknown, everywhere = torch.full_like(threshold, math.nan), going
    budget = Budget(left, ~everywhere)
    path, walked = [tree.tokens[:, 0]], []
    for depth in range(levels):
        raw, children = verified.raw[rows, node], parents == node[:, None]
        warped, noise = verified.warp(raw, node, path, going), verified.noise(depth)
        exact = first_largest(warped if noise is None else warped + noise)
        token, decided, weights = exact, everywhere, Weights()
        if not lossless:
            level_logits = verified.draft_logits[depth] if depth < len(verified.draft_logits) else None
            nodes = Nodes(raw, warped, noise, exact, tree.tokens, children, tree.by_drafter, tree.scores, level_logits,
                          tree.draft_rows[rows, node], verified.draft_tokens, threshold, budget.left, going,
                          verified.errors)
            weights = rule.weigh(nodes)
            drawn = weights.draw(nodes)
            if within is not None:
                decided = decided & within.inside_marks
            if budget.left is not None:
                regret = (raw.amax(-1) - raw.gather(1, drawn[:, None])[:, 0]).double()
                budget = budget.after(decided & (drawn != exact), regret)
                decided = decided & ~budget.closed
            token = torch.where(decided, drawn, exact)
            if within is not None:
                within = within.after(token)
        divergence = unknown if weights.divergence is None else weights.divergence.double()
        logit = None if warped is raw else warped.gather(1, token[:, None])[:, 0]
        walked.append(Level(node, token, exact, logit, divergence, budget.closed, going))
        child = children & (tree.tokens == token[:, None])  # at most one: siblings differ in their token
        going = going & child.any(-1)
        if weights.stop is not None:
            going = going & ~(weights.stop & decided)
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
    logits: Tensor,  # [B, N, V]
) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of `Step`: node, token, is_exact, closed and whether the path has this step, [B, P, 5] long;
    divergence, logprob, regret and logit, [B, P, 4] float64; and the target's log-probabilities [B, P, V]."""
    token, rows = walked.token, torch.arange(len(logits), device=logits.device)[:, None]
    raw = logits[rows, walked.node]  # [B, P, V]
    logprobs, own = raw.log_softmax(-1), raw.gather(-1, token[..., None])[..., 0]
    regret, logprob = raw.amax(-1) - own, logprobs.gather(-1, token[..., None])[..., 0]
    logit = own if walked.logit is None else walked.logit
    integers = torch.stack([walked.node, token, token == walked.exact, walked.closed, walked.going], -1)
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
