"""A decoder of Llama's architecture in as few PyTorch operations as possible, for targets and draft heads.

Written from the equations: pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. It uses
the stock modules' own weights in place; `models.linear` may have packed them. It supports families that differ by
biases, norms on queries and keys, scales, or layers without positions (`FAMILIES`), and refuses others.

B batch, N tokens of a forward, L prefix length, M keys, D hidden size, H query heads, K key heads, G = H / K, S head
size, I inner size of the MLP, C capacity of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .attention import InvariantAttention, attention_over, flash_works, has_stable_kernel, tree_attention
from .cache import BucketCache, TreeCache
from .hooks import is_hooked
from .linear import Int8, Joined
from .masks import additive, causal_ancestors, visible_keys

FAMILIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model", "SeedOssModel", "GraniteModel"}
PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
         *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
         *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))}
OPTIONAL = {"hidden_norm", "self_attn.q_norm", "self_attn.k_norm"}
FIXED_ROPE = {None, "default", "linear", "llama3", "yarn"}  # the angles depend on the position alone
SPARE = 1024  # additional positions of a rotary table, for the next request
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
        check_shape(layer, config)
        attention, mlp = layer.self_attn, layer.mlp
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

    Raises:
        Unsupported: the decoder has another architecture, or is spread over devices.
    """

    def __init__(self, decoder: nn.Module, config: PreTrainedConfig) -> None:
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
        self.layers = [FusedLayer(layer, config) for layer in decoder.layers]
        self.rotary = Rotary(decoder.rotary_emb)

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
        groups, invariant = first.heads // first.key_heads, first.qkv.form is Int8
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


def check_shape(layer: nn.Module, config: PreTrainedConfig) -> None:
    """Raise `Unsupported` unless a layer has the submodules of Llama's and no others. `CausalLM` compares their
    results at load."""
    parts = {name: part for name, part in layer.named_modules() if name and name.count(".") < 2}
    if parts.keys() - OPTIONAL != PARTS:
        raise Unsupported(f"its layers have the parts {', '.join(sorted(parts))}")
    own = [name for part in (layer, layer.self_attn, layer.mlp) for name, _ in part.named_parameters(recurse=False)]
    activation = getattr(config, "hidden_act", None)
    if own or activation not in ("silu", "swish"):
        raise Unsupported(f"its layers have {', '.join(own) or f'the activation {activation}'}")
