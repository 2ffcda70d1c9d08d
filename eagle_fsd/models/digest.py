"""A digest of a model's weights, which identifies the model in files and records."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .linear import is_packed


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
