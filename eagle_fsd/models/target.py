"""Adapter over any causal LM of `transformers`: features, logits, caches and tree masks.

B batch, N tokens of a forward, L prefix length, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import attention as _registered  # noqa: F401  (its functions are chosen by name)
from .admission import FULL, check_config, check_logits, check_weights, find_layers, tree_of_two_rows
from .cache import TreeCache
from .implementations import SPLIT
from .masks import MaskedLayers
from .output import OutputRows, output_logits
from .parallel import group_of, of_first
from .placement import Lock, copy_to, device_of, weights_digest

PARITY, HALF_PARITY = 1e-4, 2e-2  # how far features may differ between attentions or compiled, of their size
PREFILL = {"cpu": 256, "cuda": 2048}  # positions of a prompt per forward: what is computed for them is large
_sharded_digests: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # which take all processes to compute


class TargetModel:
    """A stock causal LM seen as the method sees it: `features` = last hidden state, `logits` = head(features).

    With `layers` set, the hidden states that enter those layers come before the last one, in order of depth: the
    features are then F = D * (layers + 1) wide. An EAGLE-3 head reads the first part; `logits` reads the last D.

    Args:
        check: compare our logits with the model's own on a few tokens; skip it for a model that has passed.

    Raises:
        ValueError: a model that cannot be verified with a tree: no rollback of its cache, an attention
            implementation without arbitrary masks, or logits that are not the model's own when computed our way; or
            one with weights that are not finite.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        check_config(model, self.config)
        decoder = model.get_decoder()
        self.decoder: nn.Module = getattr(model, "model", decoder) if decoder is model else decoder  # Llama-4: itself
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        # A packed weight does not have the shape of what it stands for.
        self.vocab_size: int = getattr(self.lm_head, "out_features", self.lm_head.weight.shape[0])
        self.group = group_of(model)  # processes that share the weights
        # Granite divides its logits, Cohere multiplies them, Gemma-2 caps them; all before the sampling temperature.
        config = self.config
        self.scale: float = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        self.short_positions: int | None = (
            rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
        )
        # With these, keys depend on how many positions a forward reaches.
        self.reads_in_parts: bool = rope.get("rope_type") not in ("longrope", "dynamic")
        self.layers: tuple[int, ...] = ()
        self._hooking = Lock()
        self.masked_layers = MaskedLayers.of(self.config)
        # Llama-4 counts positions itself to scale queries: from the length of the cache, as if the tree were a chain.
        self.counts_positions = bool(getattr(self.config, "attn_temperature_tuning", False))
        self.decoder_layers = find_layers(self.decoder, self.config, type(model).__name__)
        if check:
            check_weights(model, self.group)
            check_logits(self)
            if self.config._attn_implementation == SPLIT:  # not every class passes on all that it needs
                self.model.set_attn_implementation("eager")
                self.use_attention(SPLIT)
        if self.group is not None and model not in _sharded_digests:
            sample = weights_digest(model)
            _sharded_digests[model] = of_first(self.group, lambda: sample)

    def use_attention(self, implementation: str) -> None:
        """Switch to another attention implementation if it gives a tree the same features.

        Raises:
            ValueError: it does not, or the model's class does not take implementations by name; nothing has changed.
        """
        before = self.config._attn_implementation
        try:
            expected = tree_of_two_rows(self)
            self.model.set_attn_implementation(implementation)
            if self.config._attn_implementation != implementation:
                raise ValueError("its class does not choose its attention by name")
            found = tree_of_two_rows(self)
            difference = ((found - expected).norm() / expected.norm()).item()
            if not difference <= (PARITY if self.dtype in FULL else HALF_PARITY):
                raise ValueError(f"the features of a tree differ by {difference:.1g} of their size")
        except Exception as error:  # kernels raise anything
            self.model.set_attn_implementation(before)
            model = type(self.model).__name__
            raise ValueError(f"{model} stays with attention {before}, {implementation} fails: {error}") from error

    @property
    def device(self) -> torch.device:
        """Where tokens go in."""
        return device_of(self.embed_tokens)

    @property
    def output_device(self) -> torch.device:
        """Where features and logits come out, and the head lives; with a `device_map` often another one."""
        return device_of(self.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype if self.lm_head.weight.is_floating_point() else self.model.dtype

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy where they live on another device, as with a `device_map`."""
        return self.embed_tokens if self.device == device else copy_to(self.embed_tokens, device)

    def digest(self) -> str:
        """What tells one target from another, whatever dtype it is loaded in: its shape and a sample of its weights."""
        sample = _sharded_digests.get(self.model) or weights_digest(self.model)
        return f"{type(self.model).__name__}/{self.hidden_size}/{self.vocab_size}/{sample}"

    def limit_of(self, length: int) -> int | None:
        """Positions that a text of this length may grow to; None: any number.

        With the rotary embedding of Phi-3 a long text has other keys than a short one, from its first token on: a cache
        serves texts that stay short, and those that begin long.
        """
        short = self.short_positions is not None and length <= self.short_positions
        return self.short_positions if short else self.max_positions

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which texts of these lengths can be decoded together, as lists of their numbers.

        Apart are those that `limit_of` tells apart, and all where the model counts positions itself.
        """
        if self.counts_positions:
            return [[number] for number in range(len(lengths))]
        groups: dict[int | None, list[int]] = {}
        for number, length in enumerate(lengths):
            groups.setdefault(self.limit_of(length), []).append(number)
        return list(groups.values())

    def new_cache(self, capacity: int, batch: int = 1, **options: bool) -> TreeCache:
        """An empty cache for `capacity` positions of each sequence of a batch; `options` are those of `TreeCache`."""
        return TreeCache([device_of(layer) for layer in self.decoder_layers], capacity, batch, **options)

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * (len(self.layers) + 1)

    def features(
        self,
        tokens: Tensor,  # [B, N]
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """One forward through the decoder."""
        if not self.layers:
            return self.decoder(input_ids=tokens, **options).last_hidden_state
        entering: list[Tensor] = []
        with self._hooking:  # hooks are the modules', and would hear the forwards of other threads
            hooks = [
                self.decoder_layers[number].register_forward_pre_hook(lambda layer, inputs: entering.append(inputs[0]))
                for number in self.layers
            ]
            try:
                last = self.decoder(input_ids=tokens, **options).last_hidden_state
            finally:
                for hook in hooks:
                    hook.remove()
        return torch.cat([*(states.to(last.device) for states in entering), last], -1)

    def prefill(self, tokens: Tensor, cache: TreeCache) -> Tensor:
        """Features [B, N, F] of a prompt [B, N], through the model's own causal mask; a long one in parts."""
        rows = prefill_rows(self.device) if self.reads_in_parts else tokens.shape[1]
        parts = [self.features(part, past_key_values=cache, use_cache=True) for part in tokens.split(rows, 1)]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def verify(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        ancestors: Tensor,  # [B, N, N] bool
        cache: TreeCache,
    ) -> Tensor:  # [B, N, F]
        """Features of tree nodes; their keys and values are appended to the cache in node order."""
        prefix = cache.length
        limit = self.limit_of(prefix)
        if limit is not None:  # nodes beyond the last position are never emitted, but have to be embedded
            positions = positions.clamp_max(limit - 1)
        seen = self.masks(ancestors, positions, prefix, cache.visible(ancestors.device))
        if self.counts_positions:
            cache.skew = positions[0] - torch.arange(prefix, prefix + len(positions[0]), device=positions.device)
        features = self.features(tokens, position_ids=positions, past_key_values=cache, use_cache=True, **seen)
        cache.skew = 0
        return features

    def masks(
        self,
        ancestors: Tensor,  # [B, N, N] bool
        positions: Tensor,  # [B, N]
        prefix: int,  # L, keys before the tree
        prefix_visible: Tensor | None = None,  # [B, L] bool: what rows hold, the first ones of each; None: all
    ) -> dict[str, object]:
        """What a forward of the decoder must be told for its tokens to see their ancestors: its keywords."""
        return self.masked_layers.forward_options(
            self.config._attn_implementation, ancestors, positions, prefix, self.dtype, prefix_visible
        )

    def logits(self, features: Tensor) -> Tensor:
        """Raw next-token logits [..., V] in float32, from features [..., F] or last hidden states [..., D]."""
        return output_logits(self.lm_head, features[..., -self.hidden_size :], self.scale, self.softcap)

    @torch.no_grad()
    def output_rows(
        self,
        tokens: Tensor,  # [R] long
    ) -> OutputRows | None:
        """`logits` of some tokens only, from a copy of their rows; None where the output layer cannot be split so."""
        weight = self.lm_head.weight
        if type(weight) is not nn.Parameter or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        bias = getattr(self.lm_head, "bias", None)
        rows = OutputRows.of(weight, bias, tokens, self.scale, self.softcap)
        sample = torch.linspace(-1, 2, self.hidden_size, device=weight.device).to(self.dtype)
        whole = self.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None


def prefill_rows(device: torch.device) -> int:
    """How many positions of a prompt are read in one forward."""
    return PREFILL.get(device.type, PREFILL["cuda"])
