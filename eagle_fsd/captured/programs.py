"""The programs of a cycle: functions of fixed shapes, from `Buffers` to buffers, tensors of fixed addresses. None waits
for the device.

A cycle is draft, verify, walk and keep; after the draft, copies may join the trees. A draft may run again with the same
result: what it reads changes when the walk keeps a path.

B rows, N tree nodes, W nodes that copies compete with, P steps of a path, T positions that the drafter has not
processed, K nodes of a level, M slots of a bucket or copies of a row, C capacity of a cache, V vocabulary of the
target, D size of the drafter's states, F width of the target's features.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import Rule
from ..acceptance.walk import Within, descend, emitted
from ..decoding.cycle import VerifiedTrees
from ..drafting.config import TreeConfig
from ..drafting.drafter import Drafter
from ..drafting.noise import Coupling
from ..drafting.sizing import Plan
from ..drafting.tree import DraftTree, Unread, candidates_of, grow, rerank
from ..models.cache import BucketCache
from ..models.target import TargetModel

COLUMNS = 9  # of a table: `walk.emitted`'s five integers and four numbers, all as float64
BUCKET = 512  # slots of the smallest bucket; each further one is twice as large as the one before
ALIGNED = 64  # a last bucket that is a multiple of it needs no padded mask


class Buffers:
    """Tensors of B rows that share a tree. All are on the device of trees, logits and features.

    What the host knows of them:
                             set by                  valid
        owners, known        load, end of a cycle    for these requests and lengths of caches, see `holds`
        known_noise_weights  load                    for these rules
        fed                  load, launch of a walk  columns of `fed_tokens` that the next draft reads
        drafted              launch of a draft       for the next cycle, with these settings
        launched             end of a plain cycle    the table of the next one, which runs already

    Args:
        drafter: None: there is neither a drafter nor a tree, and decoding is plain.
        storages: [layers, 2, B, H, C, D] of the target's cache, and of the drafter's.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, storages: Sequence[Tensor], tree: TreeConfig | None
    ) -> None:
        storage = self.storage = storages[0]
        self.draft_storage = storages[-1]
        self.device, self.rows, self.config = storage.device, storage.shape[2], tree
        self.key = self.rows, tree
        self.most = 1 if tree is None else tree.total_tokens  # N, at most
        self.path = 1 if tree is None else tree.path + 1  # P without copies
        self.draft_tokens = None if drafter is None else drafter.draft_tokens  # programs must not allocate it again
        self.reads_features = drafter is not None and drafter.reads_features
        # Positions by which the drafter's cache is longer than the target's after a draft: it also holds the root.
        self.lead = int(drafter is not None and not drafter.reads_features)
        integers = self._new(torch.long)
        # Each row's text.
        self.lengths, self.draft_lengths = integers(), integers()  # positions in the target's and the drafter's cache
        self.counts = integers()  # T of each row
        self.fed_tokens = integers(self.most)  # [B, T]
        dtype = target.dtype
        # [B, T, F]; None: no drafter reads features.
        self.fed_features = self._new(dtype)(self.most, target.feature_size) if self.reads_features else None
        # Each row's request, see `Coupling` and `descend`.
        self.integers, self.numbers = integers(3), self._new(torch.float64)(2)
        self.seeds, self.opening, self.closing = self.integers.unbind(1)
        self.temperatures, self.threshold = self.numbers.unbind(1)
        self.noise_weights, self.left = self._new(torch.float32)(), self._new(torch.float64)()
        self.inside_marks, self.fuzzy = self._new(torch.bool)(), self._new(torch.bool)()
        # The cycle.
        self.tree, self.wide_tree = self._tree(self.most), self._tree(tree.wide if tree else 0)
        self.tree.ancestors[:, 0, 0] = True
        self.features = self._new(dtype)(self.most, target.feature_size)  # [B, N, F]
        self._draft_logits: list[Tensor] | None = None
        self._draft_vocabulary = 0 if drafter is None else drafter.draft_vocab_size
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by M
        self.origins = integers(self.most)  # of the nodes of joined trees, -1: a root
        self._tables: dict[int, Tensor] = {}  # by P
        # What the host knows of them, see above.
        self.owners: list[weakref.ref] = []  # the requests
        self.known: tuple = ()  # positions in both caches
        self.known_noise_weights: list[float] = []
        self.fed = self.path  # columns of `fed_tokens` in use
        self.drafted: object = None  # `Settings`
        self.launched: Download | None = None

    def _new(self, dtype: torch.dtype):
        return lambda *shape: torch.zeros(self.rows, *shape, dtype=dtype, device=self.device)

    def _tree(self, nodes: int) -> DraftTree:
        integers, flags = self._new(torch.long), self._new(torch.bool)
        return DraftTree(
            integers(nodes), integers(nodes), integers(nodes), flags(nodes, nodes), integers(nodes),
            self._new(torch.float32)(nodes), self.config.depth if self.config else 0, integers(nodes))

    def draft_logits(self) -> list[Tensor]:
        """The drafter's logits of each level, allocated when the first rule needs them."""
        if self._draft_logits is None:
            new = self._new(torch.float32)
            self._draft_logits = [new(self.config.top_k if level else 1, self._draft_vocabulary)
                                  for level in range(self.config.depth if self.config else 0)]
        return self._draft_logits

    def table(self, path: int) -> Tensor:
        """[B, P, 9]: the result of a walk."""
        if path not in self._tables:
            self._tables[path] = self._new(torch.float64)(path, COLUMNS)
        return self._tables[path]

    def copies(self, size: int) -> tuple[Tensor, Tensor]:
        """[B, 4, M] and [B, M], see `columns_of`."""
        if size not in self._copies:
            self._copies[size] = self._new(torch.long)(4, size), self._new(torch.float64)(size)
        return self._copies[size]

    def path_for(self, count: int) -> int:
        """The smallest P of a program for paths of this many steps, at most `most`."""
        sizes = sorted({self.path, *(1 << power for power in range(4, 12)), self.most})
        return next(size for size in sizes if self.path <= size <= self.most and size >= count)

    def bucket(self, needed: int) -> int | None:
        """The number of slots to read in the target's cache; None: the cache is too small."""
        return bucket_of(needed, self.storage.shape[-2])

    def draft_bucket(self, draft_lengths: Sequence[int]) -> int | None:
        """As `bucket`, of the drafter's cache, after rows with these numbers of positions."""
        return bucket_of(max(draft_lengths) + self.fed + self.config.room[1], self.draft_storage.shape[-2])

    def holds(self, requests: Sequence[object], lengths: list[int], draft_lengths: list[int]) -> bool:
        """Whether the buffers are those of these requests, with these numbers of positions in both caches."""
        return (self.known == (lengths, draft_lengths) and len(self.owners) == len(requests)
                and all(owner() is request for owner, request in zip(self.owners, requests, strict=True)))

    # Read by the host ---------------------------------------------------------------------------------------------

    def download(self, *buffers: Tensor) -> Download:
        """Start to copy buffers to the host."""
        values = [torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda, device="cpu")
                  for buffer in buffers]
        for value, buffer in zip(values, buffers, strict=True):
            value.copy_(buffer, non_blocking=True)
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record()
        return Download(values, event)

    # Written by the host ------------------------------------------------------------------------------------------

    def upload(self, buffer: Tensor, values: object) -> None:
        """Copy numbers to a buffer without waiting for the device."""
        host = torch.tensor(values, dtype=buffer.dtype)
        buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


class Download(NamedTuple):
    """Buffers on their way to the host; they are there after the event."""

    values: list[Tensor]  # in pinned memory
    event: torch.cuda.Event | None

    def wait(self) -> list[list]:
        if self.event is not None:
            self.event.synchronize()
        return [value.tolist() for value in self.values]


def store_tree(buffers: DraftTree, tree: DraftTree) -> None:
    """Copy trees into the first columns of buffers."""
    places = vars(first_nodes(buffers, tree.tokens.shape[1]))
    for name, part in vars(tree).items():
        if isinstance(part, Tensor):
            places[name].copy_(part)


def first_nodes(buffers: DraftTree, count: int) -> DraftTree:
    """Views of the first nodes."""
    return buffers.each(lambda part: part[:, :count, :count] if part is buffers.ancestors else part[:, :count])


def bucket_of(needed: int, capacity: int) -> int | None:
    """The smallest bucket with at least this many slots; the last one fills the cache. None: all are too small."""
    size = BUCKET
    while size < needed:
        size *= 2
    if size <= capacity:
        return size
    aligned = capacity // ALIGNED * ALIGNED
    return aligned if needed <= aligned else capacity if needed <= capacity else None


# The programs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the programs of a cycle depend on besides their shapes.

    Args:
        tree: None: decoding is plain. copying: whether copies may join trees.
        rule: its threshold is ignored, unless it is lossless. processors: kinds and numbers of the warpers.
        coupled: whether drafts are coupled to the target's draws.
        budgeted: whether a row has a budget. marked: whether the rule decides only in places: a row has marks between
            which it applies, or is exact.
    """

    tree: TreeConfig | None
    copying: bool
    rule: Rule
    greedy: bool
    processors: tuple
    coupled: bool
    budgeted: bool
    marked: bool

    @property
    def lossless(self) -> bool:
        """Whether the rule reads nothing of the draft."""
        return self.rule.is_lossless(self.greedy)


def draft(
    buffers: Buffers, target: TargetModel, drafter: Drafter, settings: Settings, warpers: LogitsProcessorList,
    bucket: int, unread: int,
) -> None:
    """The drafter reads the accepted tokens, of which there are at most `unread`, and grows and ranks the trees."""
    features = buffers.fed_features[:, :unread] if buffers.reads_features else None
    fed = Unread(buffers.fed_tokens[:, :unread], features, buffers.counts, buffers.draft_lengths + buffers.counts)
    cache = BucketCache(buffers.draft_storage, buffers.draft_lengths, bucket)
    coupling = None
    if settings.coupled:
        named = drafter.draft_vocab_size if buffers.draft_tokens is None else buffers.draft_tokens
        coupling = Coupling(buffers.seeds, buffers.lengths, buffers.temperatures.float(), buffers.noise_weights,
                            [warpers] * buffers.rows, named)
    plan = Plan(buffers.config)  # the whole tree: without prices
    scored, logits = grow(drafter, target, fed, cache, plan, coupling)
    store_tree(buffers.tree, rerank(scored, plan))
    if settings.copying:
        store_tree(buffers.wide_tree, rerank(scored, plan, wide=True))
    if not settings.lossless:
        for mine, level in zip(buffers.draft_logits(), logits, strict=True):
            mine.copy_(level)


def join_copies(buffers: Buffers, size: int, path: int) -> None:
    """Copies, at most `size` in a row, join the trees, whose paths have at most P = `path` steps."""
    tree = candidates_of(buffers.wide_tree, *buffers.copies(size), path - 1).best(buffers.most, path - 1)
    store_tree(buffers.tree, tree)
    buffers.origins.copy_(tree.origins.masked_fill(tree.depths == 0, -1))


def verify(buffers: Buffers, target: TargetModel, bucket: int, nodes: int) -> None:
    """The target's features of the trees; keys and values go to the slots after each row's text."""
    tree = first_nodes(buffers.tree, nodes)
    cache = BucketCache(buffers.storage, buffers.lengths, bucket)
    features = target.verify(tree.tokens, tree.depths + buffers.lengths[:, None], tree.ancestors, cache)
    buffers.features[:, :nodes].copy_(features)


def walk_and_keep(
    buffers: Buffers, target: TargetModel, settings: Settings, processors: LogitsProcessorList, nodes: int, path: int,
    joined: bool,
) -> None:
    """Walk down the trees, keep the paths in the target's cache, and feed them to the drafter's next read. The table
    gets a line for each of the P = `path` steps.

    Args:
        joined: whether copies may be in the trees.
    """
    features, lengths = buffers.features[:, :nodes], buffers.lengths
    tree = replace(first_nodes(buffers.tree, nodes), max_depth=path - 1)
    if not joined:
        tree = replace(tree, origins=None)
    verified = VerifiedTrees(tree, target.logits(features), () if settings.lossless else buffers.draft_logits(),
                             buffers.draft_tokens, settings.greedy, buffers.seeds, lengths, processors)
    left, within, fuzzy = buffers.left if settings.budgeted else None, None, buffers.fuzzy
    if settings.marked:
        within = Within(buffers.inside_marks & fuzzy, buffers.opening.masked_fill(~fuzzy, -1), buffers.closing)
    walked = descend(settings.rule, verified, buffers.threshold, left, within, path)
    if settings.marked:
        walked = walked._replace(divergence=walked.divergence.masked_fill(~fuzzy[:, None], math.nan))
    integers, numbers, _ = emitted(walked, verified.raw)
    node, token, count = integers[..., 0], integers[..., 1], integers[..., 4].sum(1)

    # The first `count` slots of the path are kept; what is written after them is stale.
    ahead, rows = torch.arange(path, device=lengths.device), torch.arange(len(lengths), device=lengths.device)[:, None]
    kept = buffers.storage[:, :, rows, :, lengths[:, None] + node]  # [B, P, layers, 2, H, D]
    buffers.storage[:, :, rows, :, lengths[:, None] + ahead] = kept
    if buffers.config is None:
        buffers.tree.tokens.copy_(token)  # the next root
    else:
        buffers.fed_tokens[:, :path].copy_(token)
        buffers.draft_lengths.copy_(lengths + buffers.lead)
        buffers.counts.copy_(count)
    if buffers.reads_features:
        buffers.fed_features[:, :path].copy_(features.gather(1, node[..., None].expand(-1, -1, features.shape[-1])))
    lengths.add_(count)
    buffers.table(path).copy_(torch.cat([integers.double(), numbers], -1))
