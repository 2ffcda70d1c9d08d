"""`Engine`: requests that join while others are being decoded."""

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
    """Decodes requests that come at any time, in one batch: a thread of its own runs cycle after cycle.

    Between two cycles a new request is read into a free row, and those that have ended leave. Each has its own options.
    What a lossless one gets is what `generate` alone would give it; what a fuzzy one gets is what `generate` gives it
    with the engine's `tree`, where that is fixed (docs/serving.md).

    Args:
        model: from `load`.
        max_rows: requests that are decoded together.
        max_tokens: positions that the caches have room for: those of all rows together, each as long as the longest.
            A request waits until it fits. None: as many as a quarter of the free memory holds.
        max_waiting: requests that may wait for a row.
        prefill_chunk: tokens of prompts that are read between two cycles.
        prefixes: recent texts whose caches are kept for prompts that begin alike (0: none); they take at most half as
            much room again as `max_tokens`.
        remember: tokens of recent answers that are kept for others of their pool to copy drafts from (0: none), see
            `submit`. Some 200 bytes each.
        tree: the draft tree of every request. None: in each cycle what is fastest for so many rows, also none, by the
            pair's logs for the rule of the oldest; then fuzzy texts depend on which others are decoded beside them. A
            pair that was loaded with another `tree` than "auto" has its default tree fixed.

    Attributes:
        tree: that of all; None: it is chosen.
        closed: whether new requests are refused.
        error: what ended its loop, and all requests with it; None: nothing has.

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
        # With such a rotary embedding keys depend on how many positions a forward reaches.
        self.prefill_chunk = prefill_chunk if model.target.reads_in_parts else 1 << 62
        self._rows = Rows(model, self.tree, most=max_rows, positions=max_tokens, kept=prefixes, remember=remember)
        require_integer("max_tokens", self._rows.positions, self._rows.nodes + 2)
        self._queue: deque[Request] = deque()
        self._changed = threading.Condition()  # of the queue, and of the next two
        self.closed, self._cutting = False, False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="eagle_fsd.Engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """Counters since it began, as they are now."""
        return self._rows.stats()

    @property
    def rows(self) -> int:
        """Requests that are being read or decoded."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    @lists_options(GenerateOptions, GenerateKeywords)
    def submit(
        self, prompt: Any, options: GenerateOptions | None = None, *,
        logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
        pool: str | None = None, fit: bool = False, **given: Unpack[GenerateKeywords],
    ) -> Ticket:
        """Ask for an answer; may be called from any thread. Everything is checked here, and nothing is waited for.

        Args:
            prompt: one, as `generate` takes it.
            options: a `GenerateOptions`; its fields may also be given by name. Its `tree` is a wish, as rows share one,
                and must be the engine's in a fuzzy request where that is fixed.
            logits_processor, stopping_criteria: as of `generate`; called in the engine's thread.
            pool: whose answers are remembered together, such as those of a user: the answer is one of them, and where
                it is lossless it copies from the others. None: neither.
            fit: lower `max_new_tokens` to the end of the context, or of a row's share of `max_tokens`, so that
                `max_rows` such requests have room at once; a prompt that is about as long gets 256 tokens more.

        Raises:
            TypeError, ValueError: as `generate`; also a request that there will never be room for.
            QueueFull: `max_waiting` requests wait already.
            EngineClosed: `close` was called, or the engine has failed.
        """
        options = with_options(options, given)
        self._check_tree(options)
        ids = encode_prompt(prompt, self.model)
        options = self._fitting(options, len(ids)) if fit else options
        (request,) = make_requests(self.model, [ids], options, logits_processor, stopping_criteria)
        self._rows.require_room(request)
        ticket = Ticket(request, self.model.tokenizer, options.stop_strings, pool)
        with self._changed:
            if self.closed:
                why = "it was closed" if self.error is None else f"it has failed: {self.error!r}"
                raise EngineClosed(f"the engine takes no requests any more: {why}") from self.error
            if len(self._queue) >= self.max_waiting:
                raise QueueFull(f"{len(self._queue)} requests wait already, and no more may (max_waiting)")
            self._rows.live[request] = weakref.ref(ticket)
            self._queue.append(request)
            self._changed.notify_all()
        return ticket

    def check(self, options: GenerateOptions) -> None:
        """Raise TypeError or ValueError as `submit` would for these options, whatever the prompt."""
        self._check_tree(options)
        make_requests(self.model, [[0]], self._fitting(options, 1))

    def _fitting(self, options: GenerateOptions, length: int) -> GenerateOptions:
        """With no more new tokens than a row has room for after a prompt of this length."""
        return replace(options, max_new_tokens=min(options.max_new_tokens, self._rows.share(length)))

    def _check_tree(self, options: GenerateOptions) -> None:
        """Raise ValueError for a tree of a request's own that there is no room for, or that its text may not have."""
        tree = options.tree
        if tree is None:
            return
        if self.tree is not None and tree != self.tree and not options.lossless:
            raise OptionError("tree", problem=f"of a fuzzy request must be the engine's, {self.tree}: leave it out "
                              "(Engine(tree=...), or --tree of eagle-fsd serve, sets the engine's)")
        if not self._rows.holds(tree):
            raise OptionError("tree", problem=f"is too large here: total_tokens may be {self._rows.nodes} at most, and "
                              f"depth times top_k {self._rows.levels}, got {tree}")

    def close(self, drain: bool = True) -> None:
        """Take no more requests, and return when all have ended.

        Args:
            drain: finish what was submitted. False: what is being decoded ends as if it was cancelled, and what waits
                ends with `EngineClosed`.
        """
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        if drain:
            self._thread.join()
        with self._changed:
            left, self._cutting = list(self._queue), True
            self._queue.clear()
        for request in left:
            request.finish("error", EngineClosed("the engine was closed before the request's turn came"))
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
            log.exception("the engine ends with all of its requests")
            with self._changed:
                self.closed, self.error = True, error
                self._queue.clear()
            self._rows.fail(error)

    def _wait(self) -> bool:
        """Wait until there is something to do; False: there never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or len(self._rows) or self.closed)
            return bool(self._queue or len(self._rows))

    def _turn(self) -> None:
        """What comes between two cycles, and a cycle."""
        self._rows.drop_cancelled(everyone=self._cutting)
        left = self.prefill_chunk
        while left > 0 and (self._rows.prefilling is not None or self._begin_next()):
            left -= self._rows.prefill_chunk(left)
        if self._rows.requests:
            self._rows.cycle()

    def _begin_next(self) -> bool:
        """Let the first in the queue in if it fits."""
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
    """The model's default, as far as its head has tokens."""
    tree = model.default_tree
    most = tree.top_k if model.draft is None else min(tree.top_k, model.draft.draft_vocab_size)
    return replace(tree, top_k=most)
