"""`Loop`: the thread of an engine, and the requests that wait for a row."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque

import torch

from ..decoding.request import Request
from .rows import Rows, release_frames
from .tickets import EngineClosed, QueueFull, Ticket

log = logging.getLogger(__name__)


class Loop:
    """Runs cycles in a thread of its own, which ends once the loop is closed and no request is left.

    It does not refer to its engine: an engine that nobody holds closes it.

    Args:
        max_waiting: maximum number of requests that wait for a row.
        prefill_chunk: maximum number of prompt tokens that are processed between two cycles.

    Attributes:
        closed: whether new requests are rejected.
        error: the exception that ended the loop and all requests; None: there was none.
    """

    def __init__(self, rows: Rows, max_waiting: int, prefill_chunk: int) -> None:
        self.rows, self.max_waiting, self.prefill_chunk = rows, max_waiting, prefill_chunk
        self.queue: deque[Request] = deque()
        self._changed = threading.Condition()  # of the queue, and of the next two
        self.closed, self._cancelling = False, False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="eagle_fsd.Engine", daemon=True)
        self.thread.start()

    def add(self, request: Request, ticket: Ticket) -> None:
        """Let a request wait for a row.

        Raises:
            QueueFull, EngineClosed: see `Engine.submit`.
        """
        with self._changed:
            if self.closed:
                why = "it was closed" if self.error is None else f"it has failed: {self.error!r}"
                raise EngineClosed(f"the engine accepts no more requests: {why}") from self.error
            if len(self.queue) >= self.max_waiting:
                raise QueueFull(f"{len(self.queue)} requests wait already, the limit is max_waiting={self.max_waiting}")
            self.rows.live[request] = weakref.ref(ticket)
            self.queue.append(request)
            self._changed.notify_all()

    def stop(self) -> None:
        """Reject new requests. The thread ends after the last of the others."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, drain: bool) -> None:
        """See `Engine.close`."""
        self.stop()
        if drain:
            self.thread.join()
        with self._changed:
            left, self._cancelling = list(self.queue), True
            self.queue.clear()
        for request in left:
            request.finish("error", EngineClosed("the engine was closed before the request started"))
            self.rows.end(request)
        self.thread.join()

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:
            log.exception("the engine has failed, and ends all of its requests")
            release_frames(error)
            with self._changed:
                self.closed, self.error = True, error
                self.queue.clear()
            self.rows.fail(error)
        finally:
            self.rows.release()

    def _wait(self) -> bool:
        """Wait for work. False: the loop is closed and has none left."""
        with self._changed:
            self._changed.wait_for(lambda: self.queue or len(self.rows) or self.closed)
            return bool(self.queue or len(self.rows))

    def _turn(self) -> None:
        """Cancel, prefill, and run a cycle."""
        self._drop_cancelled()
        left = self.prefill_chunk
        while left > 0 and (self.rows.prefilling is not None or self._begin_next()):
            left -= self.rows.prefill_chunk(left)
        if self.rows.requests:
            self.rows.cycle()

    def _drop_cancelled(self) -> None:
        self.rows.drop_cancelled(everyone=self._cancelling)
        with self._changed:
            for request in [waiting for waiting in self.queue if self.rows.cancelled(waiting)]:
                request.finish("cancelled")
                self.queue.remove(request)
                self.rows.end(request)

    def _begin_next(self) -> bool:
        """Start the first request of the queue if it fits. Returns whether a prompt is being prefilled."""
        with self._changed:
            request = self.queue.popleft() if self.queue and self.rows.fits(self.queue[0]) else None
        if request is not None:
            self.rows.begin(request)
        return self.rows.prefilling is not None
