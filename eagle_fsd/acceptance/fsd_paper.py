"""Fuzzy speculative decoding as published for chains, for comparison."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .fsd import FSD
from .nodes import Nodes, Weights
from .rule import only


@dataclass(frozen=True)
class FSDPaper(FSD):
    """Accept the draft's first child iff the divergence is at most T, else draw from the target and stop.

    This is the rule of arXiv 2502.20704 with the first child as the drafted token. A token drawn from the target ends
    the cycle even if it was drafted too, so at threshold 0 almost nothing is accepted.

    Args:
        threshold, divergence: see `FSD`. head_guard: none by default.
    """

    name: ClassVar[str] = "fsd_paper"
    noise_weight: ClassVar[float] = 1.0  # the first child is a sample of the draft, as in the paper

    head_guard: float | None = field(default=None, kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def weigh(self, nodes: Nodes) -> Weights:
        passes, divergence = self.gate(nodes)
        scores = nodes.scores.masked_fill(~nodes.children, -math.inf)
        columns = torch.arange(scores.shape[1], device=scores.device)
        first = nodes.children & (columns == scores.argmax(-1, keepdim=True))  # a single one even if scores tie
        accepted = first & passes & (self.candidates(nodes) | nodes.is_exact)
        return only(nodes, accepted, divergence)._replace(stop=~accepted.any(-1))
