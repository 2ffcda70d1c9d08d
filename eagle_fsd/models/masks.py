"""Tree attention masks: each node sees the committed prefix, its ancestors and itself.

B batch, L prefix length, N nodes (queries), M columns of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .implementations import SPLIT


class Prefix(NamedTuple):
    """What the small masks of `tree_masks` do not say; reaches "split" as the keyword `tree_prefix` of the forward.

    Args:
        starts: by layer, the first key that any node sees.
        partial: by layer, how many keys from there on some nodes see and others do not: they have the mask's first
            columns. All nodes see what lies between them and the tree.
        bias: [B, 1, 1, L] additive, where a row does not see all of the prefix.
        lengths: [B] int32, at least 1, where what a row sees of the prefix is its beginning; says what `bias` says.
    """

    starts: Sequence[int]
    partial: Sequence[int]
    bias: Tensor | None = None
    lengths: Tensor | None = None


def tree_masks(
    implementation: str,
    ancestors: Tensor,  # [B, N, N] bool, or self
    positions: Tensor,  # [B, N], where key j of the prefix is at position j
    prefix: int,  # L
    dtype: torch.dtype,
    layers: Sequence[str],  # the kind of each layer: full_attention, sliding_attention or chunked_attention
    *,
    window: int | None = None,  # of the sliding layers
    chunk: int | None = None,  # of the chunked layers
    prefix_visible: Tensor | None = None,  # [B, L] bool; None: all of it
    lengths: Tensor | None = None,  # [B], where row b sees the first lengths[b] keys: what prefix_visible says, shorter
) -> tuple[dict[str, Tensor], Prefix | None]:
    """Additive masks [B, 1, N, M] by kind of layer, and what else the forward of a tree must be told.

    For "split" a mask has the columns of the tree, and before them those of the keys that only some nodes see; for all
    other implementations those of all keys.
    """
    if prefix_visible is None and lengths is not None:
        prefix_visible = torch.arange(prefix, device=positions.device) < lengths[:, None]
    masks, spans = {}, {}
    for kind in dict.fromkeys(layers):
        reach = {"sliding_attention": window, "chunked_attention": chunk}.get(kind)
        narrow = reach is not None and prefix + ancestors.shape[1] > reach
        if implementation != SPLIT or (narrow and prefix_visible is not None):
            start, partial = 0, prefix
        else:
            start, partial = _span(kind, reach, prefix, ancestors.shape[1]) if narrow else (0, 0)
        mask = tree_mask(ancestors, partial, dtype, prefix_visible if partial else None)
        if narrow:
            keys = torch.arange(start, start + partial, device=positions.device).expand(len(positions), -1)
            narrowed = apply_window if kind == "sliding_attention" else apply_chunks
            mask = narrowed(mask, positions, torch.cat([keys, positions], 1), reach)
        masks[kind], spans[kind] = mask, (start, partial)
    if implementation != SPLIT or (prefix_visible is None and not any(map(any, spans.values()))):
        return masks, None
    starts, partials = zip(*(spans[kind] for kind in layers), strict=True)
    bias = None
    if prefix_visible is not None:  # CUDA kernels want rows of a multiple of 16 bytes
        bias = torch.zeros(len(positions), 1, 1, -(-prefix // 8) * 8, dtype=dtype, device=positions.device)
        bias = bias[..., :prefix].masked_fill_(~prefix_visible[:, None, None], torch.finfo(dtype).min)
    return masks, Prefix(starts, partials, bias, None if lengths is None else lengths.to(torch.int32))


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
        window = getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
        by_type = bool(kinds - {"full_attention"})
        only = "full_attention" if window is None else "sliding_attention"
        layers = config.layer_types if by_type else [only] * config.num_hidden_layers
        return cls(layers, by_type, window, config.attention_chunk_size if "chunked_attention" in kinds else None)

    def forward_options(
        self, implementation: str, ancestors: Tensor, positions: Tensor, prefix: int, dtype: torch.dtype,
        prefix_visible: Tensor | None,
    ) -> dict[str, object]:
        """Keywords of a forward whose tokens see their ancestors; the arguments are those of `tree_masks`."""
        masks, kept = tree_masks(
            implementation, ancestors, positions, prefix, dtype, self.kinds, window=self.window, chunk=self.chunk,
            prefix_visible=prefix_visible, lengths=None if prefix_visible is None else prefix_visible.sum(1),
        )
        seen: dict[str, object] = {"attention_mask": masks if self.by_type else masks[self.kinds[0]]}
        return seen if kept is None else seen | {"tree_prefix": kept}


def _span(kind: str, reach: int, prefix: int, nodes: int) -> tuple[int, int]:
    """The first key that any node sees, and how many from there on not all see; nodes are at most N - 1 deep."""
    if kind == "sliding_attention":
        start = max(0, prefix - reach + 1)
        return start, min(prefix, prefix + nodes - reach) - start
    start = prefix // reach * reach
    return start, 0 if (prefix + nodes - 1) // reach == prefix // reach else prefix - start


def tree_mask(
    visible: Tensor,  # [B, N, M] bool, over the last M keys: ancestors or self
    prefix: int,
    dtype: torch.dtype,
    prefix_visible: Tensor | None = None,  # [B, L] bool; None: the whole prefix
) -> Tensor:  # [B, 1, N, L + M]
    """Additive attention mask (0 or the lowest finite number): the prefix plus the visible nodes.

    Additive rather than boolean: both stock kernels take it, and none has to convert it in every layer.
    """
    batch, nodes, keys = visible.shape
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(batch, 1, nodes, prefix + keys, dtype=dtype, device=visible.device)
    if prefix_visible is not None:
        mask[..., :prefix].masked_fill_(~prefix_visible[:, None, None], lowest)
    mask[..., prefix:].masked_fill_(~visible[:, None], lowest)
    return mask


def apply_window(
    mask: Tensor,  # [B, 1, N, L + M], as of `tree_mask`
    query_positions: Tensor,  # [B, N]
    key_positions: Tensor,  # [B, L + M]
    window: int,
) -> Tensor:
    """The same mask for sliding-window layers: a key is seen iff query position - key position < window."""
    distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
    return mask.masked_fill(distance >= window, torch.finfo(mask.dtype).min)


def apply_chunks(
    mask: Tensor,  # [B, 1, N, L + M], as of `tree_mask`
    query_positions: Tensor,  # [B, N]
    key_positions: Tensor,  # [B, L + M]
    chunk: int,
) -> Tensor:
    """The same mask for layers of chunked attention: a key is seen iff it is in the query's chunk of positions."""
    elsewhere = (query_positions // chunk)[:, None, :, None] != (key_positions // chunk)[:, None, None, :]
    return mask.masked_fill(elsewhere, torch.finfo(mask.dtype).min)
