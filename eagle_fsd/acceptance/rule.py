"""What all rules share: the threshold and its checks, the guard, and the choice among children that may be taken.

B rows, C columns of a tree, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_interval
from ..drafting.coupling import WEIGHT
from .nodes import Nodes, Weights

HEAD_GUARD = 0.7  # of rules that gate on something: without it they take tokens of any probability (docs/fuzzy.md)


@dataclass(frozen=True)
class Rule(ABC):
    """An acceptance rule with its threshold; a larger one accepts more.

    Where a rule says that it is lossless it is not asked: the target's own choice is taken, whatever a divergence or a
    probability rounds to. Elsewhere it is asked with the threshold of each row (`Nodes.threshold`).
    """

    name: ClassVar[str]
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, False)  # upper end, and whether it is accepted
    threshold_scale: ClassVar[float] = 1.0  # hardly anyone wants more: where a slider ends
    noise_weight: ClassVar[float] = 0.0  # of the noise that tokens are drawn with in drafts, see `drafting.coupling`
    window: ClassVar[int] = 0  # above 0 fuzzy tokens are tentative, see `walk.Permission`

    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_interval("threshold", self.threshold, *self.threshold_limit, of=f"of rule {self.name!r} ")

    @abstractmethod
    def is_lossless(self, greedy: bool) -> bool:
        """Whether this threshold draws exactly what the target draws with the same noise."""

    @abstractmethod
    def weigh(self, nodes: Nodes) -> Weights:
        """Log-weights of the children of these nodes."""


@dataclass(frozen=True)
class FuzzyRule(Rule):
    """A rule that may take children which the target itself would not have drawn: fuzzy steps.

    Only what the draft head proposed may be taken so. What was copied from the text is accepted where the target draws
    it: a target that is not quite sure would else be led into writing its own text again (docs/fuzzy.md).

    Args:
        head_guard: alpha in [0, 1]; a fuzzy step needs target probability >= (1 - alpha) * the target's best.
            None: no guard. Exact steps are never guarded.
    """

    head_guard: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_guard is not None:
            check_interval("head_guard", self.head_guard, 1.0, True)

    def candidates(self, nodes: Nodes) -> Tensor:
        """[B, C] bool: children that a fuzzy step may take: the draft head's, with warped mass above 0, inside the
        head guard."""
        return nodes.in_head(self.head_guard) & nodes.by_head & (nodes.steps > -math.inf)


@dataclass(frozen=True)
class GatingRule(FuzzyRule):
    """A rule with a gate: where the target's own choice is no child, fuzzy steps may be taken that the gate lets pass,
    and of those the one that the target prefers under this noise is.

    Where the target's choice is a child it would be taken whatever the gate says: an argmax over a subset is the
    overall argmax if the subset contains it. So exact steps stay what they were, and only would-be stops change.
    """

    noise_weight: ClassVar[float] = WEIGHT

    head_guard: float | None = field(default=HEAD_GUARD, kw_only=True)

    @abstractmethod
    def gate(self, nodes: Nodes) -> tuple[Tensor, Tensor | None]:
        """[B, C] or [B, 1] bool: which fuzzy steps pass; and the divergence [B] that it went by, for receipts."""

    def weigh(self, nodes: Nodes) -> Weights:
        would_stop = nodes.children & ~nodes.is_exact.any(-1, keepdim=True)
        if nodes.nowhere(would_stop):
            return Weights()
        candidates = would_stop & self.candidates(nodes)
        asked = candidates.any(-1)
        if nodes.nowhere(candidates):
            return Weights()
        passes, divergence = self.gate(nodes)
        if divergence is not None:
            divergence = torch.where(asked, divergence, math.nan)
        allowed = candidates & passes
        return Weights(divergence=divergence) if nodes.nowhere(allowed) else only(nodes, allowed, divergence)


def only(nodes: Nodes, eligible: Tensor, divergence: Tensor | None = None) -> Weights:
    """Draw an eligible child [B, C] where there is one; elsewhere what the target draws."""
    restricted = eligible.any(-1)
    steps = nodes.steps.masked_fill(restricted[:, None] & ~eligible, -math.inf)
    return Weights(steps, torch.where(restricted, -math.inf, 0.0), divergence=divergence)


@dataclass(frozen=True)
class Custom(Rule):
    """A user's function as a rule: from the `Nodes` of one row to `Weights`, or to log-weights [V] of all tokens.

    It is called row by row; what it raises, or answers wrongly, ends that row's request and no other. The first token
    of an answer is the target's own: it comes with the prompt, where nothing is drafted.
    """

    name: ClassVar[str] = "custom"

    function: Callable[[Nodes], Weights | Tensor] = field(kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def weigh(self, nodes: Nodes) -> Weights:
        weights, divergences = nodes.warped.clone(), torch.full_like(nodes.threshold, math.nan)
        stops = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
        for row in nodes.going.nonzero()[:, 0].tolist():
            if row not in nodes.errors:
                try:
                    weights[row], stops[row], divergence = self._ask(nodes.row(row))
                    if divergence is not None:
                        divergences[row] = divergence[0]
                except Exception as error:
                    nodes.errors[row] = error
        return Weights(stop=stops, divergence=divergences, tokens=weights)

    def _ask(self, nodes: Nodes) -> tuple[Tensor, bool, Tensor | None]:
        """Log-weights [V], whether the walk ends here, and the divergence [1] that it went by."""
        answer, stop, divergence = self.function(nodes), False, None
        if isinstance(answer, Weights):
            stop = answer.stop is not None and bool(answer.stop)
            divergence = answer.divergence
            if answer.tokens is not None:
                answer = answer.tokens
            else:
                answer = nodes.warped if answer.children is None else _all_tokens(nodes, answer)
        if not isinstance(answer, Tensor):
            raise TypeError(f"a rule returns Weights or a tensor of log-weights [V], got {type(answer).__name__}")
        answer = answer[0] if answer.dim() == 2 and len(answer) == 1 else answer
        if answer.shape != nodes.warped[0].shape:
            raise ValueError(f"a rule must return log-weights of shape {list(nodes.warped[0].shape)}, got "
                             f"{list(answer.shape)}")
        best, possible = answer.max(), nodes.warped.max() > -math.inf
        if answer.isnan().any() or possible and not best.isfinite():  # no processor may leave a token
            raise ValueError("a rule must return log-weights below inf, not NaN, and above -inf somewhere")
        return answer, stop, divergence


def _all_tokens(nodes: Nodes, weights: Weights) -> Tensor:
    """[1, V]: the log-weights of all tokens, of one row's children and others."""
    if not isinstance(weights.children, Tensor) or weights.children.shape != nodes.tokens.shape:
        got = list(weights.children.shape) if isinstance(weights.children, Tensor) else repr(weights.children)
        raise ValueError(f"Weights.children must be a tensor {list(nodes.tokens.shape)}, got {got}")
    own = nodes.children[0]
    others = nodes.warped + weights.others
    return others.index_copy(1, nodes.tokens[0, own], weights.children[:, own].to(others.dtype))
