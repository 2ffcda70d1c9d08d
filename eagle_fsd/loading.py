"""`load`: a target and its draft head, from files to an `EagleModel`."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from .drafting.config import GPU_TREE, TreeConfig
from .drafting.curves import read_curves
from .heads.catalogue import display_name, find_pair
from .heads.checkpoint import load_head
from .heads.eagle import DraftHead
from .keywords import LoadKeywords, lists_options
from .load_options import LoadOptions
from .models import GROUPED, STOCK
from .models.linear import check_quantization
from .models.loading import check_device, load_compact, load_target
from .models.memory import MappedFiles, trim
from .models.target import TargetModel
from .pair import EagleModel, check_sizes

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


@lists_options(LoadOptions, LoadKeywords, described=True)
def load(
    target: str | Path | None = None, draft: str | Path | None = None, **options: Unpack[LoadKeywords]
) -> EagleModel:
    """Load a target and its draft head.

    Args:
        target, draft, options: see `LoadOptions`.

    Raises:
        TypeError: an unknown option, or one of the wrong type.
        ValueError: a default target that is not installed, a target with several known heads, a bad option, damaged or
            missing files, a head that does not fit, an unsupported target or attention. Flipped bits in the weights go
            unnoticed unless a number is no longer finite: the format has no checksum.
        OSError: a hub id that does not exist or cannot be fetched, or a broken config of the target.
        ImportError: a GGUF file, and the package gguf is not installed.
    """
    asked = LoadOptions.from_names({"target": target, "draft": draft, **options})
    check_quantization(asked.quantization)
    if asked.quantization and (asked.device_map is not None or check_device(asked.device).type != "cpu"):
        raise ValueError(f"quantization={asked.quantization!r} needs a target on the CPU: pass device=\"cpu\" without "
                         "device_map, or use a quantization_config of transformers")
    target, draft = find_pair(asked.target, asked.draft)
    head = None if draft is None else load_head(draft)  # the head first: it loads fast, so its errors come early
    curves = read_curves(draft) if asked.tree == "auto" and head is not None else None
    stock = asked.attn_implementation in STOCK
    placement = {"device": asked.device, "device_map": asked.device_map, "trust_remote_code": asked.trust_remote_code,
                 "quantization_config": asked.quantization_config,
                 "attn_implementation": asked.attn_implementation if stock else None}
    fused, early = asked.attn_implementation is None, asked.prepack and asked.quantization is None
    if early and asked.device_map is None and check_device(asked.device).type == "cpu":
        model, tokenizer, dtype = load_compact(target, dtype=asked.dtype, **placement)
        if not getattr(model, "is_quantized", False):
            pack_early(model, head, dtype, fused=fused)
    else:
        model, tokenizer = load_target(target, dtype=asked.dtype, **placement)
    pair = EagleModel.from_parts(model, head, tokenizer, fused=fused, cuda_graphs=asked.cuda_graphs)
    stored = None if asked.dtype == "auto" else asked.dtype
    pair.names = display_name(target), None if draft is None else display_name(draft)
    pair.load_stock = lambda dtype: load_target(target, dtype=dtype or stored, **placement)[0].eval()
    set_attention(pair.target, asked.attn_implementation)
    if asked.prepack:
        pair.prepack(asked.quantization)
    if isinstance(asked.tree, TreeConfig):
        pair.tree = asked.tree
    elif asked.tree == "auto":
        if pair.target.output_device.type == "cpu":
            pair.size_cycles(curves)
        elif head is not None:
            pair.tree = replace(GPU_TREE, top_k=min(GPU_TREE.top_k, head.draft_vocab_size))
    return pair


def pack_early(model: PreTrainedModel, head: DraftHead | None, dtype: torch.dtype | None, *, fused: bool) -> None:
    """Pack a target's weights before `TargetModel` checks it: the check then runs on the packed weights, and is faster.

    Args:
        head: the head that the target will be joined with.
        dtype: see `TargetModel.pack`. fused: see `EagleModel.from_parts`.
    """
    adapter, rows = TargetModel(model, fused=fused, check=False), None  # fused layers are packed together
    if head is not None:
        check_sizes(head, adapter)
        if head.token_map is not None:  # before packing: later the layer would have to be unpacked
            rows = head.output_rows = adapter.output_rows(head.token_map)
    adapter.pack(None, dtype)
    if rows is not None:
        rows.pack(None, adapter.lm_head, MappedFiles(), dtype)
    trim()
    if dtype is None:
        return
    model.config.dtype = dtype
    plain = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    if plain:
        log.warning("%d linear layers have weights that float16 cannot represent and stay in %s, which is slower "
                    '(dtype="bfloat16" may be faster): %s', len(plain), dtype, ", ".join(plain[:3]))


def set_attention(target: TargetModel, implementation: str | None) -> None:
    """Switch the target to the attention that the user asked for, or log why it cannot be used.

    Args:
        implementation: its name; None: the fastest one for the device that computes the same. The fused decoder has
            its own attention, so that None changes nothing there.
    """
    config, level = target.config, logging.WARNING
    stock = target.fused is None and target.device.type == "cpu"
    if implementation is None and stock and config._attn_implementation == "sdpa":
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        implementation, level = GROUPED if key_heads < config.num_attention_heads else None, logging.INFO
    if implementation not in (None, *STOCK):
        try:
            target.use_attention(implementation)
        except ValueError as error:
            log.log(level, "%s", error)


@functools.cache
def default_model() -> EagleModel:
    """The default pair. It is loaded once per process."""
    return load()
