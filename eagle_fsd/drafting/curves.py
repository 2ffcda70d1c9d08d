"""What is known of a head before it drafts: how often its children are accepted, and what another level is worth.

Two tables for greedy and two for sampled decoding, fitted to cycles with a wide tree (`fit`, by `eagle-fsd tune`), some
150 numbers in all. They belong to a head, not to a machine, and lie beside it in `curves.json`.

A cycle's nodes have the draft's log-probability given their parent (of a row that samples what `Coupling` makes of it),
their rank among their siblings, and what became of them. K = `WIDTH` children of a node and nodes of a level.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.files import cache_directory, save_atomically
from ..data.sources import fetch
from ..heads.eagle import DraftHead
from ..models.digest import weights_digest
from ..models.target import TargetModel
from .config import TreeConfig
from .tree import DraftTree

log = logging.getLogger(__name__)
FILE = "curves.json"
WIDTH = 3
WIDE_TREE = TreeConfig(total_tokens=96, depth=16, top_k=4)  # of the cycles that are fitted to
PRICES = (0.0, 0.05, 0.1, 0.2, 0.4)  # tokens that verifying one more node has to bring
BINS = 12  # of a log-probability
REACHES = 6  # bins of a reach
LEAST_EDGES = 200  # to fit a curve to
LEAST_REACH = 0.02  # that is followed on


@dataclass(frozen=True)
class Curves:
    """Of greedy decoding, or of sampling.

    Args:
        knots: draft log-probabilities, ascending (>= 2).
        first, others: at the knots, the log of how often a parent's best child, and its other children, are accepted
            after an accepted parent; not descending, at most 0. Linear between the knots, constant outside.
        reaches: summed acceptance probabilities of the nodes that a level starts from, ascending.
        worth: for each reach and each of `PRICES` the tokens that the nodes of another level bring, each less its
            price, without those that bring less.
    """

    knots: tuple[float, ...]
    first: tuple[float, ...]
    others: tuple[float, ...]
    reaches: tuple[float, ...]
    worth: tuple[tuple[float, ...], ...]

    def level_worth(self, price: float) -> LevelWorth:
        """What a level is worth by its reach, where a node has this price."""
        at = (*PRICES, 1.0)  # where no node can be worth it
        return LevelWorth((0.0, *self.reaches), (0.0, *(_linear(price, at, (*row, 0.0)) for row in self.worth)))


class LevelWorth(NamedTuple):
    """Tokens that another level brings beyond what its nodes cost, by the reach it starts from."""

    reaches: tuple[float, ...]
    tokens: tuple[float, ...]

    def __call__(self, reach: float) -> float:
        return _linear(reach, self.reaches, self.tokens)


def _linear(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear between the points, constant outside."""
    right = bisect_right(xs, at)
    if right in (0, len(xs)):
        return ys[0 if right == 0 else -1]
    share = (at - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


class HeadCurves(NamedTuple):
    """The curves of a head. Between temperatures those of the nearer one hold: greedy below 0.5."""

    greedy: Curves
    sampled: Curves

    def at(self, temperature: float) -> Curves:
        return self.greedy if temperature < 0.5 else self.sampled


class Cycle(NamedTuple):
    """A cycle's wide tree without its root: an entry per node, parents first."""

    parents: list[int]  # index of the parent's entry, -1 for the root
    ranks: list[int]  # among the siblings, the best 0
    log_probs: list[float]  # of the step from the parent
    accepted: list[bool]


def observed(tree: DraftTree, path: Sequence[int], row: int = 0) -> Cycle:
    """What became of a tree's nodes.

    Args:
        tree: drafted without curves at draft temperature 1. path: the accepted nodes of this row, the root first.
    """
    parents, scores = tree.parents[row].tolist(), tree.scores[row].tolist()
    steps = [score - scores[parent] for score, parent in zip(scores, parents, strict=True)]
    ranks = [sum(parents[other] == parents[node] and (steps[other], -other) > (steps[node], -node)
                 for other in range(1, len(parents))) for node in range(1, len(parents))]
    return Cycle([parent - 1 for parent in parents[1:]], ranks, steps[1:],
                 [node in path for node in range(1, len(parents))])


# Fitting ----------------------------------------------------------------------------------------------------------


def fit(cycles: Sequence[Cycle]) -> Curves:
    """The curves of these cycles.

    Raises:
        ValueError: too few of them.
    """
    edges = [(rank == 0, log_prob, taken) for cycle in cycles
             for parent, rank, log_prob, taken in zip(*cycle, strict=True)
             if rank < WIDTH and (parent < 0 or cycle.accepted[parent])]
    curves = []
    for best in (True, False):
        chosen = sorted((log_prob, taken) for first, log_prob, taken in edges if first == best)
        if len(chosen) < LEAST_EDGES:
            raise ValueError(f"{len(cycles)} cycles are too few to fit curves to: give more prompts or longer answers")
        curves.append(_curve(*np.array(chosen, float).T))
    knots = np.unique(np.concatenate([x for x, _ in curves]).round(2))
    first, others = (np.maximum.accumulate(np.minimum(0.0, np.interp(knots, x, y))) for x, y in curves)
    level = (np.diff(first) == 0) & (np.diff(others) == 0)
    needed = ~(np.concatenate([[False], level]) & np.concatenate([level, [False]]))  # not inside a flat part
    lines = tuple(tuple(np.round(values[needed], 3).tolist()) for values in (knots, first, others))
    return Curves(*lines, *_levels(cycles, *lines))


def _curve(log_probs: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots and log rates, not descending; every bin counts half an acceptance and half a refusal more than it saw."""
    parts = np.array_split(log_probs, BINS)
    accepted = np.array([part.sum() for part in np.array_split(taken, BINS)]) + 0.5
    seen = np.array([len(part) for part in parts]) + 1.0
    return np.array([part.mean() for part in parts]), np.log(_isotonic(accepted, seen))


def _isotonic(accepted: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Rates that do not descend, closest to accepted / seen: neighbours that descend are pooled, until none do."""
    pools: list[list[float]] = []  # accepted, seen, bins
    for pool in zip(accepted, seen, np.ones(len(seen)), strict=True):
        pools.append(list(pool))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] >= pools[-1][0] * pools[-2][1]:
            last = pools.pop()
            pools[-1] = [mine + its for mine, its in zip(pools[-1], last, strict=True)]
    return np.concatenate([np.full(int(bins), taken / of) for taken, of, bins in pools])


def _levels(
    cycles: Sequence[Cycle], knots: Sequence[float], first: Sequence[float], others: Sequence[float]
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Reaches, and the mean worth of a level by reach and price: how a frontier of K went on in these cycles."""
    reaches, worths = [], []
    for cycle in cycles:
        ranks, steps = np.array(cycle.ranks), np.array(cycle.log_probs)
        steps = np.where(ranks == 0, np.interp(steps, knots, first), np.interp(steps, knots, others))
        scores: list[float] = []
        for parent, step in zip(cycle.parents, steps, strict=True):
            scores.append(step + (0.0 if parent < 0 else scores[parent]))
        frontier, reach = {-1}, 1.0
        for _ in range(WIDE_TREE.depth):
            members = [node for node, parent in enumerate(cycle.parents) if parent in frontier and ranks[node] < WIDTH]
            likely = np.exp([scores[node] for node in members])
            reaches.append(reach)
            worths.append([np.maximum(likely - price, 0).sum() for price in PRICES])
            best = sorted(members, key=lambda node: -scores[node])[:WIDTH]
            frontier, reach = set(best), math.fsum(math.exp(scores[node]) for node in best)
            if reach < LEAST_REACH:
                break
    parts = np.array_split(np.argsort(reaches, kind="stable"), REACHES)
    means = [(np.mean([reaches[at] for at in part]), np.mean([worths[at] for at in part], 0)) for part in parts]
    return (tuple(round(float(reach), 3) for reach, _ in means),
            tuple(tuple(np.round(worth, 3).tolist()) for _, worth in means))


# Files ------------------------------------------------------------------------------------------------------------


def read_curves(head: str | Path) -> HeadCurves | None:
    """Those beside a head, in a directory or hub repository; None where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    path = fetch(str(head), FILE)
    if path is None:
        if fetch(str(head), "tree.json"):
            log.warning("%s has a tree.json of an earlier version, which is not read: eagle-fsd tune --out fits the "
                        "curves that take its place", head)
        return None
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"))
        return HeadCurves(*(_checked(**held[name]) for name in HeadCurves._fields))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it, or run eagle-fsd tune again") from error


def _checked(**held: Sequence) -> Curves:
    columns = {name: tuple(map(float, held.pop(name))) for name in ("knots", "first", "others", "reaches")}
    worth = tuple(tuple(map(float, row)) for row in held.pop("worth"))
    found, lengths = Curves(**columns, worth=worth, **held), {len(row) for row in worth}
    if len(found.knots) < 2 or not len(found.knots) == len(found.first) == len(found.others):
        raise ValueError("as many rates as knots, and at least two, are needed")
    if len(found.reaches) != len(worth) or not worth or lengths != {len(PRICES)}:
        raise ValueError(f"{len(PRICES)} numbers are needed for each reach")
    ascending = (found.knots, found.reaches)
    if not all(map(math.isfinite, [*sum(columns.values(), ()), *sum(worth, ())])) or any(
            each != tuple(sorted(set(each))) for each in ascending):
        raise ValueError("knots and reaches must ascend, and all numbers be finite")
    return found


def store_curves(head: str | Path, found: HeadCurves) -> Path:
    """Write them beside a head."""
    path = Path(head) / FILE
    lines = ",\n".join(f'"{name}": {json.dumps(asdict(each))}' for name, each in found._asdict().items())
    save_atomically(path, lambda part: part.write_text(f"{{{lines}}}\n", encoding="utf-8"))
    return path


@functools.cache
def default_curves() -> HeadCurves:
    """For a head without its own: those of SmolLM2's bundled head."""
    found = read_curves(Path(__file__).parent)
    assert found is not None
    return found


def own_place(target: TargetModel, head: DraftHead) -> Path:
    """Where the user's own curves of a pair are, in the user's cache directory."""
    pair = f"{target.digest()}; {weights_digest(head)}"
    return cache_directory() / "trees" / hashlib.sha256(pair.encode()).hexdigest()[:16]


def known_curves(beside: HeadCurves | None, target: TargetModel, head: DraftHead) -> HeadCurves:
    """The user's own ones, else those beside the head, else the defaults."""
    place, own = own_place(target, head), None
    try:
        own = read_curves(place) if (place / FILE).is_file() else None
    except (OSError, ValueError) as error:
        log.warning("%s", error)
    return own or beside or default_curves()
