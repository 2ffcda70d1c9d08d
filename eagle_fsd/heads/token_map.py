"""The draft vocabulary of an EAGLE-1/2 head: a file beside its weights, which SGLang takes as
--speculative-token-map.

R draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..data.files import save_atomically

TOKEN_MAP = "token_map.pt"  # a list of token ids, as FR-Spec (arXiv 2502.14856) publishes them


def read_weights(path: str) -> dict[str, Tensor]:
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle.UnpicklingError and whatever a broken pickle raises
        raise ValueError(f"{path} was refused, since it holds more than tensors or is damaged: {error}") from error


def read_token_map(path: str | Path) -> Tensor:
    """[R] long: the tokens of a file of FR-Spec's kind.

    Raises:
        ValueError: not such a file.
    """
    held = read_weights(str(path))
    try:
        tokens = torch.as_tensor(held)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} holds no list of token ids: {error}") from error
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{path} holds no list of token ids but {tokens.dtype}")
    return tokens.long()


def save_token_map(
    directory: str | Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Put a draft vocabulary beside a head's weights; returns its path."""
    path = Path(directory) / TOKEN_MAP
    save_atomically(path, lambda part: torch.save(tokens.tolist(), part))
    return path
