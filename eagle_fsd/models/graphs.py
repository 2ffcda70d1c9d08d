"""CUDA graphs of the fused decoder: the forward of a tree is one replay (docs/performance.md, "On a GPU").

A graph has fixed shapes and addresses. Its forward reads the whole capacity of one cache under a mask, and writes keys
and values to the slots in an index tensor. Each cycle copies its values into the graph's inputs.

B batch, N nodes, C capacity, K key heads, S head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import TreeCache
from .fused import FusedDecoder, attention_over
from .masks import additive, visible_keys
from .target import TargetModel

WARM_UP = 2  # forwards before the capture, in which libraries allocate memory


class Slots:
    """The slots of one layer's storage that a forward writes, by index, in the place of a view of them."""

    def __init__(self, storage: Tensor, slots: Tensor) -> None:  # [2, B, K, C, S], [N]
        self.storage, self.slots = storage, slots

    def copy_(self, states: Tensor) -> None:  # [2, B, K, N, S]
        self.storage.index_copy_(3, self.slots, states.to(self.storage.dtype))


class StaticForward:
    """The forward of trees of N nodes over one cache, from inputs of fixed addresses."""

    def __init__(
        self, fused: FusedDecoder, tokens: Tensor, cache: TreeCache, storage: Tensor, feature_layers: tuple[int, ...]
    ) -> None:
        batch, count = tokens.shape
        self.fused, self.feature_layers, self.like = fused, feature_layers, fused.decoder.embed_tokens.weight
        self.tokens, self.positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
        self.mask = self.like.new_zeros(batch, 1, count, cache.capacity)
        self.slots = torch.arange(count, device=tokens.device)
        self.storage = storage
        storage[..., cache.length :, :].zero_()  # a graph reads masked slots too: they must be finite
        self.graph: torch.cuda.CUDAGraph | None = None

    def set(self, tokens: Tensor, positions: Tensor, ancestors: Tensor, cache: TreeCache) -> None:
        """Copy a cycle's inputs into the graph's input tensors."""
        start, count = cache.length, tokens.shape[1]
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        visible = visible_keys(ancestors, start, cache.visible(tokens.device))
        self.mask[..., : start + count] = additive(visible, self.mask.dtype)
        self.slots.copy_(torch.arange(start, start + count, device=self.slots.device))

    def run(self) -> Tensor:  # [B, N, F]
        fused, first = self.fused, self.fused.layers[0]
        attend = attention_over(self.mask, False, first.heads // first.key_heads)
        rotation = fused.rotary(self.positions, 0, self.tokens.shape[1], self.mask.shape[-1], self.like)
        cached = [tuple(layer.unbind()) for layer in self.storage.unbind()]
        new_states = [Slots(layer, self.slots) for layer in self.storage.unbind()]
        return fused.compute(self.tokens, rotation, attend, new_states, cached, self.feature_layers)

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.features = self.run()


class GraphedForward:
    """A replacement of `TargetModel.forward`: one graph per tree shape and cache; prompts run without graphs.

    Usage: `target.forward = GraphedForward(target)`. Without CUDA the same forward runs without a graph.

    Raises:
        ValueError: the target is not computed by the fused decoder.
    """

    def __init__(self, target: TargetModel) -> None:
        if target.fused is None:
            raise ValueError("CUDA graphs need the fused decoder, which does not compute this target: "
                             f"{target.stock_reason}")
        self.target, self.eager = target, target.forward
        self.forwards: dict[tuple, StaticForward] = {}

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor | None, ancestors: Tensor | None, cache: TreeCache
    ) -> Tensor:
        if ancestors is None or positions is None:
            return self.eager(tokens, positions, ancestors, cache)
        fused = self.target.fused
        storage = cache.storage(fused.layers[0].key_heads, fused.layers[0].size, fused.decoder.embed_tokens.weight)
        key = *tokens.shape, self.target.layers, storage.data_ptr()
        if key not in self.forwards:
            if all(other[-1] != key[-1] for other in self.forwards):
                self.forwards.clear()  # a graph keeps the memory of its cache
            self.forwards[key] = StaticForward(fused, tokens, cache, storage, self.target.layers)
        static = self.forwards[key]
        static.set(tokens, positions, ancestors, cache)
        if tokens.is_cuda and static.graph is None:
            static.capture()
        if static.graph is None:
            features = static.run()
        else:
            static.graph.replay()
            features = static.features.clone()
        cache.advance(tokens.shape[1])
        return features
