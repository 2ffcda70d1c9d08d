"""Typical acceptance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .nodes import Nodes
from .rule import GatingRule

EPSILON = 0.09  # Medusa's `posterior_threshold`
DELTA = 0.3  # Medusa's `posterior_alpha`, sqrt(EPSILON)


@dataclass(frozen=True)
class Typical(GatingRule):
    """Accept a child whose target probability exceeds a bar that falls with entropy (Medusa, arXiv 2401.10774).

    Args:
        threshold: T in [0, 1), which multiplies the bar by 1 - T; 0 is Medusa's bar. No threshold is lossless.
        head_guard: see `FuzzyRule`.
    """

    name: ClassVar[str] = "typical"
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, False)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def gate(self, nodes: Nodes) -> tuple[Tensor, None]:
        log_probs = nodes.raw.log_softmax(-1)
        entropy = -(nodes.raw.softmax(-1) * log_probs).nan_to_num(nan=0.0).sum(-1)  # 0 * log 0 = 0
        lowered = torch.log1p(-nodes.threshold).float()
        log_bar = (math.log(DELTA) - entropy).clamp_max(math.log(EPSILON)) + lowered
        # p, the target: p(x) > (1 - T) * min(epsilon, delta * exp(-H(p)))
        return log_probs.gather(1, nodes.tokens) > log_bar[:, None], None
