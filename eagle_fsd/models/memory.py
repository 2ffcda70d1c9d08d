"""Release memory of weights that have been copied: pages of mapped files, and free memory of the allocator.

safetensors files are mapped: all pages read from a file stay resident as long as one of its tensors exists. On systems
other than Linux nothing is released.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

MADV_DONTNEED = 4
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class MappedFiles:
    """The address ranges in this process of safetensors files that are mapped when the object is created."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if LIBC is not None else ():
            if line.endswith(".safetensors"):
                start, end = line.split(maxsplit=1)[0].split("-")
                self.ranges.append((int(start, 16), int(end, 16)))

    def contains(self, weight: Tensor) -> bool:
        start = weight.data_ptr()
        return any(low <= start and start + weight.nbytes <= high for low, high in self.ranges)

    def release(self, weight: Tensor) -> None:
        """Release the whole pages of a weight in such a file; the system reads them again on the next access."""
        first, page = weight.data_ptr(), mmap.PAGESIZE
        start, end = -(-first // page) * page, (first + weight.nbytes) // page * page
        if end > start and self.contains(weight):
            LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


@torch.no_grad()
def copy_from_files(
    module: nn.Module, files: MappedFiles, skip: type[nn.Module] | tuple = (), dtype: torch.dtype | None = None
) -> None:
    """Copy a module's parameters out of mapped files, so that the files can be unmapped.

    Args:
        skip: classes of modules whose own parameters are left alone.
        dtype: of all floating parameters from now on, wherever they are; None: no conversion.
    """
    parts = (part for part in module.modules() if not isinstance(part, skip))
    for weight in (weight for part in parts for weight in part.parameters(recurse=False)):
        new_dtype = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
        if weight.device.type == "cpu" and (weight.dtype != new_dtype or files.contains(weight)):
            original, weight.data = weight.data, weight.data.to(new_dtype, copy=True)
            files.release(original)


def trim() -> None:
    """Return freed memory from the C library to the system, where the library can do so."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
