"""Products in int8 by two kernels, oneDNN's and FBGEMM's, which give the same bits, and which is faster here.

Both sum integers, so that only speed decides. It depends on processor and shape: for few rows either can read the
weights at half of the memory's speed. A weight exists in one layout, so one kernel serves all numbers of rows.

M rows, K inputs of a layer, N outputs.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..utils.files import remembered
from ..utils.installation import processor_name

ZERO = 128  # of rows as unsigned numbers
CYCLE_ROWS, PROMPT_ROWS = (1, 4, 8, 16), (32, 128, 512)
GAIN, LOSS = 0.95, 1.05  # FBGEMM's time in oneDNN's, at most: on average of a cycle's rows; for each number of rows
# Bytes of a weight: smaller ones are oneDNN's, as the start of a product, and not its reading, decides; in a model
# FBGEMM's is the slower one. A part of larger ones is measured.
LEAST, MOST = 3 << 18, 1 << 24
CACHE = 1 << 26  # bytes, as many as a processor's cache has
ROUNDS, PROMPT_ROUNDS = 5, 2


class OneDNN:
    """The product of oneDNN, for any processor with VNNI.

    Args:
        numbers: int8. scales: of the outputs.
    """

    NAME = "oneDNN"

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:  # [N, K], [N]
        self.weight, self.scales = torch.ops.onednn.qlinear_prepack(numbers, None), scales
        self.zeros = torch.zeros(len(numbers), dtype=torch.long)

    def __call__(self, rows: Tensor) -> Tensor:  # [M, K] float32 from 1 to below 256, may be changed -> [M, N] float32
        """The product of floor(rows) - 128 and the numbers, times the scales."""
        return torch.ops.onednn.qlinear_pointwise(
            rows.to(torch.uint8), 1.0, ZERO, self.weight, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none",
            [], "")

    def numbers(self) -> Tensor:  # [N, K] int8
        return self.weight.to_dense().t()


class FBGEMM:
    """The product of FBGEMM, see `OneDNN`, for processors with AVX-512 VNNI (`has_fbgemm`)."""

    NAME = "FBGEMM"

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        zeros = torch.zeros(len(numbers), dtype=torch.long)
        quantised = torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
        self.weight = torch.ops.quantized.linear_prepack(quantised, None)

    def __call__(self, rows: Tensor) -> Tensor:
        # It rounds to the nearest number, ties to even, which leaves whole numbers as they are.
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows.floor_().sub_(ZERO), 1.0, ZERO, self.weight)

    def numbers(self) -> Tensor:
        return torch.ops.quantized.linear_unpack(self.weight)[0].int_repr()


Kernel = OneDNN | FBGEMM
KERNELS = OneDNN, FBGEMM


@functools.cache
def has_fbgemm() -> bool:
    """Whether torch has FBGEMM's product, and its sums are exact.

    With AVX2 it adds pairs of products in 16 bits, which is too few for large numbers. torch 2.13 warns that its
    quantised tensors will be removed.
    """
    if not (torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()):
        return False
    numbers = torch.tensor([127, -127, 127, 1]).to(torch.int8).repeat_interleave(128)
    numbers = torch.stack([numbers, -numbers, numbers.flip(0), torch.full_like(numbers, 127)])
    rows = torch.cat([numbers, torch.randint_like(numbers, -127, 128)]).repeat(3, 1).float()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once in a process
            found = FBGEMM(numbers, torch.ones(4))(rows + ZERO)
    except (AttributeError, RuntimeError):  # a torch without it, or another quantized.engine
        return False
    return torch.equal(found.double(), rows.double() @ numbers.double().T)


def fastest_kernel(outputs: int, inputs: int) -> type[Kernel]:
    """The kernel for weights of this shape. It is measured once on a machine, and stored in the user's cache directory.

    Of large weights a part is measured; it takes some tens of milliseconds. Other work of the process should rest.
    """
    if outputs * inputs < LEAST or not has_fbgemm():
        return OneDNN
    return _fastest(min(outputs, max(1, MOST // inputs)), inputs, torch.get_num_threads())


@functools.cache
def _fastest(outputs: int, inputs: int, threads: int) -> type[Kernel]:
    facts = outputs, inputs, threads, processor_name(), torch.__version__
    names = [kernel.NAME for kernel in KERNELS]
    found = remembered("kernels", facts, lambda: faster_kernel(shares_of(outputs, inputs)).NAME, names.__contains__)
    return KERNELS[names.index(found)]


def faster_kernel(share: Callable[[int, int], float]) -> type[Kernel]:
    """FBGEMM if it is faster for the rows that cycles have, and slower for no number of rows; else oneDNN.

    Args:
        share: FBGEMM's time in oneDNN's, for a number of rows; the second number is of rounds to measure.
    """
    shares = [share(count, ROUNDS) for count in CYCLE_ROWS]
    gains = math.prod(shares) ** (1 / len(shares)) <= GAIN and max(shares) <= LOSS
    return FBGEMM if gains and all(share(count, PROMPT_ROUNDS) <= LOSS for count in PROMPT_ROWS) else OneDNN


def shares_of(outputs: int, inputs: int) -> Callable[[int, int], float]:
    """What `faster_kernel` needs, for weights of this shape that are read from memory: of the shortest rounds."""
    numbers = (torch.arange(inputs) % 255 - 127).to(torch.int8).repeat(outputs, 1)
    kernels, other = [kernel(numbers, torch.ones(outputs)) for kernel in KERNELS], torch.zeros(CACHE // 8).long()

    def seconds(kernel: Kernel, rows: Tensor) -> float:
        copied, _evicting = rows.clone(), other.sum()
        started = time.perf_counter()
        kernel(copied)
        return time.perf_counter() - started

    @torch.inference_mode()
    def share(count: int, rounds: int) -> float:
        rows = torch.full((count, inputs), ZERO + 0.5)
        times = [[seconds(kernel, rows) for kernel in kernels] for _ in range(rounds)]
        theirs, own = map(min, zip(*times, strict=True))
        return own / theirs

    return share
