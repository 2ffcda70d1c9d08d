"""Preallocated key/value caches of ragged sequences; a gather keeps the accepted positions.

All contact with the cache classes of `transformers` is in this file.
B sequences, H key/value heads, C capacity, D head size, N positions appended for a tree.

Slot j of a row stores position j of its sequence. A forward appends the keys of a row right after that row's own. It
reads all slots up to the end of the longest row; slots after a row's end are stale, and a mask must hide them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin


@lru_cache
def cache_name(kind: type[nn.Module]) -> str:
    """The name of a stock module's cache argument, which transformers 5.24 has changed."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


class TreeCacheLayer(CacheLayerMixin):
    """One layer: a view of the cache's storage that grows with every update."""

    is_sliding = False  # the cache keeps every position; the mask applies a sliding window

    def __init__(self, cache: TreeCache, device: torch.device) -> None:
        super().__init__()
        self.cache: TreeCache = weakref.proxy(cache)  # so that the storage is freed with the last use of the cache
        self.layer_device = device
        self.appended = 0  # positions of each row that forwards have appended since the last commit

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.allocate(self.layer_device, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, N, D]; return those of all slots up to the longest row's end, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.start, key_states.shape[-2]
        self.appended += count
        end, held = self.end, []
        for mine, states in ((self.keys, key_states), (self.values, value_states)):
            mine = mine[self.cache.rows]
            if isinstance(start, int):
                mine[:, :, start:end] = states
            else:
                row, slots = rows_and_slots(start, count)
                mine[row, :, slots] = states.transpose(1, 2)
            held.append(mine[:, :, :end])
        return tuple(held)

    @property
    def start(self) -> int | Tensor:
        """The slot of the next position: of all rows, or [B] long if they differ."""
        committed = self.cache.committed
        if len(set(committed)) == 1:
            return committed[0] + self.appended
        return torch.tensor(committed, device=self.layer_device) + self.appended

    @property
    def end(self) -> int:
        """The end of the longest row."""
        end, capacity = max(self.cache.committed, default=0) + self.appended, self.cache.capacity
        assert end <= capacity, f"{end} positions exceed the capacity of {capacity}"
        return end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end + query_length, 0

    def get_seq_length(self) -> int | Tensor:
        return self.end + self.cache.position_offset

    def get_max_length(self) -> int:
        return self.cache.capacity


class TreeCache(Cache):
    """A cache of fixed capacity for a model with one layer on each of `devices`.

    The layers of a device share one storage tensor, so that a commit is one gather and one copy per device.

    Args:
        capacity: positions per sequence.
    """

    def __init__(self, devices: list[torch.device], capacity: int, batch: int = 1) -> None:
        super().__init__(layers=[TreeCacheLayer(self, device) for device in devices])
        self.capacity, self.batch = capacity, batch
        self.rows = slice(0, batch)  # that a forward reads and writes
        # For models that take positions from the cache: the nodes' positions [N] minus their slots.
        self.position_offset: Tensor | int = 0
        self.committed = [0] * batch  # of the rows at the last commit
        self.allocated: list[Tensor] = []  # the storage so far: [layers, 2, B, H, C, D], or 1 in place of 2
        self.spare: Tensor | None = None  # storage of a cache of this size that is no longer used, to be used again
        self._free: dict[tuple, list[Tensor]] = {}  # unassigned [2, B, H, C, D], by device and shape

    def allocate(self, device: torch.device, key_states: Tensor, value_states: Tensor) -> Tensor | list[Tensor]:
        """Storage for one more layer of these key and value shapes: two [B, H, C, D]."""
        if value_states.shape != key_states.shape:  # latent attention (DeepSeek)
            return [self._storage(states, 1, 1)[0, 0] for states in (key_states, value_states)]
        free = self._free.setdefault((device, *key_states.shape[1::2], key_states.dtype), [])
        if not free:  # usually all layers of a device are alike; others are allocated one by one
            first = all(storage.device != key_states.device for storage in self.allocated)
            layers = [layer.layer_device for layer in self.layers].count(device) if first else 1
            free.extend(self._storage(key_states, layers, 2))
        return free.pop(0)

    def append(
        self, count: int, heads: int, size: int, like: Tensor
    ) -> tuple[Sequence[Tensor | Slots], Sequence[tuple[Tensor, Tensor]]]:
        """Extend all layers by `count` positions of each row; see `storage`.

        Returns:
            For each layer the new positions, to be written by `copy_` [2, B, H, count, D], and the keys and values of
            all slots up to the longest row's end, [B, H, slots, D] each.
        """
        storage, start = self.storage(heads, size, like)[:, :, self.rows], self.start
        for layer in self.layers:
            layer.appended += count
        end = self.length
        places = storage[..., start:end, :] if isinstance(start, int) else [
            Slots(layer, *rows_and_slots(start, count)) for layer in storage.unbind()]
        return places, [tuple(layer.unbind()) for layer in storage[..., :end, :].unbind()]

    def storage(self, heads: int, size: int, like: Tensor) -> Tensor:
        """[layers, 2, B, H, C, D]: keys and values of all layers, which are alike and on one device, of the dtype and
        device of `like`."""
        if not self.layers[0].is_initialized:
            shape = like.new_empty(0, heads, 0, size)
            for layer in self.layers:
                layer.lazy_initialization(shape, shape)
        return self.allocated[0]

    def _storage(self, states: Tensor, layers: int, tensors: int) -> Tensor:
        shape = layers, tensors, self.batch, states.shape[1], self.capacity, states.shape[3]
        if (spare := self.spare) is not None and (*spare.shape, spare.dtype) == (*shape, states.dtype):
            self.spare, storage = None, spare.zero_()
        else:
            new = states.new_zeros if self.batch > 1 else states.new_empty  # a stale slot must not contain NaN
            storage = new(shape)
        self.allocated.append(storage)
        return storage

    @property
    def start(self) -> int | Tensor:
        """See `TreeCacheLayer.start`."""
        return self.layers[0].start

    @property
    def length(self) -> int:
        """The end of the longest row."""
        return self.layers[0].end

    def end(self, count: int) -> int:
        """The number of slots that a forward of `count` tokens reads."""
        return self.length + count

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(storage.nbytes for storage in self.allocated)

    @property
    def lengths(self) -> list[int]:
        """The number of positions of each row, appended ones included."""
        return [length + self.layers[0].appended for length in self.committed]

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self.committed = list(lengths)
        for layer in self.layers:
            layer.appended = 0

    def one_row(self, row: int) -> AbstractContextManager[None]:
        return self.only(slice(row, row + 1))

    @contextmanager
    def only(self, rows: slice) -> Iterator[None]:
        """Restrict the cache to some sequences within the context. After an error they are as long as before."""
        lengths, batch = self.lengths, self.rows
        self.rows = slice(batch.start + rows.start, batch.start + rows.stop)
        self.lengths = lengths[rows]
        try:
            yield
            lengths[rows] = self.lengths
        finally:
            self.rows, self.lengths = batch, lengths

    def commit(
        self,
        lengths: Sequence[int],  # of the rows before the last forwards
        kept: Sequence[Sequence[int]],  # of the positions appended since, which each row keeps: ascending, 0 the first
    ) -> None:
        """Keep the first `lengths[b]` positions of each row, followed by the appended ones `kept[b]`; drop the rest."""
        texts = enumerate(zip(lengths, kept, strict=True), self.rows.start)
        moves = [(row, length + source, length + target) for row, (length, places) in texts
                 for target, source in enumerate(places) if source != target]
        if moves:
            chosen = torch.tensor(moves)
            moved = {place: chosen.to(place, non_blocking=True).unbind(1)
                     for place in {storage.device for storage in self.allocated}}
            for storage in self.allocated:
                row, source, target = moved[storage.device]
                slots = storage.transpose(-3, -2)  # [..., B, C, H, D]
                slots[..., row, target, :, :] = slots[..., row, source, :, :]
        self.lengths = [length + len(places) for length, places in zip(lengths, kept, strict=True)]

    def truncate(self, length: int) -> None:
        """Drop all positions from `length` on."""
        self.lengths = [min(own, length) for own in self.lengths]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this ascending order, and drop the others."""
        lengths = [self.lengths[row] for row in rows]
        for storage in self.allocated:
            for target, source in enumerate(rows):
                if target != source:
                    states = storage[..., source, :, : lengths[target], :]
                    storage[..., target, :, : lengths[target], :] = states
        self.rows, self.lengths = slice(0, len(rows)), lengths

    def resized(self, capacity: int, batch: int, rows: Sequence[int] | None = None) -> TreeCache:
        """A new cache of this size with the same sequences, or with some of them."""
        other = TreeCache([layer.layer_device for layer in self.layers], capacity, batch)
        other.keep_rows([])
        for row in range(len(self.lengths)) if rows is None else rows:
            other.add_row(self, row)
        return other

    def add_row(self, source: TreeCache, row: int) -> None:
        """Append a sequence of another cache after the others."""
        lengths = self.lengths
        assert len(lengths) < self.batch, f"this cache has room for {self.batch} sequences only"
        self.rows, self.lengths = slice(0, len(lengths) + 1), [*lengths, 0]
        self.copy_row(len(lengths), source, row, source.lengths[row])

    def copy_row(self, number: int, source: TreeCache, row: int, length: int) -> None:
        """Replace a sequence by the first `length` positions of a sequence of another cache."""
        assert length <= self.capacity, f"{length} positions exceed the capacity of {self.capacity}"
        self.allocate_like(source)
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            if theirs.is_initialized:
                mine.keys[number, :, :length] = theirs.keys[row, :, :length]
                mine.values[number, :, :length] = theirs.values[row, :, :length]
        lengths = self.lengths
        lengths[number] = length
        self.lengths = lengths

    def allocate_like(self, source: TreeCache) -> None:
        """Allocate the layers that another cache has allocated."""
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            if theirs.is_initialized and not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)

    def erase_row(self, row: int) -> None:
        """Set a sequence's keys and values to zero: a NaN would spread to the next sequence in this row."""
        for storage in self.allocated:
            storage[..., row, :, :, :] = 0


def rows_and_slots(start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices [B, 1] of the rows, and [B, count] of the slots from each row's start [B] on."""
    rows = torch.arange(len(start), device=start.device)[:, None]
    return rows, start[:, None] + torch.arange(count, device=start.device)


@dataclass(eq=False)
class Slots:
    """The slots of one layer's storage that a forward writes, by index, in place of a view of them."""

    storage: Tensor  # [2, B, H, C, D]
    rows: Tensor  # [B, 1] long, 0 to B - 1
    slots: Tensor  # [B, N] long, distinct in each row

    def copy_(self, states: Tensor) -> None:  # [2, B, H, N, D]
        self.storage[:, self.rows, :, self.slots] = states.permute(1, 3, 0, 2, 4).to(self.storage.dtype)


class BucketCache:
    """The storage of a `TreeCache` for forwards of fixed shapes: the lengths are a tensor, and a forward reads a fixed
    number of slots, the bucket.

    Args:
        start: [B] long, the slot of each row's next position. bucket: above all slots.
    """

    def __init__(self, storage: Tensor, start: Tensor, bucket: int) -> None:  # [layers, 2, B, H, C, D]
        self.storage, self.lengths = storage, start
        self.length = bucket  # at least that of the longest row, as the host does not know it
        self.capacity = storage.shape[-2]

    @property
    def start(self) -> Tensor:
        return self.lengths

    def end(self, count: int) -> int:
        return self.length

    def append(
        self, count: int, heads: int, size: int, like: Tensor
    ) -> tuple[Sequence[Slots], Sequence[tuple[Tensor, Tensor]]]:
        """As `TreeCache.append`, with the keys and values of the bucket."""
        rows, slots = rows_and_slots(self.lengths, count)
        self.lengths = self.lengths + count
        return ([Slots(layer, rows, slots) for layer in self.storage.unbind()],
                [tuple(layer.unbind()) for layer in self.storage[..., : self.length, :].unbind()])
