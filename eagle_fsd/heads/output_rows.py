"""Rows of the target's output layer, for a head that drafts some of its tokens.

D hidden size, V vocabulary of the target, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.linear import device_of, dtype_of, linear_of, pack
from ..models.target import TargetModel, output_logits


@dataclass(eq=False)
class OutputRows:
    """The output layer for some tokens only: [..., D] -> [..., R] in float32, scaled and capped as the target's.

    Args:
        source: the output layer from which the rows were copied.
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
        bias = getattr(lm_head, "bias", None)
        layer = linear_of(lm_head.weight[tokens], None if bias is None else bias[tokens])
        return cls(lm_head, layer, scale, softcap)

    @classmethod
    @torch.no_grad()
    def copied(
        cls,
        target: TargetModel,
        tokens: Tensor,  # [R] long
    ) -> OutputRows | None:
        """The rows of a target's output layer, which give its logits; None: the layer cannot be split."""
        weight = target.lm_head.weight
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        rows = cls.of(target.lm_head, tokens, target.scale, target.softcap)
        sample = torch.linspace(-1, 2, target.hidden_size, device=weight.device).to(target.dtype)
        whole = target.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None

    def __call__(self, features: Tensor) -> Tensor:
        return output_logits(self.layer, features.to(dtype_of(self.layer)), self.scale, self.softcap)

    def copied_from(self, lm_head: nn.Module) -> bool:
        """Whether the rows were copied from this output layer, in its present dtype and on its device."""
        return (self.source is lm_head and dtype_of(self.layer) == dtype_of(lm_head)
                and device_of(self.layer) == device_of(lm_head))

    def pack(self, form: str | None, lm_head: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Pack the rows.

        Args:
            lm_head: the target's output layer, packed by now.
            dtype: see `CausalLM.pack`.
        """
        parent = nn.Sequential(self.layer)
        pack(parent, form, dtype)
        self.layer, self.source = parent[0], lm_head
