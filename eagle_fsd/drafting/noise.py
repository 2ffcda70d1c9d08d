"""Gumbel noise as a pure function of seed, absolute position and token id.

B rows, P positions, V vocabulary, K nodes of a level, R tokens that a draft can name, M tokens.

argmax(log_probs + gumbel) is a sample of softmax(log_probs) (the Gumbel-max trick). The noise is a hash, not the state
of a generator. A token drawn at a position therefore does not depend on how many tokens were drafted before it, on the
other rows of the batch, or, up to the rounding of a logarithm, on the device. With one seed, speculative and plain
decoding can be compared token by token.

**Coupling**: drafting with the target's own noise, for requests that sample.

Let p be the target's next-token distribution at temperature 1, and q the draft's. At temperature T the target draws
argmax(log p + T G), with Gumbel noise G that is a function of seed and position. The noise is therefore
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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from .copies import Copies

TOGETHER = 4  # depths whose noise is computed in one call, which takes half the time of one call per depth
NOISE_WEIGHT = 0.7  # w: the best are 0.8 for SmolLM2's head, 0.5 for Qwen2.5-Coder's (docs/results/sampling.md)


def _signed(constant: int) -> int:
    """The 64-bit pattern as a Python int that an int64 tensor accepts."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)
UNIFORM_BITS = 52  # (n + 0.5) / 2^52 is exact in float64 for every 52-bit n, and never 0 or 1


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's own on int64 copies the sign bit."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The output function of splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), modulo 2^64."""
    bits = (bits ^ _shift_right(bits, 30)).mul_(MIX_1)
    bits = bits.bitwise_xor_(_shift_right(bits, 27)).mul_(MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def gumbel_noise(
    seeds: Tensor,  # [B] int64
    positions: Tensor,  # [B, P] int64
    tokens: int | Tensor,  # V: all tokens; or ids [R] or, for each position, [P, R] int64
) -> Tensor:  # [B, P, V or R] float32
    """Standard Gumbel noise of tokens at absolute positions.

    Equal (seed, position, token id) give equal noise. The function has no state and does not wait for the device.
    A tree needs one position per depth; gather the rows by node depth.
    """
    tokens = torch.arange(tokens, device=seeds.device) if isinstance(tokens, int) else tokens
    keys = _mix(_mix(seeds[:, None] + GOLDEN_GAMMA) + positions * GOLDEN_GAMMA)[..., None]  # [B, P, 1]
    bits = _shift_right(_mix(keys + (tokens + 1) * GOLDEN_GAMMA), 64 - UNIFORM_BITS)
    uniform = bits.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    # Both logarithms of -log(-log(u)) keep their relative precision: the first in float64, which resolves u near 1
    # to 2^-53; the second in float32, whose range includes all of -log(u), [2^-53, 37).
    return uniform.log_().neg_().float().log_().neg_()


def position_after(root: Tensor | int, depth: Tensor | int) -> Tensor | int:
    """The absolute position of the token that follows a node of this depth, by which its noise is drawn.

    Args:
        root: position of the tree's root, of depth 0.
    """
    return root + depth + 1


@dataclass(frozen=True)
class Coupling:
    """What is known of the target's draws before a cycle of a batch.

    Args:
        seeds, temperatures: of each row. lengths: L of each row, the position of its root. noise_weights: w of each.
        warpers: temperature and truncation of each row, which do not depend on the context; None: the row is greedy, or
            its rule needs the most probable children.
        tokens: ids of the tokens that the draft can name, or their number if they are 0 to R - 1.
    """

    seeds: Tensor  # [B]
    lengths: Tensor  # [B]
    temperatures: Tensor  # [B] float32
    noise_weights: Tensor  # [B] float32
    warpers: Sequence[LogitsProcessorList | None]
    tokens: int | Tensor  # [R]
    # Weighted noise [B, 1, R] by depth, computed so far.
    known: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def _noise(self, depth: int) -> Tensor:  # [B, 1, R]
        if depth not in self.known:
            depths = torch.arange(depth, depth + TOGETHER, device=self.lengths.device)
            positions = position_after(self.lengths[:, None], depths)
            noise = gumbel_noise(self.seeds, positions, self.tokens)  # [B, TOGETHER, R]
            self.known.update(enumerate((noise * self.noise_weights[:, None, None]).split(1, 1), depth))
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
    noise = gumbel_noise(torch.tensor([seed]), positions[None], torch.tensor(copies.tokens)[:, None]).flatten().tolist()
    scores: list[float] = []
    for copy, (parent, score, matched) in enumerate(zip(copies.parents, copies.scores, copies.matched, strict=True)):
        above, now = (0.0, 0.0) if parent < 0 else (copies.scores[parent], scores[parent])
        step = min(0.0, score - above)
        if matched:  # a token that a grammar forces has no rival
            step = math.expm1(step) * math.exp(-step - noise[copy])
        scores.append(now + step)
    return copies._replace(scores=scores)
