"""Recent answers to copy drafts from, each only for those who share the pool that it came from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..drafting.text import SEPARATOR, TextIndex

PARTS = 4  # that a pool is held in, at least, once it has all the room: the oldest is dropped as a whole


@dataclass(eq=False)
class Part:
    """Answers that came one after the other."""

    index: TextIndex = field(default_factory=TextIndex)
    answers: set[int] = field(default_factory=set)  # hashes of what it holds

    @property
    def size(self) -> int:
        """Tokens, with one that ends each answer."""
        return len(self.index.tokens)


class Remembered:
    """Answers by pool, such as that of an API key. For the engine's thread.

    An index only grows, so a pool is several of them: where there is no more room the oldest part is dropped of the
    pool that was added to least recently. An answer that comes again is as new as the last time.

    Args:
        most: tokens of all pools together; 0: nothing is remembered.
    """

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self.pools: OrderedDict[str, list[Part]] = OrderedDict()  # those and their parts: the latest last

    def of(self, pool: str) -> list[TextIndex]:
        """What to copy from; the newest answers first."""
        return [part.index for part in reversed(self.pools.get(pool, ()))]

    def add(self, pool: str, answer: Sequence[int]) -> None:
        """Remember an answer, unless it is longer than all that may be remembered."""
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
