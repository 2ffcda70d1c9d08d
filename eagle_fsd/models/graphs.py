"""CUDA graphs of the fused decoder: the forward of a tree is one replay (docs/performance.md, "On a GPU").

A graph has fixed shapes and addresses, so the forward it holds reads the whole capacity of one cache under a mask, and
writes keys and values to places that a tensor names. All that changes from cycle to cycle is copied into its inputs.

B batch, N nodes, C capacity, K key heads, S head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import TreeCache
from .fused import FusedDecoder, attention_over
from .masks import additive, visible_keys
from .target import TargetModel

WARM_UP = 2  # forwards before the capture, in which libraries allocate what they need


class Places:
    """Stands for the places of a cache that a forward writes: one layer's storage and a tensor of places in it."""

    def __init__(self, storage: Tensor, places: Tensor) -> None:  # [2, B, K, C, S], [N]
        self.storage, self.places = storage, places

    def copy_(self, states: Tensor) -> None:  # [2, B, K, N, S]
        self.storage.index_copy_(3, self.places, states.to(self.storage.dtype))


class StaticForward:
    """The forward of trees of N nodes over one cache, from inputs of fixed addresses."""

    def __init__(
        self, fused: FusedDecoder, tokens: Tensor, cache: TreeCache, storage: Tensor, entering: tuple[int, ...]
    ) -> None:
        batch, count = tokens.shape
        self.fused, self.entering, self.like = fused, entering, fused.decoder.embed_tokens.weight
        self.tokens, self.positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
        self.mask = self.like.new_zeros(batch, 1, count, cache.capacity)
        self.places = torch.arange(count, device=tokens.device)
        self.storage = storage
        storage[..., cache.length :, :].zero_()  # what is hidden is read all the same, and must be finite
        self.graph: torch.cuda.CUDAGraph | None = None

    def set(self, tokens: Tensor, positions: Tensor, ancestors: Tensor, cache: TreeCache) -> None:
        """Copy a cycle's inputs to where the graph reads them."""
        start, count = cache.length, tokens.shape[1]
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        visible = visible_keys(ancestors, start, cache.visible(tokens.device))
        self.mask[..., : start + count] = additive(visible, self.mask.dtype)
        self.places.copy_(torch.arange(start, start + count, device=self.places.device))

    def run(self) -> Tensor:  # [B, N, F]
        fused, first = self.fused, self.fused.layers[0]
        seen = attention_over(self.mask, False, first.heads // first.key_heads)
        rotation = fused.rotary(self.positions, 0, self.tokens.shape[1], self.mask.shape[-1], self.like)
        held = [tuple(layer.unbind()) for layer in self.storage.unbind()]
        written = [Places(layer, self.places) for layer in self.storage.unbind()]
        return fused.compute(self.tokens, rotation, seen, written, held, self.entering)

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
    """In the place of `TargetModel.forward`: trees by graphs, one for each shape and cache; prompts as before.

    `target.forward = GraphedForward(target)`; without CUDA the same forward is computed without a graph.

    Raises:
        ValueError: a target that the fused decoder does not serve.
    """

    def __init__(self, target: TargetModel) -> None:
        if target.fused is None:
            raise ValueError(f"only the fused decoder is captured, and {target.stock_because}")
        self.target, self.eager = target, target.forward
        self.known: dict[tuple, StaticForward] = {}

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor | None, ancestors: Tensor | None, cache: TreeCache
    ) -> Tensor:
        if ancestors is None or positions is None:
            return self.eager(tokens, positions, ancestors, cache)
        fused = self.target.fused
        storage = cache.storage(fused.layers[0].key_heads, fused.layers[0].size, fused.decoder.embed_tokens.weight)
        key = *tokens.shape, self.target.layers, storage.data_ptr()
        if key not in self.known:
            if all(known[-1] != key[-1] for known in self.known):
                self.known.clear()  # graphs hold on to the memory of their cache
            self.known[key] = StaticForward(fused, tokens, cache, storage, self.target.layers)
        static = self.known[key]
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
