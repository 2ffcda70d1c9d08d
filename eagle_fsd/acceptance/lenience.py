"""Lenient acceptance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .decision import Decision
from .rule import FuzzyRule, cycle_kl
from .verification import ChildWeights, Verification


@dataclass(frozen=True)
class Lenience(FuzzyRule):
    """Lift the probability P that the target draws a child to min(1, P / l), with T = -ln l.

    The lenience l of Leviathan et al. 2023 (arXiv 2211.17192, appendix), which multiplies the draft's
    probability in the accept test, where the draft's probability is 1 because children are picked, not
    sampled. SGLang's threshold on accumulated probability lifts the same mass. Within the children and within
    the other tokens the odds stay the target's. Under a head guard P counts only children inside it. Greedy
    decoding is exact.

    Args:
        threshold: T = -ln l >= 0; 0 is lossless.
    """

    name: ClassVar[str] = "lenience"
    threshold_scale: ClassVar[float] = 3.0
    reads_draft: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = False

    @property
    def knows_kl(self) -> bool:
        return self.head_guard is None

    def is_lossless(self, greedy: bool) -> bool:
        return greedy or self.threshold == 0

    def decide(self, verification: Verification) -> Decision:
        lifted = self.candidates(verification)
        steps = verification.step_logits
        inside = verification.log_sum_of_children(torch.where(lifted, steps, -math.inf).double())  # [B, M]
        others = verification.set_children(verification.warped_logits, torch.where(lifted, -math.inf, steps))
        outside = others.logsumexp(-1).double()

        # P -> min(1, P / l) multiplies the odds P / (1 - P) by exp(handicap), where
        # handicap = T - log(1 - min(1, P / (1 - P) * (exp(T) - 1))), infinite from P = l on.
        log_expm1 = self.threshold + math.log(-math.expm1(-self.threshold))
        excess = (inside - outside + log_expm1).exp().clamp_max(1.0)
        handicap = self.threshold - torch.log1p(-excess)
        handicap = torch.where(inside > -math.inf, handicap, 0.0)

        kept = lifted | verification.is_exact
        handicapped = steps - verification.of_parent(handicap).float()
        weights = ChildWeights(verification, torch.where(kept, steps, handicapped), -handicap.float())
        if not self.knows_kl:  # an exact step outside the guard is not handicapped: the noise decides
            return Decision(weights)

        def kl() -> Tensor:
            """Of masses P and 1 - P the second is multiplied by exp(-handicap); z is what is left of their sum."""
            log_p, log_rest = (mass - torch.logaddexp(inside, outside) for mass in (inside, outside))
            z = torch.logaddexp(log_p, log_rest - handicap)  # log
            lowered = (log_rest - handicap - z).exp()
            node_kl = -z - torch.where(lowered > 0, lowered * handicap, 0.0)
            return cycle_kl(verification, verification.step_log_probs - verification.of_parent(z), node_kl)

        return Decision(weights, kl=kl)
