"""Tree attention: each node sees the committed prefix, its ancestors and itself.

Two implementations of our own stand beside the stock ones, for any model whose attention is chosen by name: "grouped"
is stock sdpa without its copies of shared keys, "split" runs the prefix without a mask and joins the tree to it.

B batch, H query heads, K key heads, G = H / K, L prefix length, N nodes (queries), M columns of a mask, P keys of a
part, D head size, W head size of the values.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

log = logging.getLogger(__name__)

STOCK = ("sdpa", "eager")  # those of transformers that take an arbitrary 4D mask
GROUPED, SPLIT = "grouped", "split"  # ours
IMPLEMENTATIONS = (*STOCK, GROUPED, SPLIT)
HALF = (torch.float16, torch.bfloat16)
stock_attention = AttentionInterface()["sdpa"]

# Masks -------------------------------------------------------------------------------------------------------


class Prefix(NamedTuple):
    """What the small masks of `tree_masks` do not say; reaches "split" as the keyword `tree_prefix` of the forward.

    Args:
        starts: by layer, the first key that any node sees.
        partial: by layer, how many keys from there on some nodes see and others do not: they have the mask's first
            columns. All nodes see what lies between them and the tree.
        bias: [B, 1, 1, L] additive, where a row does not see all of the prefix.
        lengths: [B] int32, at least 1, where what a row sees of the prefix is its beginning; says what `bias` says.
    """

    starts: Sequence[int]
    partial: Sequence[int]
    bias: Tensor | None = None
    lengths: Tensor | None = None


def tree_masks(
    implementation: str,
    ancestors: Tensor,  # [B, N, N] bool, or self
    positions: Tensor,  # [B, N], where key j of the prefix is at position j
    prefix: int,  # L
    dtype: torch.dtype,
    layers: Sequence[str],  # the kind of each layer: full_attention, sliding_attention or chunked_attention
    *,
    window: int | None = None,  # of the sliding layers
    chunk: int | None = None,  # of the chunked layers
    prefix_visible: Tensor | None = None,  # [B, L] bool; None: all of it
    lengths: Tensor | None = None,  # [B], where row b sees the first lengths[b] keys: what prefix_visible says, shorter
) -> tuple[dict[str, Tensor], Prefix | None]:
    """Additive masks [B, 1, N, M] by kind of layer, and what else the forward of a tree must be told.

    For "split" a mask has the columns of the tree, and before them those of the keys that only some nodes see; for all
    other implementations those of all keys.
    """
    if prefix_visible is None and lengths is not None:
        prefix_visible = torch.arange(prefix, device=positions.device) < lengths[:, None]
    masks, spans = {}, {}
    for kind in dict.fromkeys(layers):
        reach = {"sliding_attention": window, "chunked_attention": chunk}.get(kind)
        narrow = reach is not None and prefix + ancestors.shape[1] > reach
        if implementation != SPLIT or (narrow and prefix_visible is not None):
            start, partial = 0, prefix
        else:
            start, partial = _span(kind, reach, prefix, ancestors.shape[1]) if narrow else (0, 0)
        mask = tree_mask(ancestors, partial, dtype, prefix_visible if partial else None)
        if narrow:
            keys = torch.arange(start, start + partial, device=positions.device).expand(len(positions), -1)
            narrowed = apply_window if kind == "sliding_attention" else apply_chunks
            mask = narrowed(mask, positions, torch.cat([keys, positions], 1), reach)
        masks[kind], spans[kind] = mask, (start, partial)
    if implementation != SPLIT or (prefix_visible is None and not any(map(any, spans.values()))):
        return masks, None
    starts, partials = zip(*(spans[kind] for kind in layers), strict=True)
    bias = None
    if prefix_visible is not None:  # CUDA kernels want rows of a multiple of 16 bytes
        bias = torch.zeros(len(positions), 1, 1, -(-prefix // 8) * 8, dtype=dtype, device=positions.device)
        bias = bias[..., :prefix].masked_fill_(~prefix_visible[:, None, None], torch.finfo(dtype).min)
    return masks, Prefix(starts, partials, bias, None if lengths is None else lengths.to(torch.int32))


def _span(kind: str, reach: int, prefix: int, nodes: int) -> tuple[int, int]:
    """The first key that any node sees, and how many from there on not all see; nodes are at most N - 1 deep."""
    if kind == "sliding_attention":
        start = max(0, prefix - reach + 1)
        return start, min(prefix, prefix + nodes - reach) - start
    start = prefix // reach * reach
    return start, 0 if (prefix + nodes - 1) // reach == prefix // reach else prefix - start


def tree_mask(
    visible: Tensor,  # [B, N, M] bool, over the last M keys: ancestors or self
    prefix: int,
    dtype: torch.dtype,
    prefix_visible: Tensor | None = None,  # [B, L] bool; None: the whole prefix
) -> Tensor:  # [B, 1, N, L + M]
    """Additive attention mask (0 or the lowest finite number): the prefix plus the visible nodes.

    Additive rather than boolean: both stock kernels take it, and none has to convert it in every layer.
    """
    batch, nodes, keys = visible.shape
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(batch, 1, nodes, prefix + keys, dtype=dtype, device=visible.device)
    if prefix_visible is not None:
        mask[..., :prefix].masked_fill_(~prefix_visible[:, None, None], lowest)
    mask[..., prefix:].masked_fill_(~visible[:, None], lowest)
    return mask


def apply_window(
    mask: Tensor,  # [B, 1, N, L + M], as of `tree_mask`
    query_positions: Tensor,  # [B, N]
    key_positions: Tensor,  # [B, L + M]
    window: int,
) -> Tensor:
    """The same mask for sliding-window layers: a key is seen iff query position - key position < window."""
    distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
    return mask.masked_fill(distance >= window, torch.finfo(mask.dtype).min)


def apply_chunks(
    mask: Tensor,  # [B, 1, N, L + M], as of `tree_mask`
    query_positions: Tensor,  # [B, N]
    key_positions: Tensor,  # [B, L + M]
    chunk: int,
) -> Tensor:
    """The same mask for layers of chunked attention: a key is seen iff it is in the query's chunk of positions."""
    elsewhere = (query_positions // chunk)[:, None, :, None] != (key_positions // chunk)[:, None, None, :]
    return mask.masked_fill(elsewhere, torch.finfo(mask.dtype).min)


# Attention functions, as `AttentionInterface` wants them ------------------------------------------------------


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, keys, D]
    value: Tensor,  # [B, K, keys, W]
    attention_mask: Tensor | None,  # [B, 1, N, keys]
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H], a logit that takes its share of the weight and has no value (GPT-OSS)
    **options: object,
) -> tuple[Tensor, None]:  # [B, N, H, W]
    """Stock sdpa; but where that would copy shared keys for every head because there is a mask, the kernel shares them.

    The kernel is the same on a CPU, and so is every bit of the result. On CUDA no kernel but the slow one does that.
    With a soft cap or sinks, for which sdpa has no place, it computes what eager attention does.
    """
    if softcap is not None or s_aux is not None:
        if attention_mask is None:
            nodes = query.shape[2]
            key, value = (key, value) if nodes == 1 else (key[:, :, :nodes], value[:, :, :nodes])
            keys = key.shape[2]
            attention_mask = torch.ones(1, 1, nodes, keys, dtype=torch.bool, device=query.device).tril(keys - nodes)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attention_mask = attention_mask[..., : key.shape[2]]
        return _by_position(_joined(query, key, value, attention_mask, scale, softcap, s_aux)), None
    stock = attention_mask is None or query.shape[2] == 1 or query.shape[1] == key.shape[1]
    more = any(options.get(name) is not None for name in ("position_bias", "cache"))
    if stock or more or query.requires_grad or query.device.type != "cpu":
        return stock_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def split_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, keys, D]
    value: Tensor,  # [B, K, keys, W]
    attention_mask: Tensor | None,  # [B, 1, N, M] of `tree_masks`, or one of all keys; None: causal
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]
    tree_prefix: Prefix | None = None,
    **options: object,
) -> tuple[Tensor, None]:  # [B, N, H, W]
    """The prefix without a mask by the fastest kernel there is, joined with the masked rest by log-sum-exp.

    FlashAttention (arXiv 2205.14135, section 3.1) joins blocks of keys in the same way. Masks of all keys, and causal
    attention where there is no flash-attn, go to `grouped_attention`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    nodes, keys = query.shape[2], key.shape[2]
    if attention_mask is None and _flash_for(query, value) is not None:
        if nodes > 1:  # from an empty cache; a static one has more keys by then
            key, value = key[:, :, :nodes], value[:, :, :nodes]
        out, lse = _prefix_attention(query, key, value, scale, softcap, causal=nodes > 1)
        if s_aux is not None:
            share = (lse - s_aux.to(lse.dtype).view(1, *lse.shape[1:3], 1)).sigmoid()
            out = out * share[..., None].to(out.dtype)
        return _by_position(out), None
    if attention_mask is None or attention_mask.shape[-1] >= keys:
        return grouped_attention(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **options
        )
    start, partial, bias, lengths = 0, 0, None, None
    if tree_prefix is not None:
        start, partial = tree_prefix.starts[module.layer_idx], tree_prefix.partial[module.layer_idx]
        bias, lengths = tree_prefix.bias, tree_prefix.lengths
    first, last = start + partial, keys - (attention_mask.shape[-1] - partial)
    before = None
    if last > first:
        before = _prefix_attention(
            query, key[:, :, first:last], value[:, :, first:last], scale, softcap, bias=bias, lengths=lengths
        )
    if partial:
        key, value = (torch.cat([each[:, :, start:first], each[:, :, last:]], 2) for each in (key, value))
    else:
        key, value = key[:, :, last:], value[:, :, last:]
    return _by_position(_joined(query, key, value, attention_mask, scale, softcap, s_aux, before)), None


def _joined(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, M, D]
    value: Tensor,  # [B, K, M, W]
    mask: Tensor,  # [B, 1, N, M], additive or bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
    before: tuple[Tensor, Tensor] | None = None,  # as of `_prefix_attention`
) -> Tensor:  # [B, K, G, N, W]
    """Attention to masked keys; the prefix is one more key, its logit the log-sum-exp and its value the output."""
    grouped = _grouped(query, key)
    scores = _scores(grouped, key, scale, softcap)
    mask = mask[:, :, None]
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    columns = [] if before is None else [before[1][..., None]]
    if sinks is not None:
        columns.append(sinks.view(1, *grouped.shape[1:3], 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1))
    weights = torch.cat([*columns, scores], -1).softmax(-1).to(value.dtype)
    out = (weights[..., len(columns) :].flatten(2, 3) @ value).unflatten(2, grouped.shape[2:4])
    return out if before is None else torch.addcmul(out, weights[..., :1], before[0])


def _prefix_attention(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, P, D], P > 0
    value: Tensor,  # [B, K, P, W]
    scale: float,
    softcap: float | None,
    *,
    causal: bool = False,  # for flash-attn only
    bias: Tensor | None = None,  # [B, 1, 1, P], as of `Prefix`
    lengths: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:  # [B, K, G, N, W], and the log-sum-exp of the scores [B, K, G, N] in float32
    """Attention that, but for `causal`, no two nodes of a row do differently."""
    grouped = _grouped(query, key)
    flash = _flash_for(query, value)
    if flash is not None and (bias is None or lengths is not None):
        each = (states.transpose(1, 2) for states in (query, key, value))
        out, lse = flash(*each, scale, softcap or 0.0, lengths, causal)  # [B, N, H, W], [B, H, N]
        return out.transpose(1, 2).unflatten(1, grouped.shape[1:3]), lse.unflatten(1, grouped.shape[1:3])
    assert not causal
    folded = grouped.flatten(2, 3)  # without a mask the queries that share keys are as good as nodes of one head
    if bias is not None:
        bias = bias.expand(-1, key.shape[1], folded.shape[2], -1)
    if softcap is not None or query.shape[-1] != value.shape[-1]:
        kernel = None
    elif query.device.type == "cpu":
        kernel = _cpu_kernel
    else:
        kernel = _cuda_kernel if query.is_cuda and query.dtype in HALF and query.shape[-1] % 8 == 0 else None
    if kernel is not None:
        out, lse = kernel(folded, key, value, scale, bias)
    else:
        scores = _scores(folded[:, :, None], key, scale, softcap)[:, :, 0]
        scores = scores if bias is None else scores + bias
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp().to(value.dtype) @ value
    return out.unflatten(2, grouped.shape[2:4]), lse.unflatten(2, grouped.shape[2:4])


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, K, G, N, D]."""
    return query.unflatten(1, (key.shape[1], -1))


def _scores(grouped: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[B, K, G, N, P] in float32."""
    scores = (grouped.flatten(2, 3) @ key.mT).unflatten(2, grouped.shape[2:4]).float() * scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _by_position(out: Tensor) -> Tensor:
    """[B, K, G, N, W] -> [B, N, H, W]."""
    return out.flatten(1, 2).transpose(1, 2).contiguous()


def _cpu_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _cuda_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if bias is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)
    return out, lse[..., : query.shape[2]]  # it is padded


# flash-attn --------------------------------------------------------------------------------------------------

# (query [B, N, H, D], key [B, P, K, D], value [B, P, K, D], scale, softcap or 0, lengths [B] or None, causal)
# -> out [B, N, H, D], log-sum-exp [B, H, N]
Flash = Callable[[Tensor, Tensor, Tensor, float, float, Tensor | None, bool], tuple[Tensor, Tensor]]


def _flash_for(query: Tensor, value: Tensor) -> Flash | None:
    """flash-attn where it is installed and serves these tensors."""
    size = query.shape[-1]
    if query.dtype not in HALF or size != value.shape[-1] or size % 8 or size > 256:
        return None
    found = find_flash(query.device)
    return found and found[1]


_flash: dict[torch.device, tuple[str, Flash] | None] = {}  # what was found; no functools.cache, for torch.compile


def find_flash(device: torch.device) -> tuple[str, Flash] | None:
    """The flash-attn package that is used on the device, of those that can be imported, and how to call it.

    On Hopper 3, else 2; on newer devices 4, else 2; on Ampere and Ada 2. Version 4 cuts the keys into parts that run
    side by side, without which a tree occupies few of the multiprocessors, on devices newer than Hopper only.
    """
    if device not in _flash:
        _flash[device] = _look_for_flash(device)
    return _flash[device]


def _look_for_flash(device: torch.device) -> tuple[str, Flash] | None:
    capability = _capability(device)
    runs = {"flash_attn_interface": capability == 9, "flash_attn.cute": capability >= 10, "flash_attn": capability >= 8}
    for name in (name for name in runs if runs[name]):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # an extension that was built for another torch raises anything
            level = logging.DEBUG if isinstance(error, ModuleNotFoundError) else logging.WARNING
            log.log(level, "%s is not used: %s", name, error)
            continue
        wanted, call = FLASH[name]
        functions = [getattr(module, function, None) for function in wanted]
        if all(functions):
            return name, functools.partial(call, *functions)
        log.warning("%s is not used: it has no %s", name, " and ".join(wanted))
    return None


def _capability(device: torch.device) -> int:
    """Major version of the compute capability; 0: no CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _flash_2_or_3(with_kvcache, query, key, value, scale, softcap, lengths, causal):
    return with_kvcache(
        query, key, value, cache_seqlens=lengths, softmax_scale=scale, softcap=softcap, causal=causal,
        return_softmax_lse=True,
    )[:2]


def _flash_4(uniform, ragged, query, key, value, scale, softcap, lengths, causal):
    options = {"softmax_scale": scale, "softcap": softcap, "causal": causal, "num_splits": 0, "return_lse": True}
    if lengths is None:
        return uniform(query, key, value, **options)[:2]
    return ragged(query, key, value, seqused_k=lengths, **options)[:2]


# What is called of each package. num_splits=0: as many as pay, which is the default of versions 2 and 3.
FLASH = {
    "flash_attn_interface": (("flash_attn_with_kvcache",), _flash_2_or_3),
    "flash_attn.cute": (("flash_attn_func", "flash_attn_varlen_func"), _flash_4),
    "flash_attn": (("flash_attn_with_kvcache",), _flash_2_or_3),
}

for _name, _function in {GROUPED: grouped_attention, SPLIT: split_attention}.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])
