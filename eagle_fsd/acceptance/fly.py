"""Loose acceptance where the target is unsure and then goes along."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..checks import require_bool, require_integer
from .rule import GatingRule
from .verification import Verification

MOST = math.log(3)  # nats, the entropy of three equal probabilities


@dataclass(frozen=True)
class FLy(GatingRule):
    """Allow a child where the target is unsure, if it opens a window in which the target follows (arXiv 2511.22972).

    A fuzzy step passes iff the entropy h of the target's three best tokens at its parent is at least ln 3 - T, and the
    next W - 1 tokens below it are the target's own. A window that does not fit into the tree passes nothing. Of the
    children that open a complete window the target's preferred one is taken, whatever the dial.

    The paper decodes chains with h >= 0.3, T = 0.799, and W = 6; its code takes h without `renormalised`.

    Args:
        threshold: T in [0, ln 3], nats; 0 passes nothing.
        window: W >= 1 tokens, the fuzzy one included; 1: whatever follows.
        renormalised: h is that of the three probabilities divided by their sum; False: the sum of their -p log p, as in
            the code published with the paper. Both lie in [0, ln 3] and agree where the three hold all of the mass.
    """

    name: ClassVar[str] = "fly"
    reads_draft: ClassVar[bool] = False
    threshold_limit: ClassVar[tuple[float, bool]] = (MOST, True)
    gate_default: ClassVar[float] = MOST - 0.3

    window: int = field(default=2, kw_only=True)
    renormalised: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("window", self.window, 1)
        require_bool("renormalised", self.renormalised)

    @property
    def knows_kl(self) -> bool:
        return self.window == 1  # else what the noise draws below decides

    @property
    def looks_ahead(self) -> bool:
        return self.window > 1

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        best = verification.target_logits.log_softmax(-1).topk(3).values  # [B, M, 3]
        if self.renormalised:
            best = best.log_softmax(-1)
        entropy = -(best.exp() * best).nan_to_num(nan=0.0).sum(-1)  # 0 * log 0 = 0
        passes = verification.of_parent(entropy >= MOST - self.threshold)  # h(parent) >= ln 3 - T
        return passes & self.opens_window(verification)

    def opens_window(self, verification: Verification) -> Tensor:
        """[B, N] bool: below the node W - 1 steps in a row are the target's own."""
        follows = verification.tree.depths >= 0  # everywhere
        if self.window > verification.tree.max_depth:  # it would end below the deepest leaf
            return follows if self.window == 1 else ~follows
        for _ in range(self.window - 1):
            follows = verification.any_child(verification.is_exact & follows)
        return follows
