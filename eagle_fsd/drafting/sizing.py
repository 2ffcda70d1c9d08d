"""How many nodes and levels a cycle drafts and verifies, of the drafter's nodes, copies and a grammar's forced tokens.

Tokens per second tend to E[tokens] / E[time] of a cycle. Let lambda be the rate achieved so far. A node, a level, or
the whole draft pays if the tokens it is expected to add exceed lambda times the time it takes (Dinkelbach's parametric
form of a ratio). `loading/timing.py` measures times at load and `Latency` interpolates them; `Curves`, fitted
statistics of a drafter, and the acceptance rates of copies predict tokens.

The unit of time is a cycle without drafting; lambda counts a row's tokens in that time. The rows of a batch share one
number of nodes and of levels, so tokens are means over rows.

`Drafting` is the policy of one batch: it makes the `Plan` of each cycle from the largest one, see
`EagleModel.largest_plan`, which has a given tree, or is that of `Sizing` (`tree="auto"`) for the number of rows, with
`Prices`.

K children of a node, M knots.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from .config import MOST_NODES, TreeConfig
from .copies import Copies

# How much more a level of several nodes may cost than a level of one: in levels of one, and in plain cycles.
WIDER = 1 / 3, 0.02
USUAL = 24  # the price of a node is the mean over this many further nodes
PACE, PACE_WEIGHT = 1.6, 4.0  # lambda before the first cycle, and as how many cycles it counts
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128  # cycles without drafting
MEMORY = 8  # drafted cycles in a running mean
WIDTH = 3  # K: children of a node, and nodes of a level, that the curves describe
WIDE_TREE = TreeConfig(total_tokens=96, depth=16, top_k=4)  # of the cycles that the curves are fitted to
PRICES = (0.0, 0.05, 0.1, 0.2, 0.4)  # cost of verifying one more node, in tokens


# Times --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    """Seconds of a decode cycle, interpolated linearly between measurements.

    Args:
        base: of a cycle that drafts one level, by nodes verified. level: of each further level, by its nodes. Both are
            summed over rows.
        plain: of a cycle without drafting.
        row, plain_row: of each further row of a batch, beyond the time of its nodes: rows do not share keys and values.
    """

    base: Mapping[int, float]
    level: Mapping[int, float]
    plain: float
    row: float = 0.0
    plain_row: float = 0.0

    def cycle(self, nodes: int = 1, levels: int = 0, top_k: int = 1, rows: int = 1) -> float:
        """Seconds of a cycle that drafts `levels` (0: the drafter is not used) and verifies `nodes` in each row."""
        verified = between(self.base, nodes * rows)
        if levels == 0:
            return self.plain + (verified - between(self.base, 1)) + (rows - 1) * self.plain_row
        return verified + (levels - 1) * between(self.level, top_k * rows) + (rows - 1) * self.row

    def relative(self, top_k: int, rows: int, nodes: int, levels: int) -> float:
        """The time of a cycle, in cycles without drafting."""
        return self.cycle(nodes, levels, top_k, rows) / self.cycle(rows=rows)


def between(measured: Mapping[int, float], at: float) -> float:
    """Linear between the measured points and beyond the last two, constant before the first."""
    points = sorted(measured)
    values = [measured[point] for point in points]
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2]) if len(points) > 1 else 0.0
    return _linear(at, points, values) + max(0, at - points[-1]) * slope


def _linear(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear between the points, constant outside."""
    right = bisect_right(xs, at)
    if right in (0, len(xs)):
        return ys[0 if right == 0 else -1]
    share = (at - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


# Tokens -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """Statistics for greedy or for sampled decoding.

    Args:
        knots: draft log-probabilities, ascending (>= 2).
        first, others: at the knots, the log acceptance rate of a node's best child and of its other children, after
            the node itself was accepted; not descending, at most 0. Linear between the knots, constant outside.
        reaches: summed acceptance probabilities of the nodes that a level expands, ascending.
        worth: for each reach and each of `PRICES`, the expected tokens of the next level's nodes, each less its price;
            nodes below their price do not count.
    """

    knots: tuple[float, ...]
    first: tuple[float, ...]
    others: tuple[float, ...]
    reaches: tuple[float, ...]
    worth: tuple[tuple[float, ...], ...]

    def level_worth(self, price: float) -> Callable[[float], float]:
        """The expected tokens of another level, less the price of its nodes, as a function of the reach."""
        prices = (*PRICES, 1.0)  # at a price of one token no node pays
        tokens = (_linear(price, prices, (*row, 0.0)) for row in self.worth)
        return partial(_linear, xs=(0.0, *self.reaches), ys=(0.0, *tokens))


def nearly_greedy(temperature: float) -> bool:
    """Whether a temperature is nearer to 0 than to 1."""
    return temperature < 0.5


class HeadCurves(NamedTuple):
    """The curves of a head."""

    greedy: Curves
    sampled: Curves

    def at(self, temperature: float) -> Curves:
        """The curves that were fitted at the nearer temperature, 0 or 1."""
        return self.greedy if nearly_greedy(temperature) else self.sampled


@lru_cache(maxsize=64)
def log_rates(curves: Curves, children: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function of the log-probabilities [..., K] of each node's K = `children` children, in descending order: their
    log acceptance probabilities [..., K], linear between the knots and constant outside.

    Linear parts are y = slope * x + offset, M + 1 of them for first children, then M + 1 for others.
    """
    knots = torch.tensor(curves.knots, dtype=torch.float64)
    slopes, offsets = [], []
    for values in (curves.first, curves.others):
        heights = torch.tensor(values, dtype=torch.float64)
        slope = torch.nn.functional.pad(heights.diff() / knots.diff(), (1, 1))
        slopes.append(slope)
        offsets.append(torch.cat([heights[:1], heights]) - slope * torch.cat([knots[:1], knots]))
    start = torch.tensor([0] + [len(knots) + 1] * (children - 1)).to(device)  # each child's first part
    knots, slope_of, offset_of = (part.float().to(device) for part in (knots, torch.cat(slopes), torch.cat(offsets)))

    def rates(log_probs: Tensor) -> Tensor:
        part = torch.bucketize(log_probs, knots) + start
        return torch.addcmul(offset_of.take(part), slope_of.take(part), log_probs)

    return rates


# Decisions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """What nodes and levels cost in a batch, and what levels bring.

    Args:
        cost: of a cycle, from its nodes and drafted levels (0: the drafter is not used), in cycles without drafting.
        curves: of the drafter, which predict acceptance; None: every level of the tree is drafted.
    """

    cost: Callable[[int, int], float]
    curves: Curves | None = None

    @cached_property
    def costs_by_nodes(self) -> list[float]:
        """Cost of a cycle with 1, 2, ... nodes and one drafted level."""
        return [self.cost(nodes, 1) for nodes in range(1, MOST_NODES + 1)]

    @cached_property
    def of_node(self) -> float:
        """Price of a further node: a mean, as costs have steps."""
        return (self.costs_by_nodes[USUAL] - self.costs_by_nodes[0]) / USUAL

    @cached_property
    def of_level(self) -> float:
        """Price of a further level."""
        return self.cost(1, 2) - self.costs_by_nodes[0]

    def of_levels(self, count: float) -> float:
        """Price of this many levels (at least 1)."""
        return self.costs_by_nodes[0] - self.cost(1, 0) + (count - 1) * self.of_level

    def outlook(self, pace: float = 1.0) -> tuple[float, int]:
        """Expected tokens of a cycle's levels, less the price of their nodes, and the best number of levels; 0 if none
        pays."""
        if self.curves is None:
            return 1.0, 1
        worth, following = self.curves.level_worth(pace * self.of_node), self.curves.level_worth(0.0)
        reach, gain, best = 1.0, 0.0, (0.0, 0.0, 0)
        for count in range(1, WIDE_TREE.depth + 1):
            gain += worth(reach)
            best = max(best, (gain - pace * self.of_levels(count), gain, count))
            reach = following(reach)
        return best[1:]


@dataclass(frozen=True)
class Plan:
    """The size of one cycle.

    Args:
        tree: the largest tree that the drafter may draft. Copies included, no more than its `total_tokens` are
            verified.
        drafts: whether the drafter drafts; if not, trees are of copies alone.
        prices: by which the numbers of nodes and levels are decided, while the cycle is drafted; None: the whole tree
            is drafted and verified.
        pace: lambda.
        missed: probability that the first copied tokens are rejected, so that the drafter's can be accepted.
    """

    tree: TreeConfig
    drafts: bool = True
    prices: Prices | None = None
    pace: float = PACE
    missed: float = 1.0

    @property
    def curves(self) -> Curves | None:
        """They estimate the acceptance of nodes, by which levels pay; None: all levels are drafted."""
        return None if self.prices is None else self.prices.curves

    @cached_property
    def _worth(self) -> Callable[[float], float]:
        return self.curves.level_worth(self.pace * self.prices.of_node)

    def level_pays(self, frontier: Sequence[Sequence[float]]) -> bool:
        """Whether another level pays.

        Args:
            frontier: for each row, log acceptance probabilities of the nodes that the level would expand.
        """
        reach = sum(math.exp(score) for row in frontier for score in row) / len(frontier)
        return self.missed * self._worth(reach) >= self.pace * self.prices.of_level

    def nodes(self, scores: Sequence[Sequence[float]]) -> int:
        """The number of nodes to verify: with prices at lambda, or at this cycle's own rate if that is higher. A cycle
        that is better than the average is probably followed by others (a long copy), which offer the omitted nodes
        again.

        Args:
            scores: for each row, log acceptance probabilities in descending order, the root's first.
        """
        most = max(1, min(self.tree.total_tokens, max(map(len, scores))))
        if self.prices is None:
            return most
        costs = self.prices.costs_by_nodes
        tokens = list(itertools.accumulate(
            sum(math.exp(row[number]) for row in scores if number < len(row)) / len(scores) for number in range(most)))
        pace = max(self.pace, *map(operator.truediv, tokens, costs))
        surplus = [expected - pace * cost for expected, cost in zip(tokens, costs, strict=False)]
        return 1 + surplus.index(max(surplus))


class Sizing:
    """`tree="auto"`: cycles have the sizes that pay at this machine's latencies.

    Args:
        curves: of the drafter; None: there is none, and drafts are copies alone.
        vocabulary: number of tokens that the drafter can name.
    """

    def __init__(self, latency: Latency, curves: HeadCurves | None, vocabulary: int = WIDTH) -> None:
        self.latency, self.curves = latency, curves
        self.largest_tree = TreeConfig(MOST_NODES, WIDE_TREE.depth, min(WIDTH, vocabulary))
        # When drafting stops because it did not pay, for lossless requests: greedy or nearly so, and others.
        self.pauses: defaultdict[bool, Pause] = defaultdict(Pause)
        self._plans: dict[tuple, Plan] = {}

    def top_k(self, rows: int = 1) -> int:
        """The number of nodes of the widest level that costs hardly more than a level of one, or whose additional cost
        is lost in the noise of measurements."""
        widths = range(1, self.largest_tree.top_k + 1)
        seconds = [between(self.latency.level, width * rows) for width in widths]
        most = seconds[0] + max(WIDER[0] * seconds[0], WIDER[1] * self.latency.cycle(rows=rows))
        return max(width for width, level in zip(widths, seconds, strict=True) if level <= most)

    def of(self, rows: int = 1, temperature: float = 0.0) -> Plan:
        """The largest cycle of this many rows. It drafts nothing if on average no tree pays even at the rate of plain
        decoding."""
        curves = None if self.curves is None else self.curves.at(temperature)
        key = rows, curves
        if key not in self._plans:
            top_k = self.top_k(rows)
            prices = Prices(partial(self.latency.relative, top_k, rows), curves)  # not a lambda: models are pickled
            drafts = curves is not None and prices.outlook()[1] > 0
            self._plans[key] = Plan(replace(self.largest_tree, top_k=top_k), drafts, prices)
        return self._plans[key]


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
        largest_plan: of a batch of these requests.
        pause: shared with earlier requests; None: a new one.

    Attributes:
        largest: the largest plan of the requests of the batch, see `resize`.
    """

    largest: Plan

    def __init__(self, largest_plan: Callable[[Sequence], Plan], pause: Pause | None = None) -> None:
        self.largest_plan, self.pause, self.rows = largest_plan, pause or Pause(), 0
        # Tokens of a row so far, and their cost in cycles without drafting.
        self.gained, self.spent = PACE * PACE_WEIGHT, PACE_WEIGHT
        # Running means over cycles without copies: tokens that the draft adds, less the price of its nodes, and its
        # levels. None: no such cycle yet, `Prices.outlook` holds.
        self.outlook: tuple[float, float] | None = None

    def resize(self, requests: Sequence) -> None:
        """Start or continue with these requests, one a row."""
        if not self.rows:
            self.pause.begin()
        self.rows = len(requests)
        if requests:
            self.largest = self.largest_plan(requests)

    @property
    def pace(self) -> float:
        """Lambda, at least the rate of plain decoding."""
        return max(1.0, self.gained / self.spent)

    def plan(self, copies: Sequence[Copies | None] = ()) -> Plan:
        """The plan of the next cycle.

        Args:
            copies: of each row, which the cycle verifies as well.
        """
        largest, pace, prices = self.largest, self.pace, self.largest.prices
        if prices is None:
            return largest
        accepted = [max((math.exp(score) for score, parent in zip(row.scores, row.parents, strict=True) if parent < 0),
                        default=0.0) if row else 0.0 for row in copies]
        missed = 1 - sum(accepted) / max(1, len(accepted))
        drafts = largest.drafts and self.pause.next_cycle()
        if drafts and any(copies):
            gain, levels = self.outlook or prices.outlook(pace)
            drafts = missed * gain >= pace * prices.of_levels(levels)
        return replace(largest, drafts=drafts, pace=pace, missed=missed)

    def learn(self, plan: Plan, nodes: int, levels: int, emitted: Sequence[int], *, copied: bool) -> None:
        """Record a cycle.

        Args:
            nodes: verified. levels: drafted. emitted: number of tokens of each row. copied: whether there were copies.
        """
        prices = plan.prices
        if prices is None:
            return
        tokens, cost = sum(emitted) / len(emitted), prices.cost(nodes, levels)
        self.gained, self.spent = self.gained + tokens, self.spent + cost
        if levels and not copied:
            gain = tokens - 1 - plan.pace * (prices.cost(nodes, 1) - prices.cost(1, 1))
            before = self.outlook or prices.outlook(plan.pace)
            self.outlook = tuple(old + (new - old) / MEMORY for old, new in zip(before, (gain, levels), strict=True))
            self.pause.learn(tokens - cost)
