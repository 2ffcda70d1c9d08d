"""Both models and their caches behind the three forwards of the decode step: draft a tree, verify it, commit a path.

Shapes: B requests, L committed positions of a request, N tree nodes, T positions that the drafter has not processed, F
width of the target's features, R vocabulary of the draft.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile

import torch
from torch import Tensor

from ..drafting.config import TreeConfig
from ..drafting.copies import MOST_NODES, Copies
from ..drafting.coupling import Coupling
from ..drafting.drafter import Drafter
from ..drafting.growth import Unread, draft, read_prompt, rerank
from ..drafting.join import join_drafts
from ..drafting.sizing import Plan
from ..drafting.tree import DraftTree, root_only
from ..models.cache import TreeCache
from ..models.causal_lm import prefill_part
from ..models.target import TargetModel
from .request import Request

log = logging.getLogger(__name__)
PART = 256  # tokens that `shared_prefix` compares at once


class Forwards:
    """Forwards of both models for requests that are decoded together, the caches of these requests, and the features
    that the drafter has not processed."""

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, cache: TreeCache, draft_cache: TreeCache | None
    ) -> None:
        self.target, self.drafter, self.cache, self.draft_cache = target, drafter, cache, draft_cache
        self.device = target.output_device  # of trees, logits and features
        self.reads_features = drafter is not None and drafter.reads_features
        # For each row the target's features [T, F] of its last T positions, in parts; empty if the drafter reads none.
        self.unread_features: list[list[Tensor]] = [[] for _ in cache.lengths]

    @property
    def lengths(self) -> list[int]:
        """L of each request, which is the position of its root."""
        return self.cache.lengths

    def prefill(self, number: int, request: Request, most: int | None = None) -> Tensor:
        """Process the prompt tokens that are not cached, at most this many, and return their features [tokens, F]."""
        with self.cache.one_row(number):
            prompt = torch.tensor([request.tokens[self.cache.length :][:most]], device=self.device)
            features = self.target.prefill(prompt.to(self.target.device), self.cache).to(self.device)[0]
        if self.reads_features:
            self.unread_features[number].append(features)
        return features

    def features(self, number: int) -> Tensor:
        """The features [T, F] that the drafter, which reads features, has not processed."""
        parts = self.unread_features[number]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def unread(self, number: int, request: Request, end: int | None = None) -> Sequence[int]:
        """The T tokens that the drafter has not processed; if it reads features, the tokens that follow these."""
        return request.tokens[self.draft_cache.lengths[number] + self.reads_features : end]

    def prefill_draft(self, number: int, request: Request) -> None:
        """The drafter processes the part of a prompt that the target has processed, except the last feature: the token
        after it comes with the next part of the prompt, or with the first cycle as the root."""
        reads = self.drafter is not None and self.has_positions(request)
        tokens = self.unread(number, request, self.lengths[number]) if reads else []
        if tokens:
            features = self.features(number)[:-1] if self.reads_features else None
            with self.draft_cache.one_row(number):
                read_prompt(self.drafter, features, torch.tensor(tokens, device=self.device), self.draft_cache)
            if self.reads_features:
                self.unread_features[number] = [self.features(number)[-1:].clone()]

    def draft(
        self, requests: Sequence[Request], plan: Plan, copies: Sequence[Copies | None] = (),
        coupling: Coupling | None = None,
    ) -> tuple[DraftTree, list[Tensor]]:
        """Trees of the drafter's nodes and of copies, and the drafter's logits by level, see `growth.draft`. Without
        either, each tree is only a root.

        Afterwards the drafter has processed all features.
        """
        tree, logits = self._drafted(requests, plan, MOST_NODES if any(copies) else 0, coupling)
        return (join_drafts(tree, copies, plan) if any(copies) else tree), logits

    def _drafted(
        self, requests: Sequence[Request], plan: Plan, nodes: int, coupling: Coupling | None
    ) -> tuple[DraftTree, list[Tensor]]:
        depth = plan.tree.depth if plan.uses_drafter else 0
        ended = [number for number, request in enumerate(requests) if depth and not self.has_positions(request, depth)]
        if not depth or len(ended) == len(requests):
            return root_only(torch.tensor([request.tokens[-1] for request in requests], device=self.device)), []
        self._catch_up(requests, plan.tree)
        features = [self.features(number) for number in range(len(requests))] if self.reads_features else None
        read = self.draft_cache.lengths
        tokens = [torch.tensor(request.tokens[-1:] if number in ended else self.unread(number, request),
                               device=self.device) for number, request in enumerate(requests)]
        unread = Unread.of(features, tokens, self.draft_cache)
        scored, logits = draft(self.drafter, self.target, unread, self.draft_cache, plan.tree, coupling, plan)
        tree = rerank(scored, plan.tree, nodes, plan)
        self.unread_features = [[] for _ in requests]
        if ended:  # the drafter processed their last tokens only to keep the batch in shape
            lengths = [(read if number in ended else self.draft_cache.lengths)[number] for number in range(len(read))]
            self.draft_cache.lengths = lengths
            tree = tree.without_drafts(ended)
        return tree, logits

    def has_positions(self, request: Request, depth: int = 1) -> bool:
        """Whether the drafter has positions for the text and a tree of this depth."""
        limit = self.drafter.max_positions
        if limit is None or len(request.tokens) + depth - 1 <= limit:
            return True
        log_limit(limit)
        return False

    def _catch_up(self, requests: Sequence[Request], config: TreeConfig) -> None:
        """Let the drafter catch up row by row if it is far behind, or rows differ by more than a path, since some
        joined while drafting paused: processed together, every row takes as many positions as the longest.
        """
        unread = [len(self.unread(number, request)) if self.has_positions(request, config.depth) else 1
                  for number, request in enumerate(requests)]
        if max(unread) - min(unread) > config.path or max(unread) > prefill_part(self.device):
            for number, count in enumerate(unread):
                if count > config.path + 1:
                    self.prefill_draft(number, requests[number])

    def verify(self, tree: DraftTree) -> Tensor:
        """The target's features [B, N, F] of the nodes."""
        positions = tree.depths + torch.tensor(self.lengths, device=self.device)[:, None]
        return self.target.verify(tree.tokens, positions, tree.ancestors, self.cache)

    def commit(
        self,
        lengths: Sequence[int],  # L of each request, before the last verify
        paths: Sequence[Sequence[int]],  # the accepted nodes of each, the root first
        features: Tensor,  # [B, N, F] of the last verify
        tree: DraftTree,
        width: int,  # nodes of a level that the drafter expanded; 0: it did not draft
    ) -> None:
        """Keep the keys, values and features of the accepted nodes; a causal LM as the drafter keeps its own keys and
        values of those that it expanded."""
        self.cache.commit(lengths, paths)
        if self.reads_features:
            for number, path in enumerate(paths):
                self.unread_features[number].append(features[number, path])
        elif width:
            kept = []
            for rows, path in zip(tree.draft_rows.tolist(), paths, strict=True):
                expanded = takewhile(lambda row: row >= 0, [rows[node] for node in path[1:]])
                kept.append([level * width + row for level, row in enumerate(expanded)])
            self.draft_cache.commit(self.draft_cache.lengths, kept)

    @property
    def caches(self) -> list[TreeCache]:
        return [self.cache] if self.draft_cache is None else [self.cache, self.draft_cache]

    @contextmanager
    def only(self, rows: slice) -> Iterator[None]:
        """Restrict the forwards to some rows within the context. An error leaves these as they were."""
        unread = self.unread_features
        self.unread_features = [list(parts) for parts in unread[rows]]
        try:
            with ExitStack() as stack:
                for cache in self.caches:
                    stack.enter_context(cache.only(rows))
                yield
            unread = [*unread[: rows.start], *self.unread_features, *unread[rows.stop :]]
        finally:
            self.unread_features = unread

    def keep_rows(self, numbers: Sequence[int]) -> None:
        """Keep only these rows (ascending)."""
        for cache in self.caches:
            cache.keep_rows(numbers)
        self.unread_features = [self.unread_features[number] for number in numbers]

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows."""
        length = max(cache.length for cache in self.caches)
        states = [(storage, storage[:, :, [second, first], :, :length]) for cache in self.caches
                  for storage in cache.allocated]  # of all caches, before a change: memory may run out
        for storage, crossed in states:
            storage[:, :, [first, second], :, :length] = crossed
        for cache in self.caches:
            lengths = cache.lengths
            lengths[first], lengths[second] = lengths[second], lengths[first]
            cache.commit(lengths, [()] * len(lengths))
        unread = self.unread_features
        unread[first], unread[second] = unread[second], unread[first]

    def allocate_like(self, other: Forwards) -> None:
        """Allocate the caches for rows of other forwards, so that `join` cannot run out of memory."""
        for cache, joining in zip(self.caches, other.caches, strict=True):
            cache.allocate_like(joining)

    def join(self, other: Forwards) -> None:
        """Append the rows of other forwards, the inverse of `keep_rows`. The caches must have room for them."""
        for cache, joining in zip(self.caches, other.caches, strict=True):
            for row in range(len(joining.lengths)):
                cache.add_row(joining, row)
        self.unread_features += other.unread_features

    def resize(self, requests: int, room: int, draft_room: int) -> None:
        """Change the number of rows, and the positions of each row in the target's and in the draft's cache."""
        cache = self.cache.resized(room, requests)
        if self.draft_cache is not None:
            self.draft_cache = self.draft_cache.resized(draft_room, requests)
        self.cache = cache

    def erase(self, number: int) -> None:
        """Erase a row whose forwards may have failed, before another request gets it."""
        for cache in self.caches:
            cache.erase_row(number)

    def row(self, number: int) -> Forwards:
        """A copy of one row, without spare capacity."""
        caches = [cache.copy_of_row(number) for cache in self.caches]
        alone = Forwards(self.target, self.drafter, caches[0], caches[1] if len(caches) > 1 else None)
        alone.unread_features = [list(self.unread_features[number])]
        return alone

    def make_room(self, room: int, levels: int, most: float = math.inf) -> None:
        """Enlarge the caches if a row has less than `room` positions in them, up to `most`. In the drafter's cache it
        needs `levels` more."""
        self.cache = self.cache.with_room(room, most)
        if self.draft_cache is not None:
            self.draft_cache = self.draft_cache.with_room(room + levels, most + levels)

    def take_over(self, request: Request, tokens: list[int]) -> None:
        """Reuse the caches of an earlier text up to its first token that differs from this request's prompt."""
        kept, self.unread_features[0] = self.shared(0, tokens, request)
        for cache in self.caches:
            cache.truncate(kept)

    def begin_with(self, request: Request, other: Forwards, number: int, tokens: list[int]) -> None:
        """`take_over` for a single request, from row `number` of other forwards, which stays as it is."""
        kept, self.unread_features[0] = other.shared(number, tokens, request)
        self.cache.copy_row(0, other.cache, number, kept)
        if self.draft_cache is not None:
            read = min(kept, other.draft_cache.lengths[number])
            self.draft_cache.copy_row(0, other.draft_cache, number, read)

    def shared(self, number: int, tokens: list[int], request: Request) -> tuple[int, list[Tensor]]:
        """The number of positions that a row, of a text with these tokens, shares with another request's prompt, and
        the features of those positions that the drafter has not processed.

        The drafter needs the feature of the last shared position again, because it reads each feature with the token
        after it, and that token is new. If the drafter has processed this feature already (the prompts differ before
        the last cycle of the earlier request), the target processes the position once more.
        """
        kept = shared_prefix(tokens[: self.lengths[number]], request.tokens[:-1])  # the last token needs logits
        if self.target.position_limit(len(request.tokens)) != self.target.position_limit(len(tokens)):
            kept = 0  # keys depend on whether the text is short or long
        if not self.reads_features:
            return kept, []
        read = self.draft_cache.lengths[number]
        if read < kept:
            return kept, [self.features(number)[: kept - read]]
        return max(0, kept - 1), []


@functools.cache
def log_limit(limit: int) -> None:
    log.warning("a text has reached the %d positions of the drafter: it goes on without its drafts", limit)


def shared_prefix(first: list[int], second: list[int]) -> int:
    """The length of the common prefix. Python compares parts of lists faster than numbers one by one."""
    at, count = 0, min(len(first), len(second))
    while at < count and first[at : at + PART] == second[at : at + PART]:
        at += PART
    return next((place for place in range(at, min(at + PART, count)) if first[place] != second[place]), count)
