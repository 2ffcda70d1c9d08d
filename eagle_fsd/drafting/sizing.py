"""How much a cycle drafts and verifies: one rule for the head's nodes, copies from the text, and what a grammar forces.

In the long run tokens per second are E[tokens] / E[time]. With lambda the rate that is achieved, a node, a level, the
head are worth their time where the tokens that they are expected to bring exceed lambda times that time (Dinkelbach's
parametric form of a ratio). Times are measured
at load (`Latency`), expected tokens come from `Curves` and from the rates of copies.

Times are counted in cycles without drafting, lambda in tokens of a row in that time. Rows of a batch share one number
of nodes and levels, so tokens are those of the mean row.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from .config import TreeConfig
from .curves import WIDE_TREE, WIDTH, Curves, HeadCurves, LevelWorth
from .latency import Latency
from .text import MOST_NODES, NODES, Copies

WIDER = 4 / 3  # what a level of several nodes may cost, of a level of one
USUAL = 24  # further nodes that the price of one is the mean of
PACE, PACE_WEIGHT = 1.6, 4.0  # lambda before anything was decoded, and the cycles that it counts as
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles that decide about a pause


@dataclass(frozen=True)
class Choice:
    """What so many requests are drafted with.

    Args:
        tree: the head's, or the most that it drafts; None: it is not asked.
        cost: of a cycle with so many nodes and levels, 0 of them where the head is not asked, in cycles without
            drafting; None: not known, and the tree is always drafted whole.
        curves: of the head; None: every level of the tree is drafted.
    """

    tree: TreeConfig | None
    cost: Callable[[int, int], float] | None = None
    curves: Curves | None = None

    @cached_property
    def costs(self) -> list[float]:
        """Of 1, 2, ... nodes, with one level of the head's."""
        assert self.cost is not None
        return [self.cost(nodes, 1) for nodes in range(1, MOST_NODES + 1)]

    @cached_property
    def node(self) -> float:
        """What a further node costs: the mean of usual numbers of nodes, as costs have steps."""
        return (self.costs[USUAL] - self.costs[0]) / USUAL

    @cached_property
    def level(self) -> float:
        """What a further level costs."""
        return self.cost(1, 2) - self.costs[0]

    def levels(self, count: float) -> float:
        """What so many levels cost, at least one."""
        return self.costs[0] - self.cost(1, 0) + (count - 1) * self.level

    def outlook(self, pace: float = 1.0) -> tuple[float, int]:
        """What the levels of a cycle bring on average beyond the price of their nodes, and how many to draft; 0 where
        none is worth its time."""
        if self.curves is None:
            return 1.0, 1
        worth, following = self.curves.level_worth(pace * self.node), self.curves.level_worth(0.0)
        reach, gain, best = 1.0, 0.0, (0.0, 0.0, 0)
        for count in range(1, WIDE_TREE.depth + 1):
            gain += worth(reach)
            best = max(best, (gain - pace * self.levels(count), gain, count))
            reach = following(reach)
        return best[1:]


class Sizing:
    """`tree="auto"`: every cycle is as large as pays, by what cycles cost on this machine.

    Args:
        curves: of the head; None: there is none, and nothing but copies is drafted.
        vocabulary: tokens that the head can name.
    """

    def __init__(self, latency: Latency, curves: HeadCurves | None, vocabulary: int = WIDTH) -> None:
        self.latency, self.curves, self.vocabulary = latency, curves, vocabulary
        self._chosen: dict[tuple, Choice] = {}

    def top_k(self, rows: int = 1) -> int:
        """The widest level that costs hardly more than one of a single node."""
        one = self.latency.level_of(rows)
        return max(width for width in range(1, min(WIDTH, self.vocabulary) + 1)
                   if self.latency.level_of(width * rows) <= WIDER * one)

    @property
    def largest(self) -> TreeConfig:
        """No cycle drafts more."""
        return TreeConfig(MOST_NODES, WIDE_TREE.depth, self.top_k())

    def of(self, rows: int = 1, temperature: float = 0.0) -> Choice:
        """For so many requests; no tree where on average none pays, even at the rate of plain decoding."""
        curves = None if self.curves is None else self.curves.at(temperature)
        if (rows, curves) not in self._chosen:
            top_k = self.top_k(rows)
            choice = Choice(TreeConfig(MOST_NODES, WIDE_TREE.depth, top_k), partial(self.latency.relative, top_k, rows),
                            curves)
            drafts = curves is not None and choice.outlook()[1] > 0
            self._chosen[rows, curves] = choice if drafts else replace(choice, tree=None)
        return self._chosen[rows, curves]


@dataclass(frozen=True)
class Plan:
    """Of one cycle.

    Args:
        tree: the most that the head drafts; None: it is not asked.
        pace: lambda.
        missed: how likely the first copied tokens are refused, so that the head's can be accepted.
    """

    choice: Choice
    tree: TreeConfig | None
    pace: float = PACE
    missed: float = 1.0

    @property
    def sized(self) -> bool:
        """Whether the number of nodes depends on how likely they are."""
        return self.choice.cost is not None

    @cached_property
    def _worth(self) -> LevelWorth:
        return self.choice.curves.level_worth(self.pace * self.choice.node)

    def goes_on(self, frontier: Sequence[Sequence[float]]) -> bool:
        """Whether another level is worth its time.

        Args:
            frontier: of each row, log acceptance probabilities of the nodes that it would start from.
        """
        reach = sum(math.exp(score) for row in frontier for score in row) / len(frontier)
        return self.missed * self._worth(reach) >= self.pace * self.choice.level

    @property
    def stops(self) -> bool:
        """Whether levels are drafted only as long as they are worth it."""
        return self.sized and self.choice.curves is not None

    def nodes(self, scores: Sequence[Sequence[float]]) -> int:
        """How many nodes to verify: at lambda, or at the rate of this cycle where that is higher, since what makes a
        cycle good lasts: where a text is copied, what is left out now is offered again.

        Args:
            scores: of each row, log acceptance probabilities in descending order, the root's first.
        """
        offered = max(map(len, scores))
        if not self.sized:
            return max(1, min(offered, NODES if self.choice.tree is None else self.choice.tree.total_tokens))
        tokens = list(itertools.accumulate(
            sum(math.exp(row[number]) for row in scores if number < len(row)) / len(scores)
            for number in range(min(offered, MOST_NODES))))
        pace = max(self.pace, *map(operator.truediv, tokens, self.choice.costs))
        surplus = [expected - pace * cost for expected, cost in zip(tokens, self.choice.costs, strict=False)]
        return 1 + surplus.index(max(surplus))


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
    """The policy of one batch. What it learns is of its own requests alone, but for pauses.

    Args:
        choose: for so many requests; fewer are left as others end.
        requests: how many there are at the beginning.
        pause: of earlier requests; None: one of its own.
        head: whether there is one; without it a tree only says how many copies are verified.
    """

    def __init__(
        self, choose: Callable[[int], Choice], requests: int, pause: Pause | None = None, *, head: bool = True
    ) -> None:
        self.choose, self.choice, self.head = choose, choose(requests), head
        self.possible = [self.choice.tree, *(choose(count).tree for count in range(1, requests))]
        self.pause = pause or Pause()
        self.pause.begin()
        self.tokens, self.cycles = PACE * PACE_WEIGHT, PACE_WEIGHT  # of a row, and what they cost
        # Running means of cycles without copies: what the head's drafts add, less the price of their nodes, and how
        # many levels they have. None: expected ones, before any was seen.
        self.outlook: tuple[float, float] | None = None

    @property
    def asks_head(self) -> bool:
        """Whether the head may be asked."""
        return self.head and self.choice.tree is not None

    @property
    def pace(self) -> float:
        """Lambda; never below what plain decoding achieves."""
        return max(1.0, self.tokens / self.cycles)

    def next(self, copies: Sequence[Copies | None] = ()) -> Plan:
        """What the next cycle drafts beside these copies."""
        tree = self.choice.tree if self.head else None
        if self.choice.cost is None:
            return Plan(self.choice, tree)
        taken = [max((math.exp(score) for score, parent in zip(row.scores, row.parents, strict=True) if parent < 0),
                     default=0.0) if row else 0.0 for row in copies]
        missed = 1 - sum(taken) / len(taken) if taken else 1.0
        if tree is not None and not self.pause.drafts():
            tree = None
        pace = self.pace
        if tree is not None and any(copies):
            gain, levels = self.outlook or self.choice.outlook(pace)
            if missed * gain < pace * self.choice.levels(levels):
                tree = None
        return Plan(self.choice, tree, pace, missed)

    def learn(self, plan: Plan, nodes: int, levels: int, emitted: Sequence[int], *, copied: bool) -> None:
        """Take note of a cycle.

        Args:
            nodes, levels: that were verified, and that the head drafted. emitted: tokens of each request.
            copied: whether there were copies beside.
        """
        if self.choice.cost is None:
            return
        mean, cost = sum(emitted) / len(emitted), self.choice.cost(nodes, levels)
        self.tokens, self.cycles = self.tokens + mean, self.cycles + cost
        if levels and not copied:
            gain = mean - 1 - plan.pace * (self.choice.cost(nodes, 1) - self.choice.cost(1, 1))
            before = self.outlook or self.choice.outlook(plan.pace)
            self.outlook = tuple(old + (new - old) / MEMORY for old, new in zip(before, (gain, levels), strict=True))
            self.pause.learn(mean - cost)

    def keep(self, requests: int) -> None:
        """So many requests there are now."""
        self.choice = self.choose(requests)
