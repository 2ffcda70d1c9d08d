"""Exponential tilting towards longer accepted paths."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_interval
from .decision import Decision
from .rule import FuzzyRule
from .verification import ChildWeights, Verification

NO_MASS = -1e6  # stands for log 0, so that differences of path sums stay defined; exp of it is 0


@dataclass(frozen=True)
class Tilt(FuzzyRule):
    """Reweight the tokens a cycle emits by exp(T * accepted length).

    Sampling. With target probabilities p and reward r(x) = 1 for every child, define bottom-up

        V(leaf) = 0,   V(v) = log(1 + sum over children x of p(x | v) (exp(T r(x) + V(x)) - 1)),
        log-weight of a child x = log p(x | v) + T r(x) + V(x),   of any other token = log p.

    The emitted segment then has law p(segment) exp(T * length) / exp(V(root)): of all laws on this tree with
    its expected length, the one with the smallest KL to the target (Gibbs variational principle). That KL is
    T * E[length] - V(root) per cycle and known before anything is drawn. The draft's probabilities play no
    part.

    A head guard sets r(x) = 0 from the first step outside the head on, so the law is tilted by the length of
    the leading run inside the head, and a child outside it never weighs more than its target probability.

    Greedy. A step costs its regret rho(x) = log max p - log p(x), of which at most `max_regret` may be given
    up at a time; the path of the largest sum of 1 - rho(x) / T is taken, the exact step having rho = 0.

    Args:
        threshold: T in [0, 1000], nats per accepted token; 0 is lossless, at 20 hardly a child is refused,
            and far larger values would swamp the target's log-probabilities in float32.
        max_regret: largest rho of a greedy step, in nats.
    """

    name: ClassVar[str] = "tilt"
    reads_draft: ClassVar[bool] = False
    threshold_limit: ClassVar[tuple[float, bool]] = (1000.0, True)
    threshold_scale: ClassVar[float] = 4.0

    max_regret: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("max_regret", self.max_regret, math.inf, True)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def decide(self, verification: Verification) -> Decision:
        return self._decide_greedily(verification) if verification.greedy else self._tilt(verification)

    def _tilt(self, verification: Verification) -> Decision:
        depths, rewards = verification.tree.depths, self._rewards(verification)
        tilted = verification.step_log_probs.clamp_min(NO_MASS) + self.threshold * rewards
        totals = verification.path_sum(torch.where(verification.is_child, tilted, 0.0))

        # The recursion for V, unrolled: exp V(v) - 1 = sum over nodes u below v of
        #   p(v -> u) * (exp(T * rewards from v to u) - exp(T * rewards from v to u's parent)).
        log_unit = math.log(-math.expm1(-self.threshold))
        gains = torch.where(rewards > 0, totals + log_unit, -math.inf)  # [B, N (u)]
        below = verification.tree.ancestors & (depths[:, :, None] > depths[:, None, :])  # u strictly below v
        log_excess = torch.where(below, gains[:, :, None], -math.inf).logsumexp(1) - totals  # [B, N (v)]
        values = torch.logaddexp(log_excess, torch.zeros_like(log_excess))  # V = log(1 + excess)

        # a node is reached with probability exp(totals + V - V(root)); each rewarded one counts
        root_value = values[:, :1]
        expected_length = (rewards * (totals + values - root_value).exp()).sum(-1)
        kl = (self.threshold * expected_length - root_value[:, 0]).clamp_min(0.0)
        lifted = verification.step_logits + (self.threshold * rewards + values).float()
        nothing = lifted.new_zeros(verification.warped_logits.shape[:2])
        return Decision(ChildWeights(verification, lifted, nothing), kl=lambda: kl.float())

    def _rewards(self, verification: Verification) -> Tensor:
        """[B, N] 1.0 for children on the leading run inside the head, else 0.0."""
        rewarded = verification.is_child
        if self.head_guard is not None:
            rewarded = rewarded & verification.on_whole_path(verification.in_head(self.head_guard))
        return rewarded.double()

    def _decide_greedily(self, verification: Verification) -> Decision:
        best = verification.warped_logits.amax(-1)
        regret = (verification.of_parent(best) - verification.step_logits).double()
        # best(v) = max(0, max over x with rho(x) <= m of 1 - rho(x) / T + best(x))
        allowed = self.candidates(verification) & (regret <= self.max_regret)
        never = -(verification.tree.max_depth + 1.0)
        gains = torch.where(allowed, 1.0 - regret / self.threshold, never)
        gains = torch.where(verification.is_exact, 1.0, gains)
        return Decision(verification.only_children(verification.best_paths(gains)))
