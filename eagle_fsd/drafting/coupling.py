"""Drafting with the target's own noise, for requests that sample.

At temperature T the target draws argmax(log p + T G), with Gumbel noise G that is a function of seed and position
(`noise.py`). So the noise is known before anything is drafted, and the children of a node are the largest log q + w T G
instead of the largest log q: where the draft's q is near p, the target's draw is among them. What is drawn does not
depend on what was drafted, so the law of a lossless rule and its tokens for a seed stay as they are. With w = 1 a
single draft is accepted with a probability of at least (1 - TV) / (1 + TV) at temperature 1 (Gumbel coupling: Daliri,
Musco and Suresh 2024, arXiv 2408.07978; several drafts: 2506.05632; the races of 2504.15475 are the same in other
words). That needs acceptance if and only if drawn token and child are equal, as in our walk; under the test u < p / q,
shared noise changes the law.

Why w < 1: a head that is right on average is flatter than the target is at any one place. Let log p = log q / w + s E
with Gumbel errors E. Draws that follow q on average then want w = 1 / sqrt(1 + s^2), 0.7 for the errors of our heads
(`WEIGHT`), and the target draws token x with probability proportional to exp((log q + w T G) / s) at x. That is the
score of a node, with s = `TreeConfig.draft_temperature` at every temperature; at 0 it is the score of greedy decoding.

B rows, K nodes of a level, R tokens that the draft can name, M copied tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .noise import gumbel_at, gumbel_noise
from .text import Copies

TOGETHER = 4  # depths whose noise is computed in one go, in half of the time that they take one by one
WEIGHT = 0.7  # w: between the best for SmolLM2's head (0.8) and Qwen2.5-Coder's (0.5), docs/performance.md


@dataclass(frozen=True)
class Coupling:
    """The target's draws in one cycle of a batch, as far as they are known before it.

    Args:
        seeds, temperatures: of each row. lengths: L of each row, the position of its root. weights: w of each row.
        warpers: temperature and truncation of each row, which have no context; None: the row is greedy, or its rule
            wants the most probable children.
        tokens: those that the draft can name, or how many there are.
    """

    seeds: Tensor  # [B]
    lengths: Tensor  # [B]
    temperatures: Tensor  # [B] float32
    weights: Tensor  # [B] float32
    warpers: Sequence[LogitsProcessorList | None]
    tokens: int | Tensor  # [R]
    # [B, 1, R] of the depths that were asked for, weighted
    known: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def _noise(self, depth: int) -> Tensor:  # [B, 1, R]
        if depth not in self.known:
            ahead = torch.arange(depth + 1, depth + 1 + TOGETHER, device=self.lengths.device)
            noise = gumbel_noise(self.seeds, self.lengths[:, None] + ahead, self.tokens)  # [B, TOGETHER, R]
            self.known.update(enumerate((noise * self.weights[:, None, None]).split(1, 1), depth))
        return self.known[depth]

    def perturb(
        self,
        logits: Tensor,  # [B, K, R] float32, the draft's, of nodes of one depth
        depth: int,
    ) -> Tensor:  # [B, K, R]
        """log q + w T G for the children of these nodes; the logits of rows that are not coupled as they are."""
        noise = self._noise(depth)  # [B, 1, R]
        scale = self.temperatures[:, None, None]
        if all(warpers is self.warpers[0] for warpers in self.warpers):
            return (_warped(self.warpers[0], logits) + noise) * scale
        rows = [level if warpers is None else (_warped(warpers, level) + noise[row]) * scale[row]
                for row, (level, warpers) in enumerate(zip(logits, self.warpers, strict=True))]
        return torch.stack(rows)


def _warped(warpers: LogitsProcessorList, logits: Tensor) -> Tensor:  # [..., R]
    return warpers(None, logits.flatten(0, -2).clone()).view_as(logits) if warpers else logits


def couple_copies(copies: Copies, seed: int, length: int) -> Copies:
    """The same with scores that know the noise of each copied token.

    A token that is accepted with probability r, whatever the noise, is drawn with probability
    exp(-(1 - r) / r * exp(-g)) where its noise is g: then the largest of all others is Gumbel(log(1 - r)).

    Args:
        length: L, the position of the root.
    """
    depths: list[int] = []
    for parent in copies.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    noise = gumbel_at(seed, length + torch.tensor(depths), torch.tensor(copies.tokens)).tolist()
    scores: list[float] = []
    for copy, (parent, score, matched) in enumerate(zip(copies.parents, copies.scores, copies.matched, strict=True)):
        above, now = (0.0, 0.0) if parent < 0 else (copies.scores[parent], scores[parent])
        step = min(0.0, score - above)
        if matched:  # what a grammar forces has no rival
            step = math.expm1(step) * math.exp(-step - noise[copy])
        scores.append(now + step)
    return copies._replace(scores=scores)
