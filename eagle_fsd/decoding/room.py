"""How large the caches of a batch may become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .request import Request

MULTIPLE = 256  # the capacity of a row is a multiple of this many positions
LEAST = 256  # new tokens after a prompt that takes all of a row's share


@dataclass(frozen=True)
class Room:
    """The limits of the caches of a batch, and what a cycle takes of them.

    Args:
        rows: maximum number. positions: of the target's cache, all rows together.
        nodes, levels: positions that the largest cycle takes besides the text, see `TreeConfig.room`: in both caches,
            and further ones in the drafter's.
    """

    rows: int
    positions: int
    nodes: int
    levels: int

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a text."""
        return self.positions - self.nodes

    def share(self, length: int) -> int:
        """The maximum number of tokens of a text that leaves room for other rows, after a prompt of this length."""
        return max(self.positions // self.rows - self.nodes, min(length + LEAST, self.longest))

    def require(self, request: Request) -> None:
        """Raise ValueError if the request can never fit."""
        if request.positions > self.longest:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} "
                             f"need {request.positions} positions, but the engine has room for {self.longest}")

    def size(self, requests: Sequence[Request]) -> tuple[int, int] | None:
        """Rows of caches for these requests, and the length of a text in them; None: there is no room."""
        needed, rows = max(request.positions for request in requests) + self.nodes, len(requests)
        if rows > self.rows or rows * needed > self.positions:
            return None
        room = min(-(-needed // MULTIPLE) * MULTIPLE, self.positions // rows)
        length = room - self.nodes
        return min(1 << (rows - 1).bit_length(), self.most_rows(length)), length

    def most_rows(self, length: int) -> int:
        """The maximum number of rows with texts of this length."""
        return min(self.rows, self.positions // (length + self.nodes))
