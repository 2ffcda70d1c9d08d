"""Configuration: small frozen dataclasses, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TreeConfig:
    """Size and shape limits of the draft tree (EAGLE-2, arXiv 2406.16858, section 4).

    Args:
        total_tokens: nodes verified per cycle, the root included (>= 2), as in the published code.
        depth: levels below the root (>= 1). The published code counts forwards after the first: its d is our d + 1.
        top_k: children scored per expanded node, and nodes expanded per level (>= 1).
        draft_temperature: the draft's logits are divided by it before the log-softmax that ranks nodes; 1 is the
            published behaviour. Below 1 the tree becomes deeper and narrower, which pays when decoding is greedy.

    Raises:
        TypeError, ValueError: a value of the wrong type or range.
    """

    total_tokens: int = 60
    depth: int = 8
    top_k: int = 10
    draft_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("total_tokens", 2), ("depth", 1), ("top_k", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"TreeConfig.{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"TreeConfig.{name} must be at least {least}, got {value}")
        if not (isinstance(self.draft_temperature, (int, float)) and 0 < self.draft_temperature < math.inf):
            raise ValueError(f"TreeConfig.draft_temperature must be a positive number, got {self.draft_temperature!r}")

    @property
    def scored_nodes(self) -> int:
        """Nodes below the root that the draft scores: K at the first level, K * K at each further one."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def nodes(self) -> int:
        """Nodes verified per cycle: `total_tokens`, or fewer where fewer can be scored."""
        return min(self.total_tokens, self.scored_nodes + 1)


# Without `tree=`: the published tree where verifying 60 nodes costs hardly more than one, a small one on a CPU.
GPU_TREE = TreeConfig(60, 8, 10)
CPU_TREE = TreeConfig(16, 6, 3, draft_temperature=0.5)
