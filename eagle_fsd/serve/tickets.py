"""What `Engine.submit` returns: an answer that is being made, to be read from threads and from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
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
        cancelled: whether its holder has cancelled it.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.prompt_tokens, self.seed = len(request.prompt), request.seed
        self.cancelled = False
        self._tokenizer, self._stops = tokenizer, request.options.stop_strings
        self._text = None if tokenizer is None else StreamedText(tokenizer, self._stops)
        self._pieces: list[Piece] = []
        self._output: Output | None = None
        self._error: BaseException | None = None
        self._submitted = time.perf_counter()
        self._begun: float | None = None
        self._first: float | None = None
        self._ended: float | None = None
        self._changed = threading.Condition()
        self._waking: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # For whoever holds it ---------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether no more will come."""
        return self._ended is not None

    @property
    def queued_seconds(self) -> float | None:
        """From `submit` to when its prompt began to be read; None: it waits, or never left the queue."""
        return self._since(self._begun)

    @property
    def first_token_seconds(self) -> float | None:
        """From `submit` to the first token; None: there is none yet."""
        return self._since(self._first)

    @property
    def total_seconds(self) -> float | None:
        """From `submit` to the end; None: it has not ended."""
        return self._since(self._ended)

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._submitted

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
        self._begun = time.perf_counter()

    def add(self, tokens: list[int], receipts: list[Receipt]) -> None:
        """What a cycle emitted."""
        piece = Piece(tokens, receipts, "" if self._text is None else self._text.add(tokens))
        with self._changed:
            self._pieces.append(piece)
            self._first = self._first or time.perf_counter()
            self._wake()

    def end(self, request: Request, error: BaseException | None = None) -> None:
        """No more will come: the request has ended, or an error has ended it."""
        try:
            output = self._whole(request) if error is None else None
        except Exception as failed:  # of the tokenizer
            output, error = None, failed
        with self._changed:
            self._output, self._error, self._ended = output, error, time.perf_counter()
            self._wake()

    def _whole(self, request: Request) -> Output:
        output, now = request.output(), time.perf_counter()
        if self._begun is not None:
            first = self._first or now
            output.stats.prefill_seconds, output.stats.decode_seconds = first - self._begun, now - first
        if self._tokenizer is not None:
            output.text = cut_text(self._tokenizer.decode(output.token_ids, skip_special_tokens=True), self._stops)
            rest = self._text.rest(output.text)
            if rest:
                self._pieces.append(Piece([], [], rest))
        return output

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, change in self._waking:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(change.set)
        self._waking.clear()
