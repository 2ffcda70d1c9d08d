"""The forward of a causal LM over a tree cache: tokens to features, by its stock decoder or by the fused one.

B batch, N tokens of a forward, L prefix length, F width of the features.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .cache import TreeCache, cache_name
from .fused import FusedDecoder, Unsupported
from .hooks import recorded_inputs, structure_of
from .linear import dtype_of
from .masks import MaskedLayers, causal_ancestors


class Forward:
    """Tokens to features by a model as it was when this was made: by its stock decoder, or by `FusedDecoder`.

    It never changes. A model that has changed gets another one, and threads may still compute with this one.

    Args:
        structure: of the model, by `read_structure`.
        stock_reason: why the stock decoder computes; None: `FusedDecoder` does.
        batch_invariant: see `FusedDecoder`.

    Raises:
        Unsupported: `FusedDecoder` was asked for and does not support the model.
        ValueError: the decoder has no list of layers.
    """

    def __init__(
        self, model: PreTrainedModel, structure: tuple, stock_reason: str | None, *, batch_invariant: bool = False
    ) -> None:
        self.model, self.structure, self.stock_reason = model, structure, stock_reason
        self.config = config = text_config(model)
        decoder = model.get_decoder()
        self.decoder: nn.Module = getattr(model, "model", decoder) if decoder is model else decoder  # Llama-4: itself
        self.layers = find_layers(self.decoder, config, type(model).__name__)
        self.masked_layers = MaskedLayers.of(config)
        self.fused: FusedDecoder | None = None
        if stock_reason is None:
            if set(self.masked_layers.kinds) != {"full_attention"} or counts_positions(config):
                raise Unsupported("it has layers without full attention, or positions of a special type")
            self.fused = FusedDecoder(self.decoder, self.layers, config, batch_invariant=batch_invariant)

    def __getstate__(self) -> dict:
        return vars(self) | {"structure": ()}  # a copy or a pickle has another model

    def __call__(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: the next ones in the cache
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache,  # the keys and values of the tokens are appended
        feature_layers: Sequence[int],  # their inputs precede the last hidden state; n: the last layer's output
    ) -> Tensor:  # [B, N, F]
        if self.fused is not None:
            return self.fused(tokens, positions, ancestors, cache, feature_layers)
        start = cache.start
        if ancestors is None and isinstance(start, Tensor):
            ancestors = causal_ancestors(tokens)
        masks = {} if ancestors is None else self.masked_layers.forward_options(
            self.config._attn_implementation, ancestors, start, cache.end(tokens.shape[1]), computed_dtype(self.model))
        return self.stock(tokens, feature_layers, position_ids=positions, use_cache=True,
                          **{cache_name(type(self.decoder)): cache}, **masks)

    def stock(
        self,
        tokens: Tensor,  # [B, N]
        feature_layers: Sequence[int],
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder."""
        if not feature_layers:
            return self.decoder(input_ids=tokens, **options).last_hidden_state
        layers = self.layers
        modules = [layers[number] if number < len(layers) else find_norm(self.decoder, layers)
                   for number in sorted(feature_layers)]
        with recorded_inputs(modules) as states:
            last = self.decoder(input_ids=tokens, **options).last_hidden_state
        return torch.cat([*(states[module].to(last.device) for module in modules), last], -1)


def read_structure(model: PreTrainedModel) -> tuple:
    """The attention, the size of the vocabulary, and `structure_of` the model, whose modules it does not keep alive."""
    return text_config(model)._attn_implementation, vocab_size_of(model), *(
        weakref.ref(part) if isinstance(part, nn.Module) else part for part in structure_of(model))


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the language model."""
    return model.config.get_text_config(decoder=True)


def counts_positions(config: PreTrainedConfig) -> bool:
    """Whether the model counts positions from the length of the cache, as if the tree were a chain: Llama-4 scales
    queries by them."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def vocab_size_of(model: PreTrainedModel) -> int:
    """V."""
    lm_head = model.get_output_embeddings()
    out_features = getattr(lm_head, "out_features", None)  # a quantised weight can have another shape
    return out_features or lm_head.weight.shape[0]


def computed_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of hidden states."""
    dtype = dtype_of(model.get_output_embeddings())
    return dtype if dtype.is_floating_point else model.dtype


def find_layers(decoder: nn.Module, config: PreTrainedConfig, name: str) -> nn.ModuleList:
    """The decoder's list of layers, whatever its name."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ValueError(f"{name} is not supported: its decoder has no list of layers to place a cache for")


def find_norm(decoder: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The decoder's norm of the last layer's output, whatever its name: the first one after its layers, or before."""
    parts = list(decoder.children())
    place = parts.index(layers)
    for module in parts[place:] + parts[:place][::-1]:
        if "norm" in type(module).__name__.lower():
            return module
    raise ValueError(f"{type(decoder).__name__} has no norm after its layers, whose input a head could read")
