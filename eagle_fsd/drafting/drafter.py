"""The interface between a decode cycle and the model that drafts for it.

B batch, N tokens of a forward, D size of a state, F width of the target's features, V vocabulary of the target,
R tokens that the drafter can name.
"""

# ruff: noqa: B027 - a drafter that needs nothing at these calls leaves their methods empty

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..models.cache import BucketCache, TreeCache
from ..models.digest import weights_digest
from ..models.fused import FusedLayer, version_of
from ..models.target import TargetModel


class Drafter(ABC):
    """A model that predicts the target's next tokens: a draft head (`heads.eagle.DraftHead`), a causal LM with the same
    tokens (`language_model.DraftModel`), or a class of yours. `EagleModel.from_parts` takes any.

    It has its own cache, and at each position a state [D], from which `own_logits` computes its logits. At position i a
    drafter with `reads_features` reads the target's feature of position i and token i + 1; any other reads token i.
    All tensors that it gets and returns are on the device of the target's output layer.

    A class of yours needs `draft_vocab_size`, `new_cache`, `predict` and `own_logits`. It must be hashable and weakly
    referable, as classes are by default. Below, members are grouped by their callers.
    """

    # The cycle: `drafting/tree.py`, `decoding/batch.py` and `cycle.py` --------------------------------------------

    reads_features: bool = False
    max_positions: int | None = None  # a longer text, its tree included, gets no drafts of it; None: no limit
    draft_vocab_size: int  # R; without `draft_tokens` it is less than V if the last rows of the target's are padding
    draft_tokens: Tensor | None = None  # [R] long, ascending: the target's ids of its tokens; None: 0 to R - 1

    @abstractmethod
    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache with room for `capacity` positions of each sequence."""

    def to_states(
        self,
        features: Tensor,  # [B, N, F] of the target
    ) -> Tensor:  # [B, N, D]
        """Features as states, for positions that the target has computed; called only if it `reads_features`."""
        return features

    @abstractmethod
    def predict(
        self,
        states: Tensor | None,  # [B, N, D], at the position before each token: by `to_states` for a text (None if
        # it reads no features), its own predictions in a tree
        tokens: Tensor,  # [B, N] ids of the target
        positions: Tensor,  # [B, N], in the drafter's own sequence
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache | BucketCache,  # the tokens' keys and values are appended to it; the latter in captured cycles
    ) -> Tensor:  # [B, N, D]
        """States of the tokens of a text, or of one level of a draft tree, whose other branches `ancestors` hides.

        The keys that a token sees are its text, in order: a sliding window of W sees the last W of them.
        """

    @abstractmethod
    def own_logits(
        self,
        states: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """Logits of the tokens that it can name."""

    def weights_key(self) -> tuple:
        """Changes with the weights and the structure, after which nothing cached is used again."""
        return tuple(map(version_of, self.module.parameters()))

    # Capture as CUDA graphs: `captured/cycle.py` ------------------------------------------------------------------

    capturable: bool = False  # whether CUDA graphs may hold its forwards, which also take a `BucketCache`
    first_layer: FusedLayer  # of a capturable one, whose layers are alike
    devices: Collection[torch.device] = ()  # of its weights
    dtype: torch.dtype = torch.float32

    # Loading: `loading/pair.py` -----------------------------------------------------------------------------------

    def fit(self, target: TargetModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Draft for this target. A drafter that reads features sets `target.feature_layers` to those whose it reads.

        Args:
            tokenizer: the target's; None: unknown.

        Raises:
            ValueError: that is impossible.
        """

    def separate(self, target: TargetModel) -> Drafter:
        """A drafter with the same weights, to be fitted to another target than this one."""
        return copy.copy(self)

    def refresh_for(self, target: TargetModel) -> None:
        """Follow changes of its modules, forwards or hooks. Called before each request.

        Raises:
            ValueError: it does not fit the target any more.
        """

    def pack_for(self, target: TargetModel, form: str | None) -> None:
        """Replace linear layers on a CPU by packed ones, see `models.linear`, after those of the target."""

    # Records: `EagleModel.described`, `loading/timing.py`, `curves.py` --------------------------------------------

    noun: str = "a drafter"  # for sentences
    kind: str = "custom"
    module: nn.Module = nn.Module()  # with its weights, and its `config` if it has one
    computed_by: str = "its own code"  # the implementation of its forwards

    def digest(self) -> str:
        """An identifier of class and weights, independent of the dtype."""
        return f"{type(self).__name__}/{self.draft_vocab_size}/{weights_digest(self.module)}"


def weights_key(target: TargetModel, drafter: Drafter | None) -> tuple:
    """A key that changes with the weights and the structure of either model."""
    return (target.feature_layers, target.weights_key(), None if drafter is None else drafter.weights_key())
