"""flash-attn where it is installed: which of its packages serves a device, and how each is called.

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
HALF = (torch.float16, torch.bfloat16)

# (query [B, N, H, D], key [B, P, K, D], value [B, P, K, D], scale, softcap or 0, lengths [B] or None, causal)
# -> out [B, N, H, D], log-sum-exp [B, H, N]
Flash = Callable[[Tensor, Tensor, Tensor, float, float, Tensor | None, bool], tuple[Tensor, Tensor]]


def flash_for(query: Tensor, value: Tensor) -> Flash | None:
    """flash-attn where it is installed and serves these tensors."""
    size = query.shape[-1]
    if query.dtype not in HALF or size != value.shape[-1] or size % 8 or size > 256:
        return None
    found = find_flash(query.device)
    return found and found[1]


@functools.cache
def find_flash(device: torch.device) -> tuple[str, Flash] | None:
    """The flash-attn package that is used on the device, of those that can be imported, and how to call it.

    On Hopper 3, else 2; on newer devices 4, else 2; on Ampere and Ada 2. Version 4 cuts the keys into parts that run
    side by side, without which a tree occupies few of the multiprocessors, on devices newer than Hopper only.
    """
    major = _capability(device)
    candidates = {"flash_attn_interface": major == 9, "flash_attn.cute": major >= 10, "flash_attn": major >= 8}
    for name in (name for name, serves in candidates.items() if serves):
        try:
            module = importlib.import_module(name)
            return name, _flash_4(module) if name == "flash_attn.cute" else _flash_2_or_3(module)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # an extension that was built for another torch raises anything
            log.warning("%s is not used: %s", name, error)
    return None


def _capability(device: torch.device) -> int:
    """Major version of the compute capability; 0: no CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _flash_2_or_3(module: ModuleType) -> Flash:
    with_kvcache = module.flash_attn_with_kvcache
    return lambda query, key, value, scale, softcap, lengths, causal: with_kvcache(
        query, key, value, cache_seqlens=lengths, softmax_scale=scale, softcap=softcap, causal=causal,
        return_softmax_lse=True,
    )[:2]


def _flash_4(module: ModuleType) -> Flash:
    uniform, ragged = module.flash_attn_func, module.flash_attn_varlen_func

    def attend(query, key, value, scale, softcap, lengths, causal):
        # num_splits=0: as many parts as pay, which is the default of versions 2 and 3.
        options = {"softmax_scale": scale, "softcap": softcap, "causal": causal, "num_splits": 0, "return_lse": True}
        if lengths is None:
            return uniform(query, key, value, **options)[:2]
        return ragged(query, key, value, seqused_k=lengths, **options)[:2]

    return attend
