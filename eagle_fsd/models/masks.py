"""Tree attention masks: each node sees the committed prefix, its ancestors and itself.

B batch, L prefix length, N nodes (queries), M columns of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from . import SPLIT

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"


def kinds_of(config: PreTrainedConfig) -> set[str]:
    """The kinds of attention layers that a config names; GPT-Neo does so in another field. Most name none."""
    return set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or [])


@dataclass(frozen=True)
class MaskedLayers:
    """What a model's layers see of a text, as its config says it.

    Args:
        kinds: of each layer. by_type: whether the model takes one mask per kind (those with layer_types do) or one for
            all (Llama, Mistral, Mixtral).
        window: of the sliding layers. chunk: of the chunked layers.
    """

    kinds: Sequence[str]
    by_type: bool
    window: int | None
    chunk: int | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> MaskedLayers:
        kinds = kinds_of(config)
        window = getattr(config, "sliding_window", None) if not kinds or SLIDING in kinds else None
        by_type = bool(kinds - {"full_attention"})
        only = "full_attention" if window is None else SLIDING
        layers = config.layer_types if by_type else [only] * config.num_hidden_layers
        return cls(layers, by_type, window, config.attention_chunk_size if CHUNKED in kinds else None)

    def forward_options(
        self,
        implementation: str,
        ancestors: Tensor,  # [B, N, N] bool, or self
        prefix: int,  # L
        dtype: torch.dtype,
        prefix_visible: Tensor | None = None,  # [B, L] bool: the first keys of each row; None: all
    ) -> dict[str, object]:
        """Keywords of a forward whose tokens see their ancestors: additive masks [B, 1, N, M], by kind of layer or one.

        For "split" a mask has the columns of the tree alone, and rows of different lengths are told as `prefix_lengths`
        [B] int32. Layers whose reach ends within the text, and all other implementations, have a mask of all keys.
        """
        masks = {}
        for kind in dict.fromkeys(self.kinds):
            reach = {SLIDING: self.window, CHUNKED: self.chunk}.get(kind)
            narrow = reach is not None and prefix + ancestors.shape[1] > reach
            if implementation == SPLIT and not narrow:
                masks[kind] = additive(ancestors, dtype)
                continue
            visible = visible_keys(ancestors, prefix, prefix_visible)
            masks[kind] = additive(visible & in_reach(visible, kind, reach) if narrow else visible, dtype)
        options: dict[str, object] = {"attention_mask": masks if self.by_type else masks[self.kinds[0]]}
        if implementation == SPLIT and prefix_visible is not None:
            options["prefix_lengths"] = prefix_visible.sum(1, dtype=torch.int32)
        return options


def visible_keys(
    ancestors: Tensor,  # [B, N, N] bool, or self
    prefix: int,
    prefix_visible: Tensor | None = None,  # [B, L] bool; None: the whole prefix
) -> Tensor:  # [B, N, L + N] bool
    """Which keys each node sees: the prefix, its ancestors and itself."""
    before = ancestors.new_ones(1, 1, prefix) if prefix_visible is None else prefix_visible[:, None]
    return torch.cat([before.expand(*ancestors.shape[:2], -1), ancestors], -1)


def in_reach(
    visible: Tensor,  # [B, N, keys] bool, each token being the last that it sees
    kind: str,  # SLIDING or CHUNKED
    reach: int,  # of the window, or a chunk
) -> Tensor:  # [B, N, keys] bool
    """Which of the visible keys a layer of this kind sees. What a token sees is its text in order, so that a key's
    position is the number of visible ones before it."""
    positions = visible.cumsum(-1) - 1
    own = positions[..., -1:]
    return own - positions < reach if kind == SLIDING else own // reach == positions // reach


def additive(
    visible: Tensor,  # [B, N, keys] bool
    dtype: torch.dtype,
) -> Tensor:  # [B, 1, N, keys]
    """Attention mask to be added to scores: 0, or the lowest finite number.

    Additive rather than boolean: both stock kernels take it, and none has to convert it in every layer.
    """
    mask = torch.zeros_like(visible[:, None], dtype=dtype)
    return mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)
