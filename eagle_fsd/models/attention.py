"""Two attention implementations for trees, in addition to the stock ones.

Both work with any model that selects its attention by name. "grouped" is stock sdpa without its copies of shared keys.
"split" runs flash-attn, which must be installed, over the prefix without a mask, and merges the tree's attention.

B batch, H query heads, K key heads, G = H / K, L prefix length, N nodes (queries), M columns of a mask, P keys of a
part, D head size, W head size of the values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from . import GROUPED, SPLIT
from .cache import rows_and_slots
from .flash import HALF_DTYPES, flash_for
from .masks import additive

stock_attention = AttentionInterface()["sdpa"]


def turn_off_cudnn() -> None:
    """Disable cuDNN's kernels in sdpa, which PyTorch prefers on Hopper: cuDNN compiles a kernel for each new number of
    keys, some 37 ms on an H100, and in decoding each forward has a new one.

    This holds for the whole process from then on. PyTorch has one flag for all threads, also used by
    `torch.nn.attention.sdpa_kernel`; if each forward changed it, threads would overwrite each other's value.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


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
    s_aux: Tensor | None = None,  # [H], attention sink: a logit in the softmax without a value (GPT-OSS)
    **options: object,
) -> tuple[Tensor, None]:  # [B, N, H, W]
    """Stock sdpa, without the copies of shared keys that stock sdpa makes for every head under a mask.

    On a CPU the kernel and every bit of the result are the same. On CUDA only the slowest kernel shares keys, so that
    the stock function runs. In half precision the kernel converts all keys for each head: for single tokens of a
    batch, the heads that share keys are passed as positions of one head, which is several times as fast and
    occasionally differs in the last bit. A soft cap and sinks, which sdpa does not support, are computed as in eager
    attention.
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
    merges = query.shape[0] > 1 and query.shape[2] == 1 and query.dtype in HALF_DTYPES
    stock = not merges and (attention_mask is None or query.shape[2] == 1) or query.shape[1] == key.shape[1]
    more = any(options.get(name) is not None for name in ("position_bias", "cache"))
    if stock or more or query.requires_grad or query.device.type != "cpu":
        return stock_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)
    shape = query.shape
    if merges:
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])  # [B, K, G, D]
        if attention_mask is not None and attention_mask.shape[1] > 1:  # a mask of each head
            attention_mask = attention_mask.reshape(*query.shape[:3], -1)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=not merges
    )
    return out.reshape(*shape[:3], -1).transpose(1, 2).contiguous(), None


def split_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, keys, D]
    value: Tensor,  # [B, K, keys, W]
    attention_mask: Tensor | None,  # [B, 1, N, M] of the last M keys, the others being a prefix; None: causal
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]
    prefix_lengths: Tensor | None = None,  # [B] long: where each row's M keys begin; None: all end with the last key
    **options: object,
) -> tuple[Tensor, None]:  # [B, N, H, W]
    """Attention over the prefix by flash-attn without a mask, merged with the masked rest by log-sum-exp.

    FlashAttention (arXiv 2205.14135, section 3.1) merges blocks of keys in the same way. A mask of all keys is passed
    to `grouped_attention`.

    Raises:
        ValueError: flash-attn is not installed or does not support these tensors.
    """
    prefix = key.shape[2] if attention_mask is None else key.shape[2] - attention_mask.shape[-1]
    if not prefix:
        return grouped_attention(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **options
        )
    scale, nodes = query.shape[-1] ** -0.5 if scaling is None else scaling, query.shape[2]
    if attention_mask is None:
        if nodes > 1:  # the cache was empty; a static cache has more keys than nodes
            key, value = key[:, :, :nodes], value[:, :, :nodes]
        out, lse = _flash(query, key, value, scale, softcap, causal=nodes > 1)
        if s_aux is not None:
            share = (lse - s_aux.to(lse.dtype).view(1, *lse.shape[1:3], 1)).sigmoid()
            out = out * share[..., None].to(out.dtype)
        return _by_position(out), None
    if prefix_lengths is not None:
        before = _flash(query, key, value, scale, softcap, prefix_lengths.int())
        key, value = keys_after(prefix_lengths, attention_mask.shape[-1], key, value)
    else:
        before = _flash(query, key[:, :, :prefix], value[:, :, :prefix], scale, softcap)
        key, value = key[:, :, prefix:], value[:, :, prefix:]
    return _by_position(_joined(query, key, value, attention_mask, scale, softcap, s_aux, before)), None


def keys_after(lengths: Tensor, count: int, *states: Tensor) -> list[Tensor]:
    """Keys and values [B, K, keys, *] in the `count` slots after each row's first lengths[b]."""
    row, slots = rows_and_slots(lengths, count)
    return [each[row, :, slots].transpose(1, 2) for each in states]  # [B, K, count, *]


def tree_attention(
    lengths: Tensor,  # [B], positions of each row's text; the tree's keys are in the slots after them
    ancestors: Tensor,  # [B, N, N] bool, ancestors or self
    dtype: torch.dtype,
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """`fused.attention_over` of flash-attn, as in `split_attention`, for texts whose lengths are a tensor."""
    mask, used = additive(ancestors, dtype), lengths.int()

    def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        queries = queries.transpose(1, 2)
        before = _flash(queries, keys, values, scale, None, used)
        out = _joined(queries, *keys_after(lengths, ancestors.shape[1], keys, values), mask, scale, None, None, before)
        return _by_position(out).flatten(2)

    return attend


def _joined(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, M, D]
    value: Tensor,  # [B, K, M, W]
    mask: Tensor,  # [B, 1, N, M], additive or bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
    before: tuple[Tensor, Tensor] | None = None,  # as of `_flash`
) -> Tensor:  # [B, K, G, N, W]
    """Attention to masked keys; the prefix is one more key, its logit the log-sum-exp and its value the output."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, K, G, N, D]
    scores = (grouped.flatten(2, 3) @ key.mT).unflatten(2, grouped.shape[2:4]).float() * scale
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    mask = mask[:, :, None]
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    columns = [] if before is None else [before[1][..., None]]
    if sinks is not None:
        columns.append(sinks.view(1, *grouped.shape[1:3], 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1))
    weights = torch.cat([*columns, scores], -1).softmax(-1).to(value.dtype)
    out = (weights[..., len(columns) :].flatten(2, 3) @ value).unflatten(2, grouped.shape[2:4])
    return out if before is None else torch.addcmul(out, weights[..., :1], before[0])


def _flash(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, P, D], P > 0
    value: Tensor,  # [B, K, P, W]
    scale: float,
    softcap: float | None,
    lengths: Tensor | None = None,  # [B] int32, see `split_attention`
    causal: bool = False,
) -> tuple[Tensor, Tensor]:  # [B, K, G, N, W], and the log-sum-exp of the scores [B, K, G, N] in float32
    """Attention by flash-attn; unless `causal`, all nodes of a row see the same keys."""
    flash = flash_for(query, value)
    if flash is None:
        raise ValueError(f"no installed flash-attn supports {query.dtype} and heads of size {query.shape[-1]} on "
                         f"{query.device}")
    transposed = (states.transpose(1, 2) for states in (query, key, value))
    out, lse, *_ = flash(  # [B, N, H, W], [B, H, N]
        *transposed, cache_seqlens=lengths, softmax_scale=scale, softcap=softcap or 0.0, causal=causal,
        return_softmax_lse=True,
    )
    shape = key.shape[1], query.shape[1] // key.shape[1]
    return out.transpose(1, 2).unflatten(1, shape), lse.unflatten(1, shape)


def _by_position(out: Tensor) -> Tensor:
    """[B, K, G, N, W] -> [B, N, H, W]."""
    return out.flatten(1, 2).transpose(1, 2).contiguous()


for _name, _function in {GROUPED: grouped_attention, SPLIT: split_attention}.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])
