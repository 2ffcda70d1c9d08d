"""The size and shape of draft trees: small frozen dataclasses, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..checks import require_integer, require_number


@dataclass(frozen=True)
class Confidence:
    """How likely a drafted token is to be accepted after an accepted parent, given the draft's probability of it.

    Piecewise linear from log-probability to log-probability, for a parent's best child and for its other children.

    Args:
        knots: draft log-probabilities, ascending (>= 2). first, others: log acceptance probabilities at the knots, not
            descending, at most 0.
    """

    knots: tuple[float, ...]
    first: tuple[float, ...]
    others: tuple[float, ...]


@dataclass(frozen=True)
class TreeConfig:
    """Size and shape limits of the draft tree (EAGLE-2, arXiv 2406.16858, section 4).

    Args:
        total_tokens: nodes verified per cycle, the root included (2 to 4096), as in the published code.
        depth: levels below the root (1 to 256). The published code counts forwards after the first: its d is our d + 1.
        top_k: children scored per expanded node, and nodes expanded per level (1 to 256).
        draft_temperature: the draft's logits are divided by it before the log-softmax that ranks nodes; 1 is the
            published behaviour. Below 1 the tree becomes deeper and narrower, which pays when decoding is greedy.
        confidence: what ranks nodes instead, fitted to what was accepted; None: the draft's log-probability.
        least_reach: no further level is drafted where the acceptance probabilities of the nodes that it would start
            from sum up to less than this; at the first level nothing is drafted then. 0: always to the full depth.
        least_probability: nodes less likely to be accepted are left out. 0: always `total_tokens` nodes.

    Raises:
        TypeError, ValueError: a value of the wrong type or range.
    """

    total_tokens: int = 60
    depth: int = 8
    top_k: int = 10
    draft_temperature: float = 1.0
    confidence: Confidence | None = None
    least_reach: float = 0.0
    least_probability: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (("total_tokens", 2, 4096), ("depth", 1, 256), ("top_k", 1, 256)):
            value = getattr(self, name)
            require_integer(f"TreeConfig.{name}", value, least)
            if value > most:  # beyond any use, and memory would run out in the middle of an answer
                raise ValueError(f"TreeConfig.{name} must be at most {most}, got {value}")
        require_number("TreeConfig.draft_temperature", self.draft_temperature, "a positive number",
                       lambda value: 0 < value < math.inf)
        for name in ("least_reach", "least_probability"):
            require_number(f"TreeConfig.{name}", getattr(self, name), "a number of at least 0",
                           lambda value: 0 <= value < math.inf)
        if not (self.confidence is None or isinstance(self.confidence, Confidence)):
            raise TypeError(f"TreeConfig.confidence must be a Confidence or None, got {self.confidence!r}")

    @property
    def scored_nodes(self) -> int:
        """Nodes below the root that the draft scores: K at the first level, K * K at each further one."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def nodes(self) -> int:
        """Nodes verified per cycle: `total_tokens`, or fewer where fewer can be scored."""
        return min(self.total_tokens, self.scored_nodes + 1)


@dataclass(frozen=True)
class Choice:
    """A chosen tree; None where plain decoding is faster.

    rate: tokens per second expected with it for each sequence. cost: of a cycle with so many nodes and levels, 0 of
    them where the head is not asked, in cycles without drafting; None where nothing is known.
    """

    tree: TreeConfig | None
    rate: float = 0.0
    cost: Callable[[int, int], float] | None = None


# Without `tree=`: the published tree where verifying 60 nodes costs hardly more than one, a small one on a CPU.
GPU_TREE = TreeConfig(60, 8, 10)
CPU_TREE = TreeConfig(16, 6, 3, draft_temperature=0.5)
