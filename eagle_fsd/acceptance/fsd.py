"""Fuzzy speculative decoding on trees."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..checks import check_choice
from .divergence import get_divergence
from .rule import GatingRule
from .verification import Verification


@dataclass(frozen=True)
class FSD(GatingRule):
    """Descend wherever the draft's next-token distribution is close to the target's (arXiv 2502.20704).

    The divergence belongs to the parent, so all siblings pass or fail together; `sibling` chooses among them.
    Unlike the paper's chain rule (`fsd_paper`) a node that fails keeps its exact step, so threshold 0 is
    lossless.

    Args:
        threshold: largest divergence at which a fuzzy step may be taken, in nats (tv: in [0, 1]); inf always
            descends.
        divergence: a name `eagle_fsd.acceptance.divergence.get_divergence` knows.
        sibling: "target", "draft" or "longest", see `restrict`.
    """

    name: ClassVar[str] = "fsd"
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)
    siblings: ClassVar[tuple[str, ...]] = ("target", "draft", "longest")

    divergence: str = field(default="js", kw_only=True)
    sibling: str = field(default="target", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        get_divergence(self.divergence)
        check_choice("sibling", self.sibling, self.siblings)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        return verification.of_parent(self.measured(verification) <= self.threshold)  # Div(target, draft) <= T

    def measured(self, verification: Verification) -> Tensor:
        return verification.divergence(self.divergence)
