"""The running requests of an engine: how they join, continue and leave the batch, and the memory of their caches."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from ..decoding import cycle
from ..decoding.batch import Batch
from ..decoding.cycle import OUT_OF_MEMORY
from ..decoding.output import Receipt
from ..decoding.request import Request
from ..drafting.config import TreeConfig
from ..drafting.growth import read_prompt
from ..drafting.sizing import Drafting, Plan, room_of
from ..drafting.tree import ORIGINS
from ..loading.pair import EagleModel
from ..utils.openmp import in_own_thread
from .memory import free_bytes
from .prefixes import Prefixes
from .tickets import Ticket

log = logging.getLogger(__name__)
# While a cache grows, the old and the new one exist at once. Prefixes and prompts in progress take memory as well.
SHARE = 1 / 4  # of the free memory
STEP = 256  # the capacity of a row is a multiple of this many positions
LEAST = 256  # new tokens after a prompt that takes all of a row's share


@dataclass
class EngineStats:
    """Counters since the engine started: sums over its requests, which never decrease.

    Args:
        requests: submitted requests.
        finished: ended requests by finish_reason, including "error" and "cancelled".
        prompt_tokens: tokens of prefilled prompts.
        reused_tokens: those whose cache entries were copied from other requests.
        tokens: new tokens.
        fuzzy: those that only the rule accepted.
        cycles: cycles of the loop.
        forwards: verify forwards, counted once for each request of a cycle.
        drafts, undrafted: those with draft tokens of the request, and without.
        proposed, accepted: draft tokens by origin, see `ORIGINS`. tau is accepted.total() / forwards + 1.
        accepted_lengths: forwards by the number of draft tokens that they accepted.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    fuzzy: int = 0
    cycles: int = 0
    forwards: int = 0
    drafts: int = 0
    undrafted: int = 0
    proposed: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ORIGINS, 0)))
    accepted: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ORIGINS, 0)))
    accepted_lengths: Counter[int] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        """Add the current counts of a request, which another thread may be decoding."""
        stats, receipts = request.stats, request.receipts
        self.requests += 1
        if receipts:  # the prefill is complete
            self.prompt_tokens += len(request.prompt)
            self.reused_tokens += len(request.prompt) - stats.prefill_tokens
        self.tokens += len(receipts)
        self.fuzzy += sum(receipt.source == "fuzzy" for receipt in receipts)
        self.forwards += stats.target_forwards
        self.drafts += stats.drafts
        self.undrafted += stats.undrafted
        self.proposed.update(Counter(stats.proposed))  # a copy: the other thread may add keys during the update
        self.accepted.update(Counter(stats.accepted))
        self.accepted_lengths.update(stats.accepted_lengths)


class Rows:
    """A batch of requests that changes between cycles. The engine's thread decodes. Others, which submit
    requests, call only `share`, `require_room` and `stats`, and enter requests into `live`.

    A prompt is prefilled in parts, in caches of its own. The request joins the batch with its first token.

    Args:
        tree: the tree of all requests; None: the model chooses it for the number of rows.
        most: maximum number of rows.
        positions: capacity of the caches, rows times the length of the longest one; None: as many as fit in memory.
        kept: number of recent rows whose caches are kept for prompts with the same beginning.
    """

    def __init__(
        self, model: EagleModel, tree: TreeConfig | None, *, most: int, positions: int | None, kept: int,
    ) -> None:
        trees = [model.sizing.largest, model.default_tree] if tree is None else [tree]  # a request may bring its own
        self.nodes, self.levels = room_of(map(Plan, trees), copying=True)
        self.model, self.most = model, most
        if positions is None:
            positions = in_own_thread(partial(positions_that_fit, model, most, self.nodes))
        self.positions = positions
        self.live: dict[Request, weakref.ref[Ticket]] = {}  # all requests that have not ended, waiting ones included
        self._ended, self._counting = EngineStats(), threading.Lock()  # the first: of requests no longer in `live`
        self.prefixes = Prefixes(kept, self.positions // 2)
        self.prefilling: Batch | None = None  # of the prompt in progress
        self.batch: Batch | None = Batch(model.target, model.draft, [], Drafting(partial(model.plan, tree)),
                                         captured=model.captured)

    @property
    def requests(self) -> list[Request]:
        """The requests that are being decoded."""
        batch = self.batch  # another thread may read this while it is released
        return [] if batch is None else batch.requests

    def __len__(self) -> int:
        return len(self.requests) + (self.prefilling is not None)

    def stats(self) -> EngineStats:
        """A snapshot of the counters, for any thread."""
        with self._counting:
            stats = copy.deepcopy(self._ended)
            for request in list(self.live):
                stats.add(request)
        return stats

    def cancelled(self, request: Request) -> bool:
        """Whether its ticket was cancelled or garbage collected."""
        ticket = self.live[request]()
        return ticket is None or ticket.cancelled

    # Capacity ---------------------------------------------------------------------------------------------------

    def require_room(self, request: Request) -> None:
        """Raise ValueError if the request can never fit."""
        needed, most = request.positions, self.positions - self.nodes
        if needed > most:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens and max_new_tokens="
                             f"{request.max_new_tokens} need {needed} positions, but the engine has room for "
                             f"{most}")

    def share(self, length: int) -> int:
        """New tokens after a prompt of this length, limited by the context and by a row's share of all positions."""
        share = max(self.positions // self.most - self.nodes, min(length + LEAST, self.positions - self.nodes))
        limit = self.model.target.position_limit(length)
        return max(1, (share if limit is None else min(share, limit)) - length)

    def fits(self, request: Request) -> bool:
        """Whether the request can start now."""
        if self.prefilling is not None:
            return False
        requests = [*self.requests, request]
        batches = self.model.target.batches([len(row.prompt) for row in requests])
        return len(batches) == 1 and self._size(requests) is not None

    def _size(self, requests: Sequence[Request]) -> tuple[int, int] | None:
        """Rows and positions of caches for the whole texts of these requests; None: they do not fit."""
        needed, rows = max(request.positions for request in requests) + self.nodes, len(requests)
        if rows > self.most or rows * needed > self.positions:
            return None
        room = min(-(-needed // STEP) * STEP, self.positions // rows)
        return min(1 << (rows - 1).bit_length(), self.most, self.positions // room), room

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Enlarge the caches if the current texts do not fit: step by step, up to the size for the whole texts."""
        cache, needed = self.batch.cache, max(len(request.tokens) for request in requests) + self.nodes
        if cache.batch < len(requests) or cache.capacity < needed:
            size = self._size(requests)
            assert size is not None, "see `fits`"
            rows, most = size
            if self.model.captured is not None:  # new caches would need new captures
                rows, needed = min(self.most, self.positions // most), most
            least = cache.capacity if needed <= cache.capacity else max(-(-needed // STEP) * STEP, 2 * cache.capacity)
            room = min(most, least)
            self.batch.resize(rows, [room, room + self.levels][: len(self.batch.caches)])

    def _grow(self) -> None:
        """Make room for another cycle. If memory runs out, the longest requests end with this error."""
        while self.requests:
            try:
                return self._make_room([*self.requests, *(self.prefilling.requests if self.prefilling else ())])
            except OUT_OF_MEMORY as error:
                max(self.requests, key=lambda request: len(request.tokens)).finish("error", error)
                self._drop_finished()

    # Joining ----------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Start the prefill of a request that fits. An error ends this request only."""
        ticket = self.live[request]()
        if ticket is not None:
            ticket.begin()
        try:
            self._make_room([*self.requests, request])
            plan = self.batch.drafting.choose([*self.requests, request])
            caches = [model.new_cache(len(request.prompt)) for model in self.batch.models]
            alone = Batch(self.model.target, self.model.draft, [request], Drafting(lambda _: plan), caches=caches)
            self.prefixes.begin(alone, self.batch)
            self.prefilling = alone
        except Exception as error:
            request.finish("error", error)
            self.end(request)

    def prefill_chunk(self, most: int) -> int:
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
            self.batch.add(alone)
        else:
            if request.error is None:
                self._park(alone, 0)
            self.end(request)
        return count

    # A cycle ----------------------------------------------------------------------------------------------------

    def cycle(self) -> None:
        """Run one cycle. Requests that end leave the batch."""
        self._grow()
        if not self.requests:
            return
        for request, receipts in zip(self.requests, cycle.step(self.batch), strict=True):
            self._show(request, receipts)
        self._ended.cycles += 1
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

    def drop_cancelled(self, everyone: bool = False) -> None:
        """End cancelled requests, or all, with their answers so far."""
        prefilled = [] if self.prefilling is None else self.prefilling.requests
        for request in [*self.requests, *prefilled]:
            if everyone or self.cancelled(request):
                request.finish("cancelled")
        if prefilled and prefilled[0].reason is not None:
            self.prefilling = None
            self.end(prefilled[0])
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Free the rows of requests that have ended, and erase those that failed."""
        finished = [(number, request) for number, request in enumerate(self.requests) if request.reason is not None]
        for number, request in finished:
            if request.error is None:
                self._park(self.batch, number)
            else:
                self.batch.erase(number)
        try:
            self.batch.drop_finished()
        finally:  # even if an error stops the others
            for _, request in finished:
                self.end(request)

    def _park(self, batch: Batch, number: int) -> None:
        """Keep a row's caches for prompts with the same beginning, if there is memory for them."""
        with suppress(*OUT_OF_MEMORY):
            self.prefixes.add(batch.row(number))

    def end(self, request: Request) -> None:
        """Count a finished request and end its ticket. Further calls have no effect."""
        with self._counting:
            reference = self.live.pop(request, None)
            if reference is None:
                return
            self._ended.add(request)
            self._ended.finished[request.reason] += 1
        release_frames(request.error)
        ticket = reference()
        if ticket is not None:
            ticket.end(request)

    def fail(self, error: BaseException) -> None:
        """End all requests with the error of the loop, waiting ones included."""
        self.release()
        for request in list(self.live):
            request.finish("error", error)
            self.end(request)

    def release(self) -> None:
        """Free the caches after the last cycle: the engine, which its user may keep, refers to the rows."""
        self.prefixes.parked.clear()
        self.batch = self.prefilling = None


# Memory -----------------------------------------------------------------------------------------------------------


def release_frames(error: BaseException | None) -> None:
    """Replace an error's traceback by its text: users may keep errors, and frames refer to the caches and the model."""
    if error is None or error.__traceback__ is None:
        return
    if sys.version_info >= (3, 11):
        error.add_note("In the engine's thread:\n" + "".join(traceback.format_exception(error)))
    while error is not None:
        error.__traceback__, error = None, error.__context__


@torch.inference_mode()
def positions_that_fit(model: EagleModel, rows: int, nodes: int) -> int:
    """Positions of caches that fit into a quarter of the free memory, but no more than the rows can use."""
    target, drafter = model.target, model.draft
    cache, token = target.new_cache(1), torch.zeros(1, 1, dtype=torch.long, device=target.device)
    features = target.prefill(token, cache).to(target.output_device)
    size = cache.nbytes
    if drafter is not None:
        draft_cache = drafter.new_cache(1)
        read_prompt(drafter, features[0] if drafter.reads_features else None, token[0].to(features.device), draft_cache)
        size += draft_cache.nbytes
    fitting = int(SHARE * free_bytes(target.output_device) / size)
    return fitting if target.max_positions is None else min(fitting, rows * (target.max_positions + nodes))
