"""Gumbel noise as a pure function of seed, absolute position and token id.

B batch, P positions, V vocabulary, R tokens that a draft can name, M tokens.

argmax(log_probs + gumbel) is a sample of softmax(log_probs) (the Gumbel-max trick). The noise is a hash, not the state
of a generator. A token drawn at a position therefore does not depend on how many tokens were drafted before it, on the
other rows of the batch, or, up to the rounding of a logarithm, on the device. With one seed, speculative and plain
decoding can be compared token by token.
"""

import torch
from torch import Tensor


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
    tokens: int | Tensor,  # V: all tokens; or ids [R] int64
) -> Tensor:  # [B, P, V or R] float32
    """Standard Gumbel noise of tokens at absolute positions.

    Equal (seed, position, token id) give equal noise. The function has no state and does not wait for the device.
    A tree needs one position per depth; gather the rows by node depth.
    """
    tokens = torch.arange(tokens, device=seeds.device) if isinstance(tokens, int) else tokens
    return _gumbel(_keys(seeds[:, None], positions)[..., None], tokens)


def position_after(root: Tensor | int, depth: Tensor | int) -> Tensor | int:
    """The absolute position of the token that follows a node of this depth, by which its noise is drawn.

    Args:
        root: position of the tree's root, of depth 0.
    """
    return root + depth + 1


def gumbel_at(
    seed: int,
    positions: Tensor,  # [M] int64
    tokens: Tensor,  # [M] int64
) -> Tensor:  # [M] float32
    """The noise of one token at each position."""
    return _gumbel(_keys(torch.tensor(seed, device=positions.device), positions), tokens)


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    return _mix(_mix(seeds + GOLDEN_GAMMA) + positions * GOLDEN_GAMMA)


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    bits = _shift_right(_mix(keys + (tokens + 1) * GOLDEN_GAMMA), 64 - UNIFORM_BITS)
    uniform = bits.double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
    # Both logarithms of -log(-log(u)) keep their relative precision: the first in float64, which resolves u near 1
    # to 2^-53; the second in float32, whose range includes all of -log(u), [2^-53, 37).
    return uniform.log_().neg_().float().log_().neg_()
