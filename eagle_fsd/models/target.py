"""The target, and any causal LM of `transformers` as an adapter: forwards of texts and trees, logits, caches.

B batch, N tokens of a forward, L prefix length, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import turn_off_cudnn
from .cache import BucketCache, TreeCache, cache_name
from .check import PASSED, STRUCTURES, TreeCheck, check_config
from .digest import weights_digest
from .fused import FusedDecoder, FusedLayer, Unsupported, version_of
from .hooks import recorded_inputs, structure_of
from .linear import device_of, dtype_of, is_int8, pack
from .masks import MaskedLayers, causal_ancestors

log = logging.getLogger(__name__)

PREFILL = {"cpu": 256, "cuda": 2048}  # positions of a prompt per forward, which bounds the activations' memory
# Where a text becomes long for their longrope, `model.generate` processes all of it again, so that all of its keys are
# those of a long text. For other types it mixes keys of both kinds, or (Phi-4 multimodal) loses the text.
REREADING = {"phi3", "phimoe"}


class Forward:
    """Tokens to features by a model as it was when this was made: by its stock decoder, or by `FusedDecoder`.

    It never changes. A model that has changed gets another one, and threads may still compute with this one.

    Args:
        stock_reason: why the stock decoder computes; None: `FusedDecoder` does.

    Raises:
        Unsupported: `FusedDecoder` was asked for and does not support the model.
        ValueError: the decoder has no list of layers.
    """

    def __init__(self, model: PreTrainedModel, stock_reason: str | None) -> None:
        self.model, self.structure, self.stock_reason = model, read_structure(model), stock_reason
        self.config = config = model.config.get_text_config(decoder=True)
        decoder = model.get_decoder()
        self.decoder: nn.Module = getattr(model, "model", decoder) if decoder is model else decoder  # Llama-4: itself
        self.layers = find_layers(self.decoder, config, type(model).__name__)
        self.masked_layers = MaskedLayers.of(config)
        self.fused: FusedDecoder | None = None
        if stock_reason is None:
            if set(self.masked_layers.kinds) != {"full_attention"}:
                raise Unsupported("it has layers without full attention")
            self.fused = FusedDecoder(self.decoder, config)

    def __getstate__(self) -> dict:
        return vars(self) | {"structure": ()}  # a copy or a pickle has another model

    def __call__(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: the next ones in the cache
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache,  # the keys and values of the tokens are appended
        feature_layers: Sequence[int],  # their inputs precede the last hidden state; n: the last layer's output
    ) -> Tensor:  # [B, N, F]
        if self.fused is not None:
            return self.fused(tokens, positions, ancestors, cache, feature_layers)
        start = cache.start
        if ancestors is None and isinstance(start, Tensor):
            ancestors = causal_ancestors(tokens)
        masks = {} if ancestors is None else self.masked_layers.forward_options(
            self.config._attn_implementation, ancestors, start, cache.end(tokens.shape[1]), computed_dtype(self.model))
        return self.stock(tokens, feature_layers, position_ids=positions, use_cache=True,
                          **{cache_name(type(self.decoder)): cache}, **masks)

    def stock(
        self,
        tokens: Tensor,  # [B, N]
        feature_layers: Sequence[int],
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder."""
        if not feature_layers:
            return self.decoder(input_ids=tokens, **options).last_hidden_state
        layers = self.layers
        modules = [layers[number] if number < len(layers) else find_norm(self.decoder, layers)
                   for number in sorted(feature_layers)]
        with recorded_inputs(modules) as states:
            last = self.decoder(input_ids=tokens, **options).last_hidden_state
        return torch.cat([*(states[module].to(last.device) for module in modules), last], -1)


class CausalLM:
    """A stock causal LM with tree verification: features = last hidden state, logits = lm_head(features).

    Its `Forward` computes the features. A model on CUDA turns off cuDNN's attention for the whole process, see
    `attention.turn_off_cudnn`.

    Args:
        fused: use `FusedDecoder` where it computes the same logits, else the stock decoder.
        check: compare the logits of a tree with the model's own, unless this model has passed before, as it is.

    Attributes:
        feature_layers: whose input hidden states the features begin with, see `TargetModel`.

    Raises:
        ValueError: the model cannot verify a tree: its cache cannot be rolled back, its attention implementation takes
            no arbitrary mask, or its logits of a tree are not finite or differ from its own forward's.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, *, fused: bool = False, check: bool = True) -> None:
        self.model = model.eval()
        self.config = config = model.config.get_text_config(decoder=True)
        check_config(model, config)
        self.hidden_size: int = config.hidden_size
        # Granite divides its logits, Cohere multiplies them, Gemma-2 caps them, all before the sampling temperature.
        self.scale: float = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        is_long = rope.get("rope_type") == "longrope"
        self.short_limit: int | None = rope["original_max_position_embeddings"] if is_long else None
        # In these types, keys depend on the last position of the forward.
        self.splits_prefill: bool = rope.get("rope_type") not in ("longrope", "dynamic")
        # Llama-4 scales queries by positions, which it counts from the length of the cache, as if a tree were a chain.
        self.positions_from_cache = bool(getattr(config, "attn_temperature_tuning", False))
        if any(weight.is_cuda for weight in model.parameters()):
            turn_off_cudnn()
        self.wants_fused = fused
        self.computation = self._read(check)  # replaced as a whole, never changed: other threads compute with it

    # The model as it is -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the model again if modules, their forwards or hooks, the attention or the vocabulary have changed since.

        Raises:
            ValueError: see `CausalLM`.
        """
        if self.computation.structure != read_structure(self.model):
            check_config(self.model, self.config)
            self.computation = self._read(check=True)

    def _read(self, check: bool) -> Forward:
        """The forward of the model as it is, by `FusedDecoder` if that is wanted and computes the same."""
        model, key = self.model, (self.wants_fused, read_structure(self.model))
        passed, tree_check = PASSED.get(model, {}) if check else {}, None
        reason = passed.get(key, None if self.wants_fused else "it was not requested")
        if check and key not in passed:
            if is_int8(model):  # two forwards differ by more than the check tolerates
                reason = "it has changed since it was packed as int8"
            else:
                tree_check = TreeCheck(self)
        if reason is None:
            try:
                forward = self._checked(tree_check, None)
            except Exception as error:  # a kernel can raise any exception
                reason = str(error)
                log.info("%s uses its stock decoder: %s", type(model).__name__, error)
        if reason is not None:
            try:
                forward = self._checked(tree_check, reason)
            except ValueError as error:
                raise ValueError(
                    f"{type(model).__name__} is not supported: {error}; a target's logits must be lm_head(last hidden "
                    "state) with a scale and a softcap, and depend on no more than the positions and keys that a tree "
                    "mask shows") from error
        if check:
            PASSED[model] = dict([*passed.items(), (key, reason)][-STRUCTURES:])
        return forward

    def _checked(self, tree_check: TreeCheck | None, stock_reason: str | None) -> Forward:
        """A forward of the model as it is that has passed the check, if there is one."""
        forward = Forward(self.model, stock_reason)
        if tree_check is not None:
            tree_check.compare(self, forward)
        return forward

    def use_attention(self, implementation: str) -> None:
        """Switch the stock decoder to another attention implementation if the logits stay the same.

        Raises:
            ValueError: the logits differ, or the model's class cannot select its attention by name. The model stays as
                it was.
        """
        before = self.config._attn_implementation
        try:
            tree_check = TreeCheck(self)
            self.model.set_attn_implementation(implementation)
            if self.config._attn_implementation != implementation:
                raise ValueError("its class cannot select its attention by name")
            self.computation = self._checked(tree_check, f"{implementation} was requested")
            self.wants_fused = False
        except Exception as error:  # a kernel can raise any exception
            self.model.set_attn_implementation(before)
            model = type(self.model).__name__
            raise ValueError(f"{model} keeps attention {before}, because {implementation} fails: {error}") from error

    @property
    def decoder_layers(self) -> nn.ModuleList:
        return self.computation.layers

    @property
    def fused(self) -> FusedDecoder | None:
        return self.computation.fused

    @property
    def stock_reason(self) -> str | None:
        """Why the stock decoder computes; None: `fused` does."""
        return self.computation.stock_reason

    @property
    def computed_by(self) -> str:
        """The implementation of its forwards, for records."""
        return "fused" if self.fused else f"{self.config._attn_implementation} ({self.stock_reason})"

    def pack(self, form: str | None, dtype: torch.dtype | None = None) -> None:
        """Replace plain linear layers on a CPU by packed ones, see `linear.pack`.

        Args:
            dtype: the model computes in it from now on (only right after loading); None: keep the weights' own dtype.
        """
        self.model.original_digest = weights_digest(self.model)
        groups = [joined for layer in self.fused.layers for joined in layer.joined] if self.fused else []
        pack(self.model, form, dtype, groups)

    # Parts --------------------------------------------------------------------------------------------------------

    @property
    def embed_tokens(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """V."""
        return vocab_size_of(self.model)

    @property
    def input_device(self) -> torch.device:
        """The device of the token embeddings."""
        return device_of(self.embed_tokens)

    @property
    def output_device(self) -> torch.device:
        """The device of features, logits and the draft head; with a `device_map` often not `input_device`."""
        return device_of(self.lm_head)

    @property
    def devices(self) -> set[torch.device]:
        return {self.input_device, self.output_device}

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs may hold its forwards: by the fused decoder, and not replaced."""
        return self.fused is not None and "forward" not in vars(self)

    @property
    def first_layer(self) -> FusedLayer:
        """Of the fused decoder."""
        return self.fused.layers[0]

    @property
    def dtype(self) -> torch.dtype:
        return computed_dtype(self.model)

    def digest(self) -> str:
        """An identifier of the model, independent of its dtype: class, sizes and a sample of the weights."""
        return f"{type(self.model).__name__}/{self.hidden_size}/{self.vocab_size}/{weights_digest(self.model)}"

    def weights_key(self) -> tuple:
        """A key that changes with the weights and the structure."""
        return (self.computation, *map(version_of, self.model.parameters()))

    def position_limit(self, length: int) -> int | None:
        """The number of positions up to which a text of this length can grow; None: no limit.

        With the rotary embedding of Phi-3, the keys of a long text differ from those of a short one from the first
        token on: a cache is valid for texts that stay short and for texts that begin long.
        """
        short = self.short_limit is not None and length <= self.short_limit
        return self.short_limit if short else self.max_positions

    def text_limit(self, length: int) -> int | None:
        """The number of tokens of the longest text that begins with a prompt of this length; None: no limit.

        A short text may end with a token that is never processed. In families that process a text again where it
        becomes long (`REREADING`), it grows further.
        """
        limit = self.position_limit(length)
        if limit == self.max_positions or self.config.model_type in REREADING:
            return self.max_positions
        return limit + 1

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache of `capacity` positions for each sequence of a batch."""
        return TreeCache([device_of(layer) for layer in self.decoder_layers], capacity, batch)

    # Forwards -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: the next ones in the cache
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache | BucketCache,  # the keys and values of the tokens are appended
    ) -> Tensor:  # [B, N, F]
        """The forward of `prefill` and `verify`.

        To replace it, assign a callable of this signature. `DraftHead.forward` can be replaced in the same way. Cycles
        of a replaced forward are not captured (`captured.cycle`).
        """
        return self.computation(tokens, positions, ancestors, cache, self.feature_layers)

    def prefill(self, tokens: Tensor, cache: TreeCache) -> Tensor:
        """Features [B, N, F] of a prompt [B, N] with the model's own causal mask; a long prompt in parts."""
        most = prefill_part(self.input_device) if self.splits_prefill else tokens.shape[1]
        return torch.cat([self.forward(part, None, None, cache) for part in tokens.split(most, 1)], 1)

    def verify(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache | BucketCache,
    ) -> Tensor:  # [B, N, F]
        """Features of tree nodes, whose keys and values are appended to the cache in node order."""
        prefix = cache.length
        limit = self.position_limit(prefix)
        if limit is not None:  # nodes beyond the last position are never emitted, but need a valid one
            positions = positions.clamp_max(limit - 1)
        if self.positions_from_cache:
            cache.position_offset = positions[0] - prefix - torch.arange(positions.shape[1], device=positions.device)
        features = self.forward(tokens, positions, ancestors, cache)
        if self.positions_from_cache:
            cache.position_offset = 0
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Raw next-token logits [..., V] in float32, from features [..., F] or last hidden states [..., D]."""
        return output_logits(self.lm_head, features[..., -self.hidden_size :], self.scale, self.softcap)


class TargetModel(CausalLM):
    """A causal LM for which drafts are made.

    If `feature_layers` is set, the features begin with the input hidden states of those layers, in order of depth, and
    are F = D * (layers + 1) wide; of n layers, number n stands for the output of the last, before the norm. An EAGLE-3
    head reads the first part; `logits` reads the last D.
    """

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group texts of these lengths, by index, into batches that can be decoded together.

        A batch shares one `position_limit`; it has one text if the model takes positions from the cache.
        """
        if self.positions_from_cache:
            return [[number] for number in range(len(lengths))]
        groups: dict[int | None, list[int]] = {}
        for number, length in enumerate(lengths):
            groups.setdefault(self.position_limit(length), []).append(number)
        return list(groups.values())

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * (len(self.feature_layers) + 1)

    def features(
        self,
        tokens: Tensor,  # [B, N]
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder, for training."""
        return self.computation.stock(tokens, self.feature_layers, **options)

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy if they are on another device, as with a `device_map`."""
        return self.embed_tokens if self.input_device == device else copy_to(self.embed_tokens, device)


def prefill_part(device: torch.device) -> int:
    """The number of positions of a prompt in one forward."""
    return PREFILL.get(device.type, PREFILL["cuda"])


def output_logits(
    lm_head: Callable[[Tensor], Tensor], features: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """[..., D] -> [..., V] in float32, scaled and capped."""
    logits = lm_head(features).float()
    if scale != 1:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def read_structure(model: PreTrainedModel) -> tuple:
    """The attention, the size of the vocabulary, and `structure_of` the model, whose modules it does not keep alive."""
    return model.config.get_text_config(decoder=True)._attn_implementation, vocab_size_of(model), *(
        weakref.ref(part) if isinstance(part, nn.Module) else part for part in structure_of(model))


def vocab_size_of(model: PreTrainedModel) -> int:
    """V."""
    lm_head = model.get_output_embeddings()  # a quantised weight can have another shape
    return getattr(lm_head, "out_features", None) or lm_head.weight.shape[0]


def computed_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of hidden states."""
    dtype = dtype_of(model.get_output_embeddings())
    return dtype if dtype.is_floating_point else model.dtype


def find_layers(decoder: nn.Module, config: PreTrainedConfig, name: str) -> nn.ModuleList:
    """The decoder's list of layers, whatever its name."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ValueError(f"{name} is not supported: its decoder has no list of layers to place a cache for")


def find_norm(decoder: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The decoder's norm of the last layer's output, whatever its name: the first one after its layers, or before."""
    parts = list(decoder.children())
    place = parts.index(layers)
    for module in parts[place:] + parts[:place][::-1]:
        if "norm" in type(module).__name__.lower():
            return module
    raise ValueError(f"{type(decoder).__name__} has no norm after its layers, whose input a head could read")


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without accelerate's hooks."""
    hook = getattr(module, "_hf_hook", None)  # may contain all offloaded weights: do not copy it
    with align_module_device(module):
        copied = copy.deepcopy(module, {id(hook): hook})
    return remove_hook_from_module(copied).to(device)
