"""Parked rows: the caches of recent requests, for prompts with the same beginning."""

from __future__ import annotations

from ..decoding.batch import Batch, Row, shared_prefix


class Prefixes:
    """The rows that ended last.

    Args:
        most: maximum number of rows. positions: maximum number of positions in all of them together.
    """

    def __init__(self, most: int, positions: int) -> None:
        self.most, self.positions = most, positions
        self.parked: list[Row] = []  # the latest last

    def add(self, row: Row) -> None:
        """Park a copy of a row that ends. It replaces rows that are a prefix of it, and the oldest ones if there is no
        room."""
        text = row.cached
        if not self.most or not text or len(text) > self.positions or row.limit != row.target.position_limit(len(text)):
            return
        self.parked = [other for other in self.parked if shared_prefix(other.tokens, text) < len(other.tokens)]
        while self.parked and (len(self.parked) >= self.most
                               or sum(len(other.tokens) for other in self.parked) + len(text) > self.positions):
            del self.parked[0]
        self.parked.append(row.copy())

    def begin(self, alone: Batch, running: Batch) -> None:
        """Copy the longest cached prefix of a new request's prompt into its caches.

        Args:
            alone: the batch of the new request. running: that of the others.
        """
        (request,) = alone.requests
        # As keys of weights never return, those of old weights are of no use any more.
        self.parked = [row for row in self.parked if row.weights == request.weights]
        rows = [*map(running.row, range(len(running.requests))), *self.parked]
        shared = [row.shared(request)[0] for row in rows]
        if not any(shared):
            return
        best = rows[shared.index(max(shared))]
        alone.adopt(best)
        if best in self.parked:  # move it to the end, as recently used
            self.parked.remove(best)
            self.parked.append(best)
