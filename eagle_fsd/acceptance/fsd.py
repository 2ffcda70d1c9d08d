"""Fuzzy speculative decoding on trees."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .divergence import get_divergence
from .nodes import Nodes
from .rule import GatingRule


@dataclass(frozen=True)
class FSD(GatingRule):
    """Accept a child where the draft's next-token distribution is close to the target's (arXiv 2502.20704).

    The divergence is a property of the parent, so all siblings pass or fail together, and the target chooses among
    them. Unlike the paper's chain rule (`fsd_paper`), a node that fails keeps its exact step: threshold 0 is lossless.

    Args:
        threshold: largest divergence at which a fuzzy step is allowed, in nats (tv: in [0, 1]); inf allows all.
        divergence: a name that `eagle_fsd.acceptance.divergence.get_divergence` accepts.
        head_guard: see `FuzzyRule`.
    """

    name: ClassVar[str] = "fsd"
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)

    divergence: str = field(default="js", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        get_divergence(self.divergence)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def gate(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        divergence = nodes.divergence(self.divergence)
        return (divergence <= nodes.threshold.float())[:, None], divergence  # Div(target, draft) <= T
