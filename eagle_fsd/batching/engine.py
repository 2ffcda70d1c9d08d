"""`Engine`: continuous batching, where requests join while others are being decoded."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor

from ..api import with_options
from ..checks import OptionError, require_integer
from ..decoding.request import Request
from ..drafting.config import TreeConfig
from ..keywords import GenerateKeywords, lists_options
from ..options import GenerateOptions
from ..pair import EagleModel
from ..prompts import encode_prompt
from ..requests import make_requests
from .rows import EngineStats, Rows
from .tickets import EngineClosed, QueueFull, Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class Engine:
    """Decodes requests that arrive at any time in one batch. A thread of its own runs the cycles.

    Between two cycles, new requests are prefilled into free rows, and requests that have ended leave. Each request has
    its own options. A lossless request has the same result as `generate` alone; a fuzzy one has the result of
    `generate` with the engine's `tree`, if this is fixed (docs/serving.md).

    Args:
        model: the result of `load`.
        max_rows: maximum number of requests that are decoded together.
        max_tokens: capacity of the caches in positions: rows times the length of the longest one. A request waits until
            it fits. None: as many as fit into a quarter of the free memory.
        max_waiting: maximum number of requests that wait for a row.
        prefill_chunk: maximum number of prompt tokens that are processed between two cycles.
        prefixes: number of recent texts whose caches are kept for prompts with the same beginning (0: none). They take
            at most half of `max_tokens` in addition.
        remember: number of tokens of recent answers that are kept as a source of drafts for requests of the same pool
            (0: none), see `submit`. Each takes some 200 bytes.
        tree: the draft tree of every request. None: each cycle uses the fastest tree for its number of rows, or none.
            Fuzzy texts then depend on the other requests of the batch. The tree is fixed to the default tree for a
            pair that was loaded with a `tree` other than "auto".

    Attributes:
        tree: the tree of all requests; None: it is chosen in each cycle.
        closed: whether new requests are rejected.
        error: the exception that ended the loop and all requests; None: there was none.

    Raises:
        TypeError, ValueError: a bad argument.
    """

    def __init__(
        self, model: EagleModel, *, max_rows: int = 8, max_tokens: int | None = None, max_waiting: int = 64,
        prefill_chunk: int = 512, prefixes: int = 8, remember: int = 0, tree: TreeConfig | None = None,
    ) -> None:
        if not isinstance(model, EagleModel):
            raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}")
        for name, value, least in (("max_rows", max_rows, 1), ("max_waiting", max_waiting, 1),
                                   ("prefill_chunk", prefill_chunk, 1), ("prefixes", prefixes, 0),
                                   ("remember", remember, 0)):
            require_integer(name, value, least)
        if not (tree is None or isinstance(tree, TreeConfig)):
            raise TypeError(f"tree must be a TreeConfig or None, got {tree!r}")
        self.model, self.max_waiting = model, max_waiting
        chosen = tree is None and model.sizing is not None
        self.tree = None if chosen else model.check_tree(tree or fixed_tree(model))
        # If the target does not split prompts, its keys depend on the number of positions in a forward.
        self.prefill_chunk = prefill_chunk if model.target.splits_prefill else 1 << 62
        self._rows = Rows(model, self.tree, most=max_rows, positions=max_tokens, kept=prefixes, remember=remember)
        require_integer("max_tokens", self._rows.positions, self._rows.nodes + 2)
        self._queue: deque[Request] = deque()
        self._changed = threading.Condition()  # of the queue, and of the next two
        self.closed, self._cancelling = False, False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="eagle_fsd.Engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters since the engine started."""
        return self._rows.stats()

    @property
    def rows(self) -> int:
        """The number of requests that are being prefilled or decoded."""
        return len(self._rows)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        room, limit = self._rows.positions - self._rows.nodes, self.model.target.max_positions
        return room if limit is None else min(room, limit)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._queue)

    @lists_options(GenerateOptions, GenerateKeywords)
    def submit(
        self, prompt: Any, options: GenerateOptions | None = None, *,
        logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
        pool: str | None = None, fit: bool = False, **keywords: Unpack[GenerateKeywords],
    ) -> Ticket:
        """Submit a request, from any thread. The call checks everything and does not block.

        Args:
            prompt: a single prompt of any form that `generate` takes.
            options: a `GenerateOptions`. Keywords override its fields. Rows share one tree: its `tree` need not be
                used, and must be the engine's tree for a fuzzy request if that is fixed.
            logits_processor, stopping_criteria: as in `generate`. The engine's thread calls them.
            pool: name of a pool of remembered answers, such as those of a user. The answer is added to the pool, and
                if the request is lossless its drafts are copied from the others as well. None: neither.
            fit: lower `max_new_tokens` to the end of the context, or to a row's share of `max_tokens`, so that
                `max_rows` such requests fit at once. A prompt that takes about all of the share gets 256 new tokens.

        Raises:
            TypeError, ValueError: as `generate`, also for a request that can never fit.
            QueueFull: `max_waiting` requests wait already.
            EngineClosed: `close` was called, or the engine has failed.
        """
        options = with_options(options, keywords)
        self._check_tree(options)
        ids = encode_prompt(prompt, self.model, options.chat_template_kwargs)
        options = self._fitting(options, len(ids)) if fit else options
        (request,) = make_requests(self.model, [ids], options, logits_processor, stopping_criteria)
        self._rows.require_room(request)
        ticket = Ticket(request, self.model.tokenizer, options.stop_strings, pool)
        with self._changed:
            if self.closed:
                why = "it was closed" if self.error is None else f"it has failed: {self.error!r}"
                raise EngineClosed(f"the engine accepts no more requests: {why}") from self.error
            if len(self._queue) >= self.max_waiting:
                raise QueueFull(f"{len(self._queue)} requests wait already, as many as may (max_waiting)")
            self._rows.live[request] = weakref.ref(ticket)
            self._queue.append(request)
            self._changed.notify_all()
        return ticket

    def check(self, options: GenerateOptions) -> None:
        """Raise TypeError or ValueError as `submit` would for these options with any prompt."""
        self._check_tree(options)
        make_requests(self.model, [[0]], self._fitting(options, 1))

    def _fitting(self, options: GenerateOptions, length: int) -> GenerateOptions:
        """The options with `max_new_tokens` lowered to a row's share after a prompt of this length."""
        return replace(options, max_new_tokens=min(options.max_new_tokens, self._rows.share(length)))

    def _check_tree(self, options: GenerateOptions) -> None:
        """Raise ValueError if a request's own tree is too large, or not allowed for a fuzzy request."""
        tree = options.tree
        if tree is None:
            return
        if self.tree is not None and tree != self.tree and not options.lossless:
            raise OptionError("tree", problem=f"of a fuzzy request must be the engine's, {self.tree}: leave it out "
                              "(Engine(tree=...), or --tree of eagle-fsd serve, sets the engine's)")
        if not self._rows.holds(tree):
            raise OptionError("tree", problem=f"is too large here: total_tokens may be at most {self._rows.nodes}, "
                              f"and depth times top_k at most {self._rows.levels}, got {tree}")

    def close(self, drain: bool = True) -> None:
        """Reject new requests, and return when all submitted ones have ended.

        Args:
            drain: finish the submitted requests. False: running requests end as if they were cancelled, and waiting
                ones with `EngineClosed`.
        """
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        if drain:
            self._thread.join()
        with self._changed:
            left, self._cancelling = list(self._queue), True
            self._queue.clear()
        for request in left:
            request.finish("error", EngineClosed("the engine was closed before the request started"))
            self._rows.end(request)
        self._thread.join()
        self._rows.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(drain=error[0] is None)

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:
            log.exception("the engine has failed, and ends all of its requests")
            with self._changed:
                self.closed, self.error = True, error
                self._queue.clear()
            self._rows.fail(error)

    def _wait(self) -> bool:
        """Wait for work. False: the engine is closed and has none left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or len(self._rows) or self.closed)
            return bool(self._queue or len(self._rows))

    def _turn(self) -> None:
        """Cancel, prefill, and run a cycle."""
        self._rows.drop_cancelled(everyone=self._cancelling)
        left = self.prefill_chunk
        while left > 0 and (self._rows.prefilling is not None or self._begin_next()):
            left -= self._rows.prefill_chunk(left)
        if self._rows.requests:
            self._rows.cycle()

    def _begin_next(self) -> bool:
        """Start the first request of the queue if it fits. Returns whether a prompt is being prefilled."""
        with self._changed:
            for request in [each for each in self._queue if self._rows.cancelled(each)]:
                request.finish("cancelled")
                self._queue.remove(request)
                self._rows.end(request)
            request = self._queue.popleft() if self._queue and self._rows.fits(self._queue[0]) else None
        if request is not None:
            self._rows.begin(request)
        return self._rows.prefilling is not None


def fixed_tree(model: EagleModel) -> TreeConfig:
    """The model's default tree, with no more children per node than its head has tokens."""
    tree = model.default_tree
    most = tree.top_k if model.draft is None else min(tree.top_k, model.draft.draft_vocab_size)
    return replace(tree, top_k=most)
