"""Decode cycles of static shapes, as CUDA graphs: drafting and verifying are one launch each.

A graph repeats its kernels at the addresses and shapes of its capture. So the models have one pair of caches for all
requests, pinned (`TreeCache.pin`) behind a *bucket*: a number of places that the text has not outgrown. What the text
really holds is a number on the device, and so is how many tokens the draft has yet to read, T of at most depth + 1.

L length of the text, N nodes, F width of the target's features, D hidden size, R vocabulary of the draft. One sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from ..drafting.confidence import confidence_lines
from ..drafting.config import TreeConfig
from ..drafting.growth import extend_draft, grow_tree
from ..drafting.tree import DraftTree, root_only
from ..heads.eagle import DraftHead
from ..models.cache import TreeCache
from ..models.masks import tree_mask
from ..models.placement import Lock
from ..models.target import TargetModel
from .compiled import why_not_together
from .forwards import Forwards
from .request import Request

log = logging.getLogger(__name__)
LEAST = 256  # places of the smallest bucket
MOST_NODES = 256  # places behind the largest: of a tree, or of what a draft keeps of its own
MOST_CYCLES = 64  # that are kept
GRAPH_PARITY = 2e-2  # of the results' size, between a graph and its function
T = TypeVar("T")


def bucket_of(length: int) -> int:
    """Places of the smallest bucket for a text of this length: 256, 384, 512, 768, 1024 and so on."""
    bucket = LEAST
    while bucket < length:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return bucket


def why_no_graphs(target: TargetModel) -> str | None:
    """Why cycles with this target have no graphs; None: they may."""
    if not target.reads_in_parts:
        return "its rotary embedding depends on the length of the text"
    return why_not_together(target)


class CapturedForward:
    """A function of tensors that stay where they are, with its result where it was the last time.

    Args:
        function: without arguments; to run it again changes nothing.
        graphs: whose memory and stream the capture uses.
    """

    def __init__(self, function: Callable[[], T], graphs: GraphCycles) -> None:
        self.function, self.graphs = function, graphs
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> T:
        if self.graphs.stream is None:
            return self.function()
        if self.graph is None:
            self.capture(self.graphs.stream)
        self.graph.replay()
        return self.result

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Run the function twice apart, as graphs want it, and capture it.

        Raises:
            RuntimeError: it waits for the device, or cannot be captured.
        """
        before = torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(before):  # a capture that fails would leave its own stream behind
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                self.function()  # what is made once, such as a cache's storage, is made here
                with waits_refused():  # a failed capture leaves more behind than an error
                    self.function()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.graphs.pool, stream=stream, capture_error_mode="thread_local"):
                self.result = self.function()
        self.graph = graph


@contextmanager
def waits_refused() -> Iterator[None]:
    """Within, what waits for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class StaticCycle:
    """The two phases of a cycle with one tree behind one bucket.

    Args:
        config: None: no drafting, the tree is the root.
        place: of the first node's keys, the end of the bucket.
        keep_logits: whether the draft's logits are wanted, see `draft_tree`.
    """

    def __init__(self, graphs: GraphCycles, config: TreeConfig | None, place: int, keep_logits: bool) -> None:
        self.graphs, self.config, self.place, self.keep_logits = graphs, config, place, keep_logits
        self.most = 1 if config is None else config.depth + 1  # T
        target, device = graphs.target, graphs.target.output_device
        self.features = torch.zeros(1, self.most, target.feature_size, dtype=target.dtype, device=device)
        self.tokens = torch.zeros(1, self.most, dtype=torch.long, device=device)
        self.numbers = torch.ones(3, dtype=torch.long, device=device)  # of tokens: to read, read by draft, by target
        self.tree = root_only(self.tokens[:, 0])  # without drafting: it shows what `tokens` holds
        self.drafting, self.verifying = CapturedForward(self._draft, graphs), CapturedForward(self._verify, graphs)
        # Graphs read these without holding them.
        self.lines = config and config.confidence and confidence_lines(config.confidence, config.top_k, device)

    def draft(
        self,
        features: Tensor,  # [T, F]
        tokens: Tensor,  # [T], the last one the root
        read: int,  # positions that the draft has read before
        length: int,  # L, the root is the token there
    ) -> tuple[DraftTree, Tensor]:
        """The draft tree, and the draft's logits [1, E or 0, R]; the draft's cache must be told what it keeps."""
        count = len(tokens)
        self.features.zero_()[0, :count] = features  # no NaN may be left in what is hidden
        self.tokens[0, :count] = tokens
        self.numbers.copy_(torch.tensor([count, read, length]), non_blocking=True)
        self.tree, draft_logits = self.drafting()
        return self.tree, draft_logits

    def begin(
        self,
        token: int,
        length: int,  # L, the token's position
    ) -> DraftTree:
        """The root alone."""
        self.tokens.fill_(token)
        self.numbers.copy_(torch.tensor([1, 0, length]), non_blocking=True)
        return self.tree

    def verify(self) -> Tensor:
        """Features [1, N, F] of the tree; the cache must be told which nodes to keep."""
        return self.verifying()

    def _held(self, count: Tensor) -> Tensor:
        return (torch.arange(self.place, device=count.device) < count)[None]

    def _draft(self) -> tuple[DraftTree, Tensor]:
        head, cache = self.graphs.head, self.graphs.draft_cache
        count, read = self.numbers[0:1], self.numbers[1:2]
        ahead = torch.arange(self.most, device=count.device)
        held, positions = self._held(read), read[:, None] + ahead
        cache.pin(read, held)
        mask = tree_mask((ahead[:, None] >= ahead)[None], self.place, head.dtype, held)
        predicted = head(head.read(self.features), self.tokens, positions, mask, cache)
        cache.pin(read + count, torch.cat([held, (ahead < count)[None]], 1))
        last = (count - 1)[:, None]
        predicted = predicted.gather(1, last[..., None].expand(-1, -1, predicted.shape[-1]))
        root = self.tokens.gather(1, last)[:, 0]
        return grow_tree(head, self.graphs.target, predicted, root, cache, self.config, self.keep_logits)

    def _verify(self) -> Tensor:
        tree, cache, length = self.tree, self.graphs.cache, self.numbers[2:3]
        cache.pin(length, self._held(length))
        return self.graphs.target.verify(tree.tokens, tree.depths + length[:, None], tree.ancestors, cache)


class GraphCycles:
    """The caches and cycles that a pair's requests use one at a time.

    Args:
        max_length: longest text, prompt and answer, that is decoded so.
        capture: as CUDA graphs; False: the same functions, called.
    """

    def __init__(self, target: TargetModel, head: DraftHead | None, max_length: int, *, capture: bool = True) -> None:
        self.target, self.head, self.max_length = target, head, max_length
        self.reserved = _reserved(target.output_device)  # before
        room = bucket_of(max_length) + MOST_NODES
        self.cache = target.new_cache(room, stale=True)
        self.draft_cache = None if head is None else head.new_cache(room, stale=True)
        self.stream = torch.cuda.Stream(target.output_device) if capture else None  # one: each claims memory for good
        self.pool = torch.cuda.graph_pool_handle() if capture else None
        self.cycles: dict[tuple, StaticCycle] = {}
        self.in_use = Lock()
        self.failed: str | None = None  # why there are no more graphs

    def serve(self, length: int, trees: Sequence[TreeConfig | None]) -> bool:
        """Whether a text that grows to this length can be decoded so, with these trees."""
        if self.failed is None and length > self.max_length:
            log.info("a text of up to %d tokens runs without CUDA graphs: they serve %d", length, self.max_length)
        return self.failed is None and length <= self.max_length and all(map(fits, trees))

    def of(self, tree: TreeConfig | None, keep_logits: bool, length: int) -> StaticCycle:
        """The cycle for a text of this length."""
        key = (tree, keep_logits, bucket_of(length))
        if key not in self.cycles:
            if len(self.cycles) == MOST_CYCLES:
                del self.cycles[next(iter(self.cycles))]
            self.cycles[key] = StaticCycle(self, tree, key[2], keep_logits)
        return self.cycles[key]

    def fail(self, error: BaseException) -> None:
        """Note that something cannot be captured: what follows runs without graphs."""
        while error.__context__ is not None:  # that of a capture says no more than that there was one
            error = error.__context__
        self.failed = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.cycles.clear()
        log.warning("%s runs without CUDA graphs: %s", type(self.target.model).__name__, self.failed)

    @torch.inference_mode()
    def warm_up(self, kinds: Sequence[tuple[TreeConfig | None, bool]]) -> bool:
        """Capture the cycles of these trees, with or without the draft's logits, for all lengths.

        It shows progress, and the log says what memory they take.

        Returns:
            Whether they could be captured, and give what the functions give.
        """
        if self.failed is not None:
            return False
        buckets = sorted({bucket_of(length) for length in range(1, self.max_length + 1)}, reverse=True)
        work = [(*kind, bucket) for bucket in buckets for kind in kinds if fits(kind[0])]  # the most memory first
        try:
            for tree, keep_logits, bucket in tqdm(
                work, desc="capturing graphs", unit="graph", leave=False, disable=None
            ):
                self._check(self.of(tree, keep_logits, bucket))
        except Exception as error:  # whatever cannot be captured ends in
            self.fail(error)
            return False
        finally:
            self.reset()
        caches = sum(cache.nbytes for cache in (self.cache, self.draft_cache) if cache is not None)
        graphs = _reserved(self.target.output_device) - self.reserved - caches
        log.info("CUDA graphs of %d cycles take %.0f MB, the caches for %d tokens %.0f MB", len(self.cycles),
                 graphs / 1e6, self.max_length, caches / 1e6)
        return True

    def _check(self, cycle: StaticCycle) -> None:
        """Capture both phases, and compare them with their functions on other inputs."""
        for text in (1, 2):
            length, noise = cycle.place // 2 + text, torch.Generator().manual_seed(text)
            tokens = torch.randint(self.target.vocab_size, (cycle.most,), generator=noise).to(cycle.tokens.device)
            if cycle.config is None:
                cycle.begin(int(tokens[0]), length)
            else:
                features = torch.randn(cycle.features[0].shape, generator=noise).to(cycle.features)
                drafted = cycle.draft(features, tokens, length - len(tokens), length)[0].scores
                _require_same("drafting", drafted, cycle.drafting.function()[0].scores)
            _require_same("verifying", cycle.verify(), cycle.verifying.function())

    def reset(self) -> tuple[TreeCache, TreeCache | None]:
        """Both caches, empty."""
        for cache in (self.cache, self.draft_cache):
            if cache is not None:
                cache.clear()
        return self.cache, self.draft_cache


class GraphForwards(Forwards):
    """One request's forwards as graphs; where something cannot be captured, nothing is lost and all goes on without."""

    def __init__(self, graphs: GraphCycles) -> None:
        super().__init__(graphs.target, graphs.head, *graphs.reset())
        self.graphs = graphs
        self.cycle: StaticCycle | None = None  # the present one

    def draft(
        self, requests: Sequence[Request], config: TreeConfig | None, keep_logits: bool
    ) -> tuple[DraftTree, Tensor]:
        (request,), self.cycle = requests, None
        if self.graphs.failed is None:
            read = 0 if self.draft_cache is None else self.draft_cache.length
            try:
                return self._replay(request, config, keep_logits)
            except RuntimeError as error:  # of a capture; errors of the device itself come again without graphs
                self.graphs.fail(error)
                if self.draft_cache is not None:
                    self.draft_cache.commit([read], [[]])
        return super().draft(requests, config, keep_logits)

    def _replay(self, request: Request, config: TreeConfig | None, keep_logits: bool) -> tuple[DraftTree, Tensor]:
        length = self.cache.length
        cycle = self.graphs.of(config, config is not None and keep_logits, length)
        if config is None:
            tree = cycle.begin(request.tokens[-1], length)
            draft_logits = self.no_logits(1)
        else:
            features, unread = request.features, request.unread(self.device)
            before = len(unread) - cycle.most  # what was emitted without drafting
            if before > 0:
                extend_draft(self.head, [features[:before]], [unread[:before]], self.draft_cache)
                features, unread = features[before:], unread[before:]
            read = self.draft_cache.length
            tree, draft_logits = cycle.draft(features, unread, read, length)
            self.draft_cache.commit([read], [range(cycle.place, cycle.place + len(unread))])
            request.features = None
        self.cycle = cycle
        return tree, draft_logits

    def verify(self, tree: DraftTree) -> Tensor:
        if self.cycle is not None:
            length = self.cache.length
            try:
                self.place = self.cycle.place
                return self.cycle.verify()
            except RuntimeError as error:
                self.graphs.fail(error)
                self.cache.commit([length], [[]])
        return super().verify(tree)


def fits(tree: TreeConfig | None) -> bool:
    """Whether there can be graphs of a tree: not of one that stops early, waiting for the device at each level.

    Behind the bucket lie its nodes, or in the draft's cache what it reads, then the frontier of each level.
    """
    if tree is None:
        return True
    needed = max(tree.nodes, tree.depth + 1 + tree.top_k * tree.depth)
    return needed <= MOST_NODES and not tree.least_reach and not tree.least_probability


def _require_same(phase: str, found: Tensor, wanted: Tensor) -> None:
    """Raise where a graph does not give what its function gives."""
    difference = ((found - wanted).float().norm() / wanted.float().norm()).item()
    if not difference <= GRAPH_PARITY:
        raise ValueError(f"{phase} by a graph differs by {difference:.1g} of the size")


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
