"""Decode cycles of static shapes, as CUDA graphs: drafting and verifying are one launch each.

A graph repeats its kernels at the addresses and shapes of its capture. So the models have one pair of caches for all
requests, pinned (`TreeCache.pin`) behind a *bucket*: a number of places that the text has not outgrown. What the text
really holds is a number on the device, and so are the tokens that the draft has yet to read, T of at most depth + 1.

L length of the text, N nodes, F width of the target's features, D hidden size, V vocabulary. One sequence.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from .attention import tree_mask
from .cache import TreeCache
from .compiled import why_not_together
from .config import TreeConfig
from .draft import DraftHead
from .drafting import grow_tree
from .target import TargetModel
from .tree import DraftTree, root_only

log = logging.getLogger(__name__)

LEAST = 256  # places of the smallest bucket
MOST_NODES = 256  # places behind the largest: of a tree, or of what a draft keeps of its own
PARITY = 2e-2  # of the features' size, between a graph and its function


def bucket_of(length: int) -> int:
    """Places of the smallest bucket for a text of this length: 256, 384, 512, 768, 1024 and so on."""
    bucket = LEAST
    while bucket < length:
        bucket = bucket * 3 // 2 if bucket & (bucket - 1) == 0 else bucket * 4 // 3
    return bucket


def why_no_graphs(target: TargetModel) -> str | None:
    """Why cycles with this target have no graphs; None: they may."""
    if target.short_positions is not None:
        return "the keys of its short texts and those of its long ones differ"
    return why_not_together(target)


class Phase:
    """A function of tensors that stay where they are, with its results where they were the last time.

    Args:
        function: without arguments; to run it again changes nothing.
        pool: the memory that graphs share; None: there is no graph, the function is called each time.
    """

    def __init__(self, function: Callable[[], tuple], pool: object | None) -> None:
        self.function, self.pool = function, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: tuple = ()

    def __call__(self) -> tuple:
        if self.pool is None:
            return self.function()
        if self.graph is None:
            self.capture()
        assert self.graph is not None
        self.graph.replay()
        return self.result

    def capture(self) -> None:
        """Run the function twice apart, as graphs want it, and capture it."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.result = self.function()
        self.graph = graph


class StaticCycle:
    """The two phases of a cycle with one tree behind one bucket.

    Args:
        tree: None: no drafting, the tree is the root.
        keep_logits: whether the draft's logits are wanted, see `draft_tree`.
    """

    def __init__(
        self, cycles: GraphCycles, tree: TreeConfig | None, place: int, keep_logits: bool, pool: object | None
    ) -> None:
        self.cycles, self.config, self.place, self.keep_logits = cycles, tree, place, keep_logits
        self.most = 1 if tree is None else tree.depth + 1  # T
        device, target = cycles.target.output_device, cycles.target
        self.features = torch.zeros(1, self.most, target.feature_size, dtype=target.dtype, device=device)
        self.tokens = torch.zeros(1, self.most, dtype=torch.long, device=device)
        self.numbers = torch.ones(3, dtype=torch.long, device=device)  # of tokens: to read, read by draft, by target
        self.drafting = Phase(self._draft, pool)
        self.verifying = Phase(self._verify, pool)

    def draft(
        self,
        features: Tensor,  # [T, F]
        tokens: Tensor,  # [T], the last one the root
        read: int,  # positions that the draft has read before
        length: int,  # L, the root is the token there
    ) -> tuple[DraftTree, Tensor]:
        """The draft tree, and the draft's logits [1, E or 0, V]; the draft's cache must be told what it keeps."""
        count = len(tokens)
        self.features[0, :count] = features
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
        self.tree, = self.drafting()
        return self.tree

    def verify(self) -> tuple[Tensor, Tensor]:
        """Features [1, N, F] and logits [1, N, V] of the tree; the cache must be told which nodes to keep."""
        return self.verifying()

    def _held(self, count: Tensor) -> Tensor:
        return (torch.arange(self.place, device=count.device) < count)[None]

    def _draft(self) -> tuple:
        if self.config is None:
            return (root_only(self.tokens[:, 0]),)
        head, cache = self.cycles.head, self.cycles.draft_cache
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
        return grow_tree(head, self.cycles.target, predicted, root, cache, self.config, self.keep_logits)

    def _verify(self) -> tuple:
        target, tree, cache, length = self.cycles.target, self.tree, self.cycles.cache, self.numbers[2:3]
        cache.pin(length, self._held(length))
        features = target.verify(tree.tokens, tree.depths + length[:, None], tree.ancestors, cache)
        return features, target.logits(features)


class GraphCycles:
    """The caches and cycles that a pair's requests use one at a time.

    Args:
        max_length: longest text, prompt and answer, that is decoded so.
        capture: as CUDA graphs; False: the same functions, called.
    """

    def __init__(self, target: TargetModel, head: DraftHead | None, max_length: int, *, capture: bool = True) -> None:
        self.target, self.head, self.max_length = target, head, max_length
        room = bucket_of(max_length) + MOST_NODES
        self.cache = target.new_cache(room, stale=True)
        self.draft_cache = None if head is None else head.new_cache(room, stale=True)
        self.pool = torch.cuda.graph_pool_handle() if capture else None
        self.cycles: dict[tuple, StaticCycle] = {}
        self.in_use = threading.Lock()
        self.failed: str | None = None  # why there are no more graphs

    def serve(self, length: int, trees: Sequence[TreeConfig | None]) -> bool:
        """Whether a text that grows to this length can be decoded so, with these trees.

        Trees that stop early wait for the device at each level, which no graph can.
        """
        def fits(tree: TreeConfig) -> bool:
            needed = max(tree.nodes, tree.depth + 1 + tree.top_k * tree.depth)
            return needed <= MOST_NODES and not tree.least_reach and not tree.least_probability

        return self.failed is None and length <= self.max_length and all(tree is None or fits(tree) for tree in trees)

    def of(self, tree: TreeConfig | None, keep_logits: bool, length: int) -> StaticCycle:
        """The cycle for a text of this length."""
        key = (tree, keep_logits, bucket_of(length))
        if key not in self.cycles:
            self.cycles[key] = StaticCycle(self, tree, key[2], keep_logits, self.pool)
        return self.cycles[key]

    def fail(self, error: Exception) -> None:
        """Note that something cannot be captured: what follows runs without graphs."""
        self.failed = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.cycles.clear()
        log.warning("%s runs without CUDA graphs: %s", type(self.target.model).__name__, self.failed)

    @torch.inference_mode()
    def warm_up(self, trees: Sequence[TreeConfig | None]) -> bool:
        """Capture the cycles of these trees for all lengths, with a progress bar; says what memory they take.

        Returns:
            Whether they could be captured, and give what the functions give.
        """
        buckets = sorted({bucket_of(length) for length in range(1, self.max_length + 1, LEAST // 2)}
                         | {bucket_of(self.max_length)})
        device, before = self.target.device, _reserved(self.target.device)
        work = [(tree, bucket) for bucket in reversed(buckets) for tree in trees]  # the largest takes the most memory
        try:
            for tree, bucket in tqdm(work, desc="capturing graphs", unit="graph", leave=False, disable=None):
                cycle = self.of(tree, False, bucket)
                if tree is None:
                    cycle.begin(0, bucket // 2)
                else:
                    cycle.draft(cycle.features[0], cycle.tokens[0], bucket // 2, bucket // 2)
                wanted = cycle.verifying.function()[0].clone()
                difference = ((cycle.verify()[0] - wanted).float().norm() / wanted.float().norm()).item()
                if not difference <= PARITY:
                    raise ValueError(f"features of a graph differ by {difference:.1g} of their size")
        except Exception as error:  # whatever cannot be captured ends in
            self.fail(error)
            return False
        finally:
            self.reset()
        held = sum(cache.nbytes for cache in (self.cache, self.draft_cache) if cache is not None)
        log.info("%d CUDA graphs take %.0f MB, the caches for %d tokens %.0f MB", 2 * len(self.cycles),
                 (_reserved(device) - before - held) / 1e6, self.max_length, held / 1e6)
        return True

    def reset(self) -> tuple[TreeCache, TreeCache | None]:
        """Both caches, empty."""
        for cache in (self.cache, self.draft_cache):
            if cache is not None:
                cache.commit([0], [[]])
        return self.cache, self.draft_cache


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
