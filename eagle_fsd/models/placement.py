"""Where modules compute, in which layout their weights lie, what tells one model's from another's, and their locks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors that make up a weight: several where it is quantised, such as numbers and scales."""
    if is_traceable_wrapper_subclass(weight):
        for name in weight.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(weight, name))
    else:
        yield weight


def weights_digest(module: nn.Module) -> str:
    """A number from a few of each parameter's values in bf16, and a head's draft vocabulary; those that are offloaded
    do not count."""
    total = 0.0
    for number, weight in enumerate(module.parameters(), 1):
        for part in plain_parts(weight.detach()):
            if not part.is_meta:
                step = max(1, part.numel() // 97)
                if part.is_contiguous():
                    values = part.flatten()[::step]
                else:  # to flatten one that lies otherwise would be to copy it
                    places = torch.arange(0, part.numel(), step, device=part.device)
                    values = part[torch.unravel_index(places, part.shape)]
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


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its bfloat16 weight [N, K], in the blocks that a CPU's kernels read.

    The stock layer brings its weight into that layout in every forward, which for a few rows takes as long as the
    product. Results are bit for bit the same. Where the weight has changed since, where gradients are wanted, and after
    copying or pickling, it computes as the stock layer does.

    Args:
        layer: whose place it takes; it shares its weight, bias and hooks.
    """

    ROWS = 64  # that the layout is chosen for; it serves one row as well
    in_use = True  # see `stock_layout`

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self.packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), self.ROWS)
        self.packed_of = self.weight.data_ptr(), self.weight._version

    def forward(self, input: Tensor) -> Tensor:
        if (self.packed is None or not self.in_use or input.dtype != torch.bfloat16 or torch.is_grad_enabled()
                or self.packed_of != (self.weight.data_ptr(), self.weight._version) or not input.numel()):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"packed": None}


def pack_linears(module: nn.Module) -> nn.Module:
    """Put packed layers in the places of a module's plain bfloat16 linear ones on a CPU; others stay as they are.

    Returns:
        The module, or what takes its place where it is such a layer itself.
    """
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if _can_be_packed(child):
                setattr(parent, name, PackedLinear(child))
    return PackedLinear(module) if _can_be_packed(module) else module


def _can_be_packed(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return (type(layer) is nn.Linear and type(weight.data) is Tensor and weight.dtype == torch.bfloat16
            and weight.device.type == "cpu" and not weight.is_inference() and not hasattr(layer, "_hf_hook")
            and torch.backends.mkldnn.is_available())


def is_packed(module: nn.Module) -> bool:
    return any(type(layer) is PackedLinear for layer in module.modules())


@contextmanager
def stock_layout() -> Iterator[None]:
    """Within, packed layers compute as the stock ones do, for measuring those."""
    before, PackedLinear.in_use = PackedLinear.in_use, False
    try:
        yield
    finally:
        PackedLinear.in_use = before
