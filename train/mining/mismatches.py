"""Mismatches as exact decoding meets them: where a walk stops although the tree had a child that a loose rule takes.

B requests of a batch, N tree nodes, V vocabulary, D hidden size of the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from eagle_fsd.acceptance import Decision, Rule, Verification, Walk, walk
from eagle_fsd.acceptance.budget import EXACT_RULE
from eagle_fsd.acceptance.judge import SIGNALS, step_signals
from eagle_fsd.quality.traces import by_request

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
    """Decodes exactly, as a rule for `generate`, and notes the mismatches of each cycle.

    The substitute is the target's best child of the node where the walk stops, if its probability is at least `floor`
    times that of the target's own token.

    Args:
        floor: in (0, 1].
        width: D; wider features (an EAGLE-3 head reads several layers) end with the last layer.
        cycles: of each call what was found in each row: (accepted tokens, mismatch or None), whose `at` counts from
            the cycle's first token.
    """

    name: ClassVar[str] = "miner"
    reads_features: ClassVar[bool] = True

    floor: float = field(kw_only=True)
    width: int = field(kw_only=True)
    cycles: list[list[tuple[int, Mismatch | None]]] = field(default_factory=list, kw_only=True)

    def is_lossless(self, greedy: bool) -> bool:
        return False  # as far as the engine is concerned: it would not put the draft's logits together

    def decide(self, verification: Verification) -> Decision:
        decision = EXACT_RULE(verification)
        walked = walk(verification, decision)
        steps = verification.of_step(verification.target_logits)  # [B, N]
        best = verification.of_parent(verification.target_logits.amax(-1))
        stops = verification.is_child & (verification.tree.parents == walked.last[:, None])
        loose = stops & (steps - best >= math.log(self.floor))  # p(x) >= floor * p of the best
        found = torch.where(loose, steps, -math.inf).max(-1)
        rows = zip(walked.length.tolist(), found.indices.tolist(), loose.any(-1).tolist(), strict=True)
        self.cycles.append([
            (length, self._mismatch(verification, walked, row, child) if any_loose else None)
            for row, (length, child, any_loose) in enumerate(rows)
        ])
        return decision

    def _mismatch(self, verification: Verification, walked: Walk, row: int, child: int) -> Mismatch:
        last = walked.last[row].item()
        here = alone(verification, row, last, child)
        values = dict(zip(SIGNALS, step_signals(here)[0, 1].tolist(), strict=True))
        values |= {name: here.divergence(name)[0, 0].item() for name in DIVERGENCES}
        top = here.target_logits[0, 0].topk(3).values.double()
        three, parts = top.log_softmax(-1), top - here.target_logits[0, 0].double().logsumexp(-1)
        values |= {"entropy_top3": -(three.exp() * three).sum().item(),  # as `fly` renormalised, and not
                   "entropy_top3_parts": -(parts.exp() * parts).sum().item(), "log_ratio": (top[1] - top[0]).item(),
                   "own_steps": own_steps(verification, row, child)}
        features = verification.features[row, [last, child], -self.width :].cpu()
        return Mismatch(walked.length[row].item(), walked.choice[row, last].item(),
                        verification.tree.tokens[row, child].item(),
                        {name: min(value, LARGEST) for name, value in values.items()}, features)


def alone(verification: Verification, row: int, node: int, child: int) -> Verification:
    """A node of one row with one of its children, as a tree of two."""
    own = slice(row, row + 1)
    return Verification(
        verification.tree.family(row, [node, child]), verification.target_logits[own, node, None],
        verification.warped_logits[own, node, None], verification.own_logits[own], None, verification.draft_tokens)


def own_steps(verification: Verification, row: int, node: int) -> int:
    """How many steps the tree has below the node that are the target's own, one after the other."""
    parents, exact = verification.tree.parents[row].tolist(), verification.is_exact[row].tolist()
    count = 0
    while True:
        below = next((n for n, parent in enumerate(parents) if n and parent == node and exact[n]), None)
        if below is None:
            return count
        node, count = below, count + 1


def placed(
    cycles: list[list[tuple[int, Mismatch | None]]], counts: list[int]
) -> Iterator[list[Mismatch]]:
    """The mismatches of each request, at their places in what was generated.

    Args:
        counts: how many cycles each request took.
    """
    for rows in by_request(cycles, counts):
        begin, found = 1, []  # the first token comes without a cycle
        for length, mismatch in rows:
            if mismatch is not None:
                found.append(Mismatch(begin + length, mismatch.own, mismatch.substitute, mismatch.signals,
                                      mismatch.features))
            begin += length + 1
        yield found
