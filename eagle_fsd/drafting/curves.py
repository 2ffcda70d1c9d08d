"""Fitted statistics of a drafter: how often its children are accepted, and how many tokens another level adds.

There are two tables for greedy and two for sampled decoding, some 150 numbers in all. `measure/cycles.py` fits them
(`eagle-fsd tune`). They belong to a drafter, not to a machine, and are stored beside it in `curves.json`.

K children of a node, M knots.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.sources import fetch
from ..models.target import TargetModel
from ..utils.files import cache_directory, save_atomically
from .config import TreeConfig
from .drafter import Drafter

log = logging.getLogger(__name__)
FILE = "curves.json"
WIDTH = 3  # K: children of a node, and nodes of a level, that the curves describe
WIDE_TREE = TreeConfig(total_tokens=96, depth=16, top_k=4)  # of the cycles that the curves are fitted to
PRICES = (0.0, 0.05, 0.1, 0.2, 0.4)  # cost of verifying one more node, in tokens


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
        return functools.partial(_linear, xs=(0.0, *self.reaches), ys=(0.0, *tokens))


def _linear(at: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear between the points, constant outside."""
    right = bisect_right(xs, at)
    if right in (0, len(xs)):
        return ys[0 if right == 0 else -1]
    share = (at - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


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


@functools.lru_cache(maxsize=64)
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


def read_curves(head: str | Path) -> HeadCurves | None:
    """Read the curves stored beside a head, in a directory or hub repository; None if there are none.

    Raises:
        ValueError: the file is damaged.
    """
    path = fetch(str(head), FILE)
    if path is None:
        if fetch(str(head), "tree.json"):
            log.warning("%s has a tree.json of an earlier version, which is not read: eagle-fsd tune --out fits the "
                        "curves that replace it", head)
        return None
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        return HeadCurves(*(_checked(**stored[name]) for name in HeadCurves._fields))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it, or run eagle-fsd tune again") from error


def _checked(**stored: Sequence) -> Curves:
    columns = {name: tuple(map(float, stored.pop(name))) for name in ("knots", "first", "others", "reaches")}
    worth = tuple(tuple(map(float, row)) for row in stored.pop("worth"))
    curves, lengths = Curves(**columns, worth=worth, **stored), {len(row) for row in worth}
    if len(curves.knots) < 2 or not len(curves.knots) == len(curves.first) == len(curves.others):
        raise ValueError("there must be as many rates as knots, and at least two")
    if len(curves.reaches) != len(worth) or not worth or lengths != {len(PRICES)}:
        raise ValueError(f"each reach needs {len(PRICES)} numbers")
    ascending = (curves.knots, curves.reaches)
    if not all(map(math.isfinite, [*sum(columns.values(), ()), *sum(worth, ())])) or any(
            column != tuple(sorted(set(column))) for column in ascending):
        raise ValueError("knots and reaches must ascend, and all numbers must be finite")
    return curves


def store_curves(head: str | Path, curves: HeadCurves) -> Path:
    """Store curves beside a head; returns the file."""
    path = Path(head) / FILE
    lines = ",\n".join(f'"{name}": {json.dumps(asdict(curve))}' for name, curve in curves._asdict().items())
    save_atomically(path, lambda part: part.write_text(f"{{{lines}}}\n", encoding="utf-8"))
    return path


@functools.cache
def default_curves(*, reads_features: bool = True) -> HeadCurves:
    """Curves for drafters without their own: those of SmolLM2's bundled head, or for causal LMs, which read no
    features, those of Qwen2.5-Coder-0.5B for the 1.5B."""
    place = Path(__file__).parent
    curves = read_curves(place if reads_features else place / "causal_lm")
    assert curves is not None
    return curves


def own_place(target: TargetModel, drafter: Drafter) -> Path:
    """The folder in the user's cache for curves that the user fitted to this pair."""
    pair = f"{target.digest()}; {drafter.digest()}"
    return cache_directory() / "trees" / hashlib.sha256(pair.encode()).hexdigest()[:16]


def known_curves(beside: HeadCurves | None, target: TargetModel, drafter: Drafter) -> HeadCurves:
    """The user's own curves, else those stored beside the drafter, else the defaults."""
    own = None
    try:
        place = own_place(target, drafter)
        own = read_curves(place) if (place / FILE).is_file() else None
    except (OSError, ValueError) as error:
        log.warning("%s", error)
    return own or beside or default_curves(reads_features=drafter.reads_features)
