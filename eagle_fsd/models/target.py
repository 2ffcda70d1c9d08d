"""The target: a causal LM whose features a draft head reads, and rows of its output layer.

N tokens, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn

from .causal_lm import CausalLM, output_logits
from .linear import device_of, dtype_of, linear_of, pack


class TargetModel(CausalLM):
    """A causal LM for which drafts are made.

    If `layers` is set, the features begin with the input hidden states of those layers, in order of depth, and are
    F = D * (layers + 1) wide; of n layers, number n stands for the output of the last, before the norm. An EAGLE-3 head
    reads the first part; `logits` reads the last D.
    """

    batch_invariant = True

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group texts of these lengths, by index, into batches that can be decoded together.

        A batch shares one `position_limit`; it has one text if the model takes positions from the cache.
        """
        if self.positions_from_cache:
            return [[number] for number in range(len(lengths))]
        groups: dict[int | None, list[int]] = {}
        for number, length in enumerate(lengths):
            groups.setdefault(self.position_limit(length), []).append(number)
        return list(groups.values())

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * (len(self.layers) + 1)

    def features(
        self,
        tokens: Tensor,  # [B, N]
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder."""
        return self.current.stock(tokens, self.layers, **options)

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy if they are on another device, as with a `device_map`."""
        return self.embed_tokens if self.device == device else copy_to(self.embed_tokens, device)

    @torch.no_grad()
    def output_rows(
        self,
        tokens: Tensor,  # [R] long
    ) -> OutputRows | None:
        """The rows of the output layer for some tokens, as a copy; None if the layer cannot be split."""
        weight = self.lm_head.weight
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        rows = OutputRows.of(self.lm_head, tokens, self.scale, self.softcap)
        sample = torch.linspace(-1, 2, self.hidden_size, device=weight.device).to(self.dtype)
        whole = self.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None


@dataclass(eq=False)
class OutputRows:
    """The output layer for some tokens only: [..., D] -> [..., R] in float32, scaled and capped as the target's.

    R rows of the whole layer's V.

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
        weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
        return cls(lm_head, linear_of(weight[tokens], None if bias is None else bias[tokens]), scale, softcap)

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


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without accelerate's hooks."""
    hook = getattr(module, "_hf_hook", None)  # may contain all offloaded weights: do not copy it
    with align_module_device(module):
        copied = copy.deepcopy(module, {id(hook): hook})
    return remove_hook_from_module(copied).to(device)
