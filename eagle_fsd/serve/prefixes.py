"""What recent requests have left in the caches, for requests that begin alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..engine.forwards import Forwards, shared_prefix
from ..engine.request import Request


@dataclass(eq=False)
class Kept:
    """A row that was: its text as far as its caches hold it, and what the draft has not read of it."""

    tokens: list[int]
    features: Tensor | None
    forwards: Forwards


class Prefixes:
    """The last rows to end, with copies of their caches.

    Args:
        most: rows. positions: of all of them together.
    """

    def __init__(self, most: int, positions: int) -> None:
        self.most, self.positions = most, positions
        self.kept: list[Kept] = []  # the latest last

    def add(self, forwards: Forwards, number: int, request: Request) -> None:
        """Keep a row that ends, in place of those that it begins with, and of the oldest where there is no room."""
        held = request.tokens[: forwards.lengths[number]]
        if not self.most or not held or len(held) > self.positions:
            return
        self.kept = [each for each in self.kept if shared_prefix(each.tokens, held) < len(each.tokens)]
        while self.kept and (len(self.kept) >= self.most
                             or sum(len(each.tokens) for each in self.kept) + len(held) > self.positions):
            del self.kept[0]
        self.kept.append(Kept(held, request.features, forwards.row(number)))

    def begin(self, request: Request, forwards: Forwards, rows: Forwards, others: Iterable[Request]) -> None:
        """Copy into a new request's caches what there is of the beginning of its prompt.

        Args:
            rows: those of the requests that are being decoded, `others`.
        """
        held = [(rows, number, other) for number, other in enumerate(others)]
        held += [(each.forwards, 0, each) for each in self.kept]
        best = max(held, key=lambda each: each[0].shared(each[1], each[2], request)[0], default=None)
        if best is None or not best[0].shared(best[1], best[2], request)[0]:
            return
        forwards.begin_with(request, *best)
        if isinstance(best[2], Kept):  # used: the latest again
            self.kept.remove(best[2])
            self.kept.append(best[2])
