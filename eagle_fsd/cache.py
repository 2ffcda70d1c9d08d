"""Preallocated key/value caches whose accepted rows are kept by gather.

All contact with the cache classes of `transformers` is in this file.
B batch, H key/value heads, C capacity, D head size, N rows appended for a tree, A rows kept of them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


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
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

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
    """

    def __init__(self, devices: list[torch.device], capacity: int) -> None:
        super().__init__(layers=[TreeCacheLayer(self, device) for device in devices])
        self.capacity = capacity
        # For models that take rows for positions: [N], by how much they differ in the forward of a tree.
        self.skew: Tensor | int = 0
        self._unallocated = Counter(devices)  # layers of each device that have no storage yet
        self._storages: dict[tuple, tuple[Tensor, int]] = {}  # storage [layers, 2, B, H, C, D] and layers handed out

    def allocate(self, device: torch.device, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Storage for one more layer of these key and value shapes: two [B, H, C, D]."""
        batch, heads, _, size = key_states.shape
        if value_states.shape != key_states.shape:  # latent attention (DeepSeek): nothing to share
            both = [states.new_empty(batch, states.shape[1], self.capacity, states.shape[3])
                    for states in (key_states, value_states)]
            self._storages |= {(device, len(self._storages) + i): (storage, 1) for i, storage in enumerate(both)}
            return both[0], both[1]
        key = (device, batch, heads, size, key_states.dtype)
        storage, used = self._storages.get(key, (None, 0))
        if storage is None or used == len(storage):
            # Nearly always all layers of a device are alike; others get what is left, one by one.
            count = self._unallocated[device] if not any(k[0] == device for k in self._storages) else 1
            storage, used = key_states.new_empty(count, 2, batch, heads, self.capacity, size), 0
            key = (*key, len(self._storages)) if key in self._storages else key
        self._unallocated[device] -= 1
        self._storages[key] = (storage, used + 1)
        return storage[used, 0], storage[used, 1]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(storage.nbytes for storage, _ in self._storages.values())

    def commit(
        self,
        length: int,
        rows: Tensor,  # [A] long, absolute positions >= length, ascending
    ) -> None:
        """Keep the first `length` positions followed by `rows`; everything else is forgotten."""
        count = len(rows)
        for storage, _ in self._storages.values():
            storage[..., length : length + count, :] = storage.index_select(-2, rows.to(storage.device))
        for layer in self.layers:
            layer.length = length + count

    def with_room(self, capacity: int) -> TreeCache:
        """This cache where it has such a capacity, else a new one, at least twice as large, that holds the same."""
        if capacity <= self.capacity:
            return self
        larger = TreeCache([layer.layer_device for layer in self.layers], max(capacity, 2 * self.capacity))
        for number, layer in enumerate(self.layers):
            if layer.is_initialized:
                held = slice(0, layer.length)
                larger.update(layer.keys[:, :, held], layer.values[:, :, held], number)
        return larger

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        for layer in self.layers:
            layer.length = length
