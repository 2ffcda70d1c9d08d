"""A decoder of Llama's architecture in as few PyTorch operations as possible, for targets and draft heads.

Written from the equations: pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. It uses
the stock modules' own weights in place; `models.linear` may have packed them. It supports families that differ by
biases, norms on queries and keys, scales, or layers without positions (`FAMILIES`), and refuses others.

B batch, N tokens of a forward, L prefix length, M keys, D hidden size, H query heads, K key heads, G = H / K, S head
size, I inner size of the MLP, C capacity of the cache.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .attention import tree_attention
from .cache import BucketCache, TreeCache
from .flash import flash_for
from .hooks import is_hooked
from .linear import Int8, Joined
from .masks import additive, causal_ancestors, visible_keys

log = logging.getLogger(__name__)
FAMILIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model", "SeedOssModel", "GraniteModel"}
BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
FIXED_ROPE = {None, "default", "linear", "llama3", "yarn"}  # the angles depend on the position alone
SPARE = 1024  # additional positions of a rotary table, for the next request
MERGED_ROWS = 64  # up to this many queries, the heads that share keys are computed as rows of one head
BLOCK_ROWS, FEW_BLOCKS = 64, 128  # of PyTorch's CUDA kernel: queries of a block; fewer leave multiprocessors idle
FLASH_CHECKED = 4, 8192  # tokens before the trees on which flash-attn is compared
GRAIN = 32768  # PyTorch divides an operation on more numbers among threads, wherever the parts end


class Unsupported(ValueError):
    """A module that the fused decoder does not support, with the reason."""


def version_of(weight: Tensor) -> tuple[int, int]:
    """Changes with the values of a tensor, except those of an inference tensor: its address and version."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class Rotary:
    """A table of cosines and sines by position, computed by the model's stock rotary module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Versions of the module's frequencies, and cosines and sines [C, S] each. Threads share it, as in `Norm`.
        self.cached: tuple[list, Tensor, Tensor] | None = None

    def __call__(
        self,
        positions: Tensor | None,  # [B, N]; None: `count` positions from `start` on
        start: int | Tensor,
        count: int,
        capacity: int,  # above all positions
        like: Tensor,  # has the dtype and device of the result
    ) -> tuple[Tensor, Tensor]:  # [B or 1, N, 1, S]; the first half of the sines is negated, as `rotate` needs it
        cached, versions = self.cached, [version_of(buffer) for buffer in self.module._buffers.values()]
        if cached is None or cached[0] != versions or len(cached[1]) < capacity or (
                (cached[1].device, cached[1].dtype) != (like.device, like.dtype)):
            every = torch.arange(capacity + SPARE, device=like.device)[None]
            cos, sin = (table[0] for table in self.module(like, every))
            sin = torch.cat([-sin[:, : sin.shape[1] // 2], sin[:, sin.shape[1] // 2 :]], -1)
            cached = self.cached = versions, cos, sin
        cos, sin = ((table[start : start + count][None] if positions is None else table[positions])
                    for table in cached[1:])
        return cos[:, :, None], sin[:, :, None]


def rotate(
    states: Tensor,  # [B, N, heads, S], changed in place
    rotation: tuple[Tensor, Tensor],
) -> None:
    """Rotary embedding (arXiv 2104.09864, equation 34) in Llama's order: element i is paired with i + S / 2."""
    partners = states.roll(states.shape[-1] // 2, -1)
    states.mul_(rotation[0]).addcmul_(partners, rotation[1])


class Norm:
    """Root mean square normalisation (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * weight, in the weight's dtype.

    On a CPU computed as x / sqrt(|x|^2 + D eps) * (sqrt(D) weight), elsewhere by torch's function, which is one kernel
    on CUDA. The factor is cached in the dtype of x, because operations on two dtypes take several times as long, and is
    recomputed when the weight changes.

    Raises:
        Unsupported: the module is no RMS norm.
    """

    def __init__(self, module: nn.Module) -> None:
        if not hasattr(module, "variance_epsilon") or [name for name, _ in module.named_parameters()] != ["weight"]:
            raise Unsupported(f"its norm is a {type(module).__name__}")
        self.module = module
        # The key, the factor [D], and sqrt(D eps) []. Threads share it: it is replaced as a whole, never changed.
        self.cached: tuple[tuple | None, Tensor | None, Tensor | None] = None, None, None

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., D] float32 or wider -> [..., D]
        weight, size, epsilon = self.module._parameters["weight"], hidden.shape[-1], self.module.variance_epsilon
        key, gain, root_epsilon = self.cached
        if key != (now := (version_of(weight), hidden.dtype, epsilon)):
            gain = weight.detach().to(hidden.dtype)
            if hidden.is_cpu:
                gain = gain * size**0.5
                root_epsilon = torch.tensor((size * epsilon) ** 0.5, dtype=hidden.dtype)
            self.cached = now, gain, root_epsilon
        if not hidden.is_cpu:
            return nn.functional.rms_norm(hidden, (size,), gain, epsilon).to(weight.dtype)
        root = torch.hypot(torch.linalg.vector_norm(hidden, dim=-1, keepdim=True), root_epsilon)
        return (hidden / root).mul_(gain).to(weight.dtype)


class FusedLayer:
    """One block. Its first norm is None if the layer has no input norm (the draft layer of EAGLE-1/2).

    Raises:
        Unsupported: the layer has another architecture.
    """

    def __init__(self, layer: nn.Module, config: PreTrainedConfig) -> None:
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        check_shape(layer, attention, mlp, config)
        self.norms = [None if isinstance(norm, nn.Identity) else Norm(norm)
                      for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.qkv = Joined((attention, "q_proj"), (attention, "k_proj"), (attention, "v_proj"))
        self.o = Joined((attention, "o_proj"))
        self.gate_up = Joined((mlp, "gate_proj"), (mlp, "up_proj"))
        self.down = Joined((mlp, "down_proj"))
        self.head_norms = [Norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self.size: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.key_heads: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.residual: float = getattr(config, "residual_multiplier", 1.0)  # Granite
        self.rotates: bool = bool(getattr(attention, "use_rope", True))  # SmolLM3 has layers without positions

    @property
    def joined(self) -> list[Joined]:
        return [self.qkv, self.o, self.gate_up, self.down]

    def __call__(
        self,
        hidden: Tensor,  # [B, N, D] float32 or wider, changed in place
        normed: Tensor,  # [B, N, *], input of the query, key and value projections
        rotation: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],  # see `attention_over`
        new_states: Tensor,  # [2, B, K, N, S], a view of the cache, to be written
        keys: Tensor,  # [B, K, M, S], which includes the new ones
        values: Tensor,
    ) -> None:
        shape, heads, dtype = hidden.shape[:2], self.heads + self.key_heads, keys.dtype
        states = self.qkv(normed).view(*shape, heads + self.key_heads, self.size)
        both = states[:, :, :heads]  # queries and keys
        if self.head_norms:
            parts = both.float().split([self.heads, self.key_heads], 2)
            both.copy_(torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], 2))
        if self.rotates:
            rotate(both, rotation)
        new_states.copy_(states[:, :, self.heads :].view(*shape, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4))
        out = self.o(attend(states[:, :, : self.heads].to(dtype), keys, values, self.scale))
        hidden.add_(out, alpha=self.residual)
        gate, up = self.gate_up(self.norms[1](hidden)).chunk(2, -1)
        silu = silu_by_rows if isinstance(attend, InvariantAttention) else nn.functional.silu
        hidden.add_(self.down(silu(gate).mul_(up)), alpha=self.residual)


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
            first, first_lse = attend_with_lse(
                padded(part.flatten(2, 3), self.ROWS), keys[rows, :, :end], values[rows, :, :end], None, scale)
            count = self.groups * part.shape[3]
            first, first_lse = first[:, :, :count].view(part.shape), first_lse[:, :, :count].view(part.shape[:-1])
            own.lerp_(first.double(), (first_lse - own_lse).sigmoid_()[..., None])
            if not whole:
                out[rows, :, :, nodes] = own
        return out.permute(0, 3, 1, 2, 4).to(queries.dtype).reshape(*queries.shape[:2], -1)


def padded(rows: Tensor, multiple: int) -> Tensor:  # [B, K, R, S] -> [B, K, R', S]
    """The rows, and zeros up to a multiple of a number."""
    missing = -rows.shape[2] % multiple
    return torch.cat([rows, rows.new_zeros(*rows.shape[:2], missing, rows.shape[3])], 2) if missing else rows


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


def silu_by_rows(gate: Tensor) -> Tensor:  # [..., I] -> the same
    """SiLU. At the end of a thread's part PyTorch computes up to 31 numbers by another formula, which differs in the
    last bit. So parts have to end where rows do, or after a multiple of 32 numbers."""
    inner, threads = gate.shape[-1], torch.get_num_threads()
    if gate.numel() < GRAIN or not inner % (64 * threads):
        return nn.functional.silu(gate)
    parts = gate.flatten(0, -2).split(max(1, GRAIN // inner))
    return torch.cat([nn.functional.silu(part) for part in parts]).view(gate.shape)


class FusedDecoder:
    """The forward of a stock decoder with a tree cache.

    Args:
        decoder: has `embed_tokens`, `layers`, `norm` and `rotary_emb`.
        layers: the decoder's list of layers.
        batch_invariant: use `InvariantAttention` where the layers are packed as int8.

    Raises:
        Unsupported: the decoder has another architecture, or is spread over devices.
    """

    def __init__(
        self, decoder: nn.Module, layers: nn.ModuleList, config: PreTrainedConfig, *, batch_invariant: bool = False
    ) -> None:
        if type(decoder).__name__ not in FAMILIES:
            raise Unsupported(f"{type(decoder).__name__} is not one of {', '.join(sorted(FAMILIES))}")
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        if kind not in FIXED_ROPE:
            raise Unsupported(f"its rotary embedding is of type {kind}")
        names = {name for name, _ in decoder.named_children()}
        if names != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            raise Unsupported(f"its decoder has the parts {', '.join(sorted(names))}")
        if is_hooked(decoder):
            raise Unsupported("its modules have hooks")
        self.decoder, self.norm = decoder, Norm(decoder.norm)
        self.embedding_scale: float = getattr(config, "embedding_multiplier", 1.0)  # Granite
        self.layers = [FusedLayer(layer, config) for layer in layers]
        self.rotary = Rotary(decoder.rotary_emb)
        self.batch_invariant = batch_invariant

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: the next ones in the cache
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache | BucketCache,  # the keys and values of the tokens are appended
        feature_layers: Sequence[int] = (),  # their inputs precede the last hidden state; n: the last layer's output
    ) -> Tensor:  # [B, N, D * (len(feature_layers) + 1)]
        """The forward, without synchronising with the device if the cache is a `BucketCache`."""
        first, count, start, like = self.layers[0], tokens.shape[1], cache.start, self.decoder.embed_tokens.weight
        attend = self._attention(tokens, positions, ancestors, start, cache.end(count))
        rotation = self.rotary(positions, start, count, cache.capacity, like)
        new_states, cached = cache.append(count, first.key_heads, first.size, like)
        embedded = self.decoder.embed_tokens(tokens)
        dtype = embedded.dtype
        hidden = embedded.to(torch.promote_types(dtype, torch.float32), copy=True)
        if self.embedding_scale != 1:
            hidden *= self.embedding_scale
        features = []
        for number, layer in enumerate(self.layers):
            if number in feature_layers:
                features.append(hidden.to(dtype, copy=True))
            layer(hidden, layer.norms[0](hidden), rotation, attend, new_states[number], *cached[number])
        if len(self.layers) in feature_layers:
            features.append(hidden.to(dtype, copy=True))
        features.append(self.norm(hidden))
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _attention(
        self, tokens: Tensor, positions: Tensor | None, ancestors: Tensor | None, start: int | Tensor, keys: int
    ) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
        """See `attention_over`."""
        first, count, dtype = self.layers[0], tokens.shape[1], self.decoder.embed_tokens.weight.dtype
        groups, invariant = first.heads // first.key_heads, self.batch_invariant and first.qkv.form is Int8
        if ancestors is None and not invariant and isinstance(start, int) and (start == 0 or count == 1):
            return attention_over(None, count > 1, groups)
        ancestors = causal_ancestors(tokens) if ancestors is None else ancestors
        if (isinstance(start, Tensor) and ancestors.shape[1] == ancestors.shape[2]
                and flash_works(first.heads, first.key_heads, first.size, dtype, tokens.device)):
            return tree_attention(start, ancestors, dtype)
        visible = visible_keys(ancestors, start, keys)
        if not invariant:
            return attention_over(None if count == 1 and isinstance(start, int) else additive(visible, dtype), False,
                                  groups)
        where = torch.arange(start, start + count)[None] if positions is None else positions
        stable = has_stable_kernel(first.key_heads, first.size, dtype, torch.get_num_threads())
        return InvariantAttention(visible, where, groups, stable)


def check_shape(layer: nn.Module, attention: nn.Module | None, mlp: nn.Module | None, config: PreTrainedConfig) -> None:
    """Raise `Unsupported` unless a layer has the submodules of Llama's and no others. `CausalLM` compares their
    results at load."""
    if attention is None or mlp is None:
        raise Unsupported(f"its layers are of {type(layer).__name__}, without self_attn and mlp")
    parts = {module: {name for name, _ in module.named_children()} for module in (layer, attention, mlp)}
    optional = {layer: {"hidden_norm"}, mlp: set(), attention: {"q_norm", "k_norm"}}
    required = {layer: BLOCK, mlp: MLP, attention: ATTENTION}
    if any(parts[module] - optional[module] != required[module] for module in parts):
        raise Unsupported(f"its layers have the parts {', '.join(sorted(set().union(*parts.values())))}")
    own = [name for module in parts for name, _ in module.named_parameters(recurse=False)]
    activation = getattr(config, "hidden_act", None)
    if own or activation not in ("silu", "swish"):
        raise Unsupported(f"its layers have {', '.join(own) or 'the activation ' + str(activation)}")
    linear = [*(getattr(attention, name) for name in ATTENTION), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not all(hasattr(projection, "out_features") for projection in linear):
        raise Unsupported(f"its layers have a {', '.join({type(projection).__name__ for projection in linear})}")
    for name in ("head_dim", "scaling"):
        if not hasattr(attention, name):
            raise Unsupported(f"its attention has no {name}")
