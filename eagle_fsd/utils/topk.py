"""The largest numbers of long rows, such as the logits of a vocabulary.

V length of a row, K the number to find, C candidates.

On a CPU, torch's `topk` and `argmax` compare one number at a time. `amax` finds the largest number of each block of a
row with vector instructions, and the K largest numbers lie in the K blocks with the largest maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FEW_BLOCKS = 8  # least blocks of a row for each number to find: in shorter rows most numbers would be candidates
WORTH_IT = 1 << 17  # least numbers of all rows: below, the additional calls cost more than they save


def largest(
    values: Tensor,  # [..., V]
    count: int,  # K
) -> Tensor:  # [..., K] long
    """Indices of the K largest values, in descending order; ties come in any order."""
    if not _pays(values, count):
        return values.topk(count).indices
    candidates, places = _candidates(values, count)
    return places.gather(-1, candidates.topk(count).indices)


def first_largest(
    values: Tensor,  # [..., V]
) -> Tensor:  # [...] long
    """`values.argmax(-1)`: the index of the largest value, the first if several are equal."""
    if not _pays(values, 1):
        return values.argmax(-1)
    candidates, places = _candidates(values, 1)
    return places.gather(-1, candidates.argmax(-1, keepdim=True))[..., 0]


def _pays(values: Tensor, count: int) -> bool:
    return values.is_cpu and values.numel() >= WORTH_IT and values.shape[-1] >= FEW_BLOCKS * BLOCK * count


def _candidates(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[..., C] numbers that include the largest, and their indices: K blocks, then the rest that fills no block."""
    whole = values.shape[-1] // BLOCK * BLOCK
    blocks, rest = values[..., :whole].unflatten(-1, (-1, BLOCK)), values[..., whole:]
    best = blocks.amax(-1)
    best = best.argmax(-1, keepdim=True) if count == 1 else best.topk(count).indices  # [..., K]
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, BLOCK)).flatten(-2)
    places = (best[..., None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(-2)
    if not rest.shape[-1]:
        return inside, places
    after = torch.arange(whole, values.shape[-1], device=values.device).expand(rest.shape)
    return torch.cat([inside, rest], -1), torch.cat([places, after], -1)
