"""Fuzzy acceptance outside of code."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .rule import GatingRule, preferred
from .verification import Verification

FENCE, TICK = "```", "`"
PLAIN, TICKED, TURNING = 0, 1, 2  # what a token's text does: nothing, has backticks, begins or ends a block


def mark_of(text: str) -> int:
    """What a token's text does: one of the three above."""
    return TURNING if text.count(FENCE) % 2 else TICKED if TICK in text else PLAIN


@dataclass(frozen=True, eq=False)
class Marks:
    """What each token does.

    Args:
        of: [V] long, `mark_of` each token's text.
    """

    of: Tensor


@dataclass(frozen=True)
class Prose(GatingRule):
    """Allow a child whose log-probability is within T of the target's best, outside of fenced code blocks only.

    A token is inside where an odd number of tokens before it in the answer, the path through the tree included, begin
    or end a block; the prompt does not count, so an answer that goes on with a block that the prompt has begun is taken
    for prose, as is one that is code without a fence. A token with a backtick is never exchanged, in neither direction:
    where blocks begin and end is the target's own. Of each node's children only the one that the target prefers is
    taken, whatever the dial. What it spares is measured in docs/fuzzy.md.

    Args:
        threshold: T >= 0 in nats; 0 is lossless, inf allows whatever the tree holds, as it does behind a + by default.
        marks: what each token does; None: decoding with a pair takes its tokenizer's.
    """

    name: ClassVar[str] = "prose"
    reads_draft: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True  # not ahead but back: a node alone has no path
    knows_kl: ClassVar[bool] = False  # which child is preferred depends on the noise
    gate_default: ClassVar[float] = math.inf
    threshold_limit: ClassVar[tuple[float, bool]] = (math.inf, True)
    threshold_scale: ClassVar[float] = 4.0

    marks: Marks | None = field(default=None, kw_only=True, repr=False)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        if self.marks is None:
            raise ValueError("rule 'prose' is decoded with a pair that has a tokenizer, and was asked without one")
        marks = self.marks.of.to(verification.target_logits.device)
        mine = marks[verification.tree.tokens]  # [B, N]
        turns = verification.path_sum(torch.where(verification.is_child, (mine == TURNING).double(), 0.0))
        if verification.answers is not None:
            said = (verification.answers >= 0) & (marks[verification.answers.clamp_min(0)] == TURNING)
            turns = turns + said.sum(-1, keepdim=True)
        text = (mine == PLAIN) & verification.of_parent((marks[verification.exact_choice] == PLAIN) & (turns % 2 == 0))
        steps = verification.of_step(verification.target_logits)
        near = steps >= verification.of_parent(verification.target_logits.amax(-1)) - self.threshold
        return near & text & preferred(
            verification, self.candidates(verification), verification.of_step(verification.noisy_logits))
