"""Fuzzy speculative decoding as published for chains, kept for comparison."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .decision import Decision
from .divergence import get_divergence
from .rule import FuzzyRule, cycle_kl
from .verification import Verification


@dataclass(frozen=True)
class FSDPaper(FuzzyRule):
    """Accept the draft's first child iff the divergence is at most T, else draw from the target and stop.

    That is the rule of arXiv 2502.20704 with the first child in the place of the drafted token. A token drawn
    from the target ends the cycle even if it was drafted too, so at threshold 0 almost nothing is accepted.

    Args:
        threshold: largest divergence at which the draft's token is accepted; inf always accepts.
        divergence: a name `eagle_fsd.acceptance.divergence.get_divergence` knows.
    """

    name: ClassVar[str] = "fsd_paper"
    looks_ahead: ClassVar[bool] = False
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)

    divergence: str = field(default="js", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        get_divergence(self.divergence)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def decide(self, verification: Verification) -> Decision:
        divergence = verification.divergence(self.divergence)
        passes = divergence <= self.threshold  # Div(target, draft) <= T, at the parent
        scores = torch.where(verification.is_child, verification.tree.scores, -math.inf)
        first = scores == verification.of_parent(verification.best_child(scores))
        allowed = self.candidates(verification) | verification.is_exact
        drafted = first & verification.of_parent(passes)
        accepted = drafted & allowed
        fuzzy = drafted & self.candidates(verification)

        def kl() -> Tensor:
            """At an accepted node its token is certain, where the target draws it with probability p: -log p."""
            chosen = verification.any_child(fuzzy)
            steps = verification.step_log_probs
            node_kl = -verification.sum_of_children(torch.where(fuzzy, steps, 0.0))
            law = torch.where(fuzzy, 0.0, torch.where(verification.of_parent(chosen), -math.inf, steps))
            return cycle_kl(verification, law, node_kl, drafted)

        return Decision(
            verification.only_children(accepted), divergence, None if verification.greedy else kl,
            stop=~verification.any_child(accepted),
        )
