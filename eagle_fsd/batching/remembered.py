"""Recent answers as a source of drafts for requests of the same pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..drafting.copies import SEPARATOR, TextIndex

PARTS = 4  # minimum number of parts of a pool that fills all the space; the oldest part is dropped as a whole


@dataclass(eq=False)
class Part:
    """Consecutive answers of a pool."""

    index: TextIndex = field(default_factory=TextIndex)
    answers: set[int] = field(default_factory=set)  # hashes of the answers

    @property
    def size(self) -> int:
        """Number of tokens, including a separator after each answer."""
        return len(self.index.tokens)


class Remembered:
    """Answers by pool, such as one pool per API key. Only the engine's thread uses it.

    An index only grows, so that a pool has several. When there is no more space, the pool that was added to least
    recently loses its oldest part. A repeated answer makes its pool the latest one.

    Args:
        most: maximum number of tokens in all pools together; 0: nothing is remembered.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self.pools: OrderedDict[str, list[Part]] = OrderedDict()  # pools and parts, the latest last

    def of(self, pool: str) -> list[TextIndex]:
        """The indices of a pool, newest answers first."""
        return [part.index for part in reversed(self.pools.get(pool, ()))]

    def add(self, pool: str, answer: Sequence[int]) -> None:
        """Remember an answer, unless it is longer than `most`."""
        size, known = len(answer) + 1, hash(tuple(answer))
        if size > self.most:
            return
        parts = self.pools.setdefault(pool, [])
        self.pools.move_to_end(pool)
        if parts and known in parts[-1].answers:
            return
        if not parts or parts[-1].size + size > self.most // PARTS:
            parts.append(Part())
        parts[-1].index.extend([*answer, SEPARATOR])
        parts[-1].answers.add(known)
        self.size += size
        while self.size > self.most:
            oldest = next(iter(self.pools))
            self.size -= self.pools[oldest].pop(0).size
            if not self.pools[oldest]:
                del self.pools[oldest]
