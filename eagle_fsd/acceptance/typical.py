"""Typical acceptance."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..checks import check_choice
from .rule import GatingRule
from .verification import Verification

EPSILON = 0.09  # Medusa's posterior threshold
DELTA = 0.3  # and posterior alpha, sqrt(EPSILON)


@dataclass(frozen=True)
class Typical(GatingRule):
    """Allow a child whose target probability clears a bar that falls with entropy (Medusa, 2401.10774).

    Args:
        threshold: T in [0, 1), lowers the bar by the factor 1 - T; 0 is Medusa's bar. There is no lossless
            end.
        sibling: among allowed children the one the "target" prefers, or the "longest" path, see `restrict`.
    """

    name: ClassVar[str] = "typical"
    reads_draft: ClassVar[bool] = False
    gate_default: ClassVar[float] = 0.0
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, False)
    siblings: ClassVar[tuple[str, ...]] = ("target", "longest")

    sibling: str = field(default="target", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sibling", self.sibling, self.siblings)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def passes(self, verification: Verification) -> Tensor:
        log_probs = verification.target_logits.log_softmax(-1)
        probs = verification.target_logits.softmax(-1)
        entropy = -(probs * log_probs).nan_to_num(nan=0.0).sum(-1)  # 0 * log 0 = 0
        log_bar = (math.log(DELTA) - entropy).clamp_max(math.log(EPSILON)) + math.log1p(-self.threshold)
        # p(x) > (1 - T) * min(epsilon, delta * exp(-H(p)))
        return verification.of_step(log_probs) > verification.of_parent(log_bar)
