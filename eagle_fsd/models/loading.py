"""Loading a causal LM of `transformers` with its tokenizer, placed as the user asks."""

from __future__ import annotations

import copy
import functools
import json
import logging
import time
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checks import check_placement
from ..data.gguf import target_source
from ..data.sources import fetch
from .linear import multiplies_half

log = logging.getLogger(__name__)


def check_dtype(dtype: object) -> None:
    """Raise unless it is "auto", None, or a floating torch dtype or its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in ("auto", None) and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f'dtype must be "auto", a floating torch dtype or its name such as "bfloat16", got {dtype!r}')


def check_device(device: object) -> torch.device:
    """The device, default CUDA where available, else the CPU.

    Raises:
        ValueError: one that torch does not know, or cannot use here.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place).item()
    except Exception as error:  # torch raises an AssertionError where it was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from error
    return place


def stored_dtype(target: str, trust_remote_code: bool) -> torch.dtype | None:
    """What a checkpoint says that it is stored in; None: it does not say, or is quantised."""
    try:
        config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception:  # the model's loading says what is wrong
        return None
    return None if getattr(config, "quantization_config", None) else config.dtype


def cpu_dtype(stored: torch.dtype | None) -> torch.dtype:
    """What "auto" means on a CPU for weights that are not packed as float16: bfloat16 for those stored so, where the
    processor is faster in it; else float32."""
    return torch.bfloat16 if stored == torch.bfloat16 and bfloat16_pays() else torch.float32


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this CPU multiplies a few rows faster in bfloat16 than in float32 (AVX-512 BF16, AMX), as measured.

    Without such instructions it is several times slower, with them at least as fast for one row, whose time is that of
    reading the weights.
    """
    if torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False  # a measurement beside other work could say anything

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(16, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.nn.functional.linear(rows, weights)
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(torch.bfloat16) < seconds(torch.float32)


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
    """A causal LM and its tokenizer, placed as `load` places them; None where it has no tokenizer that loads.

    Raises:
        ValueError, TypeError, OSError: see `load`.
    """
    check_dtype(dtype)
    if not (quantization_config is None or isinstance(quantization_config, (dict, QuantizationConfigMixin))):
        raise TypeError(f"quantization_config must be one of transformers or None, got {quantization_config!r}")
    check_placement(device, device_map)
    place = check_device(device)
    target = target_source(target)  # last: a GGUF file is dequantised
    if dtype == "auto" and device_map is None and place.type == "cpu":
        dtype = cpu_dtype(stored_dtype(target, trust_remote_code))
    options = {} if quantization_config is None else {"quantization_config": quantization_config}  # None: the saved one
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, device_map=device_map, attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code, output_loading_info=True, **options,
        )
    except (OSError, ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what damaged files and unknown devices end in
        raise ValueError(f"{target} cannot be loaded as a causal LM: {type(error).__name__}: {error}") from error
    if "fc.weight" in loaded["unexpected_keys"]:
        raise ValueError(f"{target} is a draft head: give it as the draft, and its model as the target")
    if loaded["missing_keys"]:  # transformers would go on with random numbers
        raise ValueError(f"{target} lacks weights: {', '.join(sorted(loaded['missing_keys']))}")
    if device_map is None:
        model.to(place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a broken tokenizer file raises
        log.warning("%s has no tokenizer that loads (%s); prompts must be token ids", target, error)
        tokenizer = None
    return model, tokenizer


STORED_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16"}  # the names of safetensors
PACKABLE = 0.9  # of the weights have to be in linear layers and embeddings


def load_compact(
    target: str | Path, *, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False, **options: object
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, torch.dtype | None]:
    """As `load_target` on a CPU, but weights that are to be float32 stay in the 16 bits that they are stored in, where
    linear layers can be packed as float16 (`linear.Half`): float32 in between would take three times the memory.

    Returns:
        Model, tokenizer, and the dtype that the model is to be given by `TargetModel.pack`; None: the one it has. For
        "auto" that is float32 wherever such packing is possible, else what `load_target` takes.

    Raises:
        ValueError, TypeError, OSError: see `load_target`.
    """
    check_dtype(dtype)
    load = functools.partial(load_target, trust_remote_code=trust_remote_code, **options)
    wide = dtype in ("auto", "float32", torch.float32) and options.get("quantization_config") is None
    stored = stored_dtype(target_source(target), trust_remote_code) if wide and multiplies_half() else None
    if stored in STORED_NAMES:
        names, model = stored_names(target_source(target)), None
        if not names:
            reason = "no safetensors file says what its numbers are"
        elif names != {STORED_NAMES[stored]}:
            reason = f"its file has numbers of {', '.join(sorted(names))}"
        else:
            model, tokenizer = load(target, dtype=stored)
            share = packable_share(model)
            if share >= PACKABLE:
                compute_buffers(model, torch.float32)
                return model, tokenizer, torch.float32
            reason = f"{1 - share:.0%} of its weights are in other layers than linear ones"
        dtype = cpu_dtype(stored) if dtype == "auto" else torch.float32
        if dtype == torch.float32:
            log.info("%s is read in float32 before it is packed, which takes more memory: %s", target, reason)
        else:
            log.warning("%s is computed in bfloat16, where near-ties can round otherwise than in model.generate: %s. "
                        'dtype="float32" computes as model.generate does, in twice the memory', target, reason)
            if model is not None:
                return model, tokenizer, None
        del model
    elif stored == torch.float32 and dtype == "auto":
        dtype = torch.float32
    return *load(target, dtype=dtype), None


def stored_names(target: str) -> set[str]:
    """The floating dtypes in a checkpoint's safetensors files, under their names there; none without such files."""
    index = fetch(target, "model.safetensors.index.json")
    files = set(json.loads(Path(index).read_text())["weight_map"].values()) if index else {"model.safetensors"}
    found = set()
    for path in (fetch(target, name) for name in files):
        if path is None:
            return set()
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()  # noqa: SIM118  (no mapping)
                      if not name.endswith("rotary_emb.inv_freq")}  # of old checkpoints, and not read
    return {name for name in found if name.startswith(("F", "BF"))}


def packable_share(model: PreTrainedModel) -> float:
    """Of a model's weights, how many are those of plain linear layers, or embeddings, which are looked up."""
    ours = {id(part.weight): part.weight.numel() for part in model.modules()
            if type(part) is nn.Linear or isinstance(part, nn.Embedding)}
    return sum(ours.values()) / sum(weight.numel() for weight in model.parameters())


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Have buffers of 16 bits in another dtype: those that no checkpoint holds, such as Gemma's scale of embeddings,
    as a model of that dtype computes them when it is made."""
    low = [(part, path, name) for path, part in model.named_modules()
           for name, buffer in part.named_buffers(recurse=False) if buffer.dtype in STORED_NAMES]
    if low:
        with init_empty_weights(include_buffers=False):
            made = type(model)(copy.deepcopy(model.config))
    for part, path, name in low:
        new = name in part._non_persistent_buffers_set
        setattr(part, name, (getattr(made.get_submodule(path), name) if new else getattr(part, name)).to(dtype))
