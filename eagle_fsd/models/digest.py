"""Digests of a model's weights and config."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from ..utils.files import json_digest
from .linear import packed_form

# Fields of a config that change no logits.
NO_LOGITS = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a weight; a quantised one has several, such as integers and scales."""
    if is_traceable_wrapper_subclass(weight):
        for name in weight.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(weight, name))
    else:
        yield weight


def weights_digest(module: nn.Module) -> str:
    """A digest of a few values of each parameter in bfloat16, and of a head's draft vocabulary. Offloaded parameters
    are left out. A packed module keeps the digest of its original weights (`original_digest`)."""
    if hasattr(module, "original_digest") and packed_form(module):
        return module.original_digest
    total = 0.0
    for number, weight in enumerate(module.parameters(), 1):
        for part in plain_parts(weight.detach()):
            if not part.is_meta:
                step = max(1, part.numel() // 97)
                values = part.reshape(-1)[::step]
                total += values.to(torch.bfloat16).double().sum().item() / number
    tokens = getattr(module, "token_map", None)
    return f"{total:.9g}" + ("" if tokens is None else f"/{len(tokens)}-{tokens.sum().item()}")


def config_digest(config: PreTrainedConfig) -> str:
    """A digest of a config, which has what weights do not show: scalings, windows, limits and end tokens."""
    fields = config.to_diff_dict().items()
    return json_digest({name: value for name, value in fields if name not in NO_LOGITS})
