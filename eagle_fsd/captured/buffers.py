"""The tensors of fixed addresses that the programs of a cycle share, and what the host writes to them.

B rows, N tree nodes, W nodes that copies compete with, P steps of a path, T positions that the drafter has not
processed, K nodes of a level, F width of the target's features, C capacity of a cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafting.config import MOST_NODES, TreeConfig
from ..drafting.drafter import Drafter
from ..drafting.tree import DraftTree
from ..models.target import TargetModel

COLUMNS = 9  # of a table: `walk.emitted`'s five integers and four numbers, all as float64
BUCKET = 512  # slots of the smallest bucket; each further one is twice as large as the one before
ALIGNED = 64  # a last bucket that is a multiple of it needs no padded mask


class Buffers:
    """Tensors of B rows that share a tree. All are on the device of trees, logits and features.

    What the host knows of them:
                        set by                  valid
        owners, known   load, end of a cycle    for these requests and lengths of caches, see `holds`
        known_weights   load                    for these rules
        fed             load, launch of a walk  columns of `fed_tokens` that the next draft reads
        drafted         launch of a draft       for the next cycle, with these settings
        launched        end of a plain cycle    the table of the next one, which runs already

    Args:
        drafter: None: there is neither a drafter nor a tree, and decoding is plain.
        storages: [layers, 2, B, H, C, D] of the target's cache, and of the drafter's.
        copying: whether copies may join the trees.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None, storages: Sequence[Tensor], tree: TreeConfig | None,
        copying: bool,
    ) -> None:
        storage = self.storage = storages[0]
        self.draft_storage = storages[-1]
        self.device, self.rows, self.config = storage.device, storage.shape[2], tree
        self.key = self.rows, tree, copying
        self.most = 1 if tree is None else tree.total_tokens  # N, at most
        self.wide = min(max(tree.total_tokens, MOST_NODES), tree.scored_nodes + 1) if copying else 0  # W
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
        self.tree, self.wide_tree = self._tree(self.most), self._tree(self.wide)
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
