"""What `Engine.submit` returns: an answer that is being made, to be read from threads and from asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..decoding.output import Output, Receipt
from ..decoding.request import Request
from ..text import StreamedText, answer_text


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
        pool: of remembered answers, see `Engine.submit`.
        seed: of the sampling noise.
        cancelled: whether `cancel` was called.
        queued_seconds: from `submit` to when its prompt began to be read; None: it waits, or never left the queue.
        first_token_seconds: from `submit` to the first token; None: there is none yet.
        total_seconds: from `submit` to the end; None: it has not ended.
    """

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str],
        pool: str | None = None,
    ) -> None:
        self.prompt_tokens, self.seed, self.cancelled = len(request.prompt), request.params.seed, False
        self.pool = pool
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.total_seconds: float | None = None
        self._submitted = time.perf_counter()
        self._tokenizer, self._stops = tokenizer, stops
        self._text = None if tokenizer is None else StreamedText(tokenizer, stops)
        self._pieces: list[Piece | None] = []  # after the last one None
        self._readers: list[Callable[[Piece | None], None]] = []  # told each piece; called by the engine's thread
        self._lock = threading.Lock()  # of these two
        self._output: concurrent.futures.Future[Output] = concurrent.futures.Future()
        self._output.set_running_or_notify_cancel()  # who stops waiting for it ends nothing

    @property
    def done(self) -> bool:
        """Whether no more will come."""
        return self._output.done()

    def cancel(self) -> None:
        """End it within a cycle, with what is there and `finish_reason` "cancelled"; one that has ended stays so."""
        self.cancelled = True

    def __iter__(self) -> Iterator[Piece]:
        found: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._tell(found.put)
        while (piece := found.get()) is not None:
            yield piece
        self.result()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for _, piece in interleaved([self]):
            if piece is not None:
                yield piece

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the whole answer; `await ticket` is the same for asyncio.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer; it goes on.
            EngineClosed: the engine was closed before the request's turn came.
            Exception: what ended the request, such as a logits processor's error.
        """
        concurrent.futures.wait([self._output], timeout)
        if not self.done:
            raise TimeoutError(f"the answer takes longer than {timeout} s")
        return self._output.result()

    def __await__(self) -> Generator[object, None, Output]:
        return (yield from asyncio.wrap_future(self._output))  # a generator: it holds the ticket

    def _tell(self, reader: Callable[[Piece | None], None]) -> None:
        """Tell a reader all pieces, those that are there at once; None: no more will come."""
        with self._lock:
            for piece in self._pieces:
                reader(piece)
            self._readers.append(reader)

    def _add(self, piece: Piece | None) -> None:
        with self._lock:
            self._pieces.append(piece)
            for reader in self._readers:
                reader(piece)

    # For the engine ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Its prompt is being read."""
        self.queued_seconds = self._seconds()

    def add(self, receipts: list[Receipt]) -> None:
        """What the answer grew by."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self._seconds()
        tokens = [receipt.token for receipt in receipts]
        self._add(Piece(tokens, receipts, "" if self._text is None else self._text.add(tokens)))

    def end(self, request: Request) -> None:
        """No more will come: the request has ended."""
        self.total_seconds, error = self._seconds(), request.error
        try:
            output = self._whole(request) if error is None else None
        except Exception as failed:  # of the tokenizer
            error = failed
        if error is None:
            self._output.set_result(output)
        else:
            self._output.set_exception(error)
        self._add(None)

    def _whole(self, request: Request) -> Output:
        output = request.output()
        if self._tokenizer is not None:
            output.text = answer_text(self._tokenizer, output.token_ids, self._stops)
            if rest := self._text.rest(output.text):
                self._add(Piece([], [], rest))
        return output

    def _seconds(self) -> float:
        return time.perf_counter() - self._submitted


async def interleaved(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Piece | None]]:
    """The pieces of several answers as they come, with the number of theirs; None where one has ended."""
    loop, found = asyncio.get_running_loop(), asyncio.Queue()

    def reader(number: int) -> Callable[[Piece | None], None]:
        def tell(piece: Piece | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(found.put_nowait, (number, piece))
        return tell

    for number, ticket in enumerate(tickets):
        ticket._tell(reader(number))
    left = len(tickets)
    while left:
        number, piece = await found.get()
        if piece is None:
            tickets[number].result()
            left -= 1
        yield number, piece
