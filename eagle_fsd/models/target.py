"""The target: a causal LM whose features a draft head reads.

B batch, N tokens, D hidden size, F width of the features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn

from .causal_lm import CausalLM


class TargetModel(CausalLM):
    """A causal LM for which drafts are made.

    If `feature_layers` is set, the features begin with the input hidden states of those layers, in order of depth, and
    are F = D * (layers + 1) wide; of n layers, number n stands for the output of the last, before the norm. An EAGLE-3
    head reads the first part; `logits` reads the last D.
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
        return self.hidden_size * (len(self.feature_layers) + 1)

    def features(
        self,
        tokens: Tensor,  # [B, N]
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder, for training."""
        return self.computation.stock(tokens, self.feature_layers, **options)

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy if they are on another device, as with a `device_map`."""
        return self.embed_tokens if self.input_device == device else copy_to(self.embed_tokens, device)


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without accelerate's hooks."""
    hook = getattr(module, "_hf_hook", None)  # may contain all offloaded weights: do not copy it
    with align_module_device(module):
        copied = copy.deepcopy(module, {id(hook): hook})
    return remove_hook_from_module(copied).to(device)
