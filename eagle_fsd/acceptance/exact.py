"""Lossless acceptance."""

from dataclasses import dataclass
from typing import ClassVar

from ..drafting.coupling import WEIGHT
from .nodes import Nodes, Weights
from .rule import Rule


@dataclass(frozen=True)
class Exact(Rule):
    """Draw from the target and descend while the drawn token is a child.

    The law is that of testing the children one by one, each with its target probability renormalised over
    what is left (SpecInfer, arXiv 2305.09781; EAGLE-2, arXiv 2406.16858, for children picked without
    sampling), and no lossless rule accepts more on a tree that does not know the noise. Where it does, more is
    accepted under the same law (`drafting.coupling`).
    """

    name: ClassVar[str] = "exact"
    noise_weight: ClassVar[float] = WEIGHT
    threshold_limit: ClassVar[tuple[float, bool]] = (0.0, True)

    def is_lossless(self, greedy: bool) -> bool:
        return True

    def weigh(self, nodes: Nodes) -> Weights:
        return Weights(nodes.steps)
