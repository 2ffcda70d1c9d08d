"""Memory of weights that have been copied: giving back the pages of mapped files, and what the allocator holds on to.

safetensors files are mapped: all of a file's pages that were read stay resident as long as one tensor of it lives.
Where the system is not Linux, nothing is given back and nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor, nn

MADV_DONTNEED = 4


class MappedFiles:
    """The address ranges of this process that are mapped safetensors files, as of its making."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if self.libc is not None:
            with open("/proc/self/maps", encoding="utf-8") as maps:
                for line in maps:
                    if line.rstrip().endswith(".safetensors"):
                        start, end = line.split(maxsplit=1)[0].split("-")
                        self.ranges.append((int(start, 16), int(end, 16)))

    def holds(self, weight: Tensor) -> bool:
        start = weight.data_ptr()
        return any(low <= start and start + weight.nbytes <= high for low, high in self.ranges)

    def give_back(self, weight: Tensor) -> None:
        """The whole pages of a weight that lies in such a file; whoever reads it again has them read from the file."""
        if self.holds(weight):
            page = mmap.PAGESIZE
            start = -(-weight.data_ptr() // page) * page
            end = (weight.data_ptr() + weight.nbytes) // page * page
            if end > start:
                self.libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


@torch.no_grad()
def leave_files(
    module: nn.Module, files: MappedFiles, but: type[nn.Module] | tuple = (), dtype: torch.dtype | None = None
) -> None:
    """Copy the parameters of a module that lie in mapped files, so that no file is held any longer.

    Args:
        but: kinds of modules whose own parameters stay where they are.
        dtype: what floating ones become, wherever they lie; None: they stay as they are.
    """
    parts = (part for part in module.modules() if not isinstance(part, but))
    for weight in (weight for part in parts for weight in part.parameters(recurse=False)):
        wanted = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
        if weight.device.type == "cpu" and (weight.dtype != wanted or files.holds(weight)):
            before, weight.data = weight.data, weight.data.to(wanted, copy=True)
            files.give_back(before)


def trim() -> None:
    """Have the C library give back what it keeps of freed memory, where it can be told to."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
