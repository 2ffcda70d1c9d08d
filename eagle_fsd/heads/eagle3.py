"""EAGLE-3 heads: features of several target layers in, a hidden state of their own, logits of their own out.

B batch, T tokens, D hidden size, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ..models.cache import TreeCache, cache_name
from ..models.fused import Norm
from .eagle import DraftHead


class Eagle3Layer(LlamaDecoderLayer):
    """A stock Llama layer whose attention reads [embedding, hidden state], each under a norm of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual: bool = getattr(config, "norm_before_residual", False)
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
    """EAGLE-3 (arXiv 2503.01840, section 3): features of several target layers in, logits of its own out.

    `fc` joins the target's features once; from then on the head goes on from its own hidden states, before `norm`.

    Args:
        config: as for `DraftHead`, with further fields: `draft_vocab_size` (R; default: the whole vocabulary),
            `eagle_aux_hidden_state_layer_ids` (the target layers whose entering hidden states are read; default 2,
            half and the third from the end), `target_hidden_size` (default: the head's own) and
            `norm_before_residual` (default false: `hidden_norm` is only for attention). `attention_bias` gives q, k, v
            and o a bias, `qkv_bias` q, k and v alone.
        bias: whether `fc` has a bias.
    """

    kind = "EAGLE-3"

    def _build(self, config: LlamaConfig, bias: bool) -> None:
        size, named = config.hidden_size, getattr(config, "draft_vocab_size", None) or config.vocab_size
        if named > config.vocab_size:
            raise ValueError(f"draft_vocab_size {named} exceeds vocab_size {config.vocab_size}")
        layers = len(self._layer_ids) if self._layer_ids else 3
        self.fc = nn.Linear(layers * self.target_hidden_size, size, bias=bias)
        own = config.attention_bias and not getattr(config, "qkv_bias", False)  # of the output projection, too
        config.attention_bias = config.attention_bias or getattr(config, "qkv_bias", False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        if not own:
            self.layers[0].self_attn.o_proj.register_parameter("bias", None)
        self.hidden_norm = Norm(self.layers[0].hidden_norm)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(size, named, bias=False)  # None: the target's
        # Draft token i is the target's i + d2t[i]; None: all tokens, under their own numbers.
        offsets = torch.zeros(named, dtype=torch.long) if named < config.vocab_size else None
        self.register_buffer("d2t", offsets)

    @property
    def _layer_ids(self) -> list[int] | None:
        return getattr(self.config, "eagle_aux_hidden_state_layer_ids", None)

    @property
    def target_hidden_size(self) -> int:
        return getattr(self.config, "target_hidden_size", None) or self.config.hidden_size

    @property
    def draft_tokens(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_layers(self, count: int) -> tuple[int, ...]:
        """See `DraftHead`.

        Raises:
            ValueError: a target without those layers.
        """
        return check_layers(self._layer_ids or default_layers(count), count)

    def limit_vocabulary(self, tokens: Tensor | None) -> None:
        """Raises ValueError: the head was trained with the vocabulary that it has."""
        raise ValueError("an EAGLE-3 head has its own output layer: its draft vocabulary cannot be changed")

    def read(self, features: Tensor) -> Tensor:
        return self.fc(features[..., : self.fc.in_features])

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None = None,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """The layer's hidden states [B, T, D], see `DraftHead`."""
        if self.computes_fused(cache):
            wide = torch.promote_types(features.dtype, torch.float32)
            normed = self.hidden_norm(features.to(wide))
            own = self.fused[0].norms[0](self.embed_tokens(tokens).to(wide))
            hidden = (normed if self.layers[0].norm_before_residual else features).to(wide, copy=True)
            return self.fused_layer(hidden, torch.cat([own, normed], -1), positions, mask, cache)
        layer = self.layers[0]
        return layer(
            features, self.embed_tokens(tokens).to(features.dtype), attention_mask=mask,
            position_embeddings=self.rotary_emb(features, positions), **{cache_name(type(layer.self_attn)): cache},
        )

    def own_logits(self, predicted: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        normed = self.norm(predicted)
        return output(normed) if self.lm_head is None else self.lm_head(normed).float()


def default_layers(count: int) -> tuple[int, ...]:
    """Layers that EAGLE-3 heads read in a target of `count` layers where they do not say which."""
    return (2, count // 2, count - 3)


def check_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Layers by depth.

    Raises:
        ValueError: a target of `count` layers has not all of them, or one is named twice.
    """
    if len(set(layers)) < len(layers) or not all(0 <= layer < count for layer in layers):
        raise ValueError(f"features of what enters layers {tuple(layers)} are wanted; the target has {count}, from 0")
    return tuple(sorted(layers))
