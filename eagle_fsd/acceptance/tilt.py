"""Exponential tilting towards longer accepted paths."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_interval
from .nodes import Nodes, Weights
from .rule import Ahead, FuzzyRule, only

NO_MASS = -1e6  # stands for log 0, so that differences of path sums stay defined; exp of it is 0


@dataclass(frozen=True)
class Tilt(FuzzyRule):
    """Reweight the tokens a cycle emits by exp(T * accepted length).

    Sampling. With target probabilities p and reward r(x) = 1 for every child of the draft head, define bottom-up

        V(leaf) = 0,   V(v) = log(1 + sum over children x of p(x | v) (exp(T r(x) + V(x)) - 1)),
        log-weight of a child x = log p(x | v) + T r(x) + V(x),   of any other token = log p.

    The emitted segment then has law p(segment) exp(T * length) / exp(V(root)): of all laws on this tree with
    its expected length, the one with the smallest KL to the target (Gibbs variational principle). That KL is
    T * E[length] - V(root) per cycle. The draft's probabilities play no part.

    From the first step on that is outside the head guard or not the draft head's, r(x) = 0. So the law is tilted by
    the length of the leading run, and a child outside it never weighs more than its target probability.

    Greedy. A step costs its regret rho(x) = log max p - log p(x), of which at most `max_regret` may be given
    up at a time; the path of the largest sum of 1 - rho(x) / T is taken, the exact step having rho = 0.

    Args:
        threshold: T in [0, 1000], nats per accepted token; 0 is lossless, at 20 hardly a child is refused,
            and far larger values would swamp the target's log-probabilities in float32.
        max_regret: largest rho of a greedy step, in nats.
    """

    name: ClassVar[str] = "tilt"
    threshold_limit: ClassVar[tuple[float, bool]] = (1000.0, True)
    threshold_scale: ClassVar[float] = 4.0

    max_regret: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("max_regret", self.max_regret, math.inf, True)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def weigh(self, nodes: Nodes) -> Weights:
        if nodes.greedy:
            return only(nodes, nodes.children & (nodes.ahead > 0))
        return Weights(nodes.steps + nodes.ahead)

    def look_ahead(self, ahead: Ahead) -> Tensor:
        """[B, N]: of each child T r(x) + V(x); greedy: 1 where it opens its parent's best path, else 0."""
        return self._best_paths(ahead).float() if ahead.greedy else self._lifts(ahead).float()

    def _lifts(self, ahead: Ahead) -> Tensor:
        tree, threshold = ahead.tree, ahead.threshold
        is_child = tree.depths > 0
        rewards = (is_child & _on_path(tree, ahead.eligible)).double()
        totals = _path_sum(tree, ahead.log_probs.clamp_min(NO_MASS) + threshold * rewards)

        # The recursion for V, unrolled: exp V(v) - 1 = sum over nodes u below v of
        #   p(v -> u) * (exp(T * rewards from v to u) - exp(T * rewards from v to u's parent)).
        gains = torch.where(rewards > 0, totals + (-torch.expm1(-threshold)).log(), -math.inf)  # [B, N (u)]
        below = tree.ancestors & (tree.depths[:, :, None] > tree.depths[:, None, :])  # u strictly below v
        log_excess = torch.where(below, gains[:, :, None], -math.inf).logsumexp(1) - totals  # [B, N (v)]
        return threshold * rewards + torch.logaddexp(log_excess, torch.zeros_like(log_excess))  # V = log(1 + excess)

    def _best_paths(self, ahead: Ahead) -> Tensor:
        """[B, N] bool: the children that open their parent's best downward path, where its gain is positive."""
        tree = ahead.tree
        is_child = tree.depths > 0
        regret = (ahead.best - ahead.steps).double()
        allowed = is_child & ahead.eligible & (ahead.steps > -math.inf) & (regret <= self.max_regret)
        # best(v) = max(0, max over x with rho(x) <= m of 1 - rho(x) / T + best(x)); what lies below a step that must
        # never be taken cannot make up for it.
        gains = torch.where(allowed, 1.0 - regret / ahead.threshold, -(tree.max_depth + 1.0))
        totals = _path_sum(tree, torch.where(ahead.exact & is_child, 1.0, gains))
        below = torch.where(tree.ancestors, totals[:, :, None], -math.inf).amax(1)  # [B, N], the best path's end
        best = torch.full_like(below, -math.inf).scatter_reduce_(1, tree.parents[:, 1:], below[:, 1:], "amax")
        opens = is_child & (below == best.gather(1, tree.parents))
        return opens & (below > totals.gather(1, tree.parents))


def _path_sum(tree, steps: Tensor) -> Tensor:
    """[B, N]: the sum over the steps from the root to each node."""
    steps = torch.where(tree.depths > 0, steps, 0.0)
    return torch.where(tree.ancestors, steps[:, None, :], 0).sum(-1)


def _on_path(tree, steps: Tensor) -> Tensor:
    """[B, N] bool: whether every step from the root to each node has it."""
    return (steps[:, None, :] | ~tree.ancestors | (tree.depths == 0)[:, None, :]).all(-1)
