"""Adapter over any causal LM of `transformers`: features, logits, caches and tree masks.

B batch, N tokens of a forward, L prefix length, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..locks import Lock
from .attention import turn_off_cudnn
from .cache import BucketCache, TreeCache, cache_name
from .check import TreeCheck, check_config
from .digest import weights_digest
from .fused import FusedDecoder, Unsupported
from .hooks import recorded_inputs, structure_of
from .linear import PackedLinear, dtype_of, is_int8, pack_linears
from .masks import MaskedLayers
from .memory import MappedFiles, copy_from_files

log = logging.getLogger(__name__)

PREFILL = {"cpu": 256, "cuda": 2048}  # positions of a prompt per forward, which bounds the activations' memory
STRUCTURES = 4  # of each model that are remembered as checked

# For each model, by `fused` and structure, with which it has passed the check: why the fused decoder does not serve it,
# or None if it does.
_checked: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, str | None]] = weakref.WeakKeyDictionary()
# The structure that an adapter has read. No attribute: copies and pickles of an adapter are to read their own.
_structures: weakref.WeakKeyDictionary[TargetModel, tuple] = weakref.WeakKeyDictionary()


class TargetModel:
    """A stock causal LM with tree verification: features = last hidden state, logits = lm_head(features).

    If `layers` is set, the features begin with the input hidden states of those layers, in order of depth, and are
    F = D * (layers + 1) wide; of n layers, number n stands for the output of the last, before the norm. An EAGLE-3 head
    reads the first part; `logits` reads the last D.

    A target on CUDA turns off cuDNN's attention for the whole process, see `attention.turn_off_cudnn`.

    Args:
        fused: use `FusedDecoder` where it computes the same logits, else the stock decoder.
        check: compare the logits of a tree with the model's own, unless this model has passed before, as it is.

    Attributes:
        batch_invariant: see `FusedDecoder`.

    Raises:
        ValueError: the model cannot verify a tree: its cache cannot be rolled back, its attention implementation takes
            no arbitrary mask, or its logits of a tree are not finite or differ from its own forward's.
    """

    batch_invariant = True

    def __init__(self, model: PreTrainedModel, *, fused: bool = False, check: bool = True) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        check_config(model, self.config)
        self.hidden_size: int = self.config.hidden_size
        # Granite divides its logits, Cohere multiplies them, Gemma-2 caps them, all before the sampling temperature.
        config = self.config
        self.scale: float = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        self.short_limit: int | None = (
            rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
        )
        # In these types, keys depend on the last position of the forward.
        self.splits_prefill: bool = rope.get("rope_type") not in ("longrope", "dynamic")
        self.layers: tuple[int, ...] = ()
        self.fused: FusedDecoder | None = None
        self.stock_reason: str | None = None  # why `fused` is None
        self.readings = 0  # how often the model was read: more often if it has changed
        self.wants_fused, self._adapting = fused, Lock()
        self.masked_layers = MaskedLayers.of(self.config)
        # Llama-4 scales queries by positions that it counts from the length of the cache, as if the tree were a chain.
        self.positions_from_cache = bool(getattr(self.config, "attn_temperature_tuning", False))
        if any(weight.is_cuda for weight in model.parameters()):
            turn_off_cudnn()
        self._adapt(check)

    def refresh(self) -> None:
        """Read the model again if modules, their forwards or hooks, the attention or the vocabulary have changed since.

        Raises:
            ValueError: see `TargetModel`.
        """
        with self._adapting:
            if _structures.get(self) != self._structure():
                check_config(self.model, self.config)
                self._adapt(check=True)

    def _structure(self) -> tuple:
        parts = structure_of(self.model)
        return self.config._attn_implementation, self.vocab_size, *(
            weakref.ref(part) if isinstance(part, nn.Module) else part for part in parts)

    def _adapt(self, check: bool) -> None:
        """Find the decoder and its layers, and decide whether `FusedDecoder` computes them."""
        model, structure = self.model, self._structure()
        self.readings += 1
        decoder = model.get_decoder()
        self.decoder: nn.Module = getattr(model, "model", decoder) if decoder is model else decoder  # Llama-4: itself
        self.decoder_layers = find_layers(self.decoder, self.config, type(model).__name__)
        tree_check, checked, key = None, _checked.get(model, {}), (self.wants_fused, structure)
        if check and key in checked:
            reason = checked[key]
        elif check and is_int8(model):  # two forwards differ by more than the check tolerates
            reason = "it has changed since it was packed as int8"
        else:
            reason = None if self.wants_fused else "it was not requested"
            tree_check = self._tree_check() if check else None
        if reason is None:
            self._use_fused(tree_check)
        else:
            self.fused, self.stock_reason = None, reason
        if self.fused is None and tree_check is not None:
            try:
                tree_check.compare(self._tree_logits)
            except ValueError as error:
                raise ValueError(
                    f"{type(model).__name__} is not supported: {error}; a target's logits must be lm_head(last hidden "
                    "state) with a scale and a softcap, and depend on no more than the positions and keys that a tree "
                    "mask shows") from error
        _structures[self] = structure
        if check:
            self.remember_check(self.wants_fused, self.stock_reason)

    def remember_check(self, fused: bool, reason: str | None) -> None:
        """Remember that the model as it is has passed the check, and why the fused decoder does not serve it; None: it
        does."""
        checked = _checked.setdefault(self.model, {})
        for oldest in [*checked][: 1 - STRUCTURES]:
            checked.pop(oldest, None)
        checked[fused, _structures[self]] = reason

    def _use_fused(self, tree_check: TreeCheck | None) -> None:
        """Use `FusedDecoder` if it passes the check; otherwise set `stock_reason`."""
        try:
            special = not self.splits_prefill or self.positions_from_cache
            if special or set(self.masked_layers.kinds) != {"full_attention"}:
                raise Unsupported("it has layers without full attention, or positions of a special type")
            self.fused = FusedDecoder(
                self.decoder, self.decoder_layers, self.config, batch_invariant=self.batch_invariant)
            if tree_check is not None:
                tree_check.compare(self._tree_logits)
            self.stock_reason = None
        except Exception as error:  # a kernel can raise any exception
            self.fused, self.stock_reason = None, str(error)
            log.info("%s uses its stock decoder: %s", type(self.model).__name__, error)

    def pack(self, form: str | None, dtype: torch.dtype | None = None) -> None:
        """Replace plain linear layers on a CPU by packed ones, see `models.linear`.

        Args:
            dtype: the model computes in it from now on (only right after loading); None: keep the weights' own dtype.
        """
        self.model.original_digest = weights_digest(self.model)
        files = MappedFiles()
        for weight in self.model.parameters() if dtype is not None else ():
            files.release(weight)  # the digest has read a few numbers, and the system has mapped many pages around each
        copy_from_files(self.model, files, skip=nn.Linear)  # first, because a linear layer can share a tied weight
        groups = [joined for layer in self.fused.layers for joined in layer.joined] if self.fused else []
        pack_linears(self.model, form, files, dtype, groups)
        copy_from_files(self.model, files, dtype=dtype)

    @property
    def computed_by(self) -> str:
        """The implementation of its forwards, for records."""
        return "fused" if self.fused else f"{self.config._attn_implementation} ({self.stock_reason})"

    def use_attention(self, implementation: str) -> None:
        """Switch the stock decoder to another attention implementation if the logits stay the same.

        Raises:
            ValueError: the logits differ, or the model's class cannot select its attention by name. The model stays as
                it was.
        """
        before, fused = self.config._attn_implementation, self.fused
        try:
            tree_check, self.fused = self._tree_check(), None
            self.model.set_attn_implementation(implementation)
            if self.config._attn_implementation != implementation:
                raise ValueError("its class cannot select its attention by name")
            tree_check.compare(self._tree_logits)
            self.wants_fused, self.stock_reason = False, f"{implementation} was requested"
            _structures[self] = self._structure()
        except Exception as error:  # a kernel can raise any exception
            self.model.set_attn_implementation(before)
            self.fused = fused
            model = type(self.model).__name__
            raise ValueError(f"{model} keeps attention {before}, because {implementation} fails: {error}") from error

    # The check ---------------------------------------------------------------------------------------------------

    def _tree_check(self) -> TreeCheck:
        rows = 1 if self.positions_from_cache else 2
        return TreeCheck(self.model, self.vocab_size, rows=rows, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def _tree_logits(
        self,
        texts: Tensor,  # [B, L]
        lengths: Sequence[int],  # tokens of each row before the tree
        trees: Tensor,  # [B, N]
        ancestors: Tensor,  # [N, N] bool
    ) -> Tensor:  # [B, N, V]
        """Logits of a tree by `prefill` and `verify`."""
        cache = self.new_cache(texts.shape[1] + trees.shape[1], len(texts))
        self.prefill(texts, cache)
        cache.commit([0] * len(texts), [range(length) for length in lengths])
        ancestors = ancestors.to(self.device).expand(len(texts), -1, -1)
        positions = torch.tensor(lengths, device=self.device)[:, None] + ancestors.sum(-1) - 1
        return self.logits(self.verify(trees, positions, ancestors, cache))

    @property
    def embed_tokens(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """V."""
        out_features = getattr(self.lm_head, "out_features", None)  # a quantised weight can have another shape
        return out_features or self.lm_head.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the token embeddings."""
        return device_of(self.embed_tokens)

    @property
    def output_device(self) -> torch.device:
        """The device of features, logits and the draft head; with a `device_map` often not `device`."""
        return device_of(self.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        dtype = dtype_of(self.lm_head)
        return dtype if dtype.is_floating_point else self.model.dtype

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy if they are on another device, as with a `device_map`."""
        return self.embed_tokens if self.device == device else copy_to(self.embed_tokens, device)

    def digest(self) -> str:
        """An identifier of the target, independent of its dtype: class, sizes and a sample of the weights."""
        return f"{type(self.model).__name__}/{self.hidden_size}/{self.vocab_size}/{weights_digest(self.model)}"

    def position_limit(self, length: int) -> int | None:
        """The number of positions up to which a text of this length can grow; None: no limit.

        With the rotary embedding of Phi-3, the keys of a long text differ from those of a short one from the first
        token on: a cache is valid for texts that stay short and for texts that begin long.
        """
        short = self.short_limit is not None and length <= self.short_limit
        return self.short_limit if short else self.max_positions

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

    def new_cache(self, capacity: int, batch: int = 1, spare: Tensor | None = None) -> TreeCache:
        """An empty cache of `capacity` positions for each sequence of a batch; `spare`: see `TreeCache`."""
        return TreeCache([device_of(layer) for layer in self.decoder_layers], capacity, batch, spare)

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * (len(self.layers) + 1)

    def forward(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: the next ones in the cache
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache,  # the keys and values of the tokens are appended
    ) -> Tensor:  # [B, N, F]
        """The forward of `prefill` and `verify`.

        To replace it, assign a callable of this signature. `DraftHead.forward` can be replaced in the same way. Cycles
        of a replaced forward are not captured (`captured.cycle`).
        """
        if self.fused is not None:
            return self.fused(tokens, positions, ancestors, cache, self.layers)
        masks = {} if ancestors is None else self.masked_layers.forward_options(
            self.config._attn_implementation, ancestors, cache.length, self.dtype, cache.visible(ancestors.device))
        return self.features(
            tokens, position_ids=positions, use_cache=True, **{cache_name(type(self.decoder)): cache}, **masks)

    def features(
        self,
        tokens: Tensor,  # [B, N]
        **options: object,  # keywords of the stock decoder
    ) -> Tensor:  # [B, N, F]
        """Features by the stock decoder."""
        layers = self._recorded_modules()
        if not layers:
            return self.decoder(input_ids=tokens, **options).last_hidden_state
        with recorded_inputs(layers) as states:
            last = self.decoder(input_ids=tokens, **options).last_hidden_state
        return torch.cat([*(states[layer].to(last.device) for layer in layers), last], -1)

    def _recorded_modules(self) -> list[nn.Module]:
        """The modules whose input hidden states are the first part of the features."""
        layers = self.decoder_layers
        return [
            layers[number] if number < len(layers) else find_norm(self.decoder, layers)
            for number in sorted(self.layers)
        ]

    def prefill(self, tokens: Tensor, cache: TreeCache) -> Tensor:
        """Features [B, N, F] of a prompt [B, N] with the model's own causal mask; a long prompt in parts."""
        most = prefill_part(self.device) if self.splits_prefill else tokens.shape[1]
        return torch.cat([self.forward(part, None, None, cache) for part in tokens.split(most, 1)], 1)

    def verify(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        ancestors: Tensor | None,  # [B, N, M] bool, see `masks.visible_keys`; None: causal
        cache: TreeCache,
    ) -> Tensor:  # [B, N, F]
        """Features of tree nodes, whose keys and values are appended to the cache in node order."""
        prefix = cache.length
        limit = self.position_limit(prefix)
        if limit is not None:  # nodes beyond the last position are never emitted, but need a valid one
            positions = positions.clamp_max(limit - 1)
        if self.positions_from_cache:
            cache.position_offset = positions[0] - prefix - torch.arange(positions.shape[1], device=positions.device)
        features = self.forward(tokens, positions, ancestors, cache)
        cache.position_offset = 0
        return features

    def compute(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor,  # [B, N]
        attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],  # see `fused.attention_over`
        cache: BucketCache,
    ) -> Tensor:  # [B, N, F]
        """`verify` by the fused decoder for captured cycles: nothing depends on a length that the host knows."""
        if self.max_positions is not None:  # as in `verify`
            positions = positions.clamp_max(self.max_positions - 1)
        return self.fused.compute(tokens, positions, 0, attend, cache, self.layers)

    def logits(self, features: Tensor) -> Tensor:
        """Raw next-token logits [..., V] in float32, from features [..., F] or last hidden states [..., D]."""
        return output_logits(self.lm_head, features[..., -self.hidden_size :], self.scale, self.softcap)

    @torch.no_grad()
    def output_rows(
        self,
        tokens: Tensor,  # [R] long
    ) -> OutputRows | None:
        """The rows of the output layer for some tokens, as a copy; None if the layer cannot be split."""
        weight = self.lm_head.weight
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        rows = OutputRows.of(self.lm_head, tokens, self.scale, self.softcap)
        sample = torch.linspace(-1, 2, self.hidden_size, device=weight.device).to(self.dtype)
        whole = self.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None


def prefill_part(device: torch.device) -> int:
    """The number of positions of a prompt in one forward."""
    return PREFILL.get(device.type, PREFILL["cuda"])


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


@dataclass(eq=False)
class OutputRows:
    """The output layer for some tokens only: [..., D] -> [..., R] in float32, scaled and capped as the target's.

    R rows of the whole layer's V.

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
        weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
        layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight[tokens], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return cls(lm_head, layer, scale, softcap)

    def __call__(self, features: Tensor) -> Tensor:
        return output_logits(self.layer, features.to(dtype_of(self.layer)), self.scale, self.softcap)

    def copied_from(self, lm_head: nn.Module) -> bool:
        """Whether the rows were copied from this output layer, in its present dtype and on its device."""
        return (self.source is lm_head and dtype_of(self.layer) == dtype_of(lm_head)
                and device_of(self.layer) == device_of(lm_head))

    def pack(
        self, form: str | None, lm_head: nn.Module, files: MappedFiles, dtype: torch.dtype | None = None
    ) -> None:
        """Pack the rows.

        Args:
            lm_head: the target's output layer, packed by now.
            dtype: see `TargetModel.pack`.
        """
        parent = nn.Sequential(self.layer)
        pack_linears(parent, form, files, dtype)
        copy_from_files(parent, files, dtype=dtype)
        self.layer, self.source = parent[0], lm_head


def output_logits(
    lm_head: Callable[[Tensor], Tensor], features: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """[..., D] -> [..., V] in float32, scaled and capped."""
    logits = lm_head(features).float()
    if scale != 1:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def device_of(module: nn.Module) -> torch.device:
    """The device that a module computes on: that of its weights, or the execution device of offloaded ones."""
    if isinstance(module, PackedLinear):
        return torch.device("cpu")
    first = next(each for each in module.modules() if any(True for _ in each.parameters(recurse=False)))
    weight = next(first.parameters(recurse=False))
    hook = getattr(first, "_hf_hook", None)
    return torch.device(hook.execution_device) if weight.is_meta and hook is not None else weight.device


def copy_to(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on another device, without accelerate's hooks."""
    hook = getattr(module, "_hf_hook", None)  # may contain all offloaded weights: do not copy it
    with align_module_device(module):
        copied = copy.deepcopy(module, {id(hook): hook})
    return remove_hook_from_module(copied).to(device)
