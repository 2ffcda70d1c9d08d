"""Draft heads: one transformer layer that drafts the target's next token from what the target computed.

EAGLE-1/2 heads predict the target's next feature, which the target's own output layer turns into logits.

B batch, T tokens, D hidden size, F width of the target's features, V vocabulary of the target, R the draft's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..models.attention import GROUPED  # the module registers it with transformers
from ..models.cache import TreeCache, cache_name
from ..models.digest import weights_digest
from ..models.fused import FIXED_ROPE, FusedLayer, Rotary, attention_over
from ..models.linear import Joined, pack_linears
from ..models.masks import additive
from ..models.memory import MappedFiles
from ..models.target import OutputRows


class DraftHead(nn.Module):
    """`fc` over [embedding, feature] and one stock Llama layer without input norm (arXiv 2401.15077, section 4.1).

    The feature of position i is paired with the token of position i + 1, at rotary position i.

    Args:
        config: a Llama config with `num_hidden_layers=1`, of the target's hidden size and vocabulary; its field
            `qkv_bias` (default false) gives q, k and v a bias, as in the published code.
        bias: whether `fc` has a bias.

    Raises:
        TypeError: `config` is no Llama config.
        ValueError: a config of more than one layer.
    """

    kind, reads_features = "EAGLE-1/2", True

    def __init__(self, config: LlamaConfig, *, bias: bool = False) -> None:
        super().__init__()
        if not isinstance(config, LlamaConfig):
            raise TypeError(f"a draft head is made from a LlamaConfig, got {type(config).__name__}")
        if config.num_hidden_layers != 1:
            raise ValueError(f"a draft head has 1 layer, the config has {config.num_hidden_layers}")
        self.config = config = copy.deepcopy(config)
        config._attn_implementation = GROUPED
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self._build(config, bias)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        fixed = (config.rope_parameters or {}).get("rope_type") in FIXED_ROPE and config.hidden_act == "silu"
        self.fused = (FusedLayer(self.layers[0], config), Rotary(self.rotary_emb)) if fixed else None
        self.register_buffer("token_map", None, persistent=False)  # [R] long, ascending; see `limit_vocabulary`
        self.output_rows: Callable[[Tensor], Tensor] | None = None  # [..., D] -> [..., R], of the target's output layer

    def _build(self, config: LlamaConfig, bias: bool) -> None:
        """Everything between the embeddings and the logits."""
        config.attention_bias = getattr(config, "qkv_bias", False)  # the stock layer's own field covers o as well
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])

    def _apply(self, fn: Callable, recurse: bool = True) -> DraftHead:
        """As of every module, but rotary frequencies stay float32, as `from_pretrained` leaves the target's: rounded to
        bfloat16 they turn a position of some hundreds by another angle."""
        before = {name: buffer for name, buffer in self.rotary_emb.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self.rotary_emb, name, buffer.to(self.rotary_emb.get_buffer(name).device))
        return self

    def share_embeddings(self, embed_tokens: nn.Module | None) -> None:
        """Use the target's embeddings in place of the head's own, which published files may leave out.

        They are no part of the head then: not moved, trained, sharded or saved with it. None: they are yet to be given.
        """
        self._modules.pop("embed_tokens", None)
        self.__dict__["embed_tokens"] = embed_tokens  # past nn.Module, which would register them

    @property
    def shares_embeddings(self) -> bool:
        return "embed_tokens" not in self._modules

    @property
    def device(self) -> torch.device:
        return self.layers[0].post_attention_layernorm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].post_attention_layernorm.weight.dtype

    @property
    def target_hidden_size(self) -> int:
        """That of the targets it fits."""
        return self.config.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """R: how many of the target's tokens it can name."""
        return self.config.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def draft_tokens(self) -> Tensor | None:
        """[R] long, ascending: the target's number of each token that it can name; None: it can name all."""
        return self.token_map

    def limit_vocabulary(
        self,
        tokens: Tensor | None,  # [R] integers, in any order; None: all that the target has
    ) -> None:
        """Draft these tokens of the target only, at the cost of R rows of its output layer (FR-Spec, arXiv 2502.14856).

        For a head that is joined with a target already, `EagleModel.from_parts` has to join them again.

        Raises:
            TypeError: no tensor of integers.
            ValueError: no tokens, one named twice, or one that the target has not.
        """
        if tokens is not None:
            if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
                got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
                raise TypeError(f"a draft vocabulary is a tensor of integers, got {got}")
            given, count, tokens = tokens, self.config.vocab_size, tokens.unique().long().to(self.device)  # in order
            if given.dim() != 1 or not 0 < len(tokens) == len(given):
                raise ValueError("a draft vocabulary is [R] different tokens, got "
                                 f"{len(tokens)} different ones in {list(given.shape)}")
            wrong = next((token for token in (tokens[0].item(), tokens[-1].item()) if not 0 <= token < count), None)
            if wrong is not None:
                raise ValueError(f"draft token {wrong} is none of the target's, which are 0 to {count - 1}")
            tokens = None if len(tokens) == count else tokens
        self.token_map, self.output_rows = tokens, None

    def target_layers(self, count: int) -> tuple[int, ...]:
        """Layers of a target of `count` layers whose entering hidden states it reads; the last feature always comes."""
        return ()

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache for `capacity` positions of each sequence of a batch."""
        return TreeCache([self.device], capacity, batch)

    def read(
        self,
        features: Tensor,  # [..., F] of the target, see `TargetModel`
    ) -> Tensor:  # [..., D]
        """What `forward` takes in the place of its own predictions."""
        return features

    def forward(
        self,
        features: Tensor,  # [B, T, D], of the position before each token: `read` from the target, or predicted
        tokens: Tensor,  # [B, T]
        positions: Tensor,  # [B, T], of the features
        mask: Tensor | None = None,  # [B, 1, T, keys] additive; None: causal over these T, or one T
        cache: TreeCache | None = None,
    ) -> Tensor:  # [B, T, D]
        """Predicted features of the tokens' own positions.

        The seam for other forwards, as `TargetModel.forward` is: assign another callable of this signature.
        """
        hidden = self.fc(torch.cat([self.embed_tokens(tokens).to(features.dtype), features], -1))
        if self.computes_fused(cache):
            return self.fused_layer(hidden.to(torch.promote_types(hidden.dtype, torch.float32), copy=True), hidden,
                                    positions, mask, cache)
        layer = self.layers[0]
        return layer(
            hidden, attention_mask=mask, position_ids=positions, use_cache=cache is not None,
            position_embeddings=self.rotary_emb(hidden, positions), **{cache_name(type(layer)): cache},
        )

    def predict(
        self,
        features: Tensor,  # [B, T, D]
        tokens: Tensor,  # [B, T]
        positions: Tensor,  # [B, T]
        visible: Tensor | None,  # [B, T, keys] bool
        cache: TreeCache,
    ) -> Tensor:  # [B, T, D]
        """`forward` as the decode cycle asks for it, see `drafting.drafter.Drafter`."""
        return self(features, tokens, positions, None if visible is None else additive(visible, self.dtype), cache)

    def computes_fused(self, cache: object) -> bool:
        """Whether the layer is computed by `fused`: while decoding. Training has gradients, or caches of its own."""
        return isinstance(cache, TreeCache) and self.fused is not None and not torch.is_grad_enabled()

    def fused_layer(
        self,
        hidden: Tensor,  # [B, T, D] float32 or wider, changed in place
        normed: Tensor,  # [B, T, *], what queries, keys and values are made of
        positions: Tensor,  # [B, T]
        mask: Tensor | None,
        cache: TreeCache,
    ) -> Tensor:  # [B, T, D]
        """What `layers` compute, see `FusedLayer`."""
        layer, rotary = self.fused
        count, dtype = normed.shape[1], self.dtype
        seen = attention_over(mask, mask is None and count > 1, layer.heads // layer.key_heads)
        rotation = rotary(positions, 0, count, cache.capacity, normed.to(dtype))
        written, held = cache.append(count, layer.key_heads, layer.size, normed.to(dtype))
        layer(hidden, normed, rotation, seen, written[0], *held[0])
        return hidden.to(dtype)

    def pack(self, form: str | None, lm_head: nn.Module) -> None:
        """Replace the weights of linear layers on a CPU by packed ones, see `models.linear`.

        Args:
            lm_head: the target's output layer as it is now.
        """
        self.kept_digest = weights_digest(self)
        files = MappedFiles()
        Joined((self, "fc")).pack(None, files)  # never int8: embeddings are small beside the features of their row
        for joined in self.fused[0].joined if self.fused else ():
            joined.pack(form, files)
        pack_linears(self, form, files)
        if isinstance(self.output_rows, OutputRows):
            self.output_rows.pack(form, lm_head, files)

    def own_logits(
        self,
        predicted: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """Logits over the tokens that the head can name."""
        return self.target_logits(predicted, output)

    def target_logits(
        self,
        features: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """The target's logits of the tokens that the head can name, in the order of `own_logits`."""
        if self.output_rows is not None:
            return self.output_rows(features)
        return output(features) if self.draft_tokens is None else output(features)[..., self.draft_tokens]

    def names(
        self,
        tokens: Tensor,  # [...] the target's
    ) -> Tensor:  # [...] bool
        """Which of them the head can name."""
        named = self.draft_tokens
        return torch.ones_like(tokens, dtype=torch.bool) if named is None else torch.isin(tokens, named)

    def named(
        self,
        numbers: Tensor,  # [...] long, places in `own_logits`
    ) -> Tensor:  # [...] long
        """The target's tokens."""
        return numbers if self.draft_tokens is None else self.draft_tokens[numbers]
