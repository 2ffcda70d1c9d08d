"""What an acceptance rule sees of a verified batch of trees.

B batch, N tree nodes verified (root included), M of them with logits, E draft logit rows, V vocabulary, R the draft's,
F width of the target's features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..drafting.largest import first_largest
from ..drafting.tree import DraftTree
from .divergence import get_divergence, widen

IN_CACHE = 1 << 17  # numbers: on a CPU a divergence takes several times as long once its steps leave the cache


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

    What is said of a node is [B, M], what is said of its step, the edge from its parent, [B, N]; the root has none and
    its entry is False or must not be read. M = N, but for a rule that does not look ahead, which may be asked about one
    node at a time: the tree is then that node with its children, and only the node has logits, M = 1.
    The tokens from the root to node n of row b are `tree.tokens[b, tree.ancestors[b, n]]`.
    """

    tree: DraftTree
    target_logits: Tensor  # [B, M, V] float32, raw: gates and divergences use these, at temperature 1
    warped_logits: Tensor  # [B, M, V] float32, after all processors; sampling: also temperature, top-k...
    own_logits: Tensor  # [B, E, R], of the draft, raw
    noise: Tensor | None = None  # [B, M, V] Gumbel noise, the same for nodes of one depth; None = greedy
    draft_tokens: Tensor | None = None  # [R] long, the tokens that `own_logits` are of; None: all, R = V
    features: Tensor | None = None  # [B, N, F], the target's at each node; None: not a rule that `reads_features`
    # For a rule with a memory (`Rule.remembers`), else None: what it may go by of the request so far.
    regret: Tensor | None = None  # [B] float64, logits given up by its fuzzy tokens, see `Budget.regret`
    said: Tensor | None = None  # [B] long, tokens of its answer: the root's included
    answers: Tensor | None = None  # [B, T] long, these tokens; shorter ones end with -1

    @property
    def greedy(self) -> bool:
        return self.noise is None

    def row(self, row: int) -> "Verification":
        """One sequence of the batch, as a batch of one."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        mine = {name: part[row : row + 1] for name, part in parts.items()
                if isinstance(part, Tensor) and name != "draft_tokens"}
        return Verification(**{**parts, **mine, "tree": self.tree.row(row)})

    @cached_property
    def draft_logits(self) -> Tensor:
        """[B, E, V]: the draft's raw logits, -inf for tokens that it cannot name."""
        if self.draft_tokens is None:
            return self.own_logits
        return widen(self.own_logits, self.draft_tokens, self.target_logits.shape[-1])

    @cached_property
    def noisy_logits(self) -> Tensor:
        """[B, M, V] warped logits plus noise: the order in which the target itself prefers tokens."""
        return self.warped_logits if self.noise is None else self.warped_logits + self.noise

    @cached_property
    def exact_choice(self) -> Tensor:
        """[B, M] long: the token the target itself draws at each node."""
        return first_largest(self.noisy_logits)

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
    def step_log_probs(self) -> Tensor:
        """[B, N] float64: log-probability of the node's token at its parent, after all processors."""
        return self.step_logits.double() - self.of_parent(self.warped_logits.logsumexp(-1)).double()

    @cached_property
    def child_mask(self) -> Tensor:
        """[B, M, V] bool: the token is a child of the node."""
        nothing = torch.zeros_like(self.warped_logits, dtype=torch.bool)
        return self.set_children(nothing, torch.ones_like(self.is_child))

    @cached_property
    def has_children(self) -> Tensor:
        """[B, M] bool."""
        return self.any_child(self.is_child)

    @cached_property
    def node_draft_logits(self) -> Tensor:
        """[B, M, V]: the draft's logits for the node's children; at leaves another node's, not to be read."""
        return self._of_draft(self.draft_logits)

    @cached_property
    def _step_index(self) -> Tensor:
        """[B, N] long: where (parent, token) lies in a flattened [M, V]."""
        return self.tree.parents * self.warped_logits.shape[-1] + self.tree.tokens

    def of_parent(
        self,
        values: Tensor,  # [B, M]
    ) -> Tensor:  # [B, N]
        """The value at each node's parent."""
        return values.gather(1, self.tree.parents)

    def of_step(
        self,
        values: Tensor,  # [B, M, V]
    ) -> Tensor:  # [B, N]
        """The value of each node's token at its parent."""
        return values.flatten(1).gather(1, self._step_index)

    def set_children(
        self,
        values: Tensor,  # [B, M, V]
        steps: Tensor,  # [B, N]
    ) -> Tensor:  # [B, M, V]
        """A copy of `values` in which each node's token holds `steps` at its parent."""
        return values.flatten(1).scatter(1, self._step_index[:, 1:], steps[:, 1:]).view_as(values)

    def best_child(
        self,
        steps: Tensor,  # [B, N] float
    ) -> Tensor:  # [B, M]
        """The largest value among each node's children, -inf at leaves."""
        lowest = steps.new_full(self.target_logits.shape[:2], -math.inf)
        return lowest.scatter_reduce_(1, self.tree.parents[:, 1:], steps[:, 1:], "amax")

    def sum_of_children(
        self,
        steps: Tensor,  # [B, N] float
    ) -> Tensor:  # [B, M]
        """The sum over each node's children, 0 at leaves."""
        nothing = steps.new_zeros(self.target_logits.shape[:2])
        return nothing.scatter_add_(1, self.tree.parents[:, 1:], steps[:, 1:])

    def log_sum_of_children(
        self,
        steps: Tensor,  # [B, N] float
    ) -> Tensor:  # [B, M]
        """log of the sum of exp(steps) over each node's children, -inf at leaves."""
        highest = self.best_child(steps).nan_to_num(nan=math.nan, neginf=0.0)
        return self.sum_of_children((steps - self.of_parent(highest)).exp()).log() + highest

    def any_child(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> Tensor:  # [B, M] bool
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

    def only_children(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> "ChildWeights":
        """Log-weights by which a node with such children draws one of them; other nodes are left alone."""
        restricted = self.any_child(steps)
        kept = steps | ~self.of_parent(restricted)
        return ChildWeights(
            self, torch.where(kept, self.step_logits, -math.inf), torch.where(restricted, -math.inf, 0.0)
        )

    def keep_only(
        self,
        steps: Tensor,  # [B, N] bool
    ) -> Tensor:  # [B, M, V]
        """`only_children`, written out: warped logits in which such children's siblings are -inf, and all else."""
        return self.only_children(steps).dense()

    def in_head(
        self,
        head_guard: float,  # alpha in [0, 1]
    ) -> Tensor:  # [B, N] bool
        """Steps with target probability >= (1 - alpha) * the target's best, at temperature 1."""
        slack = math.log1p(-head_guard) if head_guard < 1 else -math.inf
        return self.of_step(self.target_logits) >= self.of_parent(self.target_logits.amax(-1) + slack)

    def divergence(self, name: str) -> Tensor:
        """[B, M]: target-draft divergence at nodes with children; at leaves NaN, which passes no gate."""
        if name not in self._divergences:  # a rule, its gates and the receipts ask for the same one
            self._divergences[name] = self._divergence(name)
        return self._divergences[name]

    @cached_property
    def _divergences(self) -> dict[str, Tensor]:
        return {}

    def _divergence(self, name: str) -> Tensor:
        measure = get_divergence(name, self.draft_tokens)
        # To skip the leaves would be to wait for the device.
        if torch.compiler.is_compiling() or not self.target_logits.is_cpu:
            values = measure(self.target_logits, self._of_draft(self.own_logits))
            return torch.where(self.has_children, values, math.nan)
        values = self.target_logits.new_full(self.target_logits.shape[:2], math.nan)
        asked = self.has_children.nonzero()
        for part in asked.split(max(1, IN_CACHE // self.target_logits.shape[-1])):
            rows, nodes = part.unbind(1)
            own = self.own_logits[rows, self.tree.draft_rows[rows, nodes]]
            values[rows, nodes] = measure(self.target_logits[rows, nodes], own)
        return values

    def _of_draft(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, M, ...] that predict each node's children, of [B, E, ...]."""
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        return logits[rows, self.tree.draft_rows[:, : self.target_logits.shape[1]]]


@dataclass(frozen=True, eq=False)
class ChildWeights:
    """Log-weights that differ from the target's warped logits in a way that only the children tell apart.

    What is drawn is then a child or the token that the target itself draws, provided that a child loses no more than
    the other tokens do, and [B, N] and [B, M] say it in place of [B, M, V].
    """

    verification: Verification
    steps: Tensor  # [B, N] log-weight of each node's token at its parent
    others: Tensor  # [B, M] at most 0, added to the warped logits of all other tokens

    def dense(self) -> Tensor:
        """[B, M, V] log-weights."""
        return self.verification.set_children(self.verification.warped_logits + self.others[..., None], self.steps)

    def draw(self) -> Tensor:
        """[B, M] long: the token of the largest log-weight plus noise, the first of equal ones."""
        verification, tokens = self.verification, self.verification.tree.tokens
        exact = verification.exact_choice
        steps, own = self.steps, verification.warped_logits.gather(-1, exact[..., None])[..., 0] + self.others
        if verification.noise is not None:
            steps = steps + verification.of_step(verification.noise)
            own = own + verification.noise.gather(-1, exact[..., None])[..., 0]
        own = torch.where(verification.any_child(verification.is_exact), -math.inf, own)  # it has a step
        best = verification.best_child(steps)  # [B, M]
        none = verification.warped_logits.shape[-1]
        tied = torch.where(steps == verification.of_parent(best), tokens, none)
        first = torch.full_like(exact, none).scatter_reduce_(1, verification.tree.parents[:, 1:], tied[:, 1:], "amin")
        return torch.where((best > own) | (best == own) & (first < exact), first, exact)
