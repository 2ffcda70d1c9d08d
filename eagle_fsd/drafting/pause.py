"""Which tree the next cycle drafts, if any: by the number of requests, and not where drafting does not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .config import Choice, TreeConfig
from .tree import DraftTree

SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles that decide about a pause


class Pause:
    """Stops drafting for a while where it does not pay, and tries again: ever more rarely, as long as it fails.

    Requests may share one, so that each begins with what the last one learned.
    """

    def __init__(self) -> None:
        self.gain = 1.0  # running mean of what a drafted cycle emits beyond its cost
        self.left, self.length = 0, SHORTEST_PAUSE // 2

    def begin(self) -> None:
        """A new request: try at once, and not too rarely. No success is trusted for long."""
        self.left, self.length, self.gain = 0, min(self.length, LONGEST_PAUSE // 2), min(self.gain, 1.0)

    def drafts(self) -> bool:
        """Whether the next cycle drafts."""
        self.left -= 1
        return self.left < 0

    def learn(self, gain: float) -> None:
        """Take note of a drafted cycle: tokens emitted, less its cost in cycles without drafting."""
        self.gain += (gain - self.gain) / MEMORY
        if gain > 0:
            self.length = max(self.length // 2, SHORTEST_PAUSE // 2)
        elif self.gain < 0:
            self.left = self.length = min(2 * self.length, LONGEST_PAUSE)


class Drafting:
    """The policy of one batch.

    Args:
        choose: tree and cost for so many requests; fewer are left as others end.
        requests: how many there are at the beginning.
        pause: of earlier requests; None: one of its own.
    """

    def __init__(self, choose: Callable[[int], Choice], requests: int, pause: Pause | None = None) -> None:
        self.choose, self.choice = choose, choose(requests)
        self.possible = [self.choice.tree, *(choose(count).tree for count in range(1, requests))]
        self.pause = pause or Pause()
        self.pause.begin()

    def next(self) -> TreeConfig | None:
        """The tree of the next cycle; None: it emits one token without drafting."""
        if self.choice.tree is None or self.choice.cost is not None and not self.pause.drafts():
            return None
        return self.choice.tree

    def learn(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Take note of what a drafted cycle emitted for each request."""
        if self.choice.cost is not None:
            cost = self.choice.cost(tree.tokens.shape[1], max(1, tree.max_depth))
            self.pause.learn(sum(emitted) / len(emitted) - cost)

    def keep(self, requests: int) -> None:
        """So many requests there are now."""
        self.choice = self.choose(requests)
