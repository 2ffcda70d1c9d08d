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


def attention_kinds(config: PreTrainedConfig) -> set[str]:
    """The attention types in a config, for most models none; GPT-Neo has them in a field of its own."""
    return set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or [])


@dataclass(frozen=True)
class MaskedLayers:
    """The attention types of a model's layers, from its config, and their masks."""

    kinds: Sequence[str]  # of each layer
    by_type: bool  # the model accepts one mask per type (models with layer_types), not one for all layers (Llama)
    window: int | None  # of the sliding layers, in tokens
    chunk: int | None  # of the chunked layers, in tokens

    @classmethod
    def of(cls, config: PreTrainedConfig) -> MaskedLayers:
        kinds = attention_kinds(config)
        window = getattr(config, "sliding_window", None) if not kinds or SLIDING in kinds else None
        by_type = bool(kinds - {"full_attention"})
        only = "full_attention" if window is None else SLIDING
        layers = config.layer_types if by_type else [only] * config.num_hidden_layers
        return cls(layers, by_type, window, config.attention_chunk_size if CHUNKED in kinds else None)

    def forward_options(
        self,
        implementation: str,
        ancestors: Tensor,  # [B, N, M] bool, see `visible_keys`
        start: int | Tensor,  # slot of the first new key, [B] if the rows differ
        keys: int,  # number of slots that the forward reads
        dtype: torch.dtype,
    ) -> dict[str, object]:
        """Keywords of a tree's forward: additive masks [B, 1, N, *], one per layer type or one for all.

        For "split", a mask has the columns of `ancestors` only, and `text_lengths` [B] are the keys before these.
        Layers whose reach ends within the text, and all other implementations, get a mask of all keys.
        """
        (batch, nodes, last), split = ancestors.shape, implementation == SPLIT

        def mask_of(kind: str) -> Tensor:
            reach = {SLIDING: self.window, CHUNKED: self.chunk}.get(kind)
            narrow = reach is not None and keys > reach
            visible = ancestors if split and not narrow else visible_keys(ancestors, start, keys)
            return additive(visible & in_reach(visible, kind, reach) if narrow else visible, dtype)

        mask = {kind: mask_of(kind) for kind in set(self.kinds)} if self.by_type else mask_of(self.kinds[0])
        zeros = ancestors.new_zeros(batch, dtype=torch.int32)
        return {"attention_mask": mask} | ({"text_lengths": (zeros + start + nodes - last).int()} if split else {})


def visible_keys(
    ancestors: Tensor,  # [B, N, M] bool: which of the last M keys it sees, the N new ones included
    start: int | Tensor,  # slot of the first new key, [B] if the rows differ
    keys: int,  # number of slots that the forward reads
) -> Tensor:  # [B, N, keys] bool
    """The keys that each node sees: those before the last M of its row, and its ancestors and itself among these.

    M = N for a whole tree in one forward; larger for a level of a tree, whose earlier levels are in the cache.
    """
    batch, nodes, last = ancestors.shape
    text = start + (nodes - last)
    if not isinstance(text, Tensor):
        return torch.cat([ancestors.new_ones(1, 1, 1).expand(batch, nodes, text), ancestors], -1)
    after = torch.arange(keys, device=text.device) - text[:, None]  # [B, keys]
    after = after[:, None].expand(-1, nodes, -1)
    return (after < 0) | (after < last) & ancestors.gather(2, after.clamp(0, last - 1))


def keys_in_window(
    ancestors: Tensor,  # [B, N, M] bool
    start: int | Tensor,  # slot of the first new key, [B] if the rows differ
    window: int,  # W; there are more than W + M keys
) -> Tensor:  # [B, N, W - 1 + M] bool
    """As `visible_keys`, of each row's last W - 1 + M keys: the others are outside of a sliding window of W."""
    batch, nodes, last = ancestors.shape
    before = ancestors.new_ones(1, window - 1)
    if isinstance(start, Tensor):  # a short row has fewer
        before = (start + nodes - last)[:, None] - torch.arange(window - 1, 0, -1, device=start.device) >= 0
    visible = torch.cat([before[:, None].expand(batch, nodes, -1), ancestors], -1)
    return visible & in_reach(visible, SLIDING, window)


def causal_ancestors(tokens: Tensor) -> Tensor:  # [B, N] -> [B, N, N] bool
    """`ancestors` of a text."""
    batch, count = tokens.shape
    return torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)


def in_reach(
    visible: Tensor,  # [B, N, keys] bool; a token's own key is its last visible one
    kind: str,  # SLIDING or CHUNKED
    reach: int,  # length of the window or chunk
) -> Tensor:  # [B, N, keys] bool
    """Which of the visible keys are within the window or chunk of each token. A token's visible keys are its text in
    order, so that a key's position is the number of visible keys before it."""
    positions = visible.cumsum(-1) - 1
    own = positions[..., -1:]
    return own - positions < reach if kind == SLIDING else own // reach == positions // reach


def additive(
    visible: Tensor,  # [B, N, keys] bool
    dtype: torch.dtype,
) -> Tensor:  # [B, 1, N, keys]
    """The mask to add to attention scores: 0 for visible keys, the lowest finite number for others. Both stock
    implementations accept it, and neither has to convert it in every layer."""
    mask = torch.zeros_like(visible[:, None], dtype=dtype)
    return mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)
