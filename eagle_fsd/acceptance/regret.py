"""Acceptance within a budget of regret."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import require_integer
from .rule import GatingRule, preferred
from .verification import Verification


@dataclass(frozen=True)
class Regret(GatingRule):
    """Allow fuzzy steps while what they give up, summed over the answer, stays within a budget for its length.

    A step's regret is r = max z - z(x), by how much the raw logit of its token is below the target's best. A fuzzy step
    to the answer's n-th token passes iff the sum of r over its fuzzy tokens so far, this one included, is at most
    T * ceil(n / 100), and the cycle has taken less than m fuzzy steps before it. It goes to the child that the target
    prefers, whatever the dial; exact steps cost nothing. The additive budget of ASD (arXiv 2608.03447), which has one
    sum for the whole answer, m = 2, and a bound on each step that falls with its place in the draft besides.

    Args:
        threshold: T >= 0, logits per 100 tokens; 0 is lossless: not even ties pass.
        most: m >= 1, fuzzy steps in a cycle.
    """

    name: ClassVar[str] = "regret"
    reads_draft: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True  # not ahead but back: a node alone has no path
    knows_kl: ClassVar[bool] = False  # which steps above are fuzzy depends on the noise
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)
    threshold_scale: ClassVar[float] = 50.0

    most: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("most", self.most, 1)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        steps = verification.of_step(verification.target_logits)
        regret = (verification.of_parent(verification.target_logits.amax(-1)) - steps).double()
        fuzzy = verification.is_child & ~verification.is_exact
        spent = verification.path_sum(torch.where(fuzzy, regret, 0.0))
        taken = verification.path_sum(fuzzy.double())
        before = 1  # tokens of the answer up to the root
        if verification.said is not None:
            spent, before = spent + verification.regret[:, None], verification.said[:, None]
        hundreds = (before + verification.tree.depths + 99) // 100
        best = preferred(verification, self.candidates(verification), verification.of_step(verification.noisy_logits))
        return best & (spent <= self.threshold * hundreds) & (taken <= self.most)
