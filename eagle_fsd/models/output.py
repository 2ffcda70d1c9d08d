"""A target's output layer: logits of all tokens, or of some rows of it only.

D hidden size, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class OutputRows:
    """Some tokens' part of a target's output layer: [..., D] -> [..., R] in float32, scaled and capped as the target's.

    Args:
        source: the weight that the rows were copied from, by which it is known what they belong to.
    """

    source: Tensor  # [V, D]
    layer: nn.Linear  # D -> R
    scale: float
    softcap: float | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        weight: Tensor,  # [V, D] of the whole layer
        bias: Tensor | None,  # [V]
        tokens: Tensor,  # [R] long
        scale: float,
        softcap: float | None,
    ) -> OutputRows:
        layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight[tokens], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return cls(weight, layer, scale, softcap)

    def __call__(self, features: Tensor) -> Tensor:
        return output_logits(self.layer, features.to(self.layer.weight.dtype), self.scale, self.softcap)

    def belong_to(self, weight: Tensor) -> bool:
        """Whether they are rows of this weight [V, D], as it is now."""
        own = self.layer.weight
        return self.source is weight and (own.device, own.dtype) == (weight.device, weight.dtype)


def output_logits(
    lm_head: Callable[[Tensor], Tensor], features: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """[..., D] -> [..., V] in float32, scaled and capped as the target scales and caps its logits."""
    logits = lm_head(features).float()
    if scale != 1:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
