"""Requests that are decoded together: one row of the caches of both models for each.

B rows, L positions of a row in the target's cache, T positions that the drafter has not processed, N tree nodes, F
width of the target's features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..drafting.config import TreeConfig
from ..drafting.drafter import Drafter, weights_key
from ..drafting.sizing import Drafting
from ..drafting.tree import DraftTree, Unread, catch_up_in_parts
from ..models.cache import TreeCache
from ..models.target import TargetModel, prefill_part
from .request import Request

log = logging.getLogger(__name__)
PART = 256  # tokens that `shared_prefix` compares at once
# What an allocation that fails raises: PyTorch's on a CPU, a plain RuntimeError. Other errors of a forward are alike.
ALLOCATION_ERRORS = MemoryError, RuntimeError
# New tokens that caches have room for at first, unless cycles are captured, which need fixed addresses; the room for
# whole texts is a multiple of it.
STEP = 256


@dataclass(frozen=True, eq=False)
class Row:
    """A text in the caches of both models. It is parked if the caches are its own, and not those of a `Batch`.

    Args:
        tokens: of the text. caches: of the target, and of the drafter if there is one. number: its row in them.
        features: the target's features [T, F], in parts, that the drafter has not processed.
        weights_key: of both models when the text began.
    """

    target: TargetModel
    drafter: Drafter | None
    tokens: list[int]
    caches: list[TreeCache]
    number: int
    features: list[Tensor]
    weights_key: tuple

    @property
    def cached(self) -> list[int]:
        """The tokens in the target's cache."""
        return self.tokens[: self.caches[0].lengths[self.number]]

    def copy(self) -> Row:
        """A parked copy, whose caches have no spare capacity."""
        caches = [cache.resized(max(1, cache.lengths[self.number]), 1, [self.number]) for cache in self.caches]
        return replace(self, tokens=self.cached, caches=caches, number=0, features=list(self.features))

    def shared(self, request: Request) -> tuple[int, list[Tensor]]:
        """The number of positions that it shares with another request's prompt, and the features of those positions
        that the drafter has not processed. There are none if the weights, or the kind of positions, are others.

        The drafter needs the feature of the last shared position again, because it reads each feature with the token
        after it, and that token is new. If the drafter has processed this feature already (the prompts differ before
        the last cycle of the earlier request), the target processes the position once more.
        """
        limit = self.target.position_limit
        if self.weights_key != request.weights_key or limit(len(self.cached)) != limit(len(request.tokens)):
            return 0, []
        kept = shared_prefix(self.cached, request.tokens[:-1])  # the last token needs logits
        if self.drafter is None or not self.drafter.reads_features:
            return kept, []
        drafted = self.caches[1].lengths[self.number]
        if drafted < kept:
            return kept, [torch.cat(self.features)[: kept - drafted]]
        return max(0, kept - 1), []


@dataclass(eq=False)
class Session:
    """Keeps the caches of a request for the next one, which then processes only the new part of its prompt.

    All requests are to one model, one after the other. The text does not depend on the session. An error empties it.
    """

    row: Row | None = None  # of the last request


@dataclass(frozen=True)
class Room:
    """The limits of the caches of a batch, and what a cycle takes of them.

    Args:
        rows: maximum number. positions: of the target's cache, all rows together.
        nodes, levels: positions that the largest cycle takes besides the text, see `TreeConfig.room`: in both caches,
            and further ones in the drafter's.
    """

    rows: int
    positions: int
    nodes: int
    levels: int

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a text."""
        return self.positions - self.nodes

    def size(self, requests: Sequence[Request]) -> tuple[int, int] | None:
        """Rows of caches for these requests, and the length of a text in them; None: there is no room."""
        needed, rows = max(request.positions for request in requests) + self.nodes, len(requests)
        if rows > self.rows or rows * needed > self.positions:
            return None
        room = min(-(-needed // STEP) * STEP, self.positions // rows)
        length = room - self.nodes
        return min(1 << (rows - 1).bit_length(), self.most_rows(length)), length

    def most_rows(self, length: int) -> int:
        """The maximum number of rows with texts of this length."""
        return min(self.rows, self.positions // (length + self.nodes))


class Batch:
    """The rows of requests, each with its text in the caches of both models. `cycle.prefill` and `cycle.step` decode.

    Without a drafter, a tree or copies, decoding is plain: one token per forward, with the same noise.

    Args:
        requests: their clocks start here, unless they were started before.
        drafting: the policy, new for each batch.
        parked: for a single request, the row of an earlier one, which cannot be used afterwards: its caches become
            those of the batch, up to the first token that differs from the prompt.
        room: the limits of caches that other requests may join; None: there are none.
        captured: the `captured.cycle.CapturedCycles` of these models; None: no cycle is captured.
        observe: called after each drafted cycle, none of which is captured then, see `api.decode_requests`.

    Attributes:
        waited: cycles since the last one of rows that cannot be captured, see `CapturedCycles.groups`.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, requests: Sequence[Request], drafting: Drafting, *,
        parked: Row | None = None, room: Room | None = None, captured: Any = None,
        observe: Callable[[DraftTree, list[Tensor], list[list[int]]], None] | None = None,
    ) -> None:
        self.target, self.drafter, self.requests, self.drafting = target, drafter, list(requests), drafting
        self.captured, self.observe, self.waited = captured if observe is None else None, observe, 0
        self.device = target.output_device  # of trees, logits and features
        self.reads_features = drafter is not None and drafter.reads_features
        self.draft_tokens = None if drafter is None else drafter.draft_tokens
        key = weights_key(target, drafter) if self.requests else None
        for request in self.requests:
            request.begin(target, key)
        drafting.resize(self.requests)
        self.room = self._own_room() if room is None else room
        # For each row the target's features [T, F] of its last T positions, in parts; empty if the drafter reads none.
        self.features: list[list[Tensor]] = [[] for _ in self.requests]
        self.caches = self._new_caches(parked)  # they grow with the texts, see `make_room`

    def _own_room(self) -> Room:
        """Room for the whole texts, and for the largest cycle of any number of rows."""
        rows = len(self.requests)
        plans = [self.drafting.largest_plan(self.requests[:number]) for number in range(1, rows + 1)]
        nodes, levels = map(max, zip(*(plan.tree.room for plan in plans), strict=True))
        longest = max((request.positions for request in self.requests), default=0)
        return Room(rows, rows * (longest + nodes), nodes, levels)

    def _new_caches(self, parked: Row | None) -> list[TreeCache]:
        """Caches with room for the prompts and the next tokens, or for the whole texts if cycles are captured."""
        if not self.requests:
            return [model.new_cache(1, 0) for model in self.models]
        rows, length = self.room.size(self.requests)
        if not self._fixed:
            length = min(length, max(len(request.tokens) for request in self.requests) + STEP)
        rooms = self._rooms(length)
        if parked is not None:
            if (parked.target, parked.drafter) != (self.target, self.drafter):
                raise ValueError("the session belongs to another model: use one Session per model")
            if parked.weights_key == self.requests[0].weights_key:  # else the model may have other layers
                kept, self.features[0] = parked.shared(self.requests[0])
                for cache in parked.caches:
                    cache.truncate(kept)
                return [cache if size <= cache.capacity else cache.resized(max(size, 2 * cache.capacity), 1)
                        for cache, size in zip(parked.caches, rooms, strict=True)]
        if self._fixed:
            return self.captured.caches(rooms, rows)
        return [model.new_cache(size, rows) for model, size in zip(self.models, rooms, strict=True)]

    @property
    def models(self) -> list[TargetModel | Drafter]:
        """One for each cache."""
        return [self.target] if self.drafter is None else [self.target, self.drafter]

    @property
    def cache(self) -> TreeCache:
        """Of the target."""
        return self.caches[0]

    @property
    def draft_cache(self) -> TreeCache | None:
        return self.caches[1] if self.drafter is not None else None

    # Rows ---------------------------------------------------------------------------------------------------------

    def row(self, number: int) -> Row:
        """A row as it is. It changes with the batch, unless it is copied."""
        request = self.requests[number]
        return Row(self.target, self.drafter, request.tokens, self.caches, number, self.features[number],
                   request.weights_key)

    def adopt(self, row: Row) -> bool:
        """Copy what another row shares with the prompt of this batch's only request, which has not begun. Returns
        whether it shares anything."""
        kept, self.features[0] = row.shared(self.requests[0])
        if kept:
            for cache, other in zip(self.caches, row.caches, strict=True):
                cache.copy_row(0, other, row.number, min(kept, other.lengths[row.number]))
        return kept > 0

    def add(self, other: Batch) -> None:
        """Append the rows of another batch of the same models. The caches must have room for them."""
        self.requests = [*self.requests, *other.requests]
        for cache, joining in zip(self.caches, other.caches, strict=True):
            for row in range(len(joining.lengths)):
                cache.add_row(joining, row)
        self.features += other.features
        self.drafting.resize(self.requests)

    def drop_finished(self) -> list[Request]:
        """Remove the requests that have ended, and those whose texts have become long, see `CausalLM.position_limit`:
        all of their keys are others now. Returns the latter, which another batch prefills again."""
        limit, going, long = self.target.position_limit, [], []
        for number, (request, length) in enumerate(zip(self.requests, self.cache.lengths, strict=True)):
            if request.error is not None:  # its forwards may have failed, and another request gets its row
                for cache in self.caches:
                    cache.erase_row(number)
            elif request.reason is None and limit(length) != limit(len(request.tokens)):
                long.append(request)
            elif request.reason is None:
                going.append(number)
        if len(going) < len(self.requests):
            self.requests, self.features = ([rows[number] for number in going]
                                            for rows in (self.requests, self.features))
            for cache in self.caches:
                cache.keep_rows(going)
            self.drafting.resize(self.requests)
        return long

    @contextmanager
    def only(self, rows: slice) -> Iterator[None]:
        """Restrict the batch to some rows within the context. An error leaves these as they were."""
        requests, features = self.requests, self.features
        self.requests, self.features = requests[rows], [list(parts) for parts in features[rows]]
        try:
            with ExitStack() as stack:
                for cache in self.caches:
                    stack.enter_context(cache.only(rows))
                yield
            features = [*features[: rows.start], *self.features, *features[rows.stop :]]
        finally:
            self.requests, self.features = requests, features

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows."""
        length = max(cache.length for cache in self.caches)
        states = [(storage, storage[:, :, [second, first], :, :length]) for cache in self.caches
                  for storage in cache.allocated]  # of all caches, before a change: memory may run out
        for storage, crossed in states:
            storage[:, :, [first, second], :, :length] = crossed
        for rows in (self.requests, self.features):
            rows[first], rows[second] = rows[second], rows[first]
        for cache in self.caches:
            lengths = cache.lengths
            lengths[first], lengths[second] = lengths[second], lengths[first]
            cache.lengths = lengths

    # Memory -------------------------------------------------------------------------------------------------------

    def make_room(self, joining: Sequence[Request] = ()) -> None:
        """Enlarge the caches if another cycle of the requests, and of those that join, does not fit: step by step, up
        to the size for the whole texts; at once if cycles are captured, since new caches need new captures."""
        requests = [*self.requests, *joining]
        length = max(len(request.tokens) for request in requests)
        if len(requests) <= self.cache.batch and all(
                cache.capacity >= needed for cache, needed in zip(self.caches, self._rooms(length), strict=True)):
            return
        rows, longest = self.room.size(requests)
        if self._fixed:
            rows, length = self.room.most_rows(longest), longest
        self.caches = [
            cache.resized(max(needed, min(most, cache.capacity if needed <= cache.capacity
                                          else max(needed + STEP, 2 * cache.capacity))), rows)
            for cache, needed, most in zip(self.caches, self._rooms(length), self._rooms(longest), strict=True)]

    @property
    def _fixed(self) -> bool:
        """Whether the caches should keep their addresses, as cycles are captured."""
        return self.captured is not None and self.captured.support(self.target, self.drafter)

    def _rooms(self, length: int) -> list[int]:
        """The positions in each cache that a text of this length and the largest cycle take. The drafter's has room for
        the nodes too: it processes up to as many tokens at once, padding included."""
        room = length + self.room.nodes
        return [room, room + self.room.levels][: len(self.models)]

    def allocate_like(self, other: Batch) -> None:
        """Allocate the caches for rows of another batch, so that `add` cannot run out of memory."""
        for cache, joining in zip(self.caches, other.caches, strict=True):
            cache.allocate_like(joining)

    # The target and the drafter -----------------------------------------------------------------------------------

    def process_prompt(self, number: int, most: int | None = None) -> Tensor:
        """The target processes the prompt tokens that are not cached, at most this many. Returns their features
        [tokens, F]."""
        with self.cache.one_row(number):
            prompt = torch.tensor([self.requests[number].tokens[self.cache.length :][:most]], device=self.device)
            features = self.target.prefill(prompt.to(self.target.input_device), self.cache).to(self.device)[0]
        if self.reads_features:
            self.features[number].append(features)
        return features

    def feature(self, number: int) -> Tensor:
        """The features [T, F] that the drafter, which reads features, has not processed."""
        parts = self.features[number]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def unread_tokens(self, number: int, end: int | None = None) -> Sequence[int]:
        """The T tokens that the drafter has not processed; if it reads features, the tokens that follow these."""
        return self.requests[number].tokens[self.draft_cache.lengths[number] + self.reads_features : end]

    def catch_up(self, number: int) -> None:
        """The drafter processes what the target has processed of a row, except the last feature: the token after it
        comes with the next part of the prompt, or with the next cycle as the root."""
        reads = self.drafter is not None and self.has_positions(number)
        tokens = self.unread_tokens(number, self.cache.lengths[number]) if reads else []
        if tokens:
            features = self.feature(number)[:-1] if self.reads_features else None
            with self.draft_cache.one_row(number):
                catch_up_in_parts(self.drafter, features, torch.tensor(tokens, device=self.device), self.draft_cache)
            if self.reads_features:
                self.features[number] = [self.feature(number)[-1:].clone()]

    def has_positions(self, number: int, depth: int = 1) -> bool:
        """Whether the drafter has positions for the text of a row and a tree of this depth."""
        limit = self.drafter.max_positions
        if limit is None or len(self.requests[number].tokens) + depth - 1 <= limit:
            return True
        log_limit(limit)
        return False

    def unread(self, config: TreeConfig, out_of_positions: Sequence[int]) -> Unread:
        """What the drafter has not processed. Of rows `out_of_positions`, for whose trees it has none, only the root,
        to keep the batch in shape.

        The drafter catches up row by row before if it is far behind, or rows differ by more than a path, since some
        joined while drafting paused: processed together, every row takes as many positions as the longest.
        """
        rows = range(len(self.requests))
        counts = [1 if number in out_of_positions else len(self.unread_tokens(number)) for number in rows]
        if max(counts) - min(counts) > config.path or max(counts) > prefill_part(self.device):
            for number, count in enumerate(counts):
                if count > config.path + 1:
                    self.catch_up(number)
        features = [self.feature(number) for number in rows] if self.reads_features else None
        tokens = [self.requests[number].tokens[-1:] if number in out_of_positions else self.unread_tokens(number)
                  for number in rows]
        return Unread.of(features, [torch.tensor(row, device=self.device) for row in tokens], self.draft_cache)

    def keep(
        self,
        lengths: Sequence[int],  # L of each row, before the trees were verified
        paths: Sequence[Sequence[int]],  # the accepted nodes of each, the root first
        features: Tensor,  # [B, N, F] of the nodes
        tree: DraftTree,
        width: int,  # nodes of a level that the drafter expanded; 0: it did not draft
    ) -> None:
        """Keep the keys, values and features of the accepted nodes; a causal LM as the drafter keeps its own keys and
        values of those that it expanded."""
        self.cache.commit(lengths, paths)
        if self.reads_features:
            for number, path in enumerate(paths):
                self.features[number].append(features[number, path])
        elif width:
            kept = []
            for rows, path in zip(tree.draft_rows.tolist(), paths, strict=True):
                expanded = takewhile(lambda row: row >= 0, [rows[node] for node in path[1:]])
                kept.append([level * width + row for level, row in enumerate(expanded)])
            self.draft_cache.commit(self.draft_cache.lengths, kept)


@functools.cache
def log_limit(limit: int) -> None:
    log.warning("a text has reached the %d positions of the drafter: it goes on without its drafts", limit)


def shared_prefix(first: list[int], second: list[int]) -> int:
    """The length of the common prefix. Python compares parts of lists faster than numbers one by one."""
    at, count = 0, min(len(first), len(second))
    while at < count and first[at : at + PART] == second[at : at + PART]:
        at += PART
    return next((place for place in range(at, min(at + PART, count)) if first[place] != second[place]), count)
