"""What an acceptance rule returns, and the walk that turns it into the accepted path.

B batch, N tree nodes verified (root included), M of them with logits, V vocabulary.

A rule returns log-weights [B, M, V]. At every node the walk takes `argmax(log_weights + noise)`; if that
token is a child it descends, else it emits the token and stops. A step is *exact* where the token is the one
the target itself would have drawn with the same noise, `argmax(warped_logits + noise)`, and *fuzzy*
otherwise. Log-weights count up to a constant per node, so a rule that leaves a node alone returns that node's
warped logits bit by bit. Most rules tell children from other tokens only, and return `ChildWeights`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafting.largest import first_largest
from .verification import ChildWeights, Verification


@dataclass(frozen=True, eq=False)
class Decision:
    """What a rule returns.

    Raises:
        TypeError, ValueError: a part of the wrong type or shape.
    """

    weights: Tensor | ChildWeights  # log-weights [B, M, V] float32, up to a constant per node
    divergence: Tensor | None = None  # [B, M], for rules that gate on one; NaN at leaves
    kl: Callable[[], Tensor] | None = None  # -> [B], see `cycle_kl`; sampling, for rules that know it
    stop: Tensor | None = None  # [B, M] bool, nodes at which the walk ends even if a child is drawn

    def __post_init__(self) -> None:
        weights = self.weights
        if isinstance(weights, ChildWeights):
            nodes = weights.others.shape
        elif isinstance(weights, Tensor) and weights.is_floating_point() and weights.dim() == 3:
            nodes = weights.shape[:2]
        else:
            wanted = "a float tensor [B, M, V] or ChildWeights"
            raise TypeError(f"Decision.weights must be {wanted}, got {_described(weights)}")
        for name, value in (("divergence", self.divergence), ("stop", self.stop)):
            if value is not None and not (isinstance(value, Tensor) and value.shape == nodes):
                wanted = f"a tensor {list(nodes)}"
                raise ValueError(f"Decision.{name} must be None or {wanted}, got {_described(value)}")
        if self.stop is not None and self.stop.dtype != torch.bool:
            raise TypeError(f"Decision.stop must be a bool tensor, got {_described(self.stop)}")
        if not (self.kl is None or callable(self.kl)):
            raise TypeError(f"Decision.kl must be None or a function without arguments, got {self.kl!r}")

    @property
    def log_weights(self) -> Tensor:
        """[B, M, V], written out."""
        return self.weights.dense() if isinstance(self.weights, ChildWeights) else self.weights


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, eq=False)
class Walk:
    """The accepted path. A row emits the tokens of its accepted nodes below the root, then choice[last]."""

    choice: Tensor  # [B, N] long, token drawn at each node
    accepted: Tensor  # [B, N] bool, root included
    last: Tensor  # [B] long, deepest accepted node
    length: Tensor  # [B] long, accepted draft tokens (0 = only the root)


def draw(verification: Verification, decision: Decision) -> Tensor:  # [B, M] long
    """The token drawn at each node."""
    weights = decision.weights
    if weights is verification.warped_logits:
        return verification.exact_choice
    if isinstance(weights, ChildWeights):
        return weights.draw()
    return first_largest(weights if verification.noise is None else weights + verification.noise)


def walk(verification: Verification, decision: Decision) -> Walk:
    """Descend from the root while the drawn token is a child."""
    tree, choice = verification.tree, draw(verification, decision)
    matches = tree.tokens == verification.of_parent(choice)
    if decision.stop is not None:
        matches &= ~verification.of_parent(decision.stop)
    accepted = verification.on_whole_path(matches)  # siblings differ in their token: one path
    length, last = torch.where(accepted, tree.depths, -1).max(-1)
    return Walk(choice, accepted, last, length)
