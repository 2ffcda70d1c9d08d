"""Run a head over a whole text as decoding does, from all positions at once.

In step 1 the head reads the target's features. In step s its input at each position is its own prediction from step
s - 1 for the position before. For the last s - 1 positions, attention sees the keys of the steps in which the decoder
would have drafted them (a diagonal of each step's keys); further back, it sees those of the target's features. It is
the training of HASS (arXiv 2408.15766, section 3.2) and EAGLE-3 (arXiv 2503.01840, section 3.2).

B batch, T tokens of a row, D hidden size, F width of the target's features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from ..models.masks import additive
from .eagle import DraftHead


def aligned_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[1, T, step * T] bool, the keys of all steps so far that each query of aligned step `step` (1-based) sees.

    The query at position i represents a tree node `step - 1` levels below position i - step + 1. It sees the target's
    features up to that position (keys of step 1), then one key of each later step on its own path: key i - step + s of
    step s, for s = 2 .. step.
    """
    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    blocks = [j <= i - (step - 1), *(j == i - (step - s) for s in range(2, step + 1))]
    return torch.cat(blocks, 1)[None]


def unroll(
    head: DraftHead,
    features: Tensor,  # [B, T, F] of the target
    tokens: Tensor,  # [B, T]
    steps: int,
) -> Iterator[Tensor]:
    """Yield the head's predictions [B, T - 2, D] of each step. Position i pairs feature i with token i + 1 and predicts
    feature i + 1, whose logits are for token i + 2."""
    inputs, following = head.read(features[:, :-2]), tokens[:, 1:-1]
    first, length = inputs[:, :1], inputs.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    kind = tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    needs_mask = head.config._attn_implementation == "eager"  # sdpa is causal by itself, without a mask
    cache = DynamicCache()
    for step in range(1, steps + 1):
        mask = None
        if step > 1 or needs_mask:
            mask = additive(aligned_mask(length, step, tokens.device), dtype)
        predicted = head(inputs, following, positions, mask, cache)
        yield predicted
        # The next step's input at i is this step's prediction for i, made at i - 1; position 0 keeps the true one.
        inputs = torch.cat([first.to(predicted.dtype), predicted[:, :-1]], 1)
