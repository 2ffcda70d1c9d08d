"""What the next cycle drafts, if anything: by the number of requests, by what the text offers, and by what pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .config import Choice, TreeConfig
from .text import MOST_NODES, NODES, Copies
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


class Plan(NamedTuple):
    """Of one cycle."""

    tree: TreeConfig | None  # that the head drafts; None: it is not asked
    count: Callable[[list[list[float]]], int]  # nodes to verify where there are copies, see `join_drafts`


class Drafting:
    """The policy of one batch.

    Args:
        choose: tree and cost for so many requests; fewer are left as others end.
        head: whether there is one; without it a tree only says how many copies are verified.
        requests: how many there are at the beginning.
        pause: of earlier requests; None: one of its own.
    """

    def __init__(
        self, choose: Callable[[int], Choice], requests: int, pause: Pause | None = None, *, head: bool = True
    ) -> None:
        self.choose, self.choice, self.head = choose, choose(requests), head
        self.possible = [self.choice.tree, *(choose(count).tree for count in range(1, requests))]
        self.pause = pause or Pause()
        self.pause.begin()
        self.head_gain = 1.0  # running mean of the tokens that the head's drafts add to a cycle without copies
        self._costs: dict[int, list[float]] = {}  # by levels, of 1 to `MOST_NODES` nodes

    @property
    def asks_head(self) -> bool:
        """Whether the head may be asked."""
        return self.head and self.choice.tree is not None

    def next(self, copies: Sequence[Copies | None] = ()) -> Plan:
        """What the next cycle drafts beside these copies."""
        tree, known = self.choice.tree if self.head else None, self.choice.cost is not None
        if tree is not None and known and not self.pause.drafts():
            tree = None
        if tree is not None and known and any(copies) and not self._head_pays(tree, copies):
            tree = None
        levels = 0 if tree is None else tree.depth
        return Plan(tree, lambda scores: self._paying(scores, levels) if known else self._allowed(scores))

    def _head_pays(self, tree: TreeConfig, copies: Sequence[Copies | None]) -> bool:
        """Whether a cycle emits more tokens a second with the head's drafts beside the copies than without.

        What the head adds counts where the first copied token is refused.
        """
        scores = [sorted([0.0, *(row.scores if row else [])], reverse=True) for row in copies]
        first = [max(math.exp(score) for score, parent in zip(row.scores, row.parents, strict=True) if parent < 0)
                 if row else 0.0 for row in copies]
        added = self.head_gain * (1 - sum(first) / len(first))
        alone = self._rates(scores, self._costs_of(0))
        beside = self._rates(scores, self._costs_of(tree.depth), added)
        return max(beside) > max(alone)

    def _allowed(self, scores: Sequence[Sequence[float]]) -> int:
        """The number of nodes that the given tree allows."""
        given = self.choice.tree or TreeConfig(NODES, 1, 1)
        likely = (sum(math.exp(score) >= given.least_probability for score in row) for row in scores)
        return max(1, min(given.total_tokens, max(likely)))

    def _paying(self, scores: Sequence[Sequence[float]], levels: int) -> int:
        """The number of nodes with the most tokens a second."""
        rates = self._rates(scores, self._costs_of(levels))
        return 1 + rates.index(max(rates))

    @staticmethod
    def _rates(scores: Sequence[Sequence[float]], costs: Sequence[float], added: float = 0.0) -> list[float]:
        """Tokens by cycles without drafting, for each number of nodes: a node counts with its probability."""
        rates, tokens = [], added
        for number in range(min(max(map(len, scores)), len(costs))):
            tokens += sum(math.exp(row[number]) for row in scores if number < len(row)) / len(scores)
            rates.append(tokens / costs[number])
        return rates

    def _costs_of(self, levels: int) -> list[float]:
        if levels not in self._costs:
            self._costs[levels] = [self.choice.cost(nodes, levels) for nodes in range(1, MOST_NODES + 1)]
        return self._costs[levels]

    def learn(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Take note of what a cycle emitted for each request that only the head drafted for."""
        mean = sum(emitted) / len(emitted)
        self.head_gain += (mean - 1 - self.head_gain) / MEMORY
        if self.choice.cost is not None:
            self.pause.learn(mean - self.choice.cost(tree.tokens.shape[1], max(1, tree.max_depth)))

    def keep(self, requests: int) -> None:
        """So many requests there are now."""
        self.choice = self.choose(requests)
        self._costs = {}
