"""What `Engine.submit` returns: an answer that is being made, as an iterator for threads and for asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from typing import NamedTuple

from ..engine.receipts import Output, Receipt


class QueueFull(RuntimeError):
    """As many requests wait as may wait: try again later."""


class EngineClosed(RuntimeError):
    """The engine takes no requests any more: it was closed, or its loop has failed."""


class Piece(NamedTuple):
    """What one cycle added to an answer.

    Args:
        token_ids: never empty, but in a last piece that holds text only.
        receipts: one for each token.
        text: what the answer's text grew by; the pieces' texts together are `Output.text`. It may lag behind the
            tokens: an unfinished character and what may become a stop string are held back. Empty without a tokenizer.
    """

    token_ids: list[int]
    receipts: list[Receipt]
    text: str


class Answer:
    """An answer that the engine's thread makes and others read: pieces, then an output or an error."""

    def __init__(self) -> None:
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.pieces: list[Piece] = []
        self.output: Output | None = None
        self.error: BaseException | None = None
        self.cancelled = False  # set by whoever holds the ticket; the engine looks at it in each cycle
        self._changed = threading.Condition()
        self._waking: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def done(self) -> bool:
        return self.ended is not None

    def begin(self) -> None:
        """Its prompt is being read."""
        self.started = time.perf_counter()

    def add(self, piece: Piece) -> None:
        """One more piece."""
        with self._changed:
            self.pieces.append(piece)
            if self.first is None:
                self.first = time.perf_counter()
            self._wake()

    def end(self, output: Output | None = None, error: BaseException | None = None) -> None:
        """No more will come."""
        with self._changed:
            self.output, self.error, self.ended = output, error, time.perf_counter()
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, change in self._waking:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(change.set)
        self._waking.clear()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    def wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until there are more pieces than `count`, or no more will come; False: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.pieces) > count or self.done, timeout)

    async def wait_async(self, count: int) -> None:
        """`wait` without blocking the event loop."""
        while True:
            with self._changed:
                if len(self.pieces) > count or self.done:
                    return
                change = asyncio.Event()
                self._waking.append((asyncio.get_running_loop(), change))
            await change.wait()


class Ticket:
    """A request to an `Engine`, and its answer as far as it is made. Every iteration begins at the first piece.

    A ticket that nobody holds any more is cancelled.

    Attributes:
        prompt_tokens: length of the prompt.
        seed: of the sampling noise.
    """

    def __init__(self, answer: Answer, prompt_tokens: int, seed: int) -> None:
        self._answer = answer
        self.prompt_tokens, self.seed = prompt_tokens, seed
        weakref.finalize(self, answer.cancel).atexit = False

    @property
    def done(self) -> bool:
        """Whether no more will come."""
        return self._answer.done

    @property
    def queued_seconds(self) -> float | None:
        """From `submit` to when its prompt began to be read; None: it waits, or never left the queue."""
        answer = self._answer
        return None if answer.started is None else answer.started - answer.submitted

    @property
    def first_token_seconds(self) -> float | None:
        """From `submit` to the first token; None: there is none yet."""
        answer = self._answer
        return None if answer.first is None else answer.first - answer.submitted

    @property
    def total_seconds(self) -> float | None:
        """From `submit` to the end; None: it has not ended."""
        answer = self._answer
        return None if answer.ended is None else answer.ended - answer.submitted

    def cancel(self) -> None:
        """End it within a cycle, with what is there and `finish_reason` "cancelled"; one that has ended stays so."""
        self._answer.cancel()

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            self._answer.wait(at)
            pieces = self._answer.pieces[at:]
            if not pieces:
                break
            yield from pieces
            at += len(pieces)
        self._raise()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._answer.wait_async(at)
            pieces = self._answer.pieces[at:]
            if not pieces:
                break
            for piece in pieces:
                yield piece
            at += len(pieces)
        self._raise()

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the whole answer; `await ticket` is the same for asyncio.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer; it goes on.
            EngineClosed: the engine was closed before the request's turn came.
            Exception: what ended the request, such as a logits processor's error.
        """
        if not self._answer.wait(_ALL, timeout):
            raise TimeoutError(f"the answer takes longer than {timeout} s")
        return self._result()

    def __await__(self) -> Generator[object, None, Output]:
        return self._await().__await__()

    async def _await(self) -> Output:
        await self._answer.wait_async(_ALL)
        return self._result()

    def _result(self) -> Output:
        self._raise()
        assert self._answer.output is not None
        return self._answer.output

    def _raise(self) -> None:
        if self._answer.error is not None:
            raise self._answer.error


_ALL = 1 << 62  # more pieces than there ever are: until the end
