"""`Engine`: continuous batching, where requests join while others are being decoded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessor

from ..drafting.config import TreeConfig
from ..inputs.prompts import encode_prompt
from ..inputs.requests import make_requests
from ..loading.pair import EagleModel
from ..options.engine import EngineKeywords, EngineOptions
from ..options.generate import GenerateKeywords, GenerateOptions, with_options
from ..options.option import lists_options
from ..utils.checks import OptionError
from .loop import EngineStats, Loop
from .tickets import Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

LEAST = 256  # new tokens after a prompt that takes all of a row's share


class Engine:
    """Decodes requests that arrive at any time in one batch. A thread of its own runs the cycles.

    Between two cycles, new requests are prefilled into free rows, and requests that have ended leave. Each request has
    its own options. A lossless request has the same result as `generate` alone; a fuzzy one has the result of
    `generate` with the engine's `tree`, if this is fixed (docs/serving.md).

    An error ends the request that caused it. An engine that nobody holds finishes its requests and ends its thread.

    Args:
        model: the result of `load`.
        tree: the draft tree of every request. None: for a pair loaded on a CPU with `tree="auto"`, each cycle uses the
            fastest tree for its number of rows, or none, and fuzzy texts depend on the other requests of the batch; for
            others, the pair's default tree.
        limits: see `EngineKeywords`.

    Attributes:
        tree: the tree of all requests; None: it is chosen in each cycle.
        closed: whether new requests are rejected.
        error: the exception that ended the loop and all requests; None: there was none.

    Raises:
        TypeError, ValueError: a bad argument.
    """

    @lists_options(EngineKeywords, described=True)
    def __init__(self, model: EagleModel, *, tree: TreeConfig | None = None, **limits: Unpack[EngineKeywords]) -> None:
        EngineOptions.check_names(limits, ("tree",))
        if not isinstance(model, EagleModel):
            raise TypeError(f"model must come from eagle_fsd.load, got {type(model).__name__}")
        options = EngineOptions(**limits)
        if not (tree is None or isinstance(tree, TreeConfig)):
            raise TypeError(f"tree must be a TreeConfig or None, got {tree!r}")
        self.model = model
        chosen = tree is None and model.sizing is not None
        self.tree = None if chosen else model.check_tree(tree or model.default_tree)
        self._loop = Loop(model, self.tree, options)
        weakref.finalize(self, self._loop.stop).atexit = False

    @property
    def closed(self) -> bool:
        return self._loop.closed

    @property
    def error(self) -> BaseException | None:
        return self._loop.error

    @property
    def max_waiting(self) -> int:
        return self._loop.max_waiting

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters since the engine started."""
        return self._loop.stats()

    @property
    def rows(self) -> int:
        """The number of requests that are being prefilled or decoded."""
        return self._loop.rows

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        longest, limit = self._loop.room.longest, self.model.target.max_positions
        return longest if limit is None else min(longest, limit)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._loop.queue)

    @lists_options(GenerateKeywords)
    def submit(
        self, prompt: Any, options: GenerateOptions | None = None, *,
        logits_processor: Sequence[LogitsProcessor] | None = None, stopping_criteria: Sequence[Callable] | None = None,
        fit: bool = False, **keywords: Unpack[GenerateKeywords],
    ) -> Ticket:
        """Submit a request, from any thread. The call checks everything and does not block.

        Args:
            prompt: a single prompt of any form that `generate` takes.
            options: a `GenerateOptions`. Keywords override its fields. Rows share one tree: its `tree` need not be
                used, and must be the engine's tree for a fuzzy request if that is fixed.
            logits_processor, stopping_criteria: as in `generate`. The engine's thread calls them.
            fit: lower `max_new_tokens` to the end of the context, or to a row's share of `max_tokens`, so that
                `max_rows` such requests fit at once. A prompt that takes about all of the share gets 256 new tokens.

        Raises:
            TypeError, ValueError: as `generate`, also for a request that can never fit.
            QueueFull: `max_waiting` requests wait already.
            EngineClosed: `close` was called, or the engine has failed.
        """
        options = with_options(options, keywords, ("logits_processor", "stopping_criteria", "fit"))
        self._check_tree(options)
        ids = encode_prompt(prompt, self.model, options.chat_template_kwargs)
        options = self._limited(options, len(ids)) if fit else options
        (request,) = make_requests(self.model, [ids], options, logits_processor, stopping_criteria)
        self.model.refresh()
        if request.positions > (longest := self._loop.room.longest):
            raise ValueError(f"a prompt of {len(ids)} tokens and max_new_tokens={request.max_new_tokens} need "
                             f"{request.positions} positions, but the engine has room for {longest}")
        ticket = Ticket(request, self.model.tokenizer)
        self._loop.add(request, ticket)
        return ticket

    def check(self, options: GenerateOptions) -> None:
        """Raise TypeError or ValueError as `submit` would for these options with any prompt."""
        self._check_tree(options)
        make_requests(self.model, [[0]], self._limited(options, 1))

    def _limited(self, options: GenerateOptions, length: int) -> GenerateOptions:
        """The options with `max_new_tokens` lowered to the end of the context, or to a row's share, after a prompt of
        this length."""
        room, limit = self._loop.room, self.model.target.text_limit(length)
        share = max(room.positions // room.rows - room.nodes, min(length + LEAST, room.longest))
        share = max(1, (share if limit is None else min(share, limit)) - length)
        if (options.min_new_tokens or 0) > share:
            raise OptionError("min_new_tokens", options.min_new_tokens, f"at most {share}, a row's share of the "
                              f"engine's max_tokens after a prompt of {length} tokens")
        return replace(options, max_new_tokens=min(options.max_new_tokens, share))

    def _check_tree(self, options: GenerateOptions) -> None:
        """Raise ValueError if a request's own tree is too large, or not allowed for a fuzzy request."""
        tree = options.tree
        if tree is None:
            return
        if self.tree is not None and tree != self.tree and options.speculative and not options.lossless:
            raise OptionError("tree", problem=f"of a fuzzy request must be the engine's, {self.tree}: leave it out "
                              "(Engine(tree=...), or --tree of eagle-fsd serve, sets the engine's)")
        nodes, levels = tree.room
        room = self._loop.room
        if nodes > room.nodes or levels > room.levels:
            raise OptionError("tree", problem=f"is too large here: total_tokens may be at most {room.nodes}, "
                              f"and depth times top_k at most {room.levels}, got {tree}")

    def close(self, drain: bool = True) -> None:
        """Reject new requests, and return when all submitted ones have ended.

        Args:
            drain: finish the submitted requests. False: running requests end as if they were cancelled, and waiting
                ones with `EngineClosed`.
        """
        self._loop.close(drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(drain=error[0] is None)
