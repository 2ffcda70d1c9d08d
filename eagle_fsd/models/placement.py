"""Where modules compute, what tells one model's weights from another's, and their locks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .linear import PackedLinear, is_packed


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that make up a weight: several where it is quantised, such as numbers and scales."""
    if is_traceable_wrapper_subclass(weight):
        for name in weight.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(weight, name))
    else:
        yield weight


def weights_digest(module: nn.Module) -> str:
    """A number from a few of each parameter's values in bf16, and a head's draft vocabulary; those that are offloaded
    do not count. Of a module whose weights have been packed since, that of before (`kept_digest`)."""
    if hasattr(module, "kept_digest") and is_packed(module):
        return module.kept_digest
    total = 0.0
    for number, weight in enumerate(module.parameters(), 1):
        for part in plain_parts(weight.detach()):
            if not part.is_meta:
                step = max(1, part.numel() // 97)
                values = part.reshape(-1)[::step]
                total += values.to(torch.bfloat16).double().sum().item() / number
    tokens = getattr(module, "token_map", None)
    return f"{total:.9g}" + ("" if tokens is None else f"/{len(tokens)}-{tokens.sum().item()}")


class Lock:
    """A lock that a copy or a pickle of its owner has anew, and open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple:
        return Lock, ()


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are, or where accelerate brings those that it keeps elsewhere."""
    if isinstance(module, PackedLinear):
        return torch.device("cpu")
    first = next(each for each in module.modules() if any(True for _ in each.parameters(recurse=False)))
    weight = next(first.parameters(recurse=False))
    hook = getattr(first, "_hf_hook", None)
    return torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without the hooks that accelerate placed it with."""
    hook = getattr(module, "_hf_hook", None)  # may hold all weights that are kept elsewhere: not to be copied
    with align_module_device(module):
        copied = copy.deepcopy(module, {id(hook): hook})
    return remove_hook_from_module(copied).to(device)
