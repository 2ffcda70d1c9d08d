"""Lenient acceptance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .nodes import Nodes, Weights
from .rule import FuzzyRule


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

    def is_lossless(self, greedy: bool) -> bool:
        return greedy or self.threshold == 0

    def weigh(self, nodes: Nodes) -> Weights:
        lifted, steps, threshold = self.candidates(nodes), nodes.steps, nodes.threshold
        inside = steps.masked_fill(~lifted, -math.inf).double().logsumexp(-1)
        # Columns may name one token twice, as children of different nodes: the lifted one counts.
        taken = torch.zeros_like(nodes.warped).scatter_reduce_(1, nodes.tokens, lifted.float(), "amax") > 0
        outside = nodes.warped.masked_fill(taken, -math.inf).logsumexp(-1).double()

        # P -> min(1, P / l) multiplies the odds P / (1 - P) by exp(handicap), where
        # handicap = T - log(1 - min(1, P / (1 - P) * (exp(T) - 1))), infinite from P = l on.
        log_expm1 = threshold + (-torch.expm1(-threshold)).log()
        excess = (inside - outside + log_expm1).exp().clamp_max(1.0)
        handicap = threshold - torch.log1p(-excess)
        handicap = torch.where(inside > -math.inf, handicap, 0.0).float()

        kept = lifted | nodes.is_exact
        return Weights(torch.where(kept, steps, steps - handicap[:, None]), -handicap)
