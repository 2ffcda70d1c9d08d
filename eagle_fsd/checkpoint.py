"""Draft heads in the layout published with EAGLE-1 and EAGLE-2: a directory or hub repository with `config.json`
and `model.safetensors` or `pytorch_model.bin`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.utils import cached_file

from .draft import DraftHead

log = logging.getLogger(__name__)

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def check_source(name: str, source: object) -> str:
    """A directory or hub id as text.

    Raises:
        TypeError: neither text nor a path.
        ValueError: a file, or a path at which there is nothing.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"{name} must be a directory or a hub id, got {source!r}")
    text, path = str(source), Path(source)
    if path.is_file():
        raise ValueError(f"{name} must be a directory or a hub id, {text!r} is a file")
    is_path = isinstance(source, Path) or path.is_absolute() or text.startswith(".")
    if not text or is_path and not path.is_dir():
        raise ValueError(f"{name} must be a directory or a hub id, there is no directory {text!r}")
    return text


def _fetch(source: str, filename: str) -> str | None:
    """Local path of a file of a directory or hub repository; None where it has no such file."""
    if Path(source).is_dir():
        path = Path(source) / filename
        return str(path) if path.is_file() else None
    return cached_file(source, filename, _raise_exceptions_for_missing_entries=False)


def _read_weights(path: str) -> dict[str, Tensor]:
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle.UnpicklingError and whatever a broken pickle raises
        raise ValueError(f"{path} was refused, since it holds more than tensors or is damaged: {error}") from error


def _require_finite(state: dict[str, Tensor], path: str) -> None:
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite")


def load_head(source: str | Path) -> DraftHead:
    """A draft head from a directory or hub id, in float32 on the CPU.

    Where the file has no embeddings, `shares_embeddings` is True and the target's must be given
    (`head.share_embeddings(...)`; `eagle_fsd.load` does it).

    A changed bit among a file's numbers goes unnoticed unless a number is no longer finite: the format has no checksum.

    Raises:
        TypeError: `source` is neither text nor a path.
        ValueError: not a head of this kind: files missing or damaged, keys missing, unknown or of the wrong shape,
            numbers that are not finite.
        OSError: a hub id that cannot be found or fetched.
    """
    source = check_source("a draft head", source)
    config_path = _fetch(source, "config.json")
    if config_path is None:
        raise ValueError(f"{source!r} has no config.json; a draft head needs config.json and {' or '.join(WEIGHTS)}")
    try:
        fields = json.loads(Path(config_path).read_text(encoding="utf-8"))
        has_bias = fields.pop("bias", True)  # a missing key means true in the published code
        # Published configs carry the target's `head_dim`-free Llama fields; null entries stand for defaults.
        config = LlamaConfig(**{k: v for k, v in fields.items() if v is not None})
    except Exception as error:  # not JSON, or one of the config classes' own errors
        raise ValueError(f"{config_path} is no Llama config: {error}") from error
    if config.num_hidden_layers != 1:
        raise ValueError(f"{source!r} has {config.num_hidden_layers} layers, an EAGLE-1/2 draft head has 1")
    weights_path = next((path for name in WEIGHTS if (path := _fetch(source, name))), None)
    if weights_path is None:
        raise ValueError(f"{source!r} has no weights; one of {', '.join(WEIGHTS)} is needed")
    state = _read_weights(weights_path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{weights_path} holds no dictionary of tensors")

    _require_finite(state, weights_path)
    if "fc.bias" not in state and has_bias:
        log.info("%s has no fc.bias although its config says so; loading it without one", source)
    try:
        head = DraftHead(config, bias="fc.bias" in state)
    except (ArithmeticError, MemoryError, RuntimeError) as error:  # sizes that no head can have
        raise ValueError(f"{config_path} describes no head that can be made: {error}") from error
    missing, unknown = _compare_keys(head, state)
    if missing == {"embed_tokens.weight"}:
        missing = set()
        head.share_embeddings(None)
    if missing or unknown:
        raise ValueError(
            f"{weights_path} is no EAGLE-1/2 draft head: missing {sorted(missing) or 'nothing'}, "
            f"unknown {sorted(unknown) or 'nothing'}"
        )
    try:
        head.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{weights_path} does not fit its config.json: {error}") from error
    return head.eval()


def _compare_keys(head: DraftHead, state: dict[str, Tensor]) -> tuple[set[str], set[str]]:
    expected = set(head.state_dict())
    return expected - state.keys(), state.keys() - expected


# What consumers of heads read from config.json; the rest of a Llama config has no meaning for a head.
CONFIG_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "initializer_range", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)


def save_head(
    head: DraftHead, directory: str | Path, *, dtype: torch.dtype | None = None, file: str = "model.safetensors",
    **extra: object,
) -> Path:
    """Write a head in the published layout; returns the path of the weights.

    Args:
        directory: created where it does not exist.
        dtype: type of the stored weights; None keeps the head's.
        file: one of WEIGHTS.
        extra: goes into config.json.

    Raises:
        TypeError: not a head, `dtype` is no torch dtype, or an `extra` that JSON does not know.
        ValueError: `file` is not in WEIGHTS, or a dtype that is not of floating point.
        OSError: `directory` cannot be written.
    """
    if not isinstance(head, DraftHead):
        raise TypeError(f"save_head writes a DraftHead, got {type(head).__name__}")
    if file not in WEIGHTS:
        raise ValueError(f"file must be one of {', '.join(WEIGHTS)}, got {file!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be of floating point, got {dtype}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to("cpu", dtype or value.dtype).contiguous()
        for name, value in head.state_dict().items()
    }
    given = head.config.to_dict()
    fields = {name: given[name] for name in CONFIG_FIELDS if given.get(name) is not None}
    # Consumers on transformers 4 read the rotary embedding by older names.
    rope = dict(head.config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    fields["torch_dtype"] = str(state["fc.weight"].dtype).removeprefix("torch.")
    fields |= {"architectures": ["LlamaForCausalLM"], "bias": head.fc.bias is not None, **extra}
    (directory / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    path = directory / file
    if file.endswith(".bin"):
        torch.save(state, path)
    else:
        save_file(state, path, metadata={"format": "pt"})
    return path
