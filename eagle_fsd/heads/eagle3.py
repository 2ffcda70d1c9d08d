"""EAGLE-3 heads: they read features of several target layers, and have their own hidden state and output layer.

B batch, T tokens, D hidden size, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ..models.cache import TreeCache, cache_name
from ..models.fused import Norm
from .eagle import DraftHead

# Names of fields: the target layers that a head reads; whether there is a norm before the output layer, as ModelOpt
# calls it; and `norm_output`, as TensorRT-LLM does and SpecForge never did.
LAYER_IDS, LAST_NORM, POST_NORM = "eagle_aux_hidden_state_layer_ids", "use_last_layernorm", "return_hidden_post_norm"


class Eagle3Layer(LlamaDecoderLayer):
    """A stock Llama layer whose attention reads [embedding, hidden state], each after its own norm; with `qk_norm` the
    attention is Qwen3's, which normalises the queries and keys of each head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual: bool = getattr(config, "norm_before_residual", False)
        if getattr(config, "qk_norm", False):
            config.layer_types = getattr(config, "layer_types", None) or ["full_attention"]
            self.self_attn = Qwen3Attention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            stock = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, stock.out_features, bias=stock.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(
        self,
        hidden: Tensor,  # [B, T, D]
        embeddings: Tensor,  # [B, T, D]
        **attention: object,  # keywords of the stock attention
    ) -> Tensor:  # [B, T, D]
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(torch.cat([self.input_layernorm(embeddings), normed], -1), **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(DraftHead):
    """EAGLE-3 (arXiv 2503.01840, section 3): reads features of several target layers, has its own output layer.

    `fc` combines the target's features once; further steps continue from the head's own hidden states, before `norm`.
    EAGLE-3.1 (arXiv 2605.09992) adds norms: `fc_norm` of each layer's features, and `norm_output`.

    Args:
        config: as for `DraftHead`, with additional fields: `draft_vocab_size` (R; default: the whole vocabulary),
            `eagle_aux_hidden_state_layer_ids` (the target layers whose input hidden states are read; n: the output of
            the last of n, before the norm; default: layers 2, n/2 and n-3), `target_hidden_size` (default: the head's
            own), and these, all false by default: `norm_before_residual` (the residual is the hidden state after
            `hidden_norm`), `norm_before_fc` (one norm of all features together, `input_norm`) or `fc_norm` (one of each
            layer's), `norm_output` (further steps continue from the states after `norm`), and `qk_norm` (norms of
            queries and keys, as in Qwen3). `use_last_layernorm` (default true): whether there is a `norm`.
            `attention_bias` gives q, k, v and o a bias, `qkv_bias` gives one to q, k and v only.
        bias: whether `fc` has a bias.

    Raises:
        ValueError: `draft_vocab_size` exceeds the vocabulary, or the config has both `norm_before_fc` and `fc_norm`.
    """

    kind = "EAGLE-3"

    def _build(self, config: LlamaConfig, bias: bool) -> None:
        size, drafted = config.hidden_size, getattr(config, "draft_vocab_size", None) or config.vocab_size
        if drafted > config.vocab_size:
            raise ValueError(f"draft_vocab_size {drafted} exceeds vocab_size {config.vocab_size}")
        layers = len(self._layer_ids) if self._layer_ids else 3
        self.fc = nn.Linear(layers * self.target_hidden_size, size, bias=bias)
        before_fc, per_layer = (getattr(config, name, False) for name in ("norm_before_fc", "fc_norm"))
        if before_fc and per_layer:
            raise ValueError("norm_before_fc and fc_norm exclude each other: accepted is one of them")
        eps = config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(self.fc.in_features, eps=eps) if before_fc else None
        norms = (LlamaRMSNorm(self.target_hidden_size, eps=eps) for _ in range(layers))
        self.fc_norm = nn.ModuleList(norms) if per_layer else None
        self.norm_output: bool = getattr(config, "norm_output", False)
        o_bias = config.attention_bias and not getattr(config, "qkv_bias", False)
        config.attention_bias = config.attention_bias or getattr(config, "qkv_bias", False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        if not o_bias:
            self.layers[0].self_attn.o_proj.register_parameter("bias", None)
        self.hidden_norm = Norm(self.layers[0].hidden_norm)
        self.norm = LlamaRMSNorm(size, eps=eps) if getattr(config, LAST_NORM, True) else nn.Identity()
        self.lm_head: nn.Linear | None = nn.Linear(size, drafted, bias=False)  # None: the target's
        # Draft token i has the target's id i + d2t[i]; None: all tokens, with the same ids.
        offsets = torch.zeros(drafted, dtype=torch.long) if drafted < config.vocab_size else None
        self.register_buffer("d2t", offsets)

    @property
    def _layer_ids(self) -> list[int] | None:
        return getattr(self.config, LAYER_IDS, None)

    @property
    def target_hidden_size(self) -> int:
        return getattr(self.config, "target_hidden_size", None) or self.config.hidden_size

    @property
    def draft_tokens(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_layers(self, count: int) -> tuple[int, ...]:
        """See `DraftHead`.

        Raises:
            ValueError: the target lacks one of these layers.
        """
        return check_layers(self._layer_ids or default_layers(count), count)

    def limit_vocabulary(self, tokens: Tensor | None) -> None:
        """Raise ValueError: the draft vocabulary of an EAGLE-3 head is fixed in training."""
        raise ValueError("an EAGLE-3 head has its own output layer: its draft vocabulary cannot be changed")

    def to_states(self, features: Tensor) -> Tensor:
        features = features[..., : self.fc.in_features]
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """The layer's hidden states [B, T, D], with `norm_output` normalised, see `DraftHead`."""
        if self.computes_fused(cache):
            wide = torch.promote_types(features.dtype, torch.float32)
            normed = self.hidden_norm(features.to(wide))
            own = self.fused[0].norms[0](self.embed_tokens(tokens).to(wide))
            hidden = (normed if self.layers[0].norm_before_residual else features).to(wide, copy=True)
            states = self.fused_layer(hidden, torch.cat([own, normed], -1), positions, mask, cache)
        else:
            layer = self.layers[0]
            states = layer(
                features, self.embed_tokens(tokens).to(features.dtype), attention_mask=mask,
                position_embeddings=self.rotary_emb(features, positions), **{cache_name(type(layer.self_attn)): cache})
        return self.norm(states) if self.norm_output else states

    def own_logits(self, states: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        normed = states if self.norm_output else self.norm(states)
        return output(normed) if self.lm_head is None else self.lm_head(normed).float()


def default_layers(count: int) -> tuple[int, ...]:
    """The layers, of a target's `count`, that EAGLE-3 heads read by default."""
    return (2, count // 2, count - 3)


def check_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers in order of depth.

    Raises:
        ValueError: a target of `count` layers lacks one of them, or there is a duplicate.
    """
    if len(set(layers)) < len(layers) or not all(0 <= layer <= count for layer in layers):
        raise ValueError(f"feature layers must be distinct and from 0 to {count}, the output of the target's last, got "
                         f"{tuple(layers)}")
    return tuple(sorted(layers))
