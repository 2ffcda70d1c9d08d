"""Mismatches as exact decoding meets them: where a walk stops although the tree had a child that a loose rule takes.

N tree nodes, V vocabulary, D hidden size of the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from eagle_fsd.acceptance import Decision, Rule, Verification, Walk, walk
from eagle_fsd.acceptance.budget import EXACT_RULE
from eagle_fsd.acceptance.judge import SIGNALS, step_signals

DIVERGENCES = tuple(f"{name}{top}" for name in ("kl", "reverse_kl", "js", "tv") for top in ("", "_top10"))
LARGEST = 1e9  # in place of an infinite divergence, which JSON does not know


@dataclass(frozen=True)
class Mismatch:
    """A place where another token could have been taken.

    Args:
        at: index in the answer. own, substitute: the target's token there and the tree's.
        signals: by name, in nats but for tv (a share), and own_steps: how many tokens below the substitute in the tree
            are the target's own.
        features: [2, D] of the target, last layer: at the node before and at the substitute's.
    """

    at: int
    own: int
    substitute: int
    signals: dict[str, float]
    features: Tensor


@dataclass(frozen=True, eq=False)
class Miner(Rule):
    """Decodes one request exactly, as its rule, and notes the mismatches.

    The substitute is the target's best child of the node where the walk stops, if its probability is at least `floor`
    times that of the target's own token.

    Args:
        floor: in (0, 1].
        width: D; wider features (an EAGLE-3 head reads several layers) end with the last layer.
        mismatches: what was found.
    """

    name: ClassVar[str] = "miner"
    reads_features: ClassVar[bool] = True
    remembers: ClassVar[bool] = True  # how much was said

    floor: float = field(kw_only=True)
    width: int = field(kw_only=True)
    mismatches: list[Mismatch] = field(default_factory=list, kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False  # as far as the engine is concerned: it would not put the draft's logits together

    def decide(self, verification: Verification) -> Decision:
        decision = EXACT_RULE(verification)
        walked = walk(verification, decision)
        steps = verification.of_step(verification.target_logits)  # [B, N]
        best = verification.of_parent(verification.target_logits.amax(-1))
        stops = verification.is_child & (verification.tree.parents == walked.last[:, None])
        loose = stops & (steps - best >= math.log(self.floor))  # p(x) >= floor * p of the best
        if loose.any():
            child = torch.where(loose, steps, -math.inf).argmax().item()
            self.mismatches.append(self._mismatch(verification, walked, child))
        return decision

    def _mismatch(self, verification: Verification, walked: Walk, child: int) -> Mismatch:
        assert verification.features is not None and verification.said is not None
        last = walked.last.item()
        here = alone(verification, last, child)
        values = dict(zip(SIGNALS, step_signals(here)[0, 1].tolist(), strict=True))
        values |= {name: here.divergence(name)[0, 0].item() for name in DIVERGENCES}
        top = here.target_logits[0, 0].topk(3).values.double()
        three, parts = top.log_softmax(-1), top - here.target_logits[0, 0].double().logsumexp(-1)
        values |= {"entropy_top3": -(three.exp() * three).sum().item(),  # as `fly` renormalised, and not
                   "entropy_top3_parts": -(parts.exp() * parts).sum().item(), "log_ratio": (top[1] - top[0]).item(),
                   "own_steps": own_steps(verification, child)}
        features = verification.features[0, [last, child], -self.width :].cpu()
        return Mismatch((verification.said + walked.length).item(), walked.choice[0, last].item(),
                        verification.tree.tokens[0, child].item(),
                        {name: min(value, LARGEST) for name, value in values.items()}, features)


def alone(verification: Verification, node: int, child: int) -> Verification:
    """A node of the only row with one of its children, as a tree of two."""
    return Verification(
        verification.tree.family(0, [node, child]), verification.target_logits[:, node, None],
        verification.warped_logits[:, node, None], verification.own_logits, None, verification.draft_tokens)


def own_steps(verification: Verification, node: int) -> int:
    """How many steps the tree of the only row has below the node that are the target's own, one after the other."""
    parents, exact = verification.tree.parents[0].tolist(), verification.is_exact[0].tolist()
    count = 0
    while True:
        below = next((n for n, parent in enumerate(parents) if n and parent == node and exact[n]), None)
        if below is None:
            return count
        node, count = below, count + 1
