"""What an acceptance rule returns, and the walk that turns it into the accepted path.

B batch, N tree nodes verified (root included), V vocabulary.

A rule returns log-weights [B, N, V]. At every node the walk takes `argmax(log_weights + noise)`; if that
token is a child it descends, else it emits the token and stops. A step is *exact* where the token is the one
the target itself would have drawn with the same noise, `argmax(warped_logits + noise)`, and *fuzzy*
otherwise. Log-weights count up to a constant per node, so a rule that leaves a node alone returns that node's
warped logits bit by bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .verification import Verification


@dataclass(frozen=True, eq=False)
class Decision:
    """What a rule returns.

    Raises:
        TypeError, ValueError: a part of the wrong type or shape.
    """

    log_weights: Tensor  # [B, N, V] float32, up to a constant per node
    divergence: Tensor | None = None  # [B, N], for rules that gate on one; NaN at leaves
    kl: Callable[[], Tensor] | None = None  # -> [B], see `cycle_kl`; sampling, for rules that know it
    stop: Tensor | None = None  # [B, N] bool, nodes at which the walk ends even if a child is drawn

    def __post_init__(self) -> None:
        weights = self.log_weights
        if not (isinstance(weights, Tensor) and weights.is_floating_point() and weights.dim() == 3):
            raise TypeError(f"Decision.log_weights must be a float tensor [B, N, V], got {_described(weights)}")
        for name, value in (("divergence", self.divergence), ("stop", self.stop)):
            if value is not None and not (isinstance(value, Tensor) and value.shape == weights.shape[:2]):
                wanted = f"a tensor {list(weights.shape[:2])}"
                raise ValueError(f"Decision.{name} must be None or {wanted}, got {_described(value)}")
        if self.stop is not None and self.stop.dtype != torch.bool:
            raise TypeError(f"Decision.stop must be a bool tensor, got {_described(self.stop)}")
        if not (self.kl is None or callable(self.kl)):
            raise TypeError(f"Decision.kl must be None or a function without arguments, got {self.kl!r}")


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, eq=False)
class Walk:
    """The accepted path. A row emits the tokens of its accepted nodes below the root, then choice[last]."""

    choice: Tensor  # [B, N] long, token drawn at each node
    accepted: Tensor  # [B, N] bool, root included
    last: Tensor  # [B] long, deepest accepted node
    length: Tensor  # [B] long, accepted draft tokens (0 = only the root)


def walk(verification: Verification, decision: Decision) -> Walk:
    """Descend from the root while the drawn token is a child."""
    tree = verification.tree
    if decision.log_weights is verification.warped_logits:
        choice = verification.exact_choice
    else:
        noise = verification.noise
        choice = (decision.log_weights if noise is None else decision.log_weights + noise).argmax(-1)
    matches = tree.tokens == verification.of_parent(choice)
    if decision.stop is not None:
        matches &= ~verification.of_parent(decision.stop)
    accepted = verification.on_whole_path(matches)  # siblings differ in their token: one path
    length, last = torch.where(accepted, tree.depths, -1).max(-1)
    return Walk(choice, accepted, last, length)
