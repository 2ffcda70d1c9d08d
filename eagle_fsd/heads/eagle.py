"""Draft heads: one transformer layer that drafts the target's next tokens from the target's features.

EAGLE-1/2 heads predict the target's next feature, from which the target's own output layer computes logits.

B batch, T tokens, D hidden size, F width of the target's features, V vocabulary of the target, R the draft's own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..drafting.drafter import Drafter
from ..models.attention import GROUPED, attention_over  # the module registers it with transformers
from ..models.cache import BucketCache, TreeCache, cache_name, rows_and_slots
from ..models.digest import weights_digest
from ..models.fused import FIXED_ROPE, FusedLayer, Rotary, version_of
from ..models.hooks import structure_of
from ..models.linear import Joined, device_of, dtype_of, linear_of, pack
from ..models.masks import SLIDING, additive, causal_ancestors, in_reach, keys_in_window, visible_keys
from ..models.target import TargetModel, output_logits
from ..utils.checks import require_integer

log = logging.getLogger(__name__)


class HeadRotary(LlamaRotaryEmbedding):
    """The stock module, whose frequencies stay float32, as `from_pretrained` leaves the target's: rounded to bfloat16
    they give wrong angles from positions of some hundreds on."""

    def _apply(self, fn: Callable, recurse: bool = True) -> HeadRotary:
        return super()._apply(lambda buffer: fn(buffer) if buffer.is_meta else buffer.to(fn(buffer).device), recurse)


class DraftHead(nn.Module, Drafter):
    """`fc` over [embedding, feature] and one stock Llama layer without input norm (arXiv 2401.15077, section 4.1).

    The feature of position i is paired with the token of position i + 1, at rotary position i.

    Args:
        config: a Llama config with `num_hidden_layers=1`, of the target's hidden size and vocabulary; its field
            `qkv_bias` (default false) gives q, k and v a bias, as in the published code.
        bias: whether `fc` has a bias.

    Raises:
        TypeError: `config` is not a LlamaConfig.
        ValueError: the config has more than one layer.
    """

    noun, kind, reads_features = "a head", "EAGLE-1/2", True

    def __init__(self, config: LlamaConfig, *, bias: bool = False) -> None:
        super().__init__()
        if not isinstance(config, LlamaConfig):
            raise TypeError(f"config must be a LlamaConfig, got {type(config).__name__}")
        if config.num_hidden_layers != 1:
            raise ValueError(f"config of a draft head must have 1 layer, got {config.num_hidden_layers}")
        self.config = config = copy.deepcopy(config)
        config._attn_implementation = GROUPED
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self._build(config, bias)
        self.rotary_emb = HeadRotary(config)
        fusible = (config.rope_parameters or {}).get("rope_type") in FIXED_ROPE and config.hidden_act == "silu"
        self._fusible = (FusedLayer(self.layers[0], config), Rotary(self.rotary_emb)) if fusible else None
        self._built = self._structure()
        self.refresh()
        self.register_buffer("token_map", None, persistent=False)  # [R] long, ascending; see `limit_vocabulary`
        self.output_rows: OutputRows | None = None

    def _build(self, config: LlamaConfig, bias: bool) -> None:
        """Create the modules between the embeddings and the logits."""
        config.attention_bias = getattr(config, "qkv_bias", False)  # the stock field would give o a bias, too
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        layer.self_attn.o_proj = nn.Linear(layer.self_attn.o_proj.in_features, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])

    def refresh(self) -> None:
        """Use the fused layer in decoding while the stock one has the modules that it was built with, and no hooks."""
        self.fused = self._fusible if self._structure() == self._built else None

    def _structure(self) -> list[object]:
        parts = structure_of(nn.ModuleList([self.layers[0], self.rotary_emb]))[1:]
        return [part for part in parts if not isinstance(part, FunctionType)]  # which cannot always be pickled

    def check_sizes(self, target: TargetModel) -> None:
        """Raise ValueError unless hidden size and vocabulary are those of the target."""
        for what, ours, theirs in (("hidden size", self.target_hidden_size, target.hidden_size),
                                   ("vocabulary size", self.config.vocab_size, target.vocab_size)):
            if ours != theirs:
                raise ValueError(f"the draft head does not fit the target: its {what} is {ours}, the target's is "
                                 f"{theirs}")

    def fit(self, target: TargetModel, tokenizer: object = None) -> None:
        """Draft for this target: move to its device and dtype, and make it return the features that the head reads.

        Args:
            tokenizer: the target's, which a head does not need.

        Raises:
            ValueError: hidden size, vocabulary or layers differ.
        """
        self.check_sizes(target)
        target.feature_layers = self.target_layers(len(target.decoder_layers))
        if self.shares_embeddings:
            if self.config.hidden_size != target.hidden_size:
                raise ValueError("the draft head has no embeddings, and the target's are of size "
                                 f"{target.hidden_size}, not {self.config.hidden_size}")
            self.share_embeddings(target.embeddings_on(target.output_device))
        self.to(device=target.output_device, dtype=target.dtype).eval()
        if self.token_map is not None and not (self.output_rows and self.output_rows.copied_from(target.lm_head)):
            self.output_rows = OutputRows.copied(target, self.token_map)
            if self.output_rows is None:
                log.warning("the draft head has %d of %d tokens, but the rows of the target's output layer are not "
                            "plain weights: the whole layer is computed", self.draft_vocab_size, target.vocab_size)

    def separate(self, target: TargetModel) -> DraftHead:
        """A head to be fitted to another target than this one. It shares the weights that are on the target's device in
        its dtype."""
        head = copy.copy(self)
        head._modules, head._buffers, head.output_rows = dict(self._modules), dict(self._buffers), None
        if self.shares_embeddings:
            head.share_embeddings(None)
        shared = (self.device, self.dtype) == (target.output_device, target.dtype)
        return head if shared else copy.deepcopy(head)

    def share_embeddings(self, embed_tokens: nn.Module | None) -> None:
        """Use the target's embeddings in place of the head's own, which published files may omit.

        They do not become part of the head: they are not moved, trained, sharded or saved with it.

        Args:
            embed_tokens: None: to be set later.
        """
        self._modules.pop("embed_tokens", None)
        self.__dict__["embed_tokens"] = embed_tokens  # not by setattr, which would register the module

    @property
    def module(self) -> DraftHead:
        return self

    @property
    def capturable(self) -> bool:
        return self.fused is not None and "forward" not in vars(self)

    @property
    def first_layer(self) -> FusedLayer:
        return self.fused[0]

    @property
    def computed_by(self) -> str:
        return "stock modules" if self.fused is None else "fused"

    @property
    def devices(self) -> set[torch.device]:
        return {self.device}

    def refresh_for(self, target: TargetModel) -> None:
        self.refresh()
        self.check_sizes(target)

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
        """The hidden size of compatible targets."""
        return self.config.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """R: the number of the target's tokens that the head can draft."""
        return self.config.vocab_size if self.draft_tokens is None else len(self.draft_tokens)

    @property
    def draft_tokens(self) -> Tensor | None:
        """[R] long, ascending: the target's ids of the tokens that the head can draft; None: all."""
        return self.token_map

    def limit_vocabulary(
        self,
        tokens: Tensor | None,  # [R] integers, in any order; None: all of the target's
    ) -> None:
        """Draft these tokens of the target only, at the cost of R rows of its output layer (FR-Spec, arXiv 2502.14856).

        If the head already belongs to an `EagleModel`, create the pair again by `EagleModel.from_parts`.

        Raises:
            TypeError: `tokens` is not a tensor of integers.
            ValueError: there are no tokens, a duplicate, or one outside of the target's vocabulary.
        """
        if tokens is not None:
            if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
                got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
                raise TypeError(f"a draft vocabulary must be a tensor of integers, got {got}")
            shape, count, tokens = list(tokens.shape), self.config.vocab_size, tokens.unique().long().to(self.device)
            if len(shape) != 1 or not 0 < len(tokens) == shape[0]:
                raise ValueError(f"a draft vocabulary must be [R] distinct tokens, got {len(tokens)} distinct ones in "
                                 f"{shape}")
            wrong = next((token for token in (tokens[0].item(), tokens[-1].item()) if not 0 <= token < count), None)
            if wrong is not None:
                raise ValueError(f"draft token {wrong} is outside of the target's vocabulary, 0 to {count - 1}")
            tokens = None if len(tokens) == count else tokens
        self.token_map, self.output_rows = tokens, None

    @property
    def window(self) -> int | None:
        """W: the head sees the last W positions, its own included; None: the whole text. In the config it is that of
        published heads with a window."""
        return self.config.sliding_window if getattr(self.config, "layer_types", None) == [SLIDING] else None

    @window.setter
    def window(self, window: int | None) -> None:
        if window is not None:
            require_integer("draft_window", window, 1)
        self.config.layer_types = ["full_attention" if window is None else SLIDING]
        self.config.sliding_window = window

    def digest(self) -> str:
        """An identifier of the head and its window, independent of its dtype."""
        return weights_digest(self) + ("" if self.window is None else f"/window {self.window}")

    def weights_key(self) -> tuple:
        """A key that changes with the weights and the structure."""
        rows = [] if self.output_rows is None else [self.output_rows.layer.weight]
        return (self.fused, self.window, *map(version_of, [*self.parameters(), *self.buffers(), *rows]))

    def target_layers(self, count: int) -> tuple[int, ...]:
        """The layers, of a target's `count`, whose input hidden states the head reads in addition to the last one."""
        return ()

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache of `capacity` positions for each sequence of a batch."""
        return TreeCache([self.device], capacity, batch)

    def forward(
        self,
        features: Tensor,  # [B, T, D], at the position before each token: by `to_states`, or predicted
        tokens: Tensor,  # [B, T]
        positions: Tensor,  # [B, T], of the features
        mask: Tensor | None = None,  # [B, 1, T, keys] additive; None: causal over these T, or one T
        cache: TreeCache | None = None,
    ) -> Tensor:  # [B, T, D]
        """Predicted features at the tokens' own positions.

        To replace it, assign a callable of this signature, as for `CausalLM.forward`.
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
        states: Tensor,  # [B, T, D]
        tokens: Tensor,  # [B, T]
        positions: Tensor,  # [B, T]
        ancestors: Tensor | None,  # [B, T, M] bool
        cache: TreeCache | BucketCache,
    ) -> Tensor:  # [B, T, D]
        """`forward` with the mask of these ancestors."""
        start, count, mask = cache.start, tokens.shape[1], None
        keys, window = cache.end(count), self.window
        narrow = window is not None and keys > window
        if ancestors is None and (isinstance(start, Tensor) or narrow or start and count > 1):
            ancestors = causal_ancestors(tokens)
        if narrow and keys > ancestors.shape[2] + window and self.computes_fused(cache):  # the others are not read
            mask = additive(keys_in_window(ancestors, start, window), self.dtype)
        elif ancestors is not None:
            visible = visible_keys(ancestors, start, keys)
            mask = additive(visible & in_reach(visible, SLIDING, window) if narrow else visible, self.dtype)
        return self(states, tokens, positions, mask, cache)

    def computes_fused(self, cache: object) -> bool:
        """Whether `fused` computes the layer: only in decoding, since training has gradients or other caches."""
        return (isinstance(cache, (TreeCache, BucketCache)) and self.fused is not None
                and not torch.is_grad_enabled())

    def fused_layer(
        self,
        hidden: Tensor,  # [B, T, D] float32 or wider, changed in place
        normed: Tensor,  # [B, T, *], input of the query, key and value projections
        positions: Tensor,  # [B, T]
        mask: Tensor | None,
        cache: TreeCache,
    ) -> Tensor:  # [B, T, D]
        """The head's layer, see `FusedLayer`."""
        layer, rotary = self.fused
        start, count, dtype = cache.start, normed.shape[1], self.dtype
        attend = attention_over(mask, mask is None and count > 1, layer.heads // layer.key_heads)
        rotation = rotary(positions, 0, count, cache.capacity, normed.to(dtype))
        new_states, cached = cache.append(count, layer.key_heads, layer.size, normed.to(dtype))

        def attend_in_window(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            if isinstance(start, int):
                return attend(queries, keys[:, :, -last:], values[:, :, -last:], scale)
            # A short row has fewer keys; in place of the others it gets any, which the mask hides.
            row, slots = rows_and_slots(start + count - last, last)
            return attend(queries, *(states[row, :, slots].transpose(1, 2) for states in (keys, values)), scale)

        last = cached[0][0].shape[-2] if mask is None else mask.shape[-1]  # keys of each row that the mask describes
        layer(hidden, normed, rotation, attend_in_window if last < cached[0][0].shape[-2] else attend, new_states[0],
              *cached[0])
        return hidden.to(dtype)

    def pack_for(self, target: TargetModel, form: str | None) -> None:
        self.original_digest = weights_digest(self)
        Joined((self, "fc")).pack(None)  # never int8: its row also has small embeddings
        pack(self, form, groups=self.fused[0].joined if self.fused else ())
        if self.output_rows is not None:
            self.output_rows.pack(form, target.lm_head)

    def own_logits(self, states: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        return self.target_logits(states, output)  # its states are the features that it predicts

    def target_logits(
        self,
        features: Tensor,  # [..., D]
        output: Callable[[Tensor], Tensor],  # the target's output layer, [..., D] -> [..., V]
    ) -> Tensor:  # [..., R] float32
        """The target's logits of the tokens that the head can draft, in the order of `own_logits`."""
        if self.output_rows is not None:
            return self.output_rows(features)
        return output(features) if self.draft_tokens is None else output(features)[..., self.draft_tokens]

    def names(
        self,
        tokens: Tensor,  # [...] ids of the target
    ) -> Tensor:  # [...] bool
        """Whether the head can draft each token."""
        named = self.draft_tokens
        return torch.ones_like(tokens, dtype=torch.bool) if named is None else torch.isin(tokens, named)


@dataclass(eq=False)
class OutputRows:
    """The target's output layer for the tokens that a head drafts: [..., D] -> [..., R] in float32, scaled and capped.

    Args:
        source: the output layer from which the rows were copied.
    """

    source: nn.Module
    layer: nn.Linear  # D -> R
    scale: float
    softcap: float | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        lm_head: nn.Module,  # the whole layer, of weight [V, D]
        tokens: Tensor,  # [R] long
        scale: float,
        softcap: float | None,
    ) -> OutputRows:
        bias = getattr(lm_head, "bias", None)
        layer = linear_of(lm_head.weight[tokens], None if bias is None else bias[tokens])
        return cls(lm_head, layer, scale, softcap)

    @classmethod
    @torch.no_grad()
    def copied(
        cls,
        target: TargetModel,
        tokens: Tensor,  # [R] long
    ) -> OutputRows | None:
        """The rows of a target's output layer, which give its logits; None: the layer cannot be split."""
        weight = target.lm_head.weight
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        rows = cls.of(target.lm_head, tokens, target.scale, target.softcap)
        sample = torch.linspace(-1, 2, target.hidden_size, device=weight.device).to(target.dtype)
        whole = target.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None

    def __call__(self, features: Tensor) -> Tensor:
        return output_logits(self.layer, features.to(dtype_of(self.layer)), self.scale, self.softcap)

    def copied_from(self, lm_head: nn.Module) -> bool:
        """Whether the rows were copied from this output layer, in its present dtype and on its device."""
        return (self.source is lm_head and dtype_of(self.layer) == dtype_of(lm_head)
                and device_of(self.layer) == device_of(lm_head))

    def pack(self, form: str | None, lm_head: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Pack the rows.

        Args:
            lm_head: the target's output layer, packed by now.
            dtype: see `CausalLM.pack`.
        """
        parent = nn.Sequential(self.layer)
        pack(parent, form, dtype)
        self.layer, self.source = parent[0], lm_head
