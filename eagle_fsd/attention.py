"""Tree attention masks: each node sees the committed prefix of its sequence, its ancestors and itself.

B batch, L prefix length, N nodes (queries).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    mask = torch.full((batch, 1, nodes, prefix + keys), torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    if prefix_visible is None:
        mask[..., :prefix] = 0
    else:
        mask[..., :prefix].masked_fill_(prefix_visible[:, None, None], 0)
    mask[:, 0, :, prefix:].masked_fill_(visible, 0)
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
