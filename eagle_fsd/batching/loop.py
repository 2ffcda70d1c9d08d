"""`Loop`: the thread of an engine, in which requests join a batch and leave it, and the memory of its caches."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from ..decoding import cycle
from ..decoding.batch import ALLOCATION_ERRORS, Batch, Room, Row, shared_prefix
from ..decoding.output import Counts, Receipt, counted
from ..decoding.request import Request
from ..drafting.config import TreeConfig
from ..drafting.copies import ORIGINS
from ..drafting.sizing import Drafting
from ..loading.pair import EagleModel
from ..options.engine import EngineOptions
from ..utils.checks import require_integer
from ..utils.threads import in_own_thread
from .memory import positions_in_memory
from .tickets import EngineClosed, QueueFull, Ticket

log = logging.getLogger(__name__)


@dataclass
class EngineStats(Counts):
    """Counters since the engine started: sums over its requests, which never decrease.

    Args:
        requests: submitted requests.
        finished: ended requests by finish_reason, including "error" and "cancelled".
        prompt_tokens: tokens of prefilled prompts.
        reused_tokens: those whose cache entries were copied from other requests.
        tokens: new tokens.
        fuzzy: those that only the rule accepted.
        cycles: cycles of the loop.
        accepted_lengths: forwards by the number of draft tokens that they accepted.
        drafts, undrafted, proposed, accepted: see `Stats`. tau is accepted.total() / forwards + 1.
    """

    requests: int = counted("accepted requests")
    finished: Counter[str] = counted("finished requests by reason", Counter, "reason")
    prompt_tokens: int = counted("prompt tokens")
    reused_tokens: int = counted("prompt tokens read from the cache of an earlier request")
    tokens: int = counted("new tokens")
    fuzzy: int = counted("new tokens that only a rule accepted")
    cycles: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for counter in (self.proposed, self.accepted):
            counter.update(dict.fromkeys(ORIGINS, 0))

    @property
    def forwards(self) -> int:
        """Verify forwards, counted once for each request of a cycle."""
        return self.accepted_lengths.total()

    def add_request(self, request: Request) -> None:
        """Add the current counts of a request, which another thread may be decoding."""
        stats, receipts = request.stats, request.receipts
        self.add(stats)
        self.requests += 1
        if receipts:  # the prefill is complete
            self.prompt_tokens += len(request.prompt)
            self.reused_tokens += len(request.prompt) - stats.prefill_tokens
        self.tokens += len(receipts)
        self.fuzzy += sum(receipt.source == "fuzzy" for receipt in receipts)
        self.accepted_lengths.update(stats.accepted_lengths)


class Loop:
    """Decodes requests in a thread of its own, which ends once the loop is closed and no request is left.

    A prompt is prefilled in parts, in caches of its own. The request joins the batch with its first token. When it has
    ended, it leaves the batch (`_drop_finished`), its caches serve later prompts (`_park`), it is counted (`_retire`),
    and its ticket gets the output (`Ticket.end`). Other threads, which submit requests, call only what stands before
    `_work`.

    The loop does not refer to its engine: an engine that nobody holds closes it.

    Args:
        tree: of all requests, though lossless ones may bring their own; None: it is chosen for the number of rows.

    Attributes:
        queue: the requests that wait for a row.
        closed: whether new requests are rejected.
        error: the exception that ended the loop and all requests; None: there was none.
        room: the limits of the caches.

    Raises:
        ValueError: `max_tokens` is too small for a cycle.
    """

    def __init__(self, model: EagleModel, tree: TreeConfig | None, options: EngineOptions) -> None:
        self.model, self.max_waiting = model, options.max_waiting
        nodes, levels = (model.sizing.largest_tree if tree is None else tree).room
        positions = options.max_tokens or in_own_thread(partial(positions_in_memory, model, options.max_rows, nodes))
        require_integer("max_tokens", positions, nodes + 2)
        self.room = Room(options.max_rows, positions, nodes, levels)
        # If the target does not split prompts, its keys depend on the number of positions in a forward.
        self.prefill_chunk = options.prefill_chunk if model.target.splits_prefill else 1 << 62
        self.queue: deque[Request] = deque()
        self._changed = threading.Condition()  # of the queue, and of the next two
        self.closed, self._cancelling = False, False
        self.error: BaseException | None = None
        self.live: dict[Request, weakref.ref[Ticket]] = {}  # all requests that have not ended, waiting ones included
        self._totals, self._counting = EngineStats(), threading.Lock()  # the first: without requests in `live`
        # Of the loop's thread.
        self.prefixes = Prefixes(options.prefixes, positions // 2)
        self.prefilling: Batch | None = None  # of the prompt in progress
        self.batch: Batch | None = Batch(
            model.target, model.draft, [], Drafting(lambda requests: model.largest_plan(requests, tree)),
            room=self.room, captured=model.captured)
        self.thread = threading.Thread(target=self._work, name="eagle_fsd.Engine", daemon=True)
        self.thread.start()

    # For all threads --------------------------------------------------------------------------------------------

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
            self.live[request] = weakref.ref(ticket)
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
            if request.receipts:  # it waited for a second prefill
                request.finish("cancelled")
            else:
                request.finish("error", EngineClosed("the engine was closed before the request started"))
            self._retire(request)
        self.thread.join()

    @property
    def requests(self) -> list[Request]:
        """The requests that are being decoded."""
        batch = self.batch  # another thread may read this while it is released
        return [] if batch is None else batch.requests

    @property
    def rows(self) -> int:
        """The number of requests that are being prefilled or decoded."""
        return len(self.requests) + (self.prefilling is not None)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        with self._counting:
            stats = copy.deepcopy(self._totals)
            for request in list(self.live):
                stats.add_request(request)
        return stats

    # The thread -------------------------------------------------------------------------------------------------

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
            self._release()
            for request in list(self.live):
                request.finish("error", error)
                self._retire(request)
        finally:
            self._release()

    def _release(self) -> None:
        """Free the caches after the last cycle: the engine, which its user may keep, refers to the loop."""
        self.prefixes.parked.clear()
        self.batch = self.prefilling = None

    def _wait(self) -> bool:
        """Wait for work. False: the loop is closed and has none left."""
        with self._changed:
            self._changed.wait_for(lambda: self.queue or self.rows or self.closed)
            return bool(self.queue or self.rows)

    def _turn(self) -> None:
        """Drop cancelled requests, prefill, and run a cycle."""
        self._drop_cancelled()
        left = self.prefill_chunk
        while left > 0 and (self.prefilling is not None or self._start_next()):
            left -= self._prefill(left)
        if self.requests:
            self._cycle()

    # Joining ----------------------------------------------------------------------------------------------------

    def _start_next(self) -> bool:
        """Start the prefill of the first request of the queue if there is room for it. An error ends this request only.
        Returns whether a prompt is being prefilled."""
        with self._changed:
            if not self.queue or not self._has_room_for(self.queue[0]):
                return False
            request = self.queue.popleft()
        ticket, together = self.live[request](), [*self.requests, request]
        if ticket is not None and not request.receipts:
            ticket.leave_queue()
        try:
            self.batch.make_room([request])
            plan = self.batch.drafting.largest_plan(together)
            alone = Batch(self.model.target, self.model.draft, [request], Drafting(lambda _: plan))
            self.prefixes.copy_into(alone, self.batch)
            self.prefilling = alone
        except Exception as error:
            request.finish("error", error)
            self._retire(request)
        return self.prefilling is not None

    def _prefill(self, most: int) -> int:
        """Process at most this many tokens of the prompt in progress, and return their number."""
        alone = self.prefilling
        (request,), before = alone.requests, alone.cache.length
        try:
            receipts = cycle.prefill(alone, 0, most)
            if receipts and request.reason is None:
                self.batch.allocate_like(alone)  # here, as memory may run out
        except Exception as error:
            request.finish("error", error)
            receipts = []
        count = alone.cache.length - before
        if request.reason is None and not receipts:  # the prompt has more tokens
            return count
        self.prefilling = None
        self._show(request, receipts)
        if request.reason is None:
            self._wait_again(alone.drop_finished())
            self.batch.add(alone)
        else:
            self._park(alone, 0)
            self._retire(request)
        return count

    # A cycle ----------------------------------------------------------------------------------------------------

    def _cycle(self) -> None:
        """Run one cycle. Requests that end leave the batch."""
        emitted = cycle.step(self.batch, self.prefilling.requests if self.prefilling else ())
        for request, receipts in zip(self.requests, emitted, strict=True):
            self._show(request, receipts)
        self._totals.cycles += 1
        self._drop_finished()

    def _show(self, request: Request, receipts: list[Receipt]) -> None:
        """Pass the new receipts to the request's ticket. An error of the tokenizer ends this request only."""
        ticket = self.live[request]()
        if receipts and ticket is not None:
            try:
                ticket.add(receipts)
            except Exception as error:
                request.finish("error", error)

    # Leaving ----------------------------------------------------------------------------------------------------

    def _is_cancelled(self, request: Request) -> bool:
        """Whether its ticket was cancelled or garbage collected."""
        ticket = self.live[request]()
        return ticket is None or ticket.cancelled

    def _drop_cancelled(self) -> None:
        """End cancelled requests, with their answers so far."""
        prefilled = [] if self.prefilling is None else self.prefilling.requests
        for request in [*self.requests, *prefilled]:
            if self._cancelling or self._is_cancelled(request):
                request.finish("cancelled")
        if prefilled and prefilled[0].reason is not None:
            self.prefilling = None
            self._retire(prefilled[0])
        self._drop_finished()
        with self._changed:
            for request in filter(self._is_cancelled, list(self.queue)):
                request.finish("cancelled")
                self.queue.remove(request)
                self._retire(request)

    def _drop_finished(self) -> None:
        """Free the rows of requests that have ended."""
        finished = [(number, request) for number, request in enumerate(self.requests) if request.reason is not None]
        for number, _ in finished:
            self._park(self.batch, number)
        try:
            self._wait_again(self.batch.drop_finished())
        finally:  # even if an error stops the others
            for _, request in finished:
                self._retire(request)

    def _wait_again(self, long: Sequence[Request]) -> None:
        """Texts that have become long are prefilled again, before the others in the queue."""
        with self._changed:
            self.queue.extendleft(reversed(long))

    def _park(self, batch: Batch, number: int) -> None:
        """Keep the caches of a row for prompts with the same beginning, unless it failed or memory runs out."""
        if batch.requests[number].error is None:
            with suppress(*ALLOCATION_ERRORS):
                self.prefixes.add(batch.row(number))

    def _retire(self, request: Request) -> None:
        """Count a finished request and end its ticket. Further calls have no effect."""
        with self._counting:
            reference = self.live.pop(request, None)
            if reference is None:
                return
            self._totals.add_request(request)
            self._totals.finished[request.reason] += 1
        release_frames(request.error)
        ticket = reference()
        if ticket is not None:
            ticket.end(request)

    def _has_room_for(self, request: Request) -> bool:
        """Whether the request can start now."""
        requests = [*self.requests, request]
        batches = self.model.target.batches([len(row.tokens) for row in requests])
        return len(batches) == 1 and self.room.size(requests) is not None


class Prefixes:
    """The rows that ended last, parked for prompts with the same beginning.

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
        if not self.most or not text or len(text) > self.positions:
            return
        self.parked = [other for other in self.parked if shared_prefix(other.tokens, text) < len(other.tokens)]
        while self.parked and (len(self.parked) >= self.most
                               or sum(len(other.tokens) for other in self.parked) + len(text) > self.positions):
            del self.parked[0]
        self.parked.append(row.copy())

    def copy_into(self, alone: Batch, running: Batch) -> None:
        """Copy the longest cached prefix of a new request's prompt into its caches.

        Args:
            alone: the batch of the new request. running: that of the others.
        """
        (request,) = alone.requests
        # As keys of weights never return, those of old weights are of no use any more.
        self.parked = [row for row in self.parked if row.weights_key == request.weights_key]
        rows = [*map(running.row, range(len(running.requests))), *self.parked]
        best = max(rows, key=lambda row: row.shared(request)[0], default=None)
        if best is not None and alone.adopt(best) and best in self.parked:  # move it to the end, as recently used
            self.parked.remove(best)
            self.parked.append(best)


def release_frames(error: BaseException | None) -> None:
    """Replace an error's traceback by its text: users may keep errors, and frames refer to the caches and the model."""
    if error is None or error.__traceback__ is None:
        return
    if sys.version_info >= (3, 11):
        error.add_note("In the engine's thread:\n" + "".join(traceback.format_exception(error)))
    while error is not None:
        error.__traceback__, error = None, error.__context__
