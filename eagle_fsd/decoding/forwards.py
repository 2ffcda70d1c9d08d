"""Both models and their caches, as the decode step asks for them: draft a tree, verify it, keep a path of it.

B requests, L committed positions of one, N tree nodes, T positions that the drafter has not read, F width of the
target's features, R vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..drafting.config import TreeConfig
from ..drafting.coupling import Coupling
from ..drafting.drafter import Drafter
from ..drafting.growth import draft_tree, extend_draft
from ..drafting.join import join_drafts
from ..drafting.sizing import Plan
from ..drafting.text import MOST_NODES, Copies
from ..drafting.tree import DraftTree, root_only
from ..models.cache import TreeCache
from ..models.target import TargetModel
from .request import Request


class CachedText(Protocol):
    """The text of a row of the caches: a `Request`, or what is kept of one."""

    tokens: Sequence[int]
    features: Tensor | None  # [T, F] of the last cached positions, which the drafter has not read; None: it reads none


class Forwards:
    """Forwards of both models after what the caches of requests hold that are decoded together."""

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, cache: TreeCache, draft_cache: TreeCache | None
    ) -> None:
        self.target, self.drafter, self.cache, self.draft_cache = target, drafter, cache, draft_cache
        self.device = target.output_device  # trees, logits and features live there
        self.place = 0  # of the first node's keys, in the last verify

    @property
    def lengths(self) -> list[int]:
        """L of each request: its root is the token there."""
        return self.cache.lengths

    def prefill(self, number: int, request: Request, most: int | None = None) -> Tensor:
        """Features [L, F] of what the target's cache does not hold of a prompt, at most so many."""
        with self.cache.one_row(number):
            prompt = torch.tensor([request.tokens[self.cache.length :][:most]], device=self.device)
            features = self.target.prefill(prompt.to(self.target.device), self.cache).to(self.device)
        return features[0]

    def _unread(self, number: int, request: Request, end: int | None = None) -> Sequence[int]:
        """Tokens [T] that the drafter has not read; with features, each the one after its feature."""
        return request.tokens[self.draft_cache.lengths[number] + self.drafter.reads_features : end]

    def prefill_draft(self, number: int, request: Request) -> None:
        """The drafter reads what the target has read of a prompt; of features, all but the last one: the token after
        that comes with the next part, or it is the root and comes with the first cycle."""
        tokens = [] if self.drafter is None else self._unread(number, request, self.lengths[number])
        if tokens:
            features = [request.features[:-1]] if self.drafter.reads_features else None
            with self.draft_cache.one_row(number):
                extend_draft(self.drafter, features, [torch.tensor(tokens, device=self.device)], self.draft_cache)
            if self.drafter.reads_features:
                request.features = request.features[-1:].clone()

    def draft(
        self, requests: Sequence[Request], plan: Plan, copies: Sequence[Copies | None] = (),
        coupling: Coupling | None = None,
    ) -> tuple[DraftTree, list[Tensor]]:
        """Draft trees of the drafter's nodes and of copies, and its logits by level, see `draft_tree`; the roots alone
        where there is neither.

        Drafting takes the requests' features: what the drafter has read is no longer kept.
        """
        tree, logits = self._drafted(requests, plan, MOST_NODES if any(copies) else 0, coupling)
        return (join_drafts(tree, copies, plan) if any(copies) else tree), logits

    def _drafted(
        self, requests: Sequence[Request], plan: Plan, nodes: int, coupling: Coupling | None
    ) -> tuple[DraftTree, list[Tensor]]:
        if plan.tree is None:
            return root_only(torch.tensor([request.tokens[-1] for request in requests], device=self.device)), []
        self._catch_up(requests, plan.tree)
        features = [request.features for request in requests] if self.drafter.reads_features else None
        tokens = [torch.tensor(self._unread(number, request), device=self.device)
                  for number, request in enumerate(requests)]
        drafted = draft_tree(
            self.drafter, self.target, features, tokens, self.draft_cache, plan.tree, nodes, coupling, plan)
        for request in requests:
            request.features = None
        return drafted

    def _catch_up(self, requests: Sequence[Request], config: TreeConfig) -> None:
        """Have the drafter read each row alone where some lag behind by more than a path: rows that joined while
        nothing was drafted. Together, all would append as much as the last one lacks, after the longest, and exceed the
        room.
        """
        unread = [len(self._unread(number, request)) for number, request in enumerate(requests)]
        path = min(config.depth, config.nodes - 1)
        if max(unread) - min(unread) > path:
            for number, count in enumerate(unread):
                if count > path + 1:
                    self.prefill_draft(number, requests[number])

    def verify(self, tree: DraftTree) -> Tensor:
        """Features [B, N, F] of the trees' nodes."""
        self.place = self.cache.length
        positions = tree.depths + torch.tensor(self.lengths, device=self.device)[:, None]
        return self.target.verify(tree.tokens, positions, tree.ancestors, self.cache)

    def commit(
        self,
        lengths: Sequence[int],  # L of each request, before the last verify
        paths: Sequence[Sequence[int]],  # the accepted nodes of each, the root first
    ) -> None:
        """Keep the accepted nodes' keys and values."""
        self.cache.commit(lengths, [[self.place + node for node in path] for path in paths])

    @property
    def caches(self) -> list[TreeCache]:
        return [self.cache] if self.draft_cache is None else [self.cache, self.draft_cache]

    def keep_rows(self, numbers: Sequence[int]) -> None:
        """Go on with these requests only, ascending."""
        for cache in self.caches:
            cache.keep_rows(numbers)

    def join(self, other: Forwards) -> None:
        """Go on with another's requests as well, after one's own: the inverse of `keep_rows`. There must be room."""
        for cache, joining in zip(self.caches, other.caches, strict=True):
            for row in range(len(joining.lengths)):
                cache.add_row(joining, row)

    def resize(self, requests: int, room: int, draft_room: int) -> None:
        """Have room for so many requests of so many positions, those of the draft beside its levels."""
        cache = self.cache.resized(room, requests)
        if self.draft_cache is not None:
            self.draft_cache = self.draft_cache.resized(draft_room, requests)
        self.cache = cache

    def erase(self, number: int) -> None:
        """Leave nothing of a request whose forwards may have gone wrong to who gets its place."""
        for cache in self.caches:
            cache.erase_row(number)

    def row(self, number: int) -> Forwards:
        """A copy for one request alone, without further room."""
        alone = [cache.copy_of_row(number) for cache in self.caches]
        return Forwards(self.target, self.drafter, alone[0], alone[1] if len(alone) > 1 else None)

    def take_over(self, request: Request, before: CachedText, room: int, draft_room: int) -> None:
        """Go on with the caches of an earlier request, as far as they hold the beginning of this one's prompt."""
        kept, request.features = self.shared(0, before, request)
        if self.draft_cache is not None:
            self.draft_cache.truncate(kept)
            self.draft_cache = self.draft_cache.with_room(draft_room)
        self.cache.truncate(kept)
        self.cache = self.cache.with_room(room)

    def begin_with(self, request: Request, other: Forwards, number: int, before: CachedText) -> None:
        """`take_over` by copy, for a single request: what row `number` of other forwards holds stays there as well."""
        kept, features = other.shared(number, before, request)
        request.features = None if features is None else features.clone()
        self.cache.copy_row(0, other.cache, number, kept)
        if self.draft_cache is not None:
            read = min(kept, other.draft_cache.lengths[number])
            self.draft_cache.copy_row(0, other.draft_cache, number, read)

    def shared(self, number: int, before: CachedText, request: Request) -> tuple[int, Tensor | None]:
        """How many positions of a row are the beginning of another request's prompt, and the features of those of them
        that the drafter has not read.

        Of the positions that the prompts share, it needs the last one's feature again: it reads each feature with the
        token after it, and that token is new. Where it had read the feature already (a prompt that departs from the
        earlier one before its last cycle), the target processes that position once more.
        """
        held = before.tokens[: self.lengths[number]]
        kept = shared_prefix(held, request.tokens[:-1])  # the last token's logits are wanted
        if self.target.position_limit(len(request.tokens)) != self.target.position_limit(len(before.tokens)):
            kept = 0  # the keys of a short text and those of a long one differ
        if self.drafter is None or not self.drafter.reads_features:
            return kept, None
        read = self.draft_cache.lengths[number]
        if read < kept:
            return kept, before.features[: kept - read]
        return max(0, kept - 1), None


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
