"""Attention of trees: for stock decoders by name, for the fused decoder as functions, and the flash-attn of both.

"grouped" is stock sdpa without its copies of shared keys; "split" runs flash-attn, which must be installed, over a
tree's text. Both work with any model that selects its attention by name.

B batch, H query heads, K key heads, G = H / K, N nodes (queries), M keys, D or S head size, W head size of the values.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from . import GROUPED, SPLIT
from .cache import rows_and_slots
from .masks import additive, visible_keys

log = logging.getLogger(__name__)
stock_attention = AttentionInterface()["sdpa"]
HALF_DTYPES = (torch.float16, torch.bfloat16)
MERGED_ROWS = 64  # up to this many queries, the heads that share keys are computed as rows of one head
BLOCK_ROWS, FEW_BLOCKS = 64, 128  # of PyTorch's CUDA kernel: queries of a block; fewer leave multiprocessors idle
FLASH_CHECKED = 4, 8192  # tokens before the trees on which flash-attn is compared


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
    attention_mask: Tensor | None,  # [B, 1, N, keys], or [B, 1, N, M] of a tree, whose M keys follow each row's text
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]
    text_lengths: Tensor | None = None,  # [B] int32
    **options: object,
) -> tuple[Tensor, None]:  # [B, N, H, W]
    """A tree's attention by `text_and_tree`; without a tree, or with a mask of all keys, `grouped_attention`.

    Raises:
        ValueError: flash-attn is not installed or does not support these tensors.
    """
    if attention_mask is None or attention_mask.shape[-1] == key.shape[2]:
        return grouped_attention(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _by_position(text_and_tree(query, key, value, attention_mask, text_lengths, scale, softcap, s_aux)), None


for _name, _function in {GROUPED: grouped_attention, SPLIT: split_attention}.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, AttentionMaskInterface()["sdpa"])


def _joined(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, M, D]
    value: Tensor,  # [B, K, M, W]
    mask: Tensor,  # [B, 1, N, M], additive or bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
    before: tuple[Tensor, Tensor] | None = None,  # of the text: attention, and its log-sum-exp [B, K, G, N]
) -> Tensor:  # [B, K, G, N, W]
    """Attention to masked keys; a text before them is one more key, its logit the log-sum-exp, its value the output."""
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


def _by_position(out: Tensor) -> Tensor:
    """[B, K, G, N, W] -> [B, N, H, W]."""
    return out.flatten(1, 2).transpose(1, 2).contiguous()


# Of the fused decoder -------------------------------------------------------------------------------------------


def attention_over(
    mask: Tensor | None,  # [B, 1, N, M] additive; None: all keys, or causal
    causal: bool,
    groups: int,  # G
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """A function from queries [B, N, H, S], keys and values [B, K, M, S] and a scale to attention [B, N, H * S].

    PyTorch's CPU kernel converts the keys for each head. Up to MERGED_ROWS queries, the heads that share keys are
    therefore computed as rows of one head: several times as fast for one token, a tenth faster for a tree. On CUDA
    a mask always merges them, because only the slowest kernel supports both a mask and shared keys (0.3 ms of CPU time
    per layer on an H100). There a block of that kernel reads all keys of a head, one after the other, and few queries
    make few blocks: then two products and a softmax are faster, the more so the longer the text.
    """
    rows = 1 if mask is None else mask.shape[2]
    merged = not causal and (groups * rows <= MERGED_ROWS or mask is not None and mask.is_cuda)
    if mask is not None and merged and groups > 1:
        mask = mask.repeat(1, 1, groups, 1)
    wide = mask.float() if mask is not None and mask.is_cuda else None

    def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        batch, count, heads, size = queries.shape
        if not merged:
            out = nn.functional.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=causal, scale=scale,
                enable_gqa=groups > 1)
            return out.transpose(1, 2).reshape(batch, count, -1)
        grouped = queries.view(batch, count, -1, groups, size).permute(0, 2, 3, 1, 4)  # [B, K, G, N, S]
        queries = grouped.reshape(batch, -1, groups * count, size)
        blocks = batch * keys.shape[1] * -(-groups * count // BLOCK_ROWS)
        if wide is not None and blocks < FEW_BLOCKS:
            out = masked_products(queries, keys, values, wide, scale)
        else:
            out = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        return out.unflatten(2, (groups, count)).permute(0, 3, 1, 2, 4).reshape(batch, count, -1)

    return attend


def masked_products(
    queries: Tensor,  # [B, K, N, S]
    keys: Tensor,  # [B, K, M, S]
    values: Tensor,  # [B, K, M, S]
    mask: Tensor,  # [B, 1, N, M] float32, additive
    scale: float,
) -> Tensor:  # [B, K, N, S]
    """Attention as two products and a softmax in float32."""
    scores = torch.add(mask, queries @ keys.mT, alpha=scale)
    return scores.softmax(-1).to(values.dtype) @ values


class InvariantAttention:
    """Batch-invariant attention: its results do not depend on what else is in the forward, which are other rows and
    queries, masked keys, the slots of keys, and the kernels chosen for a shape. A function as of `attention_over`, for
    layers in int8 on a CPU.

    There everything else is computed row by row, or in integers. Sums of attention alone would differ in their last
    bits between a tree and a single token; sometimes a rounding to int8 then differs, and soon all numbers do. So the
    keys are divided by the position of the query alone. Those of the text's first blocks are in the same slots in
    every forward, and PyTorch's kernel treats a query's row alike in any company (`has_stable_kernel` tries it). The
    others, among them a tree's, are summed in float64: in another order a sum differs by some 1e-16 of itself, so that
    one in 1e8 rounds to another float32. The two are merged as blocks of keys in FlashAttention (arXiv 2205.14135,
    section 3.1).

    Args:
        visible: which keys each query sees. Slots before the first of the new ones are positions of the text.
        positions: of the queries. For nodes more than NEAR levels below the root they are divided where the text ends,
            so that their last bits depend on the tree.
        groups: G. blocks: whether the first blocks may be computed by PyTorch's kernel.
    """

    NEAR, BLOCK = 64, 32  # the last NEAR to NEAR + BLOCK keys of a query are summed in float64
    LONG = 256  # below this position all are: two kernels would take longer than one
    ROWS = 4  # PyTorch's kernel has another product for the last one to three queries

    def __init__(
        self,
        visible: Tensor,  # [B or 1, N, M] bool
        positions: Tensor,  # [B or 1, N]
        groups: int,
        blocks: bool,
    ) -> None:
        self.groups = groups
        divided = blocks * (positions >= self.LONG)
        reach = visible.cumprod(-1, dtype=torch.uint8).sum(-1)  # [B, N], the keys before the first that is not seen
        ends = (positions - self.NEAR).minimum(reach) // self.BLOCK * self.BLOCK * divided  # of the first blocks
        self.start = int(ends.min())
        near = (visible & (torch.arange(visible.shape[-1]) >= ends[..., None]))[..., self.start :]
        self.near = None if near.all() else additive(near, torch.float64).repeat(1, 1, groups, 1)  # [B, 1, G * N, keys]
        # Queries with the same first blocks: rows, nodes, end. Masked keys after these would change the sums' order.
        alike = bool((ends == self.start).all())
        self.first = [(slice(None), slice(None), self.start)] if alike and self.start else [
            (slice(row, row + 1), (own == end).nonzero()[:, 0], int(end))
            for row, own in enumerate(ends) for end in own.unique() if end and not alike]

    def __call__(
        self,
        queries: Tensor,  # [B, N, H, S]
        keys: Tensor,  # [B, K, M, S]
        values: Tensor,  # [B, K, M, S]
        scale: float,
    ) -> Tensor:  # [B, N, H * S]
        grouped = queries.unflatten(2, (-1, self.groups)).permute(0, 2, 3, 1, 4)  # [B, K, G, N, S]
        near = (states[:, :, self.start :].double() for states in (keys, values))
        out, lse = attend_with_lse(grouped.double().flatten(2, 3), *near, self.near, scale)
        out, lse = out.view(grouped.shape), lse.view(grouped.shape[:-1])
        for rows, nodes, end in self.first:
            whole = isinstance(nodes, slice)  # indexing, even by slices, takes as long as a small operation
            part, own, own_lse = (grouped, out, lse) if whole else (
                states[rows, :, :, nodes] for states in (grouped, out, lse))
            count, padded = self.groups * part.shape[3], part.flatten(2, 3)
            if count % self.ROWS:
                padded = nn.functional.pad(padded, (0, 0, 0, -count % self.ROWS))
            first, first_lse = attend_with_lse(padded, keys[rows, :, :end], values[rows, :, :end], None, scale)
            first, first_lse = first[:, :, :count].view(part.shape), first_lse[:, :, :count].view(part.shape[:-1])
            own.lerp_(first.double(), (first_lse - own_lse).sigmoid_()[..., None])
            if not whole:
                out[rows, :, :, nodes] = own
        return out.permute(0, 3, 1, 2, 4).to(queries.dtype).reshape(*queries.shape[:2], -1)


def attend_with_lse(
    rows: Tensor,  # [B, K, R, S]
    keys: Tensor,  # [B, K, M, S]
    values: Tensor,  # [B, K, M, S]
    mask: Tensor | None,  # [B, 1, R, M], additive
    scale: float,
) -> tuple[Tensor, Tensor]:  # [B, K, R, S], and the log-sum-exp of the scores, [B, K, R]
    """Attention by the kernel of PyTorch's sdpa on a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, attn_mask=mask, scale=scale)


@functools.cache
def has_stable_kernel(key_heads: int, size: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether a query's results of `attend_with_lse` are the same to the last bit beside any number of others, rounded
    up to ROWS, alone and in a batch. Some numbers are tried, with random keys."""
    random = torch.Generator().manual_seed(0)
    rows, keys, values = (torch.randn(2, key_heads, n, size, generator=random).to(dtype) for n in (800, 608, 608))
    for end in (192, 224, 320, 480, 512, 544, 608):  # the kernel reads blocks of 512 keys
        cached = keys[:, :, :end], values[:, :, :end]
        whole = attend_with_lse(rows, *cached, None, size**-0.5)
        for few in (*range(4, 72, 4), 96, 200, 512, 516):
            alone = attend_with_lse(rows[:1, :, :few], *(states[:1] for states in cached), None, size**-0.5)
            if not all(torch.equal(one, every[:1, :, :few]) for one, every in zip(alone, whole, strict=True)):
                return False
    return True


# flash-attn -----------------------------------------------------------------------------------------------------


def tree_attention(
    lengths: Tensor,  # [B], positions of each row's text; the tree's keys are in the slots after them
    ancestors: Tensor,  # [B, N, N] bool, ancestors or self
    dtype: torch.dtype,
) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """`attention_over` for texts whose lengths are a tensor, by `text_and_tree`."""
    mask, lengths = additive(ancestors, dtype), lengths.int()

    def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return _by_position(text_and_tree(queries.transpose(1, 2), keys, values, mask, lengths, scale)).flatten(2)

    return attend


def text_and_tree(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, keys, D]
    value: Tensor,  # [B, K, keys, W]
    mask: Tensor,  # [B, 1, N, M], additive, of the M keys after each row's text
    lengths: Tensor,  # [B] int32, of the texts
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [B, K, G, N, W]
    """Attention to each row's text by flash-attn without a mask, merged with the masked rest by log-sum-exp, as
    FlashAttention merges blocks of keys (arXiv 2205.14135, section 3.1).

    Raises:
        ValueError: flash-attn is not installed or does not support these tensors.
    """
    flash = flash_for(query, value)
    if flash is None:
        raise ValueError(f"no installed flash-attn supports {query.dtype} and heads of size {query.shape[-1]} on "
                         f"{query.device}")
    out, lse, *_ = flash(  # [B, N, H, W], [B, H, N]
        *(states.transpose(1, 2) for states in (query, key, value)), cache_seqlens=lengths, softmax_scale=scale,
        softcap=softcap or 0.0, return_softmax_lse=True)
    heads = key.shape[1], query.shape[1] // key.shape[1]
    row, slots = rows_and_slots(lengths, mask.shape[-1])
    last = (states[row, :, slots].transpose(1, 2) for states in (key, value))  # [B, K, M, *]
    before = out.transpose(1, 2).unflatten(1, heads), lse.unflatten(1, heads)
    return _joined(query, *last, mask, scale, softcap, sinks, before)


@functools.cache
def flash_works(heads: int, key_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether flash-attn is installed and computes the attention of a tree of two nodes after a short and a long text,
    for which its kernels differ."""
    def waves(*shape: int) -> Tensor:  # neighbours differ, so that a wrong key or weight shows
        return torch.arange(math.prod(shape), device=device).float().sin().to(dtype).view(shape)

    def agrees(text: int) -> bool:
        keys, lengths = waves(1, key_heads, text + 4, size), torch.full((1,), text, dtype=torch.long, device=device)
        visible = visible_keys(ancestors, lengths, text + 4)
        masked = attention_over(additive(visible, dtype), False, heads // key_heads)(sample, keys, keys, size**-0.5)
        out = tree_attention(lengths, ancestors, dtype)(sample, keys, keys, size**-0.5)
        return bool(((out - masked).abs().max() <= 0.05 * masked.abs().max()).item())

    sample, ancestors = waves(1, 2, heads, size), torch.ones(1, 2, 2, dtype=torch.bool, device=device).tril()
    if flash_for(sample, sample) is None:
        return False
    try:
        works = all(map(agrees, FLASH_CHECKED))
    except Exception as error:  # a kernel can raise any exception
        works = False
        log.warning("flash-attn fails: %r", error)
    if not works:
        log.warning("flash-attn is installed but does not compute the attention of a tree here: PyTorch's is used")
    return works


def flash_for(query: Tensor, value: Tensor) -> Callable | None:
    """`flash_attn_with_kvcache` or its equivalent, if an installed package supports these tensors; else None."""
    size = query.shape[-1]
    if query.dtype not in HALF_DTYPES or size != value.shape[-1] or size % 8 or size > 256:
        return None
    return find_flash(query.device)


@functools.cache
def find_flash(device: torch.device) -> Callable | None:
    """The function of version 3 or 4 on Hopper, of 4 on newer devices, else of 2; None: no package can be imported."""
    major = _capability(device)
    packages = {"flash_attn_interface": major == 9, "flash_attn.cute": major >= 9, "flash_attn": major >= 8}
    for name in (name for name, supported in packages.items() if supported):
        try:
            module = importlib.import_module(name)
            return _version_4(module, major) if name == "flash_attn.cute" else module.flash_attn_with_kvcache
        except ModuleNotFoundError:
            continue
        except Exception as error:  # an extension built for another torch can raise any exception
            log.warning("%s cannot be imported: %s", name, error)
    return None


def _version_4(module: ModuleType, major: int) -> Callable:
    """Adapt version 4 to the signature of the others. num_splits=0, their default, selects the number of splits of the
    keys; on Hopper version 4 has no splits, and fails where it selects more than one."""
    def flash_attn_with_kvcache(query, key, value, *, cache_seqlens, return_softmax_lse, **options):
        return module.flash_attn_varlen_func(query, key, value, seqused_k=cache_seqlens, return_lse=return_softmax_lse,
                                             num_splits=1 if major == 9 else 0, **options)

    return flash_attn_with_kvcache


def _capability(device: torch.device) -> int:
    """Major version of the compute capability; 0: no CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
