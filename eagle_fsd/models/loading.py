"""Loading a causal LM of `transformers` with its tokenizer, placed as the user asks."""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checks import check_placement
from ..data.gguf import target_source

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


def cpu_dtype(target: str, trust_remote_code: bool) -> torch.dtype:
    """What "auto" means on a CPU: bfloat16 for weights stored so, where the processor is faster in it; else float32."""
    try:
        stored = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code).dtype
    except Exception:  # the model's loading says what is wrong
        return torch.float32
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
        dtype = cpu_dtype(target, trust_remote_code)
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
