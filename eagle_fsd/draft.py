"""The draft head of EAGLE-1/2: one transformer layer that predicts the target's next feature.

B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .cache import TreeCache


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

    def __init__(self, config: LlamaConfig, *, bias: bool = False) -> None:
        super().__init__()
        if not isinstance(config, LlamaConfig):
            raise TypeError(f"a draft head is made from a LlamaConfig, got {type(config).__name__}")
        if config.num_hidden_layers != 1:
            raise ValueError(f"a draft head has 1 layer, the config has {config.num_hidden_layers}")
        self.config = config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        config.attention_bias = getattr(config, "qkv_bias", False)  # the stock layer's own field covers o as well
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def share_embeddings(self, embed_tokens: nn.Module | None) -> None:
        """Use the target's embeddings in place of the head's own, which published files may leave out.

        They are no part of the head then: not moved, trained, sharded or saved with it. None: they are yet to be given.
        """
        self._modules.pop("embed_tokens", None)
        self.__dict__["embed_tokens"] = embed_tokens  # past nn.Module, which would register them

    def own_embeddings(
        self,
        weight: Tensor,  # [V, D]
    ) -> None:
        """Embeddings of the head's own, saved with it, in place of shared ones."""
        self.__dict__.pop("embed_tokens", None)
        self.embed_tokens = nn.Embedding.from_pretrained(weight)

    @property
    def shares_embeddings(self) -> bool:
        return "embed_tokens" not in self._modules

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def new_cache(self, capacity: int) -> TreeCache:
        """An empty cache for `capacity` positions."""
        return TreeCache([self.device], capacity)

    def forward(
        self,
        features: Tensor,  # [B, T, D], of the position before each token
        tokens: Tensor,  # [B, T]
        positions: Tensor,  # [B, T], of the features
        mask: Tensor | None = None,  # [B, 1, T, keys] additive; None: causal over these T, or one T
        cache: TreeCache | None = None,
    ) -> Tensor:  # [B, T, D]
        """Predicted features of the tokens' own positions."""
        hidden = self.fc(torch.cat([self.embed_tokens(tokens).to(features.dtype), features], -1))
        return self.layers[0](
            hidden, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=cache is not None,
            position_embeddings=self.rotary_emb(hidden, positions),
        )
