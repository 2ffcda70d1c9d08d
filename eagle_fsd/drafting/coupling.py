"""Drafting with the target's own noise, for requests that sample.

Let p be the target's next-token distribution at temperature 1, and q the draft's. At temperature T the target draws
argmax(log p + T G), with Gumbel noise G that is a function of seed and position (`noise.py`). The noise is therefore
known before drafting, and the children of a node can be the largest log q + w T G instead of the largest log q. If q is
near p, the target's draw is among them. The draw does not depend on the draft, so a lossless rule keeps its
distribution, and its tokens for a seed. With w = 1 and one draft the acceptance rate is at least (1 - TV) / (1 + TV) at
temperature 1 (Gumbel coupling: Daliri, Musco and Suresh 2024, arXiv 2408.07978; several drafts: 2506.05632; the races
of 2504.15475 are equivalent). This requires a walk that accepts a child if and only if it equals the drawn token, as
ours does; under the test u < p / q, shared noise changes the distribution.

Why w < 1: a head that is right on average is flatter than the target is in any one context. Let log p = log q / w + s E
with Gumbel errors E. For draws to follow q on average, w must be 1 / sqrt(1 + s^2), which is 0.7 for the errors of our
heads (`NOISE_WEIGHT`). The target then draws token x with probability proportional to exp((log q + w T G) / s) at x.
This is the score of a node, with s = `TreeConfig.draft_temperature`, at every temperature; T = 0 gives greedy
decoding's score.

B rows, K nodes of a level, R tokens that the draft can name, M copied tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .copies import Copies
from .noise import gumbel_at, gumbel_noise, position_after

TOGETHER = 4  # depths whose noise is computed in one call, which takes half the time of one call per depth
NOISE_WEIGHT = 0.7  # w: the best are 0.8 for SmolLM2's head, 0.5 for Qwen2.5-Coder's (docs/results/sampling.md)


@dataclass(frozen=True)
class Coupling:
    """What is known of the target's draws before a cycle of a batch.

    Args:
        seeds, temperatures: of each row. lengths: L of each row, the position of its root. weights: w of each row.
        warpers: temperature and truncation of each row, which do not depend on the context; None: the row is greedy, or
            its rule needs the most probable children.
        tokens: ids of the tokens that the draft can name, or their number if they are 0 to R - 1.
    """

    seeds: Tensor  # [B]
    lengths: Tensor  # [B]
    temperatures: Tensor  # [B] float32
    weights: Tensor  # [B] float32
    warpers: Sequence[LogitsProcessorList | None]
    tokens: int | Tensor  # [R]
    # Weighted noise [B, 1, R] by depth, computed so far.
    known: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def _noise(self, depth: int) -> Tensor:  # [B, 1, R]
        if depth not in self.known:
            depths = torch.arange(depth, depth + TOGETHER, device=self.lengths.device)
            positions = position_after(self.lengths[:, None], depths)
            noise = gumbel_noise(self.seeds, positions, self.tokens)  # [B, TOGETHER, R]
            self.known.update(enumerate((noise * self.weights[:, None, None]).split(1, 1), depth))
        return self.known[depth]

    def perturb(
        self,
        logits: Tensor,  # [B, K, R] float32, the draft's raw logits at nodes of one depth
        depth: int,
    ) -> Tensor:  # [B, K, R]
        """log q + w T G for the children of these nodes; rows without warpers keep their logits."""
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
    """Condition the scores of copies on the noise of each copied token.

    Let r be a token's acceptance rate, averaged over the noise. If its noise is g, the target draws it with probability
    exp(-(1 - r) / r * exp(-g)), since the maximum over all other tokens is Gumbel(log(1 - r)).

    Args:
        length: L, the position of the root.
    """
    positions = position_after(length, torch.tensor(copies.depths) - 1)
    noise = gumbel_at(seed, positions, torch.tensor(copies.tokens)).tolist()
    scores: list[float] = []
    for copy, (parent, score, matched) in enumerate(zip(copies.parents, copies.scores, copies.matched, strict=True)):
        above, now = (0.0, 0.0) if parent < 0 else (copies.scores[parent], scores[parent])
        step = min(0.0, score - above)
        if matched:  # a token that a grammar forces has no rival
            step = math.expm1(step) * math.exp(-step - noise[copy])
        scores.append(now + step)
    return copies._replace(scores=scores)
