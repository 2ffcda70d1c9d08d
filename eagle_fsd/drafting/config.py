"""The size and shape of draft trees: small frozen dataclasses, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..utils.checks import require_integer, require_number


@dataclass(frozen=True)
class TreeConfig:
    """Size and shape limits of the draft tree (EAGLE-2, arXiv 2406.16858, section 4).

    Args:
        total_tokens: nodes verified per cycle, the root and copies included (2 to 4096), as in the published code.
        depth: levels below the root (1 to 256). The published code does not count the
            first forward: its 7 is 8 here.
        top_k: children scored per expanded node, and nodes expanded per level (1 to 256).
        draft_temperature: divides the draft's logits before the log-softmax that ranks nodes; 1 is the published
            behaviour. Values below 1 make the tree deeper and narrower, which pays when decoding is greedy.

    Raises:
        TypeError, ValueError: a value of the wrong type or range.
    """

    total_tokens: int = 60
    depth: int = 8
    top_k: int = 10
    draft_temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, least, most in (("total_tokens", 2, 4096), ("depth", 1, 256), ("top_k", 1, 256)):
            # Larger values are of no use, and memory would run out in the middle of an answer.
            require_integer(f"TreeConfig.{name}", getattr(self, name), least, most)
        require_number("TreeConfig.draft_temperature", self.draft_temperature, "a positive number",
                       lambda value: 0 < value < math.inf)

    @property
    def scored_nodes(self) -> int:
        """Nodes that the draft scores: the root, K at the first level, K * K at each further one."""
        return 1 + self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def nodes(self) -> int:
        """Nodes verified per cycle without copies: `total_tokens`, or fewer where fewer can be scored."""
        return min(self.total_tokens, self.scored_nodes)

    @property
    def wide(self) -> int:
        """Nodes of the drafter with which copies compete."""
        return min(max(self.total_tokens, MOST_NODES), self.scored_nodes)

    @property
    def path(self) -> int:
        """Draft tokens on the longest path."""
        return min(self.depth, self.nodes - 1)

    @property
    def room(self) -> tuple[int, int]:
        """Positions that a cycle takes besides the text, at most: the nodes in both caches, and the levels' expanded
        ones in the drafter's."""
        return self.total_tokens, self.depth * self.top_k


MOST_NODES = 64  # of a tree with copies, unless its `TreeConfig` has more, and of one whose size is chosen
# The defaults: on a GPU, where 60 nodes cost hardly more than one, the published tree; on a CPU a small one.
GPU_TREE = TreeConfig(60, 8, 10)
CPU_TREE = TreeConfig(16, 6, 3, draft_temperature=0.5)


def parse_tree(text: str) -> TreeConfig:
    """Parse "total_tokens,depth,top_k[,draft_temperature]" into a `TreeConfig`."""
    parts = text.split(",")
    try:
        if not 3 <= len(parts) <= 4:
            raise ValueError(f"got {len(parts)} number{'s' * (len(parts) > 1)}")
        return TreeConfig(*map(int, parts[:3]), *map(float, parts[3:]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a tree must be total_tokens,depth,top_k[,draft_temperature], such as 16,5,4, got {text!r} "
                         f"({error})") from error
