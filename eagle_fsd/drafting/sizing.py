"""How many nodes and levels a cycle drafts and verifies, of the drafter's nodes, copies and a grammar's forced tokens.

Tokens per second tend to E[tokens] / E[time] of a cycle. Let lambda be the rate achieved so far. A node, a level, or
the whole draft pays if the tokens it is expected to add exceed lambda times the time it takes (Dinkelbach's parametric
form of a ratio). `decoding/timing.py` measures times at load and `Latency` interpolates them; `Curves` and the
acceptance rates of copies predict tokens.

The unit of time is a cycle without drafting; lambda counts a row's tokens in that time. The rows of a batch share one
number of nodes and of levels, so tokens are means over rows.

Roles: `Sizing` belongs to a model, and makes an `Auto` for each number of rows. `Drafting` is the policy of one batch,
`Auto` or a `Fixed` tree, and makes a `Plan` for each cycle. Requests to one model may share a `Pause`. Here a tree of
None means that the drafter drafts nothing; in options, requests and engines, that they leave the tree to the model.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

from .config import TreeConfig
from .copies import MOST_NODES, NODES, Copies
from .curves import WIDE_TREE, WIDTH, Curves, HeadCurves, LevelWorth
from .latency import Latency

# How much more a level of several nodes may cost than a level of one: in levels of one, and in plain cycles.
WIDER = 1 / 3, 0.02
USUAL = 24  # the price of a node is the mean over this many further nodes
PACE, PACE_WEIGHT = 1.6, 4.0  # lambda before the first cycle, and as how many cycles it counts
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles in a running mean


@dataclass(frozen=True)
class Fixed:
    """Every cycle drafts the whole of one tree.

    Args:
        tree: None: the drafter drafts nothing.
    """

    tree: TreeConfig | None = None

    def most_nodes(self, copying: bool) -> int:
        """The most nodes that a cycle verifies. Copies may fill a tree that the drafter does not."""
        if self.tree is None:
            return NODES if copying else 1
        return self.tree.verified(copying)

    def plan(self, tree: TreeConfig | None) -> Plan:
        """The plan of a cycle that drafts this tree, or without it copies alone."""
        return Plan(tree, self.most_nodes(copying=True))


@dataclass(frozen=True)
class Auto:
    """Every cycle has the size that pays.

    Args:
        tree: the largest tree that the drafter may draft; None: it drafts nothing.
        cost: of a cycle, from its nodes and drafted levels (0: the drafter is not used), in cycles without drafting.
        curves: of the drafter, which predict acceptance; None: every level of the tree is drafted.
    """

    tree: TreeConfig | None
    cost: Callable[[int, int], float]
    curves: Curves | None = None

    def most_nodes(self, copying: bool) -> int:
        """The most nodes that a cycle verifies."""
        return MOST_NODES

    def plan(self, tree: TreeConfig | None, pace: float = PACE, missed: float = 1.0) -> PricedPlan:
        """The plan of a cycle that drafts at most this tree; see `PricedPlan`."""
        return PricedPlan(tree, self.most_nodes(copying=True), self, pace, missed)

    @cached_property
    def costs_by_nodes(self) -> list[float]:
        """Cost of a cycle with 1, 2, ... nodes and one drafted level."""
        return [self.cost(nodes, 1) for nodes in range(1, MOST_NODES + 1)]

    @cached_property
    def node_price(self) -> float:
        """Price of a further node: a mean, as costs have steps."""
        return (self.costs_by_nodes[USUAL] - self.costs_by_nodes[0]) / USUAL

    @cached_property
    def level_price(self) -> float:
        """Price of a further level."""
        return self.cost(1, 2) - self.costs_by_nodes[0]

    def price_of_levels(self, count: float) -> float:
        """Price of this many levels (at least 1)."""
        return self.costs_by_nodes[0] - self.cost(1, 0) + (count - 1) * self.level_price

    def outlook(self, pace: float = 1.0) -> tuple[float, int]:
        """Expected tokens of a cycle's levels, less the price of their nodes, and the best number of levels; 0 if none
        pays."""
        if self.curves is None:
            return 1.0, 1
        worth, following = self.curves.level_worth(pace * self.node_price), self.curves.level_worth(0.0)
        reach, gain, best = 1.0, 0.0, (0.0, 0.0, 0)
        for count in range(1, WIDE_TREE.depth + 1):
            gain += worth(reach)
            best = max(best, (gain - pace * self.price_of_levels(count), gain, count))
            reach = following(reach)
        return best[1:]


class Sizing:
    """`tree="auto"`: cycles have the sizes that pay at this machine's latencies.

    Args:
        curves: of the drafter; None: there is none, and drafts are copies alone.
        vocabulary: number of tokens that the drafter can name.
    """

    def __init__(self, latency: Latency, curves: HeadCurves | None, vocabulary: int = WIDTH) -> None:
        self.latency, self.curves = latency, curves
        self.largest = TreeConfig(MOST_NODES, WIDE_TREE.depth, min(WIDTH, vocabulary))  # no cycle's tree is larger
        self._choices: dict[tuple, Auto] = {}

    def top_k(self, rows: int = 1) -> int:
        """The number of nodes of the widest level that costs hardly more than a level of one, or whose additional cost
        is lost in the noise of measurements."""
        one, plain = self.latency.level_of(rows), self.latency.plain_cycle(rows)
        most = one + max(WIDER[0] * one, WIDER[1] * plain)
        return max(width for width in range(1, self.largest.top_k + 1) if self.latency.level_of(width * rows) <= most)

    def of(self, rows: int = 1, temperature: float = 0.0) -> Auto:
        """The sizes for this many rows, without a tree if on average none pays even at the rate of plain decoding."""
        curves = None if self.curves is None else self.curves.at(temperature)
        key = rows, curves
        if key not in self._choices:
            top_k = self.top_k(rows)
            choice = Auto(replace(self.largest, top_k=top_k), partial(self.latency.relative, top_k, rows), curves)
            drafts = curves is not None and choice.outlook()[1] > 0
            self._choices[key] = choice if drafts else replace(choice, tree=None)
        return self._choices[key]


def mean(values: Sequence[float]) -> float:
    """0 if there are none."""
    return sum(values) / max(1, len(values))


@dataclass(frozen=True)
class Plan:
    """The size of one cycle: that of a `Fixed` tree.

    Args:
        tree: the largest tree that the drafter may draft; None: it drafts nothing.
        most: the most nodes to verify, copies included.
    """

    tree: TreeConfig | None
    most: int

    decided_by_scores: ClassVar[bool] = False  # whether the numbers of nodes and levels are
    curves: ClassVar[Curves | None] = None  # estimate the acceptance of nodes, by which levels pay

    @property
    def uses_drafter(self) -> bool:
        """Whether the drafter drafts in this cycle."""
        return self.tree is not None

    def nodes(self, scores: Sequence[Sequence[float]]) -> int:
        """The number of nodes to verify.

        Args:
            scores: for each row, log acceptance probabilities in descending order, the root's first.
        """
        return max(1, min(self.most, max(map(len, scores))))


@dataclass(frozen=True)
class PricedPlan(Plan):
    """The size of one cycle of `Auto`, decided while it is drafted.

    Args:
        pace: lambda.
        missed: probability that the first copied tokens are rejected, so that the drafter's can be accepted.
    """

    choice: Auto
    pace: float
    missed: float

    decided_by_scores: ClassVar[bool] = True

    @property
    def curves(self) -> Curves | None:
        return self.choice.curves

    @cached_property
    def _worth(self) -> LevelWorth:
        return self.choice.curves.level_worth(self.pace * self.choice.node_price)

    def level_pays(self, frontier: Sequence[Sequence[float]]) -> bool:
        """Whether another level pays.

        Args:
            frontier: for each row, log acceptance probabilities of the nodes that the level would expand.
        """
        reach = sum(math.exp(score) for row in frontier for score in row) / len(frontier)
        return self.missed * self._worth(reach) >= self.pace * self.choice.level_price

    def nodes(self, scores: Sequence[Sequence[float]]) -> int:
        """The number of nodes to verify: at lambda, or at this cycle's own rate if that is higher. A cycle that is
        better than the average is probably followed by others (a long copy), which offer the omitted nodes again."""
        tokens = list(itertools.accumulate(
            sum(math.exp(row[number]) for row in scores if number < len(row)) / len(scores)
            for number in range(super().nodes(scores))))
        pace = max(self.pace, *map(operator.truediv, tokens, self.choice.costs_by_nodes))
        surplus = [expected - pace * cost for expected, cost in zip(tokens, self.choice.costs_by_nodes, strict=False)]
        return 1 + surplus.index(max(surplus))


class Pause:
    """Pauses drafting while it does not pay, and retries after pauses that grow with each failure.

    Successive requests may share a pause, so that each starts from the experience of the last.
    """

    def __init__(self) -> None:
        self.gain = 1.0  # running mean over drafted cycles: tokens emitted, less the cost
        self.left, self.length = 0, SHORTEST_PAUSE // 2

    def begin(self) -> None:
        """A new request drafts at once; earlier successes and failures count, up to a limit."""
        self.left, self.length, self.gain = 0, min(self.length, LONGEST_PAUSE // 2), min(self.gain, 1.0)

    def next_cycle(self) -> bool:
        """Count a cycle; whether it drafts."""
        self.left -= 1
        return self.left < 0

    def learn(self, gain: float) -> None:
        """Record a drafted cycle: tokens emitted, less its cost in cycles without drafting."""
        self.gain += (gain - self.gain) / MEMORY
        if gain > 0:
            self.length = max(self.length // 2, SHORTEST_PAUSE // 2)
        elif self.gain < 0:
            self.left = self.length = min(2 * self.length, LONGEST_PAUSE)


class Drafting:
    """The drafting policy of one batch. It learns from its own requests alone, except for pauses.

    Args:
        choose: the choice, constant or as a function of the requests in the batch.
        pause: shared with earlier requests; None: a new one.
    """

    def __init__(self, choose: Fixed | Auto | Callable[[Sequence], Fixed | Auto], pause: Pause | None = None) -> None:
        self.choose = choose if callable(choose) else lambda requests: choose
        self.choice, self.has_drafter = Fixed() if callable(choose) else choose, True  # until `begin`
        self.pause = pause or Pause()
        # Tokens of a row so far, and their cost in cycles without drafting.
        self.gained, self.spent = PACE * PACE_WEIGHT, PACE_WEIGHT
        # Running means over cycles without copies: tokens that the draft adds, less the price of its nodes, and its
        # levels. None: no such cycle yet, `Auto.outlook` holds.
        self.outlook: tuple[float, float] | None = None

    def begin(self, requests: Sequence, *, has_drafter: bool) -> None:
        """Start with these requests, one a row.

        Args:
            has_drafter: whether there is a drafter; without one a tree only limits the number of copies to verify.
        """
        self.has_drafter = has_drafter
        self.pause.begin()
        self.resize(requests)

    def resize(self, requests: Sequence) -> None:
        """Continue with these requests."""
        self.choice = self.choose(requests)

    def room(self, requests: Sequence, copying: bool) -> tuple[int, int]:
        """The most positions that a cycle of these requests, or of the first ones of them, takes in the target's cache
        (its nodes) and in the drafter's (its levels) besides the text.

        Args:
            copying: whether copies may join the trees.
        """
        choices = [self.choose(requests[:count]) for count in range(1, len(requests) + 1)]
        trees = [choice.tree for choice in choices if choice.tree is not None]
        return (max((choice.most_nodes(copying) for choice in choices), default=1),
                max((tree.drafted for tree in trees), default=0))

    @property
    def uses_drafter(self) -> bool:
        """Whether cycles of this batch may use the drafter."""
        return self.has_drafter and self.choice.tree is not None

    @property
    def pace(self) -> float:
        """Lambda, at least the rate of plain decoding."""
        return max(1.0, self.gained / self.spent)

    def next(self, copies: Sequence[Copies | None] = ()) -> Plan:
        """The plan of the next cycle.

        Args:
            copies: of each row, which the cycle verifies as well.
        """
        tree = self.choice.tree if self.has_drafter else None
        if isinstance(self.choice, Fixed):
            return self.choice.plan(tree)
        accepted = [max((math.exp(score) for score, parent in zip(row.scores, row.parents, strict=True) if parent < 0),
                        default=0.0) if row else 0.0 for row in copies]
        missed = 1 - sum(accepted) / len(accepted) if accepted else 1.0
        if tree is not None and not self.pause.next_cycle():
            tree = None
        pace = self.pace
        if tree is not None and any(copies):
            gain, levels = self.outlook or self.choice.outlook(pace)
            if missed * gain < pace * self.choice.price_of_levels(levels):
                tree = None
        return self.choice.plan(tree, pace, missed)

    def learn(self, plan: Plan, nodes: int, levels: int, emitted: Sequence[int], *, copied: bool) -> None:
        """Record a cycle.

        Args:
            nodes: verified. levels: drafted. emitted: number of tokens of each row. copied: whether there were copies.
        """
        if not isinstance(plan, PricedPlan):
            return
        tokens, cost = mean(emitted), plan.choice.cost(nodes, levels)
        self.gained, self.spent = self.gained + tokens, self.spent + cost
        if levels and not copied:
            gain = tokens - 1 - plan.pace * (plan.choice.cost(nodes, 1) - plan.choice.cost(1, 1))
            before = self.outlook or plan.choice.outlook(plan.pace)
            self.outlook = tuple(old + (new - old) / MEMORY for old, new in zip(before, (gain, levels), strict=True))
            self.pause.learn(tokens - cost)
