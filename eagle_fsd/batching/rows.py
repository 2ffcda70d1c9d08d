"""The requests that an engine decodes at the moment: how they join, go on and leave, and the memory that they have."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..decoding.decoder import Decoder
from ..decoding.forwards import Forwards, shared_prefix
from ..decoding.output import Receipt
from ..decoding.request import Request
from ..drafting.config import TreeConfig
from ..drafting.growth import extend_draft
from ..drafting.sizing import Choice, Drafting
from ..drafting.text import MOST_NODES
from ..drafting.tree import DRAFTERS
from ..pair import EagleModel
from .remembered import Remembered
from .tickets import Ticket

log = logging.getLogger(__name__)
# Caches that grow stand beside those that they grow from, and prefixes and prompts in parts take some as well.
SHARE = 1 / 4  # of the free memory
STEP = 256  # positions that the room of a row is rounded up to
LEAST = 256  # new tokens that a row has room for after a prompt that takes all of its share


@dataclass
class EngineStats:
    """Counters since the engine began, which only grow: sums over its requests.

    Args:
        requests: taken by `submit`. finished: by finish_reason, "error" and "cancelled" included.
        prompt_tokens: of prompts that were read; reused_tokens: those of them that were copied from other requests.
        tokens: new ones. fuzzy: those of them that only a rule accepted.
        cycles: of the loop. forwards: verify forwards, counted for each request of a cycle; undrafted: those of them
            without a draft tree. proposed, accepted: draft tokens by who drafted them, of `DRAFTERS`; tau is
            accepted.total() / forwards + 1.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    fuzzy: int = 0
    cycles: int = 0
    forwards: int = 0
    undrafted: int = 0
    proposed: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DRAFTERS, 0)))
    accepted: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(DRAFTERS, 0)))

    def add(self, request: Request) -> None:
        """Count a request as far as it is decoded; it may go on meanwhile in another thread."""
        stats, receipts = request.stats, request.receipts
        self.requests += 1
        if receipts:  # the prompt has been read
            self.prompt_tokens += len(request.prompt)
            self.reused_tokens += len(request.prompt) - stats.prefill_tokens
        self.tokens += len(receipts)
        self.fuzzy += sum(receipt.source == "fuzzy" for receipt in receipts)
        self.forwards += stats.target_forwards
        self.undrafted += stats.undrafted
        self.proposed.update(Counter(stats.proposed))  # a copy: it may get keys while it is gone through
        self.accepted.update(Counter(stats.accepted))


class Rows:
    """Requests in one batch whose members change between cycles. For the engine's thread.

    A prompt is read in caches of its own, a part at a time, and joins the batch with its first token.

    Args:
        tree: of all requests; None: the model's choice for so many rows.
        most: rows. positions: of the caches of all rows together, each as long as the longest; None: as many as fit.
        kept: recent rows whose caches are kept for prompts that begin alike. remember: tokens of recent answers.
    """

    def __init__(
        self, model: EagleModel, tree: TreeConfig | None, *, most: int, positions: int | None, kept: int,
        remember: int = 0,
    ) -> None:
        trees = [model.sizing.largest, model.default_tree] if tree is None else [tree]  # a request may wish for one
        # Of the largest tree: copies fill up the one that is given, and are as many as pay where that is known.
        copied = MOST_NODES if tree is None or model.draft is None else tree.total_tokens
        self.nodes = max(copied, *(1 if model.draft is None else each.nodes for each in trees))
        self.levels = max(each.depth * each.top_k for each in trees)  # beside the text, in the draft's cache
        self.model, self.tree, self.most = model, tree, most
        self.positions = positions_that_fit(model, most, self.nodes) if positions is None else positions
        self.live: dict[Request, weakref.ref[Ticket]] = {}  # all that have not ended, those that wait included
        self._ended, self._counting = EngineStats(), threading.Lock()  # requests that are not in `live` any more
        self.prefixes = Prefixes(kept, self.positions // 2)
        self.remembered = Remembered(remember)
        self.prefilling: Decoder | None = None  # of the prompt that is being read
        self.decoder: Decoder | None = None
        self.decoder = Decoder(model.target, model.draft, [], Drafting(self))

    @property
    def requests(self) -> list[Request]:
        """Those that are being decoded."""
        return [] if self.decoder is None else self.decoder.requests

    def __len__(self) -> int:
        return len(self.requests) + (self.prefilling is not None)

    def stats(self) -> EngineStats:
        """Counters as they are now; for any thread."""
        with self._counting:
            stats = copy.deepcopy(self._ended)
            for request in list(self.live):
                stats.add(request)
        return stats

    def cancelled(self, request: Request) -> bool:
        """Whether nobody waits for it."""
        ticket = self.live[request]()
        return ticket is None or ticket.cancelled

    def of(self, rows: int, temperature: float) -> Choice:
        """The choice for the current requests, see `Sizes`."""
        return self._choice(self.requests)

    def _choice(self, requests: Sequence[Request]) -> Choice:
        """The tree for these. A fuzzy rule's text depends on it: a fixed one gives way to a request's own only where
        all are lossless. Without a head the choice is a cost, by which copies are as many as pay."""
        requests, count = [request for request in requests if request.params.speculative], len(requests)
        if not requests:
            return Choice(None)
        own = [request.params.tree for request in requests if request.params.tree is not None]
        if own and (self.tree is None or all(request.params.lossless for request in requests)):
            return Choice(own[0])
        if self.tree is not None:
            return Choice(self.tree)
        return self.model.sizing.of(count, requests[0].params.temperature)

    def holds(self, tree: TreeConfig) -> bool:
        """Whether there is room for a tree of a request's own."""
        return tree.total_tokens <= self.nodes and tree.depth * tree.top_k <= self.levels

    # Room -------------------------------------------------------------------------------------------------------

    def require_room(self, request: Request) -> None:
        """Raise ValueError where there will never be room for it."""
        needed, most = positions_of(request), self.positions - self.nodes
        if needed > most:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens and max_new_tokens="
                             f"{request.params.max_new_tokens} need {needed} positions, and the engine has room for "
                             f"{most}")

    def share(self, length: int) -> int:
        """New tokens after a prompt of this length, to the end of the context or of a row's share of the positions."""
        each = max(self.positions // self.most - self.nodes, min(length + LEAST, self.positions - self.nodes))
        limit = self.model.target.position_limit(length)
        return max(1, (each if limit is None else min(each, limit)) - length)

    def fits(self, request: Request) -> bool:
        """Whether it can begin now."""
        if self.prefilling is not None:
            return False
        requests = [*self.requests, request]
        batches = self.model.target.batches([len(each.prompt) for each in requests])
        return len(batches) == 1 and self._size(requests) is not None

    def _size(self, requests: Sequence[Request]) -> tuple[int, int] | None:
        """Rows and positions of caches that hold the whole texts of these; None: they do not fit."""
        needed, rows = max(map(positions_of, requests)) + self.nodes, len(requests)
        if rows > self.most or rows * needed > self.positions:
            return None
        each = min(-(-needed // STEP) * STEP, self.positions // rows)
        return min(1 << (rows - 1).bit_length(), self.most, self.positions // each), each

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Caches that these fit into as they are now: they grow with the texts, to what the whole ones need at most."""
        cache, needed = self.decoder.forwards.cache, max(len(request.tokens) for request in requests) + self.nodes
        if cache.batch < len(requests) or cache.capacity < needed:
            size = self._size(requests)
            assert size is not None, "it was asked whether they fit"
            rows, most = size
            least = cache.capacity if needed <= cache.capacity else max(-(-needed // STEP) * STEP, 2 * cache.capacity)
            each = min(most, least)
            self.decoder.forwards.resize(rows, each, each + self.levels)

    def _grow(self) -> None:
        """Have room for another cycle; where there is no memory for it, the longest texts end with that error."""
        while self.requests:
            try:
                return self._make_room([*self.requests, *(self.prefilling.requests if self.prefilling else ())])
            except RuntimeError as error:
                max(self.requests, key=lambda request: len(request.tokens)).finish("error", error)
                self._drop_finished()

    # Coming in --------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Let a request that fits in; what ends it before its prompt is read ends it alone."""
        ticket = self.live[request]()
        if ticket is not None:
            ticket.begin()
            # A fuzzy text may depend on what is drafted, and must not depend on what others asked for.
            if ticket.pool is not None and request.copies is not None and request.params.lossless:
                request.copies.add_texts(self.remembered.of(ticket.pool))
        try:
            self._make_room([*self.requests, request])
            target, head, length = self.model.target, self.model.draft, len(request.prompt)
            draft_cache = None if head is None else head.new_cache(length)
            forwards = Forwards(target, head, target.new_cache(length), draft_cache)
            drafting = Drafting(self._choice([*self.requests, request]))
            alone = Decoder(target, head, [request], drafting, forwards=forwards)
            self.prefixes.begin(request, forwards, self.decoder.forwards, self.requests)
            self.prefilling = alone
        except Exception as error:
            request.finish("error", error)
            self.end(request)

    def prefill_chunk(self, most: int) -> int:
        """Read so many tokens of the prompt that is being read; returns how many it were."""
        alone = self.prefilling
        (request,), before = alone.requests, alone.forwards.lengths[0]
        try:
            receipts = alone.prefill_chunk(0, most)
        except Exception as error:
            request.finish("error", error)
            receipts = []
        count = alone.forwards.lengths[0] - before
        if request.reason is None and not receipts:  # the prompt goes on
            return count
        self.prefilling = None
        self._show(request, receipts)
        if request.reason is None:
            self.decoder.join(alone)
        else:
            if request.error is None:
                self._keep_prefix(alone.forwards, 0, request)
            self.end(request)
        return count

    # A cycle ----------------------------------------------------------------------------------------------------

    def cycle(self) -> None:
        """One cycle of those that are being decoded; those that end leave."""
        self._grow()
        if not self.requests:
            return
        for request, receipts in zip(self.requests, self.decoder.step(), strict=True):
            self._show(request, receipts)
        self._ended.cycles += 1
        self._drop_finished()

    def _show(self, request: Request, receipts: list[Receipt]) -> None:
        """Tell a request's ticket what its answer grew by."""
        ticket = self.live[request]()
        if receipts and ticket is not None:
            ticket.add(receipts)

    # Leaving ----------------------------------------------------------------------------------------------------

    def drop_cancelled(self, everyone: bool = False) -> None:
        """Those that nobody waits for leave with what they have."""
        reading = [] if self.prefilling is None else self.prefilling.requests
        for request in [*self.requests, *reading]:
            if everyone or self.cancelled(request):
                request.finish("cancelled")
        if reading and reading[0].reason is not None:
            self.prefilling = None
            self.end(reading[0])
        self._drop_finished()

    def _drop_finished(self) -> None:
        """The rows of requests that have ended are free; those of errors are erased."""
        forwards = self.decoder.forwards
        finished = [(number, request) for number, request in enumerate(self.requests) if request.reason is not None]
        for number, request in finished:
            if request.error is None:
                self._keep_prefix(forwards, number, request)
            else:
                forwards.erase(number)
        try:
            self.decoder.drop_finished()
        finally:  # they have ended, whatever becomes of the others
            for _, request in finished:
                self.end(request)

    def _keep_prefix(self, forwards: Forwards, number: int, request: Request) -> None:
        """Keep a row's caches for prompts that begin alike, where there is memory for what is not needed."""
        with suppress(RuntimeError):
            self.prefixes.add(forwards, number, request)

    def end(self, request: Request) -> None:
        """Tell the ticket of a finished request that no more will come; only the first time counts."""
        with self._counting:
            holder = self.live.pop(request, None)
            if holder is None:
                return
            self._ended.add(request)
            self._ended.finished[request.reason] += 1
        ticket = holder()
        if ticket is not None:
            if ticket.pool is not None and request.reason not in ("cancelled", "error"):
                self.remembered.add(ticket.pool, request.answer)
            ticket.end(request)

    def fail(self, error: BaseException) -> None:
        """The loop cannot go on: all end with its error, those that wait included."""
        self.release()
        for request in list(self.live):
            request.finish("error", error)
            self.end(request)

    def release(self) -> None:
        """Let go of the caches, after the last cycle: decoder and rows hold each other, and would stay for long."""
        self.prefixes.kept.clear()
        self.decoder = self.prefilling = None


# What recent requests have left, for requests that begin alike -----------------------------------------------------


@dataclass(eq=False)
class Kept:
    """A row that was: its text as far as its caches hold it, and what the draft has not read of it."""

    tokens: list[int]
    features: Tensor | None
    forwards: Forwards


class Prefixes:
    """The last rows to end, with copies of their caches.

    Args:
        most: rows. positions: of all of them together.
    """

    def __init__(self, most: int, positions: int) -> None:
        self.most, self.positions = most, positions
        self.kept: list[Kept] = []  # the latest last

    def add(self, forwards: Forwards, number: int, request: Request) -> None:
        """Keep a row that ends, in place of those that it begins with, and of the oldest where there is no room."""
        held = request.tokens[: forwards.lengths[number]]
        if not self.most or not held or len(held) > self.positions:
            return
        self.kept = [each for each in self.kept if shared_prefix(each.tokens, held) < len(each.tokens)]
        while self.kept and (len(self.kept) >= self.most
                             or sum(len(each.tokens) for each in self.kept) + len(held) > self.positions):
            del self.kept[0]
        self.kept.append(Kept(held, request.features, forwards.row(number)))

    def begin(self, request: Request, forwards: Forwards, rows: Forwards, others: Iterable[Request]) -> None:
        """Copy into a new request's caches what there is of the beginning of its prompt.

        Args:
            rows: those of the requests that are being decoded, `others`.
        """
        held = [(rows, number, other) for number, other in enumerate(others)]
        held += [(each.forwards, 0, each) for each in self.kept]
        shared = [forwards.shared(number, other, request)[0] for forwards, number, other in held]
        if not any(shared):
            return
        best = held[shared.index(max(shared))]
        forwards.begin_with(request, *best)
        if isinstance(best[2], Kept):  # used: the latest again
            self.kept.remove(best[2])
            self.kept.append(best[2])


# Memory -----------------------------------------------------------------------------------------------------------


def positions_of(request: Request) -> int:
    """Of its whole text."""
    return len(request.prompt) + request.params.max_new_tokens


@torch.inference_mode()
def positions_that_fit(model: EagleModel, rows: int, nodes: int) -> int:
    """How many positions of caches a quarter of the free memory holds; no more than can be used."""
    target, head = model.target, model.draft
    cache, token = target.new_cache(1), torch.zeros(1, 1, dtype=torch.long, device=target.device)
    features = target.prefill(token, cache).to(target.output_device)
    size = cache.nbytes
    if head is not None:
        draft_cache = head.new_cache(1)
        extend_draft(head, [features[0]], [token[0].to(features.device)], draft_cache)
        size += draft_cache.nbytes
    fitting = int(SHARE * free_bytes(target.output_device) / size)
    return fitting if target.max_positions is None else min(fitting, rows * (target.max_positions + nodes))


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, limit = psutil.virtual_memory().available, Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip() != "max":  # a container's
        free = min(free, int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
    return max(0, free)
