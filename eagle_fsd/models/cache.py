"""Preallocated key/value caches of ragged sequences; a gather keeps the accepted positions.

All contact with the cache classes of `transformers` is in this file.
B sequences, H key/value heads, C capacity, D head size, N positions appended for a tree.

Slot j of a row stores position j of the sequence. A forward appends its keys to all rows from one slot on, the length
of the longest sequence. A shorter sequence has stale slots before them, which a mask must hide; `commit` moves what it
keeps to its own end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    is_compileable = False

    def __init__(self, cache: TreeCache, device: torch.device) -> None:
        super().__init__()
        self.cache = cache
        self.layer_device = device
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.allocate(self.layer_device, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, N, D]; return those of all positions, as views of the storage."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        assert end <= self.cache.capacity, f"{end} positions exceed the capacity of {self.cache.capacity}"
        rows = self.cache.rows
        self.keys[rows, :, start:end] = key_states
        self.values[rows, :, start:end] = value_states
        self.length = end
        return self.keys[rows, :, :end], self.values[rows, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int | Tensor:
        return self.length + self.cache.position_offset

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # the name in older minor versions


class TreeCache(Cache):
    """A cache of fixed capacity for a model with one layer on each of `devices`.

    The layers of a device share one storage tensor, so that a commit is one gather and one copy per device.

    Args:
        capacity: positions per sequence. batch: number of sequences.
        spare: storage of a cache of this size that is no longer used, to be used again.
    """

    def __init__(
        self, devices: list[torch.device], capacity: int, batch: int = 1, spare: Tensor | None = None
    ) -> None:
        super().__init__(layers=[TreeCacheLayer(self, device) for device in devices])
        self.capacity = capacity
        self.batch = batch
        self.rows = slice(0, batch)  # the rows that a forward reads and writes
        # For models that take positions from the cache: the nodes' positions [N] minus their slots.
        self.position_offset: Tensor | int = 0
        self._lengths: list[int] | None = None  # of the sequences; None: all are as long as the cache
        self._storages: list[tuple[torch.device, Tensor]] = []  # [layers, 2, B, H, C, D], or 1 in place of 2
        self._spare = spare
        self._free: dict[tuple, list[Tensor]] = {}  # unassigned [2, B, H, C, D], by device and shape

    def allocate(self, device: torch.device, key_states: Tensor, value_states: Tensor) -> Tensor | list[Tensor]:
        """Storage for one more layer of these key and value shapes: two [B, H, C, D]."""
        if value_states.shape != key_states.shape:  # latent attention (DeepSeek)
            return [self._storage(device, states, 1, 1)[0, 0] for states in (key_states, value_states)]
        free = self._free.setdefault((device, *key_states.shape[1::2], key_states.dtype), [])
        if not free:  # usually all layers of a device are alike; others are allocated one by one
            first = all(place != device for place, _ in self._storages)
            layers = [layer.layer_device for layer in self.layers].count(device) if first else 1
            free.extend(self._storage(device, key_states, layers, 2))
        return free.pop(0)

    def append(
        self, count: int, heads: int, size: int, like: Tensor
    ) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Extend all layers, which are alike and on one device, by `count` positions.

        Args:
            like: has the dtype and device of keys and values.

        Returns:
            Views of the storage: the new positions, to be written, [layers, 2, B, H, count, D], and for each layer the
            keys and values of all positions, [B, H, length + count, D].
        """
        start = self.length
        storage = self.storage(heads, size, like)[:, :, self.rows]
        end = self.advance(count)
        return storage[..., start:end, :], [tuple(layer.unbind()) for layer in storage[..., :end, :].unbind()]

    def storage(self, heads: int, size: int, like: Tensor) -> Tensor:
        """[layers, 2, B, H, C, D]: keys and values of all layers, which are alike and on one device."""
        if not self.layers[0].is_initialized:
            shape = like.new_empty(0, heads, 0, size)
            for layer in self.layers:
                layer.lazy_initialization(shape, shape)
        return self._storages[0][1]

    def advance(self, count: int) -> int:
        """Add `count` positions, which the caller writes, to the length; return the new length."""
        end = self.length + count
        assert end <= self.capacity, f"{end} positions exceed the capacity of {self.capacity}"
        for layer in self.layers:
            layer.length = end
        return end

    def _storage(self, device: torch.device, states: Tensor, layers: int, tensors: int) -> Tensor:
        shape = layers, tensors, self.batch, states.shape[1], self.capacity, states.shape[3]
        if (spare := self._spare) is not None and (*spare.shape, spare.dtype) == (*shape, states.dtype):
            self._spare, storage = None, spare.zero_()
        else:
            new = states.new_zeros if self.batch > 1 else states.new_empty  # a stale slot must not contain NaN
            storage = new(shape)
        self._storages.append((device, storage))
        return storage

    @property
    def allocated(self) -> list[Tensor]:
        """The storage, as far as it is allocated."""
        return [storage for _, storage in self._storages]

    @property
    def length(self) -> int:
        """The length of the longest sequence, at which the next forward's keys begin."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(storage.nbytes for _, storage in self._storages)

    @property
    def lengths(self) -> list[int]:
        """The number of positions of each sequence."""
        count = self.rows.stop - self.rows.start
        return [self.length] * count if self._lengths is None else list(self._lengths)

    def visible(self, device: torch.device) -> Tensor | None:
        """[B, length] bool: the slots with a position of their sequence; None: all of them."""
        if self._lengths is None:
            return None
        slots = torch.arange(self.length, device=device)
        return slots < torch.tensor(self._lengths, device=device)[:, None]

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        for layer in self.layers:
            layer.length = max(lengths, default=0)
        self._lengths = list(lengths) if len(set(lengths)) > 1 else None

    @contextmanager
    def one_row(self, row: int) -> Iterator[None]:
        """Restrict the cache to one sequence within the context, for a forward of that sequence alone."""
        lengths = self.lengths
        batch, self.rows, self._lengths = self.rows, slice(row, row + 1), None
        for layer in self.layers:
            layer.length = lengths[row]
        try:
            yield
        finally:
            lengths[row] = self.length
            self.rows = batch
            self._set_lengths(lengths)

    def commit(
        self,
        lengths: Sequence[int],  # of the sequences before the last forward
        kept: Sequence[Sequence[int]],  # slots of the forward that each sequence keeps, ascending, >= its length
    ) -> None:
        """Keep the first `lengths[b]` positions of each sequence, followed by the slots `kept[b]`; drop the rest."""
        moves = [(row, slot, length + count) for row, (length, slots) in enumerate(zip(lengths, kept, strict=True))
                 for count, slot in enumerate(slots) if slot != length + count]
        if moves:
            chosen = torch.tensor(moves)
            moved = {device: chosen.to(device, non_blocking=True).unbind(1) for device, _ in self._storages}
            for device, storage in self._storages:
                row, source, target = moved[device]
                slots = storage.transpose(-3, -2)  # [..., B, C, H, D]
                slots[..., row, target, :, :] = slots[..., row, source, :, :]
        self._set_lengths([length + len(slots) for length, slots in zip(lengths, kept, strict=True)])

    def truncate(self, length: int) -> None:
        """Drop all positions from `length` on."""
        self._set_lengths([min(own, length) for own in self.lengths])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this ascending order, and drop the others."""
        lengths = [self.lengths[row] for row in rows]
        for _, storage in self._storages:
            for target, source in enumerate(rows):
                if target != source:
                    states = storage[..., source, :, : lengths[target], :]
                    storage[..., target, :, : lengths[target], :] = states
        self.rows = slice(0, len(rows))
        self._set_lengths(lengths)

    def with_room(self, capacity: int) -> TreeCache:
        """This cache if its capacity suffices, else a copy at least twice as large."""
        return self if capacity <= self.capacity else self.resized(max(capacity, 2 * self.capacity), self.batch)

    def resized(self, capacity: int, batch: int) -> TreeCache:
        """A new cache of this size with the same sequences."""
        other = TreeCache([layer.layer_device for layer in self.layers], capacity, batch)
        other.rows = slice(0, 0)
        for row in range(len(self.lengths)):
            other.add_row(self, row)
        return other

    def add_row(self, source: TreeCache, row: int) -> None:
        """Append a sequence of another cache after the others."""
        lengths = self.lengths
        assert len(lengths) < self.batch, f"this cache has room for {self.batch} sequences only"
        self.rows = slice(0, len(lengths) + 1)
        self._set_lengths([*lengths, 0])
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
        self._set_lengths(lengths)

    def allocate_like(self, source: TreeCache) -> None:
        """Allocate the layers that another cache has allocated."""
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            if theirs.is_initialized and not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)

    def copy_of_row(self, row: int) -> TreeCache:
        """A copy of one sequence, whose capacity is its length."""
        other = TreeCache([layer.layer_device for layer in self.layers], max(1, self.lengths[row]))
        other.copy_row(0, self, row, self.lengths[row])
        return other

    def erase_row(self, row: int) -> None:
        """Set a sequence's keys and values to zero: a NaN would spread to the next sequence in this row."""
        for _, storage in self._storages:
            storage[..., row, :, :, :] = 0


class Slots:
    """The slots of one layer's storage that a forward writes, by index, in place of a view of them.

    Args:
        storage: [2, B, H, C, D]. rows: [B, 1] long, 0 to B - 1. slots: [B, N] long, distinct in each row.
    """

    def __init__(self, storage: Tensor, rows: Tensor, slots: Tensor) -> None:
        self.storage, self.rows, self.slots = storage, rows, slots

    def copy_(self, states: Tensor) -> None:  # [2, B, H, N, D]
        self.storage[:, self.rows, :, self.slots] = states.permute(1, 3, 0, 2, 4).to(self.storage.dtype)


class BucketCache:
    """The storage of a `TreeCache` for forwards of fixed shapes: lengths are tensors, and slot j of each row has its
    position j. A forward reads a bucket of slots, of which a mask hides the stale ones.

    Args:
        start: [B] long, the slot of each row's next position. bucket: above all slots.
    """

    def __init__(self, storage: Tensor, start: Tensor, bucket: int) -> None:  # [layers, 2, B, H, C, D]
        self.storage, self.start, self.bucket = storage, start, bucket
        self.capacity = storage.shape[-2]

    def append(
        self, count: int, heads: int, size: int, like: Tensor
    ) -> tuple[Sequence[Slots], Sequence[tuple[Tensor, Tensor]]]:
        """As `TreeCache.append`, with the keys and values of the bucket."""
        rows = torch.arange(len(self.start), device=self.start.device)[:, None]
        slots = self.start[:, None] + torch.arange(count, device=self.start.device)
        self.start = self.start + count
        return ([Slots(layer, rows, slots) for layer in self.storage.unbind()],
                [tuple(layer.unbind()) for layer in self.storage[..., : self.bucket, :].unbind()])
