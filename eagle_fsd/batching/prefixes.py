"""Caches of recent requests, for prompts with the same beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..decoding.forwards import Forwards, shared_prefix
from ..decoding.request import Request
from ..drafting.drafter import weights_key


class Kept(NamedTuple):
    """A copy of a row: its cached text, its caches, and the key of the weights that it began with."""

    tokens: list[int]
    forwards: Forwards
    weights: tuple | None


class Prefixes:
    """The caches of the rows that ended last. A request copies from those that began with the current weights only: as
    keys never return, the weights have not changed since.

    Args:
        most: maximum number of rows. positions: maximum number of positions in all of them together.
    """

    def __init__(self, most: int, positions: int) -> None:
        self.most, self.positions = most, positions
        self.kept: list[Kept] = []  # the latest last

    def add(self, forwards: Forwards, number: int, request: Request) -> None:
        """Keep a row that ends. It replaces rows that are a prefix of it, and the oldest ones if there is no room."""
        text = request.tokens[: forwards.lengths[number]]
        limit = forwards.target.position_limit
        if not self.most or not text or len(text) > self.positions or limit(len(text)) != limit(len(request.prompt)):
            return
        self.kept = [kept for kept in self.kept if shared_prefix(kept.tokens, text) < len(kept.tokens)]
        while self.kept and (len(self.kept) >= self.most
                             or sum(len(kept.tokens) for kept in self.kept) + len(text) > self.positions):
            del self.kept[0]
        self.kept.append(Kept(text, forwards.row(number), request.weights))

    def begin(self, request: Request, forwards: Forwards, rows: Forwards, others: Sequence[Request]) -> None:
        """Copy the longest cached prefix of a new request's prompt into its caches.

        Args:
            forwards: of the new request. rows: of the running requests, `others`.
        """
        request.weights = weights = weights_key(forwards.target, forwards.drafter)
        self.kept = [kept for kept in self.kept if kept.weights == weights]
        running = [(number, other) for number, other in enumerate(others) if other.weights == weights]
        cached = [(rows, number, other.tokens) for number, other in running]
        cached += [(kept.forwards, 0, kept.tokens) for kept in self.kept]
        shared = [row.shared(number, tokens, request)[0] for row, number, tokens in cached]
        if not any(shared):
            return
        best = shared.index(max(shared))
        forwards.begin_with(request, *cached[best])
        if best >= len(running):  # move it to the end, as recently used
            self.kept.append(self.kept.pop(best - len(running)))
