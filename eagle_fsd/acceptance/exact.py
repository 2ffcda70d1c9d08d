"""Lossless acceptance."""

from dataclasses import dataclass
from typing import ClassVar

from ..drafting.noise import NOISE_WEIGHT
from .nodes import Nodes, Weights
from .rule import Rule


@dataclass(frozen=True)
class Exact(Rule):
    """Draw from the target and descend while the drawn token is a child.

    The output has the same distribution as under a test of the children one by one, each with its target probability
    renormalised over the remaining tokens (SpecInfer, arXiv 2305.09781; EAGLE-2, arXiv 2406.16858, for children that
    are not sampled). No lossless rule accepts more on a tree that is independent of the noise; a tree drafted with the
    noise (`drafting.noise`) gets more tokens accepted, with the same distribution.
    """

    name: ClassVar[str] = "exact"
    noise_weight: ClassVar[float] = NOISE_WEIGHT
    threshold_limit: ClassVar[tuple[float, bool]] = (0.0, True)

    def is_lossless(self, greedy: bool) -> bool:
        return True

    def weigh(self, nodes: Nodes) -> Weights:
        return Weights(nodes.child_logits)
