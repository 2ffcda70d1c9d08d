"""Base classes of rules: the threshold and its checks, the head guard, and the choice among candidates.

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

from ..drafting.noise import NOISE_WEIGHT
from ..utils.checks import check_interval
from .nodes import Nodes, TokenWeights, Weights

# What earlier versions had, and what to use instead: rules, and attributes of rules.
REMOVED_RULES = {
    "tilt": "'fsd', which was as fast and lost less (docs/results/tried.md)",
    "fly": "'fsd', which was as fast (docs/results/tried.md)",
    "ensemble": "'fsd', which was faster (docs/results/tried.md)",
}
REMOVED_ATTRIBUTES = {
    "window": "no token is tentative now: decide at its node, or limit the regret by budget=",
    "mixes_draft": "the draft's logits are not processed now: read `Nodes.draft_logits`",
}
HEAD_GUARD = 0.7  # default of gating rules, which would otherwise accept tokens of any probability (docs/fuzzy.md)


@dataclass(frozen=True)
class Rule(ABC):
    """An acceptance rule with its threshold; a larger threshold accepts more.

    If `is_lossless`, the walk takes the target's own token and does not call `weigh`, so that rounding cannot matter.
    Otherwise it calls `weigh`, which reads the threshold of each row (`Nodes.threshold`), not `self.threshold`: a CUDA
    graph is captured once for all thresholds. So `weigh` must also be free of what waits for the device, such as
    `tensor.item()`, `if tensor:` and shapes that depend on values.
    """

    name: ClassVar[str]
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, False)  # upper bound, and whether it is included
    noise_weight: ClassVar[float] = 0.0  # of the target's noise in drafts, see `drafting.noise`

    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name, instead in REMOVED_ATTRIBUTES.items():
            if hasattr(self, name):
                raise TypeError(f"rule {self.name!r} has {name!r}, which was removed: {instead}")
        check_interval("threshold", self.threshold, *self.threshold_limit, of=f"of rule {self.name!r} ")

    @abstractmethod
    def is_lossless(self, greedy: bool) -> bool:
        """Whether this threshold always draws the target's own token. All thresholds above 0 give one answer, since a
        captured cycle serves them all."""

    @abstractmethod
    def weigh(self, nodes: Nodes) -> Weights | TokenWeights:
        """Log-weights of the tokens after these nodes."""


@dataclass(frozen=True)
class FuzzyRule(Rule):
    """A rule that may accept children other than the target's own token: fuzzy steps.

    Only tokens that the drafter proposed may be fuzzy. A token copied from the text is accepted only if the target
    draws it; otherwise an uncertain target could be led to repeat its own text (docs/results/fuzzy.md).

    Args:
        head_guard: alpha in [0, 1]; a fuzzy step needs a target probability >= (1 - alpha) times that of the target's
            best token. None: no guard. Exact steps are never guarded.
    """

    head_guard: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_guard is not None:
            check_interval("head_guard", self.head_guard, 1.0, True)

    def candidates(self, nodes: Nodes) -> Tensor:
        """[B, C] bool: children that a fuzzy step may accept: proposed by the drafter, not truncated, and inside the
        head guard."""
        return nodes.inside_guard(self.head_guard) & nodes.by_drafter & (nodes.child_logits > -math.inf)


@dataclass(frozen=True)
class GatingRule(FuzzyRule):
    """A rule with a gate: if the target's own token is no child, the target draws among the children that pass it, with
    the same noise.

    Where the target's own token is a child it is accepted, and the gate's result is ignored. So exact steps do not
    change; only nodes where the walk would stop do.
    """

    noise_weight: ClassVar[float] = NOISE_WEIGHT

    head_guard: float | None = field(default=HEAD_GUARD, kw_only=True)

    @abstractmethod
    def gate(self, nodes: Nodes) -> tuple[Tensor, Tensor | None]:
        """Which fuzzy steps pass, [B, C] or [B, 1] bool, and the divergence [B] that decided, for receipts."""

    def weigh(self, nodes: Nodes) -> Weights:
        would_stop = nodes.children & ~nodes.is_exact.any(-1, keepdim=True)
        if nodes.known_empty(would_stop):
            return Weights()
        candidates = would_stop & self.candidates(nodes)
        if nodes.known_empty(candidates):
            return Weights()
        passes, divergence = self.gate(nodes)
        if divergence is not None:
            divergence = torch.where(candidates.any(-1), divergence, math.nan)
        return only(nodes, candidates & passes, divergence)


def only(nodes: Nodes, eligible: Tensor, divergence: Tensor | None = None) -> Weights:
    """Draw among the eligible children [B, C] where there are any; elsewhere the target's own token."""
    restricted = eligible.any(-1)
    weights = nodes.child_logits.masked_fill(restricted[:, None] & ~eligible, -math.inf)
    return Weights(weights, torch.where(restricted, -math.inf, 0.0), divergence=divergence)


@dataclass(frozen=True)
class Custom(Rule):
    """A user's function as a rule: from the `Nodes` of one row to `Weights`, `TokenWeights` or log-weights [V].

    It is called row by row. An error or a bad result ends that row's request only. It does not decide the first token
    of an answer, which the target draws after the prompt.
    """

    name: ClassVar[str] = "custom"

    function: Callable[[Nodes], Weights | TokenWeights | Tensor] = field(kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def weigh(self, nodes: Nodes) -> TokenWeights:
        weights, divergences = nodes.warped.clone(), torch.full_like(nodes.threshold, math.nan)
        stops = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
        for row in nodes.going.nonzero()[:, 0].tolist():
            if row not in nodes.errors:
                try:
                    weights[row], stops[row], divergence = self._call(nodes.row(row))
                    if divergence is not None:
                        divergences[row] = divergence[0]
                except Exception as error:
                    nodes.errors[row] = error
        return TokenWeights(weights, stops, divergences)

    def _call(self, nodes: Nodes) -> tuple[Tensor, bool, Tensor | None]:
        """Log-weights [V], whether the walk ends here, and the divergence [1] for receipts."""
        result, stop, divergence = self.function(nodes), False, None
        if isinstance(result, Weights | TokenWeights):
            stop = result.stop is not None and bool(result.stop)
            divergence = result.divergence
            result = result.tokens if isinstance(result, TokenWeights) else _all_tokens(nodes, result)
        if not isinstance(result, Tensor):
            raise TypeError("a rule must return Weights, TokenWeights or a tensor of log-weights [V], got "
                            f"{type(result).__name__}")
        result = result[0] if result.dim() == 2 and len(result) == 1 else result
        if result.shape != nodes.warped[0].shape:
            raise ValueError(f"a rule must return log-weights of shape {list(nodes.warped[0].shape)}, got "
                             f"{list(result.shape)}")
        best, possible = result.max(), nodes.warped.max() > -math.inf  # a processor may rule out every token
        if result.isnan().any() or possible and not best.isfinite():
            raise ValueError("a rule must return log-weights below inf, not NaN, and above -inf somewhere")
        return result, stop, divergence


def _all_tokens(nodes: Nodes, weights: Weights) -> Tensor:
    """[1, V]: log-weights of all tokens, from one row's `children` and `others`."""
    if weights.children is None:
        return nodes.warped
    if not isinstance(weights.children, Tensor) or weights.children.shape != nodes.tokens.shape:
        got = list(weights.children.shape) if isinstance(weights.children, Tensor) else repr(weights.children)
        raise ValueError(f"Weights.children must be a tensor {list(nodes.tokens.shape)}, got {got}")
    own = nodes.children[0]
    others = nodes.warped + weights.others
    return others.index_copy(1, nodes.tokens[0, own], weights.children[:, own].to(others.dtype))
