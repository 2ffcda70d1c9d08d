"""A target's output layer: logits of all tokens, or of some rows of it only.

D hidden size, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .linear import dtype_of, pack_linears
from .memory import MappedFiles, leave_files
from .placement import device_of


@dataclass(eq=False)
class OutputRows:
    """Some tokens' part of a target's output layer: [..., D] -> [..., R] in float32, scaled and capped as the target's.

    Args:
        source: the output layer that the rows were copied from, by which it is known what they belong to.
    """

    source: nn.Module
    layer: nn.Linear  # D -> R
    scale: float
    softcap: float | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        lm_head: nn.Module,  # the whole layer, of weight [V, D]
        tokens: Tensor,  # [R] long
        scale: float,
        softcap: float | None,
    ) -> OutputRows:
        weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
        layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight[tokens], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return cls(lm_head, layer, scale, softcap)

    def __call__(self, features: Tensor) -> Tensor:
        return output_logits(self.layer, features.to(dtype_of(self.layer)), self.scale, self.softcap)

    def belong_to(self, lm_head: nn.Module) -> bool:
        """Whether they are rows of this output layer, as it is now."""
        return (self.source is lm_head and dtype_of(self.layer) == dtype_of(lm_head)
                and device_of(self.layer) == device_of(lm_head))

    def pack(
        self, form: str | None, lm_head: nn.Module, files: MappedFiles, dtype: torch.dtype | None = None
    ) -> None:
        """Pack the rows; `lm_head` is what stands now for the output layer that they come from.

        Args:
            dtype: see `TargetModel.pack`.
        """
        holder = nn.Sequential(self.layer)
        pack_linears(holder, form, files, dtype)
        leave_files(holder, files, dtype=dtype)
        self.layer, self.source = holder[0], lm_head


def output_logits(
    lm_head: Callable[[Tensor], Tensor], features: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """[..., D] -> [..., V] in float32, scaled and capped as the target scales and caps its logits."""
    logits = lm_head(features).float()
    if scale != 1:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
