"""What an acceptance rule sees of a verified batch of trees.

B batch, N tree nodes verified (root included), E draft logit rows, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trees.tree import DraftTree
from .divergence import get_divergence


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
