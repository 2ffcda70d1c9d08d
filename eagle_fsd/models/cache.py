"""Preallocated key/value caches of ragged sequences, whose accepted positions are kept by gather.

All contact with the cache classes of `transformers` is in this file.
B sequences, H key/value heads, C capacity, D head size, N positions appended for a tree.

Position j of sequence b lies at place j of its row. A forward appends its keys for all rows at one place, the length of
the longest sequence; a shorter one has stale places before them, which a mask must hide, and gets what it keeps moved
to its own end.
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
    """The keyword by which a stock module takes its cache: another one since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


class TreeCacheLayer(CacheLayerMixin):
    """One layer: a window on the cache's storage that grows with every update."""

    is_sliding = False  # every position is kept; windows are a matter of the mask
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
        """Append [B, H, N, D] keys and values; returns those of all positions, views of the storage."""
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
        return self.length + self.cache.skew

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in older minor versions


class TreeCache(Cache):
    """A cache of fixed capacity for a model whose layers are placed on `devices` (one entry per layer).

    The layers of a device share one storage tensor, so that a commit is one gather and one copy per device.

    Args:
        capacity: positions of each sequence. batch: sequences.
    """

    def __init__(self, devices: list[torch.device], capacity: int, batch: int = 1) -> None:
        super().__init__(layers=[TreeCacheLayer(self, device) for device in devices])
        self.capacity = capacity
        self.batch = batch
        self.rows = slice(0, batch)  # those that a forward reads and writes
        # For models that take rows for positions: [N], by how much they differ in the forward of a tree.
        self.skew: Tensor | int = 0
        self._lengths: list[int] | None = None  # of the sequences; None: all are as long as the cache
        self._storages: list[tuple[torch.device, Tensor]] = []  # [layers, 2, B, H, C, D], or with one of the two
        self._free: dict[tuple, list[Tensor]] = {}  # [2, B, H, C, D] that no layer has yet, by device and shape

    def allocate(self, device: torch.device, key_states: Tensor, value_states: Tensor) -> Tensor | list[Tensor]:
        """Storage for one more layer of these key and value shapes: two [B, H, C, D]."""
        if value_states.shape != key_states.shape:  # latent attention (DeepSeek): nothing to share
            return [self._storage(device, states, 1, 1)[0, 0] for states in (key_states, value_states)]
        free = self._free.setdefault((device, *key_states.shape[1::2], key_states.dtype), [])
        if not free:  # nearly always all layers of a device are alike; what differs comes one by one
            first = all(place != device for place, _ in self._storages)
            layers = [layer.layer_device for layer in self.layers].count(device) if first else 1
            free.extend(self._storage(device, key_states, layers, 2))
        return free.pop(0)

    def append(
        self, count: int, heads: int, size: int, like: Tensor
    ) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Room for so many more positions in all layers at once, of alike heads and on one device.

        Args:
            like: of the dtype and device of keys and values.

        Returns:
            Where they are to be written, [layers, 2, B, H, count, D], and for each layer the keys and values of all
            positions, [B, H, length + count, D]; views of the storage.
        """
        start = self.length
        storage = self.storage(heads, size, like)
        end = self.advance(count)
        held = storage[..., :end, :]
        return storage[..., start:end, :], [tuple(layer.unbind()) for layer in held.unbind()]

    def storage(self, heads: int, size: int, like: Tensor) -> Tensor:
        """[layers, 2, B, H, C, D]: keys and values of all layers, which are alike and on one device."""
        if not self.layers[0].is_initialized:
            shape = like.new_empty(0, heads, 0, size)
            for layer in self.layers:
                layer.lazy_initialization(shape, shape)
        return self._storages[0][1][:, :, self.rows]

    def advance(self, count: int) -> int:
        """Count so many more positions as written; the new length."""
        end = self.length + count
        assert end <= self.capacity, f"{end} positions exceed the capacity of {self.capacity}"
        for layer in self.layers:
            layer.length = end
        return end

    def _storage(self, device: torch.device, states: Tensor, layers: int, each: int) -> Tensor:
        new = states.new_zeros if self.batch > 1 else states.new_empty  # stale places must hold no NaN
        storage = new(layers, each, self.batch, states.shape[1], self.capacity, states.shape[3])
        self._storages.append((device, storage))
        return storage

    @property
    def length(self) -> int:
        """Where the next forward's keys go: the length of the longest sequence."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(storage.nbytes for _, storage in self._storages)

    @property
    def lengths(self) -> list[int]:
        """Positions held of each sequence."""
        count = self.rows.stop - self.rows.start
        return [self.length] * count if self._lengths is None else list(self._lengths)

    def visible(self, device: torch.device) -> Tensor | None:
        """[B, length] bool: the places that hold a position of their sequence; None: all do."""
        if self._lengths is None:
            return None
        places = torch.arange(self.length, device=device)
        return places < torch.tensor(self._lengths, device=device)[:, None]

    def _settle(self, lengths: Sequence[int]) -> None:
        """Take note of what each sequence holds."""
        for layer in self.layers:
            layer.length = max(lengths, default=0)
        self._lengths = list(lengths) if len(set(lengths)) > 1 else None

    @contextmanager
    def one_row(self, row: int) -> Iterator[None]:
        """Within, the cache is that of one sequence, for a forward that goes on with it alone."""
        lengths = self.lengths
        batch, self.rows, self._lengths = self.rows, slice(row, row + 1), None
        for layer in self.layers:
            layer.length = lengths[row]
        try:
            yield
        finally:
            lengths[row] = self.length
            self.rows = batch
            self._settle(lengths)

    def commit(
        self,
        lengths: Sequence[int],  # of the sequences before the last forward
        kept: Sequence[Sequence[int]],  # places >= that, ascending, of what each keeps of the forward
    ) -> None:
        """Keep the first `lengths[b]` positions of each sequence followed by those at `kept[b]`; forget the rest."""
        moves = [(row, place, length + count) for row, (length, places) in enumerate(zip(lengths, kept, strict=True))
                 for count, place in enumerate(places) if place != length + count]
        if moves:
            chosen = torch.tensor(moves)
            moved = {device: chosen.to(device, non_blocking=True).unbind(1) for device, _ in self._storages}
            for device, storage in self._storages:
                row, source, target = moved[device]
                places = storage.transpose(-3, -2)  # [..., B, C, H, D]
                places[..., row, target, :, :] = places[..., row, source, :, :]
        self._settle([length + len(places) for length, places in zip(lengths, kept, strict=True)])

    def truncate(self, length: int) -> None:
        """Forget all places from `length` on."""
        self._settle([min(held, length) for held in self.lengths])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this ascending order, and forget the others."""
        lengths = [self.lengths[row] for row in rows]
        for _, storage in self._storages:
            for place, row in enumerate(rows):
                if place != row:
                    held = storage[..., row, :, : lengths[place], :]
                    storage[..., place, :, : lengths[place], :] = held
        self.rows = slice(0, len(rows))
        self._settle(lengths)

    def with_room(self, capacity: int) -> TreeCache:
        """This cache where it has such a capacity, else a new one, at least twice as large, that holds the same."""
        return self if capacity <= self.capacity else self.resized(max(capacity, 2 * self.capacity), self.batch)

    def resized(self, capacity: int, batch: int) -> TreeCache:
        """A new cache of this size that holds the same sequences."""
        other = TreeCache([layer.layer_device for layer in self.layers], capacity, batch)
        other.rows = slice(0, 0)
        for row in range(len(self.lengths)):
            other.add_row(self, row)
        return other

    def add_row(self, source: TreeCache, row: int) -> None:
        """One more sequence, after the others: one of another cache. `keep_rows` takes it away."""
        lengths = self.lengths
        assert len(lengths) < self.batch, f"{self.batch} sequences are all that this cache has room for"
        self.rows = slice(0, len(lengths) + 1)
        self._settle([*lengths, 0])
        self.copy_row(len(lengths), source, row, source.lengths[row])

    def copy_row(self, number: int, source: TreeCache, row: int, held: int) -> None:
        """Have a sequence be the first `held` positions of one of another cache."""
        assert held <= self.capacity, f"{held} positions exceed the capacity of {self.capacity}"
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            if theirs.is_initialized:
                if not mine.is_initialized:
                    mine.lazy_initialization(theirs.keys, theirs.values)
                mine.keys[number, :, :held] = theirs.keys[row, :, :held]
                mine.values[number, :, :held] = theirs.values[row, :, :held]
        lengths = self.lengths
        lengths[number] = held
        self._settle(lengths)

    def row_alone(self, row: int) -> TreeCache:
        """A copy of one sequence, without further room."""
        other = TreeCache([layer.layer_device for layer in self.layers], max(1, self.lengths[row]))
        other.copy_row(0, self, row, self.lengths[row])
        return other

    def erase_row(self, row: int) -> None:
        """Zeros in place of a sequence's keys and values: a NaN would reach whoever gets its place."""
        for _, storage in self._storages:
            storage[..., row, :, :, :] = 0
