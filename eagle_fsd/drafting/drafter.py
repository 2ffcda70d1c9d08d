"""What a decode cycle asks for drafts.

B batch, N tokens of a forward, D size of a state, F width of the target's features, V vocabulary of the target,
R tokens that the drafter can name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..models.cache import TreeCache


class Drafter(Protocol):
    """A model that predicts the target's next tokens: a draft head (`heads.eagle.DraftHead`), or any causal LM of the
    same tokens.

    It reads the text into a cache of its own and has a state [D] at each position, from which its logits are computed.
    At position i a drafter that `reads_features` reads the target's feature of position i with token i + 1; any other
    reads token i.
    """

    reads_features: bool

    @property
    def draft_vocab_size(self) -> int:
        """R."""

    @property
    def draft_tokens(self) -> Tensor | None:
        """[R] long, ascending: the target's number of each token that it can name; None: 0 to R - 1."""

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache for `capacity` positions of each sequence of a batch."""

    def read(
        self,
        features: Tensor,  # [B, N, F] of the target
    ) -> Tensor:  # [B, N, D]
        """What stands for states where the target has computed the position; asked only if it `reads_features`."""

    def predict(
        self,
        states: Tensor | None,  # [B, N, D], of the position before each token's; None: it reads no features
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N], places of the text in the cache
        visible: Tensor | None,  # [B, N, keys] bool, the last N keys being these tokens'; None: all before each token
        cache: TreeCache,  # to which the tokens' keys and values are appended
    ) -> Tensor:  # [B, N, D]
        """States of tokens: of a text, or of one level of a draft tree, after keys of which some are other branches'.

        The keys that a token sees are the positions of its text in order: a window of W sees the last W of them.
        """

    def own_logits(
        self,
        states: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """Logits over the tokens that it can name, on the device of the target's logits."""
