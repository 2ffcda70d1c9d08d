"""Lenient acceptance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .nodes import Nodes, Weights
from .rule import FuzzyRule


@dataclass(frozen=True)
class Lenience(FuzzyRule):
    """Raise the probability P that the target draws a child to min(1, P / l), with T = -ln l.

    This is the lenience l of Leviathan et al. 2023 (arXiv 2211.17192, appendix). It multiplies the draft's probability
    in the acceptance test, which is 1 here because children are not sampled. SGLang's threshold on accumulated
    probability raises the same mass. The target's odds among the children, and among the other tokens, do not change.
    With a head guard, P sums only over the children inside it. Greedy decoding is exact.

    Args:
        threshold: T = -ln l >= 0; 0 is lossless.
    """

    name: ClassVar[str] = "lenience"

    def is_lossless(self, greedy: bool) -> bool:
        return greedy or self.threshold == 0

    def weigh(self, nodes: Nodes) -> Weights:
        lifted, logits, threshold = self.candidates(nodes), nodes.child_logits, nodes.threshold
        inside = logits.masked_fill(~lifted, -math.inf).double().logsumexp(-1)
        # A token may have several columns, as a child of different nodes: it is lifted if one of them is.
        named = torch.zeros_like(nodes.warped).scatter_reduce_(1, nodes.tokens, lifted.float(), "amax") > 0
        outside = nodes.warped.masked_fill(named, -math.inf).logsumexp(-1).double()

        # P -> min(1, P / l) multiplies the odds P / (1 - P) by exp(handicap), where
        # handicap = T - log(1 - min(1, P / (1 - P) * (exp(T) - 1))), infinite for P >= l.
        log_expm1 = threshold + (-torch.expm1(-threshold)).log()
        excess = (inside - outside + log_expm1).exp().clamp_max(1.0)
        handicap = threshold - torch.log1p(-excess)
        handicap = torch.where(inside > -math.inf, handicap, 0.0).float()

        kept = lifted | nodes.is_exact
        return Weights(torch.where(kept, logits, logits - handicap[:, None]), -handicap)
