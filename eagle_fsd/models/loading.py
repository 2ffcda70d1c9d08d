"""Load a causal LM of `transformers` and its tokenizer."""

from __future__ import annotations

import copy
import functools
import json
import logging
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..data.gguf import target_source
from ..data.sources import fetch
from ..utils.checks import check_placement
from ..utils.threads import one_at_a_time
from .linear import has_half_kernels

log = logging.getLogger(__name__)


def check_dtype(dtype: object) -> None:
    """Raise unless it is "auto", None, or a floating torch dtype or its name."""
    value = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in ("auto", None) and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f'dtype must be "auto", a floating torch dtype or its name such as "bfloat16", got {dtype!r}')


def check_device(device: object) -> torch.device:
    """The device; by default CUDA where available, else the CPU.

    Raises:
        ValueError: torch does not know the device or cannot use it.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place).item()
    except Exception as error:  # torch built without CUDA raises an AssertionError
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from error
    return place


def stored_dtype(target: str, trust_remote_code: bool) -> torch.dtype | None:
    """The dtype in a checkpoint's config; None: the config has none, or the checkpoint is quantised."""
    try:
        config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception:  # loading the model reports the error
        return None
    return None if getattr(config, "quantization_config", None) else config.dtype


def cpu_dtype(stored: torch.dtype | None) -> torch.dtype:
    """The dtype for "auto" on a CPU if weights are not packed as float16: bfloat16 if they are stored in it and the
    processor is faster in it, else float32."""
    return torch.bfloat16 if stored == torch.bfloat16 and bfloat16_is_faster() else torch.float32


def bfloat16_is_faster() -> bool:
    """Whether torch multiplies bfloat16 by instructions of this CPU (AVX-512 BF16, AMX, ARM's BF16).

    With them bfloat16 is at least as fast as float32 for one row, whose time is that of reading the weights; without
    them it is several times slower. A measurement would make the dtype depend on what else the machine does.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # older versions of torch; AMX came after AVX-512 BF16
        return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    known = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@one_at_a_time
def load_target(
    target: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict | None = None,
    quantization_config: object | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal LM and its tokenizer, placed as in `load`; None in place of a tokenizer that cannot be loaded.

    Raises:
        ValueError, TypeError, OSError: see `load`.
    """
    check_dtype(dtype)
    if not (quantization_config is None or isinstance(quantization_config, (dict, QuantizationConfigMixin))):
        raise TypeError("quantization_config must be a quantization config of transformers, a dict or None, got "
                        f"{quantization_config!r}")
    check_placement(device, device_map)
    place = check_device(device)
    target = target_source(target)  # after the checks: it may dequantise a GGUF file
    if dtype == "auto" and device_map is None and place.type == "cpu":
        dtype = cpu_dtype(stored_dtype(target, trust_remote_code))
    # None: the checkpoint's own
    options = {} if quantization_config is None else {"quantization_config": quantization_config}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, device_map=device_map, attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code, output_loading_info=True, **options,
        )
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged files and unknown devices can raise any exception
        raise ValueError(f"{target} cannot be loaded as a causal LM: {type(error).__name__}: {error}") from error
    if "fc.weight" in loaded["unexpected_keys"]:
        raise ValueError(f"{target} is a draft head: pass it as the draft, and its model as the target")
    if loaded["missing_keys"]:  # transformers would leave these weights random
        raise ValueError(f"{target} lacks weights: {', '.join(sorted(loaded['missing_keys']))}")
    if device_map is None:
        model.to(place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken tokenizer file can raise any exception
        log.warning("%s has no tokenizer that can be loaded (%s); prompts must be token ids", target, error)
        tokenizer = None
    return model, tokenizer


STORED_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16"}  # dtype names of safetensors
PACKABLE = 0.9  # the least share of the weights in linear layers and embeddings


def load_compact(
    target: str | Path, *, dtype: str | torch.dtype = "auto", quantization: str | None = None,
    trust_remote_code: bool = False, **options: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, torch.dtype | None]:
    """Load as `load_target` on a CPU, but leave weights in their stored 16 bits if they will be packed: as float16 for
    a float32 model (`linear.Half`), or as int8. Converting to float32 first would take three times the memory.

    Args:
        quantization: see `LoadOptions`.

    Returns:
        Model, tokenizer, and the dtype to pass to `CausalLM.pack`; None: the model has its final dtype. Without
        quantisation, "auto" is float32 where packing as float16 is possible; otherwise it is that of `load_target`.

    Raises:
        ValueError, TypeError, OSError: see `load_target`.
    """
    check_dtype(dtype)
    load = functools.partial(load_target, trust_remote_code=trust_remote_code, **options)
    packable = options.get("quantization_config") is None and (
        quantization is not None or dtype in ("auto", "float32", torch.float32) and has_half_kernels())
    stored = stored_dtype(target_source(target), trust_remote_code) if packable else None
    if stored not in STORED_NAMES:
        return *load(target, dtype=dtype), None
    final = {"auto": cpu_dtype(stored), None: stored}.get(dtype) or getattr(torch, str(dtype).removeprefix("torch."))
    names, model = safetensors_dtypes(target_source(target)), None
    if names == {STORED_NAMES[stored]}:
        model, tokenizer = load(target, dtype=stored)
        if quantization is not None:
            return model, tokenizer, final
        share = packable_share(model)
        if share >= PACKABLE or final == torch.float32:
            return model, tokenizer, torch.float32
        reason = f"{1 - share:.0%} of its weights are neither in linear layers nor in embeddings"
    elif quantization is not None:
        return *load(target, dtype=dtype), None
    else:
        reason = f"its files have weights of {', '.join(sorted(names))}" if names else "it has no safetensors files"
    if final == torch.float32:
        log.info("%s is loaded in float32 before packing, which takes more memory: %s", target, reason)
    else:
        log.warning("%s runs in bfloat16, in which near-ties can round differently from model.generate: %s. "
                    'dtype="float32" gives the tokens of model.generate, in twice the memory', target, reason)
    if model is None:
        model, tokenizer = load(target, dtype=final)
    return model, tokenizer, None


def safetensors_dtypes(target: str) -> set[str]:
    """The names of the floating dtypes in a checkpoint's safetensors files; empty without such files."""
    index = fetch(target, "model.safetensors.index.json")
    shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else ()
    files = set(shards) or {"model.safetensors"}
    dtypes = set()
    for path in (fetch(target, name) for name in files):
        if path is None:
            return set()
        with safe_open(path, "pt") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()  # noqa: SIM118  (no mapping)
                       if not name.endswith("rotary_emb.inv_freq")}  # in old checkpoints; not loaded
    return {name for name in dtypes if name.startswith(("F", "BF"))}


def packable_share(model: PreTrainedModel) -> float:
    """The share of a model's weights in plain linear layers and embeddings."""
    sizes = {id(part.weight): part.weight.numel() for part in model.modules()
             if type(part) is nn.Linear or isinstance(part, nn.Embedding)}
    return sum(sizes.values()) / sum(weight.numel() for weight in model.parameters())


class EmptyWeights(TorchFunctionMode):
    """Modules made within get weights without values or memory, which take no time to draw; their buffers are real.

    Other threads are not affected, unlike by accelerate's `init_empty_weights`, which changes `nn.Module` for all.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.empty:  # of layers and embeddings; buffers are made by other functions
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


@torch.no_grad()
def convert_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert 16-bit buffers to another dtype. Buffers that are not stored, such as Gemma's scale of embeddings, are
    recomputed by a model constructed in that dtype."""
    low = [(part, path, name) for path, part in model.named_modules()
           for name, buffer in part.named_buffers(recurse=False) if buffer.dtype in STORED_NAMES]
    if low:
        with EmptyWeights():
            fresh = type(model)(copy.deepcopy(model.config))
    for part, path, name in low:
        source = fresh.get_submodule(path) if name in part._non_persistent_buffers_set else part
        setattr(part, name, getattr(source, name).to(dtype))
