"""The interface between a decode cycle and the model that drafts for it.

B batch, N tokens of a forward, D size of a state, F width of the target's features, V vocabulary of the target,
R tokens that the drafter can name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..models.cache import BucketCache, TreeCache
from ..models.fused import FusedLayer
from ..models.target import TargetModel


class Drafter(Protocol):
    """A model that predicts the target's next tokens: a draft head (`heads.eagle.DraftHead`), or a causal LM with the
    same tokens (`language_model.DraftModel`).

    It has its own cache, and at each position a state [D], from which `own_logits` computes its logits. At position i a
    drafter with `reads_features` reads the target's feature of position i and token i + 1; any other reads token i.
    """

    noun: str  # "a head", for records
    kind: str
    reads_features: bool
    max_positions: int | None  # a longer text, its tree included, gets no drafts of it; None: no limit
    dtype: torch.dtype
    devices: set[torch.device]
    module: nn.Module  # with its weights and its `config`
    fused: object | None  # what computes it in a decode cycle; None: stock modules
    first_layer: FusedLayer  # of `fused`
    computed_by: str  # the implementation of its forwards, for records

    @property
    def draft_vocab_size(self) -> int:
        """R; without `draft_tokens` it is less than V if the last rows of the target's vocabulary are padding."""

    @property
    def draft_tokens(self) -> Tensor | None:
        """[R] long, ascending: the target's ids of the tokens that it can name; None: 0 to R - 1."""

    def fit(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Draft for this target. Raise ValueError if that is impossible.

        Args:
            tokenizer: the target's; None: unknown.
        """

    def separate(self, target: TargetModel) -> Drafter:
        """A drafter with the same weights, to be fitted to another target than this one."""

    def refresh_for(self, target: TargetModel) -> None:
        """Follow changes of its modules, forwards or hooks. Raise ValueError if it does not fit the target any more."""

    def pack_for(self, target: TargetModel, form: str | None) -> None:
        """Replace linear layers on a CPU by packed ones, see `models.linear`, after those of the target."""

    def digest(self) -> str:
        """An identifier, independent of its dtype."""

    def weights_key(self) -> tuple:
        """See `models.causal_lm.CausalLM.weights_key`."""

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache with room for `capacity` positions of each sequence."""

    def read(
        self,
        features: Tensor,  # [B, N, F] of the target
    ) -> Tensor:  # [B, N, D]
        """Features as states, for positions that the target has computed; called only if it `reads_features`."""

    def predict(
        self,
        states: Tensor | None,  # [B, N, D], at the position before each token; None if it reads no features
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N], in the drafter's own sequence
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache | BucketCache,  # the tokens' keys and values are appended to it; the latter in captured cycles
    ) -> Tensor:  # [B, N, D]
        """States of the tokens of a text, or of one level of a draft tree, whose other branches `ancestors` hides.

        The keys that a token sees are its text, in order: a sliding window of W sees the last W of them.
        """

    def own_logits(
        self,
        states: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """Logits of the tokens that it can name, on the device of the target's logits."""


def weights_key(target: TargetModel, drafter: Drafter | None) -> tuple:
    """A key that changes with the weights and the structure of either model."""
    return (target.layers, target.weights_key(), None if drafter is None else drafter.weights_key())
