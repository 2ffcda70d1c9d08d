"""`Ticket`, the result of `Engine.submit`: an answer in progress, for threads and for asyncio."""

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
from ..utils.text import StreamedText


class QueueFull(RuntimeError):
    """The queue is full: try again later."""


class EngineClosed(RuntimeError):
    """The engine accepts no more requests: it was closed, or its loop has failed."""


class Piece(NamedTuple):
    """The part of an answer that one cycle added.

    Args:
        token_ids: the new tokens; empty only in a last piece with the rest of the text.
        receipts: one for each token.
        text: the new text. The texts of all pieces together are `Output.text`. It may lag behind the tokens: an
            incomplete character and a possible stop string are withheld. Empty without a tokenizer.
    """

    token_ids: list[int]
    receipts: list[Receipt]
    text: str


class Ticket:
    """The handle of a request to an `Engine`. Every iteration over it begins at the first piece.

    A request is cancelled when its ticket is garbage collected.

    Attributes:
        prompt_tokens: length of the prompt.
        seed: seed of the sampling noise.
        stops: strings that end the answer.
        cancelled: whether `cancel` was called.
        queued_seconds: from `submit` to the start of the prefill; None: it has not started.
        first_token_seconds: from `submit` to the first token; None: there is none yet.
        total_seconds: from `submit` to the end; None: it has not ended.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.prompt_tokens, self.seed, self.cancelled = len(request.prompt), request.seed, False
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.total_seconds: float | None = None
        self._submitted = time.perf_counter()
        self._tokenizer, self.stops = tokenizer, request.stops
        self._text = None if tokenizer is None else StreamedText(tokenizer, self.stops)
        self._pieces: list[Piece | None] = []  # None after the last one
        self._readers: list[Callable[[Piece | None], None]] = []  # called with each piece, in the engine's thread
        self._lock = threading.Lock()  # of these two
        self._output: concurrent.futures.Future[Output] = concurrent.futures.Future()
        self._output.set_running_or_notify_cancel()  # so that a waiter's cancellation does not cancel it

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self._output.done()

    def cancel(self) -> None:
        """End the answer within a cycle, with `finish_reason` "cancelled". No effect if it has ended."""
        self.cancelled = True

    def __iter__(self) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._subscribe(pieces.put)
        while (piece := pieces.get()) is not None:
            yield piece
        self.result()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for _, piece in interleaved([self]):
            if piece is not None:
                yield piece

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the whole answer. In asyncio, use `await ticket`.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it takes longer. The request continues.
            EngineClosed: the engine was closed before the request started.
            Exception: the error that ended the request, such as that of a logits processor.
        """
        concurrent.futures.wait([self._output], timeout)
        if not self.done:
            raise TimeoutError(f"the answer takes longer than {timeout} s")
        return self._output.result()

    def __await__(self) -> Generator[object, None, Output]:
        return (yield from asyncio.wrap_future(self._output))  # a generator keeps the ticket alive

    def _subscribe(self, reader: Callable[[Piece | None], None]) -> None:
        """Call a reader with all pieces, existing ones at once, and with None after the last."""
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

    def leave_queue(self) -> None:
        """The prefill starts."""
        self.queued_seconds = self._seconds()

    def add(self, receipts: list[Receipt]) -> None:
        """Add the new tokens of a cycle."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self._seconds()
        tokens = [receipt.token for receipt in receipts]
        self._add(Piece(tokens, receipts, "" if self._text is None else self._text.add(tokens)))

    def end(self, request: Request) -> None:
        """The request has ended."""
        self.total_seconds, error = self._seconds(), request.error
        if error is None:
            try:
                output = request.output(self._tokenizer)
                if self._text is not None and (rest := self._text.rest(output.text)):
                    self._add(Piece([], [], rest))
            except Exception as failed:  # in the tokenizer
                error = failed
        if error is None:
            self._output.set_result(output)
        else:
            self._output.set_exception(error)
        self._add(None)

    def _seconds(self) -> float:
        return time.perf_counter() - self._submitted


async def interleaved(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Piece | None]]:
    """Pieces of several answers as they arrive, each with the number of its ticket; None after the last of a ticket."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

    def reader(number: int) -> Callable[[Piece | None], None]:
        def put(piece: Piece | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))
        return put

    for number, ticket in enumerate(tickets):
        ticket._subscribe(reader(number))
    left = len(tickets)
    while left:
        number, piece = await pieces.get()
        if piece is None:
            tickets[number].result()
            left -= 1
        yield number, piece
