"""Lenient acceptance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .decision import Decision
from .rule import FuzzyRule, cycle_kl
from .verification import Verification


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
    reads_draft: ClassVar[bool] = False

    @property
    def knows_kl(self) -> bool:
        return self.head_guard is None

    def is_lossless(self, greedy: bool) -> bool:
        return greedy or self.threshold == 0

    def decide(self, verification: Verification) -> Decision:
        lifted = self.candidates(verification)
        steps = verification.step_logits
        nothing = torch.full_like(verification.warped_logits, -math.inf)
        inside = verification.set_children(nothing, torch.where(lifted, steps, -math.inf))
        outside = verification.set_children(verification.warped_logits, torch.where(lifted, -math.inf, steps))
        log_inside, log_outside = inside.logsumexp(-1).double(), outside.logsumexp(-1).double()  # [B, N]

        # P -> min(1, P / l) multiplies the odds P / (1 - P) by exp(handicap), where
        # handicap = T - log(1 - min(1, P / (1 - P) * (exp(T) - 1))), infinite from P = l on.
        log_expm1 = self.threshold + math.log(-math.expm1(-self.threshold))
        excess = (log_inside - log_outside + log_expm1).exp().clamp_max(1.0)
        handicap = self.threshold - torch.log1p(-excess)
        handicap = torch.where(log_inside > -math.inf, handicap, 0.0).float()

        log_weights = verification.warped_logits - handicap[..., None]
        kept = lifted | verification.is_exact
        handicapped = steps - verification.of_parent(handicap)
        decided = verification.set_children(log_weights, torch.where(kept, steps, handicapped))
        if not self.knows_kl:  # an exact step outside the guard is not handicapped: the noise decides
            return Decision(decided)
        return Decision(decided, kl=lambda: cycle_kl(verification, decided.log_softmax(-1)))
