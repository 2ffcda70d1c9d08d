"""Fuzzy acceptance outside of code."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .rule import GatingRule, preferred
from .verification import Verification

FENCE = 3  # backticks in a row begin a block, or end it
BEFORE, INSIDE, BEHIND = range(3)  # where a text has come to: in front of its first block, in a block, past its end
STATES = 3 * FENCE  # the place times 3, plus the backticks that the text ends with and that may become a fence


def moves_of(text: str) -> list[int]:
    """[STATES], where a text leads from each state."""
    found = []
    for state in range(STATES):
        place, ticks = divmod(state, FENCE)
        for letter in text:
            ticks = ticks + 1 if letter == "`" else 0
            if ticks == FENCE:
                place, ticks = BEHIND if place == INSIDE else INSIDE, 0
        found.append(FENCE * place + ticks)
    return found


@dataclass(frozen=True, eq=False)
class Marks:
    """What each token of a vocabulary does to the place in an answer: a fence may be one token or several.

    Args:
        moves: [V, STATES] uint8, `moves_of` its text.
        ticked: [V] bool, whether it has backticks.
    """

    moves: Tensor
    ticked: Tensor

    @classmethod
    def of(cls, texts: Iterable[tuple[int, str]], size: int, device: torch.device | None = None) -> "Marks":
        """Of `size` tokens with these texts; what is not named has no backticks."""
        moves = torch.tensor(moves_of("x"), dtype=torch.uint8).repeat(size, 1)
        ticked = torch.zeros(size, dtype=torch.bool)
        for token, text in texts:
            if "`" in text and token < size:
                moves[token], ticked[token] = torch.tensor(moves_of(text)), True
        return cls(moves.to(device), ticked.to(device))


def after_all(
    moves: Tensor,  # [B, T, STATES] long, T >= 1
) -> Tensor:  # [B]
    """The state of a text that begins in state 0 and makes these moves: two neighbours are as one, again and again."""
    stay = torch.arange(STATES, device=moves.device)
    while moves.shape[1] > 1:
        if moves.shape[1] % 2:
            moves = torch.cat([moves, stay.expand(len(moves), 1, -1)], 1)
        moves = moves[:, 1::2].gather(-1, moves[:, ::2])
    return moves[:, 0, 0]


@dataclass(frozen=True)
class Prose(GatingRule):
    """Allow a child whose log-probability is within T of the target's best, outside of fenced code blocks only.

    Where a token stands is told by three backticks in a row in the answer before it, be they one token or several, the
    path through the tree included; other fences (tildes, four backticks around three) are not known. The prompt does
    not count, so an answer that goes on with a block that the prompt has begun is taken for prose, as is one that is
    code without a fence. A token with a backtick is never exchanged, in neither direction: where blocks begin and end
    is the target's own. Of each node's children only the one that the target prefers is taken, whatever the dial. What
    it spares is measured in docs/fuzzy.md.

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
    open_places: ClassVar[tuple[int, ...]] = (BEFORE, BEHIND)

    marks: Marks | None = field(default=None, kw_only=True, repr=False)

    def is_lossless(self, greedy: bool) -> bool:
        return self.threshold == 0

    def passes(self, verification: Verification) -> Tensor:
        if self.marks is None:
            raise ValueError(f"rule {self.name!r} needs a pair that has a tokenizer, and was asked without one")
        places = self.states(verification) // FENCE  # [B, N]
        is_open = torch.stack([places == place for place in self.open_places]).any(0)
        plain = ~self.marks.ticked.to(places.device)
        text = plain[verification.tree.tokens] & verification.of_parent(plain[verification.exact_choice] & is_open)
        steps = verification.of_step(verification.target_logits)
        near = steps >= verification.of_parent(verification.target_logits.amax(-1)) - self.threshold
        return near & text & preferred(
            verification, self.candidates(verification), verification.of_step(verification.noisy_logits))

    def states(self, verification: Verification) -> Tensor:
        """[B, N] long: the state behind each node's token."""
        tree, moves = verification.tree, self.marks.moves.to(verification.target_logits.device)
        stay = torch.arange(STATES, device=moves.device)
        states = torch.zeros_like(tree.tokens)
        if verification.answers is not None:
            said = moves[verification.answers.clamp_min(0)].long()
            said = after_all(torch.where((verification.answers >= 0)[..., None], said, stay))
            states = said[:, None].expand_as(tree.tokens)
        own = torch.where(verification.is_child[..., None], moves[tree.tokens].long(), stay)
        for _ in range(tree.max_depth):  # right down to one more level each time
            states = own.gather(-1, verification.of_parent(states)[..., None])[..., 0]
        return states
