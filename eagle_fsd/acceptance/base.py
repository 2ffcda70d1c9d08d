"""What an acceptance rule sees and returns, the walk that rules share, and the pieces they are made of.

B batch, N tree nodes verified (root included), E draft logit rows, V vocabulary.

A rule returns log-weights [B, N, V]. At every node the walk takes `argmax(log_weights + noise)`; if that
token is a child it descends, else it emits the token and stops. A step is *exact* where the token is the one
the target itself would have drawn with the same noise, `argmax(warped_logits + noise)`, and *fuzzy*
otherwise. Log-weights count up to a constant per node, so a rule that leaves a node alone returns that node's
warped logits bit by bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from ..divergence import get_divergence
from ..tree import DraftTree


class cached_property:
    """`functools.cached_property` without its lock (before Python 3.12), which `torch.compile` cannot trace."""

    def __init__(self, function: Callable) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> object:
        if instance is None:
            return self
        value = self.function(instance)
        object.__setattr__(instance, self.function.__name__, value)  # found before this from now on
        return value


@dataclass(frozen=True, eq=False)
class Verification:
    """One verified batch of trees, as a rule sees it.

    The helpers that return [B, N] "of a node" speak about its step, the edge from its parent; the root has
    none and its entry is False or must not be read.
    """

    tree: DraftTree
    target_logits: Tensor  # [B, N, V] float32, raw: gates and divergences use these, at temperature 1
    warped_logits: Tensor  # [B, N, V] float32, after all processors; sampling: also temperature, top-k...
    draft_logits: Tensor  # [B, E, V], raw
    noise: Tensor | None = None  # [B, N, V] Gumbel noise, the same for nodes of one depth; None = greedy

    @property
    def greedy(self) -> bool:
        return self.noise is None

    def row(self, row: int) -> "Verification":
        """One sequence of the batch, as a batch of one."""
        here = slice(row, row + 1)
        noise = None if self.noise is None else self.noise[here]
        return Verification(
            self.tree.row(row), self.target_logits[here], self.warped_logits[here], self.draft_logits[here], noise
        )

    @cached_property
    def noisy_logits(self) -> Tensor:
        """[B, N, V] warped logits plus noise: the order in which the target itself prefers tokens."""
        return self.warped_logits if self.noise is None else self.warped_logits + self.noise

    @cached_property
    def exact_choice(self) -> Tensor:
        """[B, N] long: the token the target itself draws at each node."""
        return self.noisy_logits.argmax(-1)

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N] bool: every node but the root."""
        return self.tree.depths > 0

    @cached_property
    def is_exact(self) -> Tensor:
        """[B, N] bool: the node's token is the one the target itself draws at the parent."""
        return (self.tree.tokens == self.of_parent(self.exact_choice)) & self.is_child

    @cached_property
    def step_logits(self) -> Tensor:
        """[B, N]: warped logit of the node's token at its parent."""
        return self.of_step(self.warped_logits)

    @cached_property
    def child_mask(self) -> Tensor:
        """[B, N, V] bool: the token is a child of the node."""
        nothing = torch.zeros_like(self.warped_logits, dtype=torch.bool)
        return self.set_children(nothing, torch.ones_like(self.is_child))

    @cached_property
    def has_children(self) -> Tensor:
        """[B, N] bool."""
        return self.any_child(self.is_child)

    @cached_property
    def node_draft_logits(self) -> Tensor:
        """[B, N, V]: the draft's logits for the node's children; at leaves another node's, not to be read."""
        rows = torch.arange(len(self.draft_logits), device=self.draft_logits.device)[:, None]
        return self.draft_logits[rows, self.tree.draft_rows]

    @cached_property
    def _step_index(self) -> Tensor:
        """[B, N] long: where (parent, token) lies in a flattened [N, V]."""
        return self.tree.parents * self.warped_logits.shape[-1] + self.tree.tokens

    def of_parent(
        self,
        values: Tensor,  # [B, N]
    ) -> Tensor:  # [B, N]
        """The value at each node's parent."""
        return values.gather(1, self.tree.parents)

    def of_step(
        self,
        values: Tensor,  # [B, N, V]
    ) -> Tensor:  # [B, N]
        """The value of each node's token at its parent."""
        return values.flatten(1).gather(1, self._step_index)

    def set_children(
        self,
        values: Tensor,  # [B, N, V]
        steps: Tensor,  # [B, N]
    ) -> Tensor:  # [B, N, V]
        """A copy of `values` in which each node's token holds `steps` at its parent."""
        return values.flatten(1).scatter(1, self._step_index[:, 1:], steps[:, 1:]).view_as(values)

    def best_child(
        self,
        steps: Tensor,  # [B, N] float
    ) -> Tensor:  # [B, N]
        """The largest value among each node's children, -inf at leaves."""
        lowest = torch.full_like(steps, -math.inf)
        return lowest.scatter_reduce_(1, self.tree.parents[:, 1:], steps[:, 1:], "amax")

    def any_child(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> Tensor:  # [B, N] bool
        """Whether any of the node's children has it."""
        return self.best_child(steps.float()) > 0

    def path_sum(
        self,
        steps: Tensor,  # [B, N], 0 at the root
    ) -> Tensor:  # [B, N]
        """Sum over the path from the root to each node."""
        return torch.where(self.tree.ancestors, steps[:, None, :], 0).sum(-1)

    def on_whole_path(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> Tensor:  # [B, N] bool, True at the root
        """Whether every step from the root to each node has it."""
        return (steps[:, None, :] | ~self.tree.ancestors | ~self.is_child[:, None, :]).all(-1)

    def best_paths(
        self,
        gains: Tensor,  # [B, N] float
    ) -> Tensor:  # [B, N] bool
        """The children that open their parent's best downward path: the largest summed gain, if positive.

        A path may stop at any node. A step that must never be taken has gain -(max_depth + 1) when no gain
        exceeds 1: whatever lies below cannot make up for it.
        """
        totals = self.path_sum(torch.where(self.is_child, gains, 0))
        best_below = torch.where(self.tree.ancestors, totals[:, :, None], -math.inf).amax(1)  # [B, N]
        is_best = best_below == self.of_parent(self.best_child(best_below))
        return is_best & (best_below > self.of_parent(totals)) & self.is_child

    def keep_only(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> Tensor:  # [B, N, V]
        """Warped logits in which a node with such children keeps only those; other nodes are left alone."""
        restricted = self.any_child(steps)
        log_weights = self.warped_logits + torch.where(restricted, -math.inf, 0.0)[..., None]
        kept = steps | ~self.of_parent(restricted)
        return self.set_children(log_weights, torch.where(kept, self.step_logits, -math.inf))

    def in_head(
        self,
        head_guard: float,  # alpha in [0, 1]
    ) -> Tensor:  # [B, N] bool
        """Steps with target probability >= (1 - alpha) * the target's best, at temperature 1."""
        slack = math.log1p(-head_guard) if head_guard < 1 else -math.inf
        return self.of_step(self.target_logits) >= self.of_parent(self.target_logits.amax(-1) + slack)

    def divergence(self, name: str) -> Tensor:
        """[B, N]: target-draft divergence at nodes with children; at leaves NaN, which passes no gate."""
        measure = get_divergence(name)
        # To skip the leaves would be to wait for the device.
        if torch.compiler.is_compiling() or not self.target_logits.is_cpu:
            values = measure(self.target_logits, self.node_draft_logits)
            return torch.where(self.has_children, values, math.nan)
        rows, nodes = self.has_children.nonzero(as_tuple=True)
        draft_logits = self.draft_logits[rows, self.tree.draft_rows[rows, nodes]]
        values = torch.full_like(self.step_logits, math.nan)
        values[rows, nodes] = measure(self.target_logits[rows, nodes], draft_logits)
        return values


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


def check_interval(label: str, value: object, upper: float, closed: bool) -> None:
    """Raise unless 0 <= value <= upper (or < upper)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{label} must be a number, got {value!r}")
    if not (0 <= value < upper or (closed and value == upper)):
        raise ValueError(f"{label} must lie in [0, {upper:g}{']' if closed else ')'}, got {value!r}")


def check_choice(label: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{label} must be one of {', '.join(accepted)}, got {value!r}")


@dataclass(frozen=True)
class Rule(ABC):
    """An acceptance rule with its dial; a larger threshold accepts more.

    Subclasses say where they are lossless and decide elsewhere, so that a lossless setting is the target's
    own choice by construction, whatever a divergence or a probability rounds to.
    """

    name: ClassVar[str]
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, False)  # upper end, and whether it is accepted
    reads_draft: ClassVar[bool] = True  # whether it looks at the draft's distribution, and not at the tree alone
    knows_kl: ClassVar[bool] = True  # whether decisions carry the KL of their law when sampling

    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_interval(f"threshold of rule {self.name!r}", self.threshold, *self.threshold_limit)

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


def cycle_kl(
    verification: Verification,
    log_probs: Tensor,  # [B, N, V], the law of the token drawn at each node, averaged over the noise
    descends: Tensor | None = None,  # [B, N] bool, whether drawing the node's token leads to it; None: always
) -> Tensor:  # [B]
    """KL in nats of the law of a cycle's tokens to the target's own, given the tree and all tokens before.

    By the chain rule it is the mean, over the nodes that the walk reaches, of the KL of the token drawn there;
    and the KL of a whole answer is the expected sum over its cycles.
    """
    target = verification.warped_logits.log_softmax(-1)
    excess = torch.where(log_probs > -math.inf, log_probs - target, 0.0)
    node_kl = (log_probs.exp() * excess).sum(-1)
    steps = verification.of_step(log_probs)
    if descends is not None:
        steps = torch.where(descends, steps, -math.inf)
    steps = torch.where(verification.is_child, steps, 0.0).clamp_min(-1e6)  # a path sum of -inf and 0 is NaN
    return (verification.path_sum(steps).exp() * node_kl).sum(-1).clamp_min(0.0)


def restricted_law(
    verification: Verification,
    fuzzy: Tensor,  # [B, N] bool
) -> Tensor:  # [B, N, V]
    """Log-probabilities of the choice among the fuzzy steps and the exact one, where it is a child.

    At a node with fuzzy steps F of target mass m and other children of mass c, the exact choice is one of those with
    probability c, and is taken; else the target's preference within F is, whatever the target chose:
    p(x) (1 - c) / m for x in F.
    """
    log_probs = verification.warped_logits.log_softmax(-1)
    steps = verification.of_step(log_probs)
    nothing = torch.full_like(log_probs, -math.inf)
    inside = verification.set_children(nothing, torch.where(fuzzy, steps, -math.inf)).logsumexp(-1)  # log m
    other = verification.set_children(nothing, torch.where(fuzzy, -math.inf, steps)).logsumexp(-1).exp()  # c
    lift = torch.log1p(-other.clamp_max(1.0)) - inside
    restricted = verification.any_child(fuzzy)
    law = torch.where(restricted[..., None], nothing, log_probs)
    lifted = torch.where(fuzzy, steps + verification.of_parent(lift), steps)
    return verification.set_children(law, lifted)


def restrict(
    verification: Verification,
    fuzzy: Tensor,  # [B, N] bool, fuzzy steps that may be taken
    sibling: str,
    divergence: Tensor | None = None,  # [B, N], that the rule gated on
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
    log_weights = verification.keep_only(eligible & verification.of_parent(verification.any_child(fuzzy)))
    if verification.greedy or sibling == "longest":  # what lies below decides there, and with it the noise
        return Decision(log_weights, divergence)
    return Decision(log_weights, divergence, lambda: cycle_kl(verification, restricted_law(verification, fuzzy)))


@dataclass(frozen=True)
class Custom(Rule):
    """A user's function as a rule: from a `Verification` to a `Decision` or to log-weights [B, N, V]."""

    name: ClassVar[str] = "custom"

    function: Callable[[Verification], Decision | Tensor] = field(kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def decide(self, verification: Verification) -> Decision:
        result = self.function(verification)
        expected = verification.warped_logits.shape
        if isinstance(result, Tensor) and result.shape != expected:
            raise ValueError(f"a rule must return log-weights of shape {list(expected)}, got {list(result.shape)}")
        decision = Decision(result) if isinstance(result, Tensor) else result
        if not isinstance(decision, Decision):
            got = type(result).__name__
            raise TypeError(f"a rule returns a Decision or a Tensor of log-weights, got {got}")
        if decision.log_weights.shape != expected:
            got = list(decision.log_weights.shape)
            raise ValueError(f"a rule must return log-weights of shape {list(expected)}, got {got}")
        best, possible = decision.log_weights.amax(-1), verification.warped_logits.amax(-1) > -math.inf
        if not (best.isfinite() | ~possible).all():  # where processors leave no token, a rule has none to choose
            raise ValueError("a rule must return log-weights below inf, not NaN, and above -inf somewhere at each node")
        return decision
