"""What all rules share: the dial and its checks, guards, and the laws of restricted steps.

B batch, N tree nodes verified (root included), M of them with logits, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import check_interval
from .decision import Decision
from .verification import ChildWeights, Verification


@dataclass(frozen=True)
class Rule(ABC):
    """An acceptance rule with its dial; a larger threshold accepts more.

    Subclasses say where they are lossless and decide elsewhere, so that a lossless setting is the target's
    own choice by construction, whatever a divergence or a probability rounds to.
    """

    name: ClassVar[str]
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, False)  # upper end, and whether it is accepted
    threshold_scale: ClassVar[float] = 1.0  # hardly anyone wants more: where a slider ends
    reads_draft: ClassVar[bool] = True  # whether it looks at the draft's distribution, and not at the tree alone
    knows_kl: ClassVar[bool] = True  # whether decisions carry the KL of their law when sampling
    looks_ahead: ClassVar[bool] = True  # whether a node's decision depends on more than its children and its logits
    reads_features: ClassVar[bool] = False  # whether it looks at `Verification.features`
    remembers: ClassVar[bool] = False  # whether it looks at what the request has given up, or said, so far

    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_interval(f"threshold of rule {self.name!r}", self.threshold, *self.threshold_limit)

    @property
    def parts(self) -> "tuple[Rule, ...]":
        """The rules that it is made of: itself, or for a composed one those between the `+`."""
        return (self,)

    def each_part(self, change: "Callable[[Rule], Rule]") -> "Rule":
        """The rule with each of its parts changed."""
        return change(self)

    @abstractmethod
    def is_lossless(self, greedy: bool) -> bool:
        """Whether this setting draws exactly what the target draws with the same noise."""

    @abstractmethod
    def decide(self, verification: Verification) -> Decision:
        """The decision where the rule is not lossless."""

    def __call__(self, verification: Verification) -> Decision:
        if self.is_lossless(verification.greedy):
            warped_logits = verification.warped_logits
            return Decision(warped_logits, kl=lambda: warped_logits.new_zeros(len(warped_logits)))
        return self.decide(verification)


@dataclass(frozen=True)
class FuzzyRule(Rule):
    """A rule that takes fuzzy steps.

    Args:
        head_guard: alpha in [0, 1]; a fuzzy step needs target probability >= (1 - alpha) * the target's best.
            None: no guard. Exact steps are never guarded.
    """

    head_guard: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_guard is not None:
            check_interval("head_guard", self.head_guard, 1.0, True)

    def candidates(self, verification: Verification) -> Tensor:
        """[B, N] bool: children that a fuzzy step may take: warped mass above 0 and inside the head guard."""
        candidates = verification.is_child & (verification.step_logits > -math.inf)
        if self.head_guard is not None:
            candidates &= verification.in_head(self.head_guard)
        return candidates


def preferred(
    verification: Verification,
    candidates: Tensor,  # [B, N] bool
    values: Tensor,  # [B, N]
) -> Tensor:  # [B, N] bool
    """Of each node's candidates the one of the largest value, the first token of equal ones."""
    values = torch.where(candidates, values, -math.inf)
    largest = candidates & (values == verification.of_parent(verification.best_child(values)))
    order = torch.where(largest, -verification.tree.tokens.float(), -math.inf)
    return largest & (order == verification.of_parent(verification.best_child(order)))


@dataclass(frozen=True)
class GatingRule(FuzzyRule):
    """A rule with a gate: fuzzy steps that `passes` names are open, all others are not.

    Two such rules together are the logical and of their gates, see `gated.Gated`.
    """

    gate_default: ClassVar[float | None] = None  # dial behind a + where none is given; None: has to be
    sibling: ClassVar[str] = "target"  # see `restrict`; a field where there is a choice

    @property
    def knows_kl(self) -> bool:
        return self.sibling != "longest"

    @property
    def looks_ahead(self) -> bool:
        return self.sibling == "longest"

    @abstractmethod
    def passes(self, verification: Verification) -> Tensor:
        """[B, N] bool: the fuzzy steps that the gate lets pass, whatever `candidates` says of them.

        It is asked where the rule is not lossless. Exact steps are taken whatever it says of them, and of the root it
        may say anything.
        """

    def measured(self, verification: Verification) -> Tensor | None:
        """[B, M], the divergence that it gates on, for receipts; None: it gates on none."""
        return None

    def decide(self, verification: Verification) -> Decision:
        return self.descend(verification, self.passes(verification))

    def descend(self, verification: Verification, passes: Tensor, knows_kl: bool = True) -> Decision:
        """The decision to take fuzzy steps [B, N] that pass, see `restrict`."""
        fuzzy = self.candidates(verification) & passes
        known = knows_kl and self.knows_kl
        return restrict(verification, fuzzy, self.sibling, self.measured(verification), known)


def cycle_kl(
    verification: Verification,
    steps: Tensor,  # [B, N] log-probability of each node's token at its parent, averaged over the noise
    node_kl: Tensor,  # [B, M] KL of the token drawn at each node to the target's own
    descends: Tensor | None = None,  # [B, N] bool, whether drawing the node's token leads to it; None: always
) -> Tensor:  # [B]
    """KL in nats of the law of a cycle's tokens to the target's own, given the tree and all tokens before.

    By the chain rule it is the mean, over the nodes that the walk reaches, of the KL of the token drawn there;
    and the KL of a whole answer is the expected sum over its cycles.
    """
    if descends is not None:
        steps = torch.where(descends, steps, -math.inf)
    steps = torch.where(verification.is_child, steps, 0.0).clamp_min(-1e6)  # a path sum of -inf and 0 is NaN
    return (verification.path_sum(steps).exp() * node_kl).sum(-1).clamp_min(0.0).float()


def restricted_kl(
    verification: Verification,
    fuzzy: Tensor,  # [B, N] bool
) -> Tensor:  # [B]
    """`cycle_kl` of the choice among the fuzzy steps and the exact one, where it is a child.

    At a node with fuzzy steps F of target mass m and other children of mass c, the exact choice is one of those with
    probability c, and is taken; else the target's preference within F is, whatever the target chose:
    p(x) (1 - c) / m for x in F. The KL there is (1 - c) log((1 - c) / m).
    """
    steps = verification.step_log_probs
    restricted = verification.any_child(fuzzy)
    inside = verification.log_sum_of_children(torch.where(fuzzy, steps, -math.inf))  # log m
    other = verification.sum_of_children(torch.where(fuzzy, 0.0, steps.exp())).clamp_max(1.0)  # c
    lift = torch.where(restricted, torch.log1p(-other) - inside, 0.0)
    node_kl = torch.where(other < 1, (1 - other) * lift, 0.0)
    return cycle_kl(verification, torch.where(fuzzy, steps + verification.of_parent(lift), steps), node_kl)


def restrict(
    verification: Verification,
    fuzzy: Tensor,  # [B, N] bool, fuzzy steps that may be taken
    sibling: str,
    divergence: Tensor | None = None,  # [B, M], that the rule gated on
    knows_kl: bool = True,  # the fuzzy steps do not depend on the noise
) -> Decision:
    """The decision to descend wherever a fuzzy step may be taken; elsewhere the target's own.

    The exact choice, where it is a child, stays eligible beside the fuzzy steps. Among eligible siblings:

    - "target": the one the target prefers under this noise. An argmax over a subset is the overall argmax if
      the subset contains it, so exact steps stay what they were and only would-be stops change.
    - "draft": the exact choice, else the draft's most probable.
    - "longest": one that opens the longest path of eligible steps; of those the one the target prefers.
    """
    if sibling == "draft":
        scores = torch.where(fuzzy, verification.tree.scores, -math.inf)
        fuzzy = fuzzy & (scores == verification.of_parent(verification.best_child(scores)))
    eligible = fuzzy | verification.is_exact
    if sibling == "longest":
        never = -(verification.tree.max_depth + 1.0)
        eligible = verification.best_paths(torch.where(eligible, 1.0, never))
    weights = verification.only_children(eligible & verification.of_parent(verification.any_child(fuzzy)))
    if verification.greedy or not knows_kl or sibling == "longest":  # what lies below decides there, and the noise
        return Decision(weights, divergence)
    return Decision(weights, divergence, lambda: restricted_kl(verification, fuzzy))


@dataclass(frozen=True)
class Custom(Rule):
    """A user's function as a rule: from a `Verification` to a `Decision` or to log-weights [B, N, V]."""

    name: ClassVar[str] = "custom"
    reads_features: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    function: Callable[[Verification], Decision | Tensor] = field(kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def decide(self, verification: Verification) -> Decision:
        result = self.function(verification)
        expected = verification.warped_logits.shape
        if isinstance(result, Tensor) and result.shape != expected:
            raise ValueError(f"a rule must return log-weights of shape {list(expected)}, got {list(result.shape)}")
        decision = Decision(result) if isinstance(result, (Tensor, ChildWeights)) else result
        if not isinstance(decision, Decision):
            got = type(result).__name__
            raise TypeError(f"a rule returns a Decision or a Tensor of log-weights, got {got}")
        if isinstance(decision.weights, ChildWeights):
            return decision
        if decision.weights.shape != expected:
            got = list(decision.weights.shape)
            raise ValueError(f"a rule must return log-weights of shape {list(expected)}, got {got}")
        best, possible = decision.weights.amax(-1), verification.warped_logits.amax(-1) > -math.inf
        if not (best.isfinite() | ~possible).all():  # where processors leave no token, a rule has none to choose
            raise ValueError("a rule must return log-weights below inf, not NaN, and above -inf somewhere at each node")
        return decision
