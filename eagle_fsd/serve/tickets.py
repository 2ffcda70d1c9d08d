"""What `Engine.submit` returns: an answer that is being made, to be read from threads and from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..api import cut_text
from ..engine.receipts import Output, Receipt
from ..text import StreamedText
from ._old import Request

ALL = 1 << 62  # more pieces than there ever are: until the end


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


class Ticket:
    """The handle of a request to an `Engine`: its answer as far as it is made. Every iteration begins at the first
    piece. A ticket that nobody holds any more is cancelled.

    Attributes:
        prompt_tokens: length of the prompt.
        seed: of the sampling noise.
        cancelled: whether `cancel` was called.
        queued_seconds: from `submit` to when its prompt began to be read; None: it waits, or never left the queue.
        first_token_seconds: from `submit` to the first token; None: there is none yet.
        total_seconds: from `submit` to the end; None: it has not ended.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.prompt_tokens, self.seed, self.cancelled = len(request.prompt), request.seed, False
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.total_seconds: float | None = None
        self._submitted = time.perf_counter()
        self._tokenizer, self._stops = tokenizer, request.options.stop_strings
        self._text = None if tokenizer is None else StreamedText(tokenizer, self._stops)
        self._pieces: list[Piece] = []
        self._output: Output | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._waking: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # For whoever holds it ---------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether no more will come."""
        return self.total_seconds is not None

    def cancel(self) -> None:
        """End it within a cycle, with what is there and `finish_reason` "cancelled"; one that has ended stays so."""
        self.cancelled = True

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while True:
            self._wait(at)
            pieces = self._pieces[at:]
            if not pieces:
                break
            yield from pieces
            at += len(pieces)
        self._raise()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        at = 0
        while True:
            await self._wait_async(at)
            pieces = self._pieces[at:]
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
        if not self._wait(ALL, timeout):
            raise TimeoutError(f"the answer takes longer than {timeout} s")
        self._raise()
        return self._output

    def __await__(self) -> Generator[object, None, Output]:
        yield from self._wait_async(ALL).__await__()
        self._raise()
        return self._output

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, count: int, timeout: float | None = None) -> bool:
        """Wait until there are more pieces than `count`, or no more will come; False: the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._pieces) > count or self.done, timeout)

    async def _wait_async(self, count: int) -> None:
        """`_wait` without blocking the event loop."""
        while True:
            with self._changed:
                if len(self._pieces) > count or self.done:
                    return
                change = asyncio.Event()
                self._waking.append((asyncio.get_running_loop(), change))
            await change.wait()

    # For the engine ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Its prompt is being read."""
        self.queued_seconds = self._seconds()

    def add(self, tokens: list[int], receipts: list[Receipt]) -> None:
        """What a cycle emitted."""
        piece = Piece(tokens, receipts, "" if self._text is None else self._text.add(tokens))
        with self._changed:
            self._pieces.append(piece)
            if self.first_token_seconds is None:
                self.first_token_seconds = self._seconds()
            self._wake()

    def end(self, request: Request, error: BaseException | None = None) -> None:
        """No more will come: the request has ended, or an error has ended it."""
        try:
            output = self._whole(request) if error is None else None
        except Exception as failed:  # of the tokenizer
            output, error = None, failed
        with self._changed:
            self._output, self._error, self.total_seconds = output, error, self._seconds()
            self._wake()

    def _whole(self, request: Request) -> Output:
        output, now = request.output(), self._seconds()
        if self.queued_seconds is not None:
            first = now if self.first_token_seconds is None else self.first_token_seconds
            output.stats.prefill_seconds, output.stats.decode_seconds = first - self.queued_seconds, now - first
        if self._tokenizer is not None:
            output.text = cut_text(self._tokenizer.decode(output.token_ids, skip_special_tokens=True), self._stops)
            rest = self._text.rest(output.text)
            if rest:
                self._pieces.append(Piece([], [], rest))
        return output

    def _seconds(self) -> float:
        return time.perf_counter() - self._submitted

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, change in self._waking:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(change.set)
        self._waking.clear()


async def interleaved(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Piece | None]]:
    """The pieces of several answers as they come, with the number of theirs; None where one has ended.

    Whoever stops reading cancels them all.
    """
    found: asyncio.Queue[tuple[int, Piece | None | Exception]] = asyncio.Queue()

    async def read(number: int, ticket: Ticket) -> None:
        try:
            async for piece in ticket:
                found.put_nowait((number, piece))
            found.put_nowait((number, None))
        except Exception as error:
            found.put_nowait((number, error))

    readers = [asyncio.ensure_future(read(number, ticket)) for number, ticket in enumerate(tickets)]
    try:
        left = len(tickets)
        while left:
            number, piece = await found.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield number, piece
    finally:
        for ticket, reader in zip(tickets, readers, strict=True):
            ticket.cancel()
            reader.cancel()
