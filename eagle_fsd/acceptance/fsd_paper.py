"""Fuzzy speculative decoding as published for chains, for comparison."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .divergence import get_divergence
from .nodes import Nodes, Weights
from .rule import FuzzyRule, only


@dataclass(frozen=True)
class FSDPaper(FuzzyRule):
    """Accept the draft's first child iff the divergence is at most T, else draw from the target and stop.

    This is the rule of arXiv 2502.20704 with the first child as the drafted token. A token drawn from the target ends
    the cycle even if it was drafted too, so at threshold 0 almost nothing is accepted.

    Args:
        threshold: largest divergence at which the draft's token is accepted; inf always accepts.
        divergence: a name that `eagle_fsd.acceptance.divergence.get_divergence` accepts.
    """

    name: ClassVar[str] = "fsd_paper"
    noise_weight: ClassVar[float] = 1.0  # the first child is a sample of the draft, as in the paper
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)

    divergence: str = field(default="js", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        get_divergence(self.divergence)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def weigh(self, nodes: Nodes) -> Weights:
        divergence = nodes.divergence(self.divergence)
        passes = divergence <= nodes.threshold.float()  # Div(target, draft) <= T
        scores = nodes.scores.masked_fill(~nodes.children, -math.inf)
        columns = torch.arange(scores.shape[1], device=scores.device)
        first = nodes.children & (columns == scores.argmax(-1, keepdim=True))  # a single one even if scores tie
        accepted = first & passes[:, None] & (self.candidates(nodes) | nodes.is_exact)
        return only(nodes, accepted, divergence)._replace(stop=~accepted.any(-1))
