"""Ensemble verification."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..drafting.coupling import NOISE_WEIGHT
from .nodes import Nodes, TokenWeights, Weights
from .rule import Rule


@dataclass(frozen=True)
class Ensemble(Rule):
    """Draw from w p + (1 - w) q instead of the target's p, wherever the draft model predicted q (arXiv 2604.07622).

    p and q are the distributions after the same processors. The token is drawn from the whole vocabulary, and the walk
    descends if it is a child, so that the law is exactly the mixture on every tree. Where the draft model predicted
    nothing (below copies, or below the last level of a tree), it is p. Greedy decoding takes the best token of the
    mixture at temperature 1, as `assistant_ensemble_weight` = w of `model.generate` does.

    Args:
        threshold: 1 - w in [0, 1], the share of the draft model; 0 is lossless.
    """

    name: ClassVar[str] = "ensemble"
    noise_weight: ClassVar[float] = NOISE_WEIGHT
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, True)
    mixes_draft: ClassVar[bool] = True

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def weigh(self, nodes: Nodes) -> Weights | TokenWeights:
        if nodes.warped_draft is None:
            return Weights()
        share = nodes.threshold.float()[:, None]
        mixed = nodes.warped.softmax(-1).lerp(nodes.warped_draft.softmax(-1), share).log_()  # w p + (1 - w) q
        predicted = (share > 0) & (nodes.warped_draft.amax(-1, keepdim=True) > -torch.inf)
        return TokenWeights(torch.where(predicted, mixed, nodes.warped))
