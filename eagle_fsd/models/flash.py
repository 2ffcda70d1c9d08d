"""flash-attn, if installed: the package that supports a device.

B batch, H query heads, K key heads, N nodes (queries), P keys, D head size.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger(__name__)
HALF_DTYPES = (torch.float16, torch.bfloat16)


def flash_for(query: Tensor, value: Tensor) -> Callable | None:
    """`flash_attn_with_kvcache` or its equivalent, if an installed package supports these tensors; else None."""
    size = query.shape[-1]
    if query.dtype not in HALF_DTYPES or size != value.shape[-1] or size % 8 or size > 256:
        return None
    return find_flash(query.device)


@functools.cache
def find_flash(device: torch.device) -> Callable | None:
    """The function of version 3 or 4 on Hopper, of 4 on newer devices, else of 2; None: no package can be imported."""
    major = _capability(device)
    packages = {"flash_attn_interface": major == 9, "flash_attn.cute": major >= 9, "flash_attn": major >= 8}
    for name in (name for name, supported in packages.items() if supported):
        try:
            module = importlib.import_module(name)
            return _version_4(module, major) if name == "flash_attn.cute" else module.flash_attn_with_kvcache
        except ModuleNotFoundError:
            continue
        except Exception as error:  # an extension built for another torch can raise any exception
            log.warning("%s cannot be imported: %s", name, error)
    return None


def _version_4(module: ModuleType, major: int) -> Callable:
    """Adapt version 4 to the signature of the others. num_splits=0, their default, selects the number of splits of the
    keys; on Hopper version 4 has no splits, and fails where it selects more than one."""
    splits = 1 if major == 9 else 0

    def flash_attn_with_kvcache(query, key, value, *, cache_seqlens, return_softmax_lse, **options):
        ragged = functools.partial(module.flash_attn_varlen_func, seqused_k=cache_seqlens)
        flash = module.flash_attn_func if cache_seqlens is None else ragged
        return flash(query, key, value, num_splits=splits, return_lse=return_softmax_lse, **options)

    return flash_attn_with_kvcache


def _capability(device: torch.device) -> int:
    """Major version of the compute capability; 0: no CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
