"""`load`: a target and its drafter, from files to an `EagleModel`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.sources import at_revision
from ..drafting.config import TreeConfig
from ..drafting.language_model import DraftModel, draft_form
from ..heads.catalogue import display_name, find_pair
from ..heads.checkpoint import is_causal_lm, load_head
from ..heads.eagle import DraftHead, OutputRows
from ..models import GROUPED, STOCK
from ..models.linear import check_quantization, device_of
from ..models.loading import check_device, convert_buffers, load_compact, load_target
from ..models.memory import trim
from ..models.target import CausalLM, TargetModel
from ..options.load import LoadKeywords, LoadOptions
from ..options.option import lists_options
from ..utils.threads import one_at_a_time
from .curves import read_curves
from .pair import EagleModel, check_once

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


@lists_options(LoadKeywords, described=True)
@one_at_a_time
def load(
    target: str | Path | None = None, draft: str | Path | None = None, **options: Unpack[LoadKeywords]
) -> EagleModel:
    """Load a target and its drafter: a draft head, or a smaller causal LM. Several threads may call this; they load one
    after the other.

    Args:
        target, draft, options: see `LoadOptions`.

    Raises:
        TypeError: an unknown option, or one of the wrong type.
        ValueError: a default target that is not installed, a target with several known heads, a bad option, damaged or
            missing files, a drafter that does not fit, an unsupported target or attention. Flipped bits in the weights
            go unnoticed unless a number is no longer finite: the format has no checksum.
        OSError: a hub id that does not exist or cannot be fetched, or a broken config of the target.
        ImportError: a GGUF file, and the package gguf is not installed.
    """
    LoadOptions.check_names(options)
    asked = LoadOptions(target=target, draft=draft, **options)
    for name in ("quantization", "draft_quantization"):
        form = getattr(asked, name)
        check_quantization(form)
        if form and (asked.device_map is not None or check_device(asked.device).type != "cpu"):
            raise ValueError(f"{name}={form!r} needs a target on the CPU: pass device=\"cpu\" without device_map, or "
                             "use a quantization_config of transformers")
    target, draft = find_pair(asked.target, asked.draft)
    target = at_revision("revision", target, asked.revision)
    draft = at_revision("draft_revision", draft, asked.draft_revision)
    small = draft is not None and is_causal_lm(draft)
    if not small and (asked.draft_dtype or asked.draft_quantization):
        raise ValueError("draft_dtype and draft_quantization are for a causal LM as the drafter: leave them out")
    head = None if draft is None or small else load_head(draft)  # the head first: it loads fast, so errors come early
    if asked.draft_window is not None:
        if head is None:
            raise ValueError(f"draft_window={asked.draft_window} is for a head, which this pair lacks: leave it out")
        head.window = asked.draft_window
    curves = None if draft is None or asked.tree != "auto" or Path(draft).is_file() else read_curves(draft)
    stock = asked.attn_implementation in STOCK
    placement = {"device": asked.device, "device_map": asked.device_map, "trust_remote_code": asked.trust_remote_code,
                 "quantization_config": asked.quantization_config,
                 "attn_implementation": asked.attn_implementation if stock else None}
    fused, drafter = asked.attn_implementation is None, head
    packs = {"prepack": asked.prepack, "fused": fused}
    model, tokenizer = load_model(target, asked.dtype, placement, quantization=asked.quantization, head=head, **packs)
    if small:
        place = device_of(model.get_output_embeddings())
        small_model, small_tokenizer = load_model(
            draft, asked.draft_dtype or asked.dtype,
            {**placement, "device": place, "device_map": None, "quantization_config": None},
            quantization=draft_form(asked.draft_quantization or asked.quantization), **packs)
        drafter = DraftModel(small_model, small_tokenizer, fused=fused)
        set_attention(drafter, asked.attn_implementation)
    pair = EagleModel.from_parts(model, drafter, tokenizer, fused=fused, cuda_graphs=asked.cuda_graphs)
    stored = None if asked.dtype == "auto" else asked.dtype
    pair.names = display_name(target), None if draft is None else display_name(draft)
    pair.load_stock = lambda dtype: load_target(target, dtype=dtype or stored, **placement)[0].eval()
    set_attention(pair.target, asked.attn_implementation)
    if asked.prepack:
        pair.prepack(asked.quantization, asked.draft_quantization)
    if isinstance(asked.tree, TreeConfig):
        pair.tree = asked.tree
    elif asked.tree == "auto" and pair.target.output_device.type == "cpu":
        pair.size_cycles(curves)
    return pair


def load_model(
    source: str | Path, dtype: object, placement: Mapping[str, Any], *, prepack: bool = True,
    quantization: str | None = None, fused: bool = True, head: DraftHead | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal LM and its tokenizer by `load_target`; weights on a CPU are packed as soon as they are loaded.

    The check of `CausalLM` runs on the packed weights, where it is faster; but before packing as int8, because two
    forwards in int8 differ by more than the check tolerates.

    Args:
        placement: further keywords of `load_target`.
        fused: see `EagleModel.from_parts`. head: the head that the model will be joined with.
    """
    on_cpu = placement.get("device_map") is None and check_device(placement["device"]).type == "cpu"
    if not prepack or not on_cpu:
        return load_target(source, dtype=dtype, **placement)
    model, tokenizer, dtype = load_compact(source, dtype=dtype, quantization=quantization, **placement)
    if getattr(model, "is_quantized", False):
        return model, tokenizer
    if quantization is not None:
        check_once(model, fused=fused)
    if dtype is not None:
        convert_buffers(model, dtype)
    adapter, rows = TargetModel(model, fused=fused, check=False), None  # fused layers are packed together
    if head is not None:
        head.check_sizes(adapter)
        if head.token_map is not None:  # before packing: later the layer would have to be unpacked
            rows = head.output_rows = OutputRows.copied(adapter, head.token_map)
    adapter.pack(quantization, dtype)
    if rows is not None:
        rows.pack(quantization, adapter.lm_head, dtype)
    trim()
    plain = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    if dtype is not None and plain:
        log.warning("%d linear layers have weights that float16 cannot represent and stay in %s, which is slower "
                    '(dtype="bfloat16" may be faster): %s', len(plain), dtype, ", ".join(plain[:3]))
    model.config.dtype = dtype or model.config.dtype
    return model, tokenizer


def set_attention(model: CausalLM, implementation: str | None) -> None:
    """Switch the model to the attention that the user asked for, or log why it cannot be used.

    Args:
        implementation: its name; None: the fastest one for the device that computes the same. The fused decoder has
            its own attention, so that None changes nothing there.
    """
    config, level = model.config, logging.WARNING
    stock = model.fused is None and model.input_device.type == "cpu"
    if implementation is None and stock and config._attn_implementation == "sdpa":
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        implementation, level = GROUPED if key_heads < config.num_attention_heads else None, logging.INFO
    if implementation not in (None, *STOCK):
        try:
            model.use_attention(implementation)
        except ValueError as error:
            log.log(level, "%s", error)


@one_at_a_time
@functools.cache
def default_model() -> EagleModel:
    """The default pair. It is loaded once per process."""
    return load()
