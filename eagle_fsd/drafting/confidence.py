"""A fitted `Confidence` as lines that rank the children of a node on the device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .config import Confidence


class Lines(NamedTuple):
    """A `Confidence` of M knots as lines y = slope * x + offset, for each child those left of a knot and the last."""

    knots: Tensor  # [M]
    first: Tensor  # [K], where a child's lines begin
    slopes: Tensor  # [2 * (M + 1)]
    offsets: Tensor  # [2 * (M + 1)]


def apply_confidence(
    lines: Lines,
    log_probs: Tensor,  # [..., K], the children of each node in descending order
) -> Tensor:  # [..., K]
    """Log acceptance probabilities; linear between the knots, constant outside."""
    line = torch.bucketize(log_probs, lines.knots) + lines.first
    return torch.addcmul(lines.offsets.take(line), lines.slopes.take(line), log_probs)


@functools.lru_cache(maxsize=64)
def confidence_lines(confidence: Confidence, children: int, device: torch.device) -> Lines:
    """The lines of K = `children` children."""
    knots = torch.tensor(confidence.knots, dtype=torch.float64)
    slopes, offsets = [], []
    for values in (confidence.first, confidence.others):
        heights = torch.tensor(values, dtype=torch.float64)
        slope = torch.nn.functional.pad(heights.diff() / knots.diff(), (1, 1))
        slopes.append(slope)
        offsets.append(torch.cat([heights[:1], heights]) - slope * torch.cat([knots[:1], knots]))
    first = torch.tensor([0] + [len(knots) + 1] * (children - 1))
    tables = (knots.float(), first, torch.cat(slopes).float(), torch.cat(offsets).float())
    return Lines(*(each.to(device) for each in tables))
