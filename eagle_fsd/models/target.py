"""Adapter over any causal LM of `transformers`: features, logits, caches and tree masks.

B batch, N tokens of a forward, L prefix length, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from . import IMPLEMENTATIONS
from .attention import turn_off_cudnn
from .cache import TreeCache, cache_name
from .fused import FusedDecoder, Unfit
from .linear import dtype_of, pack_linears
from .masks import CHUNKED, SLIDING, MaskedLayers, kinds_of
from .memory import MappedFiles, leave_files
from .output import OutputRows, output_logits
from .placement import Lock, copy_to, device_of, weights_digest

log = logging.getLogger(__name__)

FULL = (torch.float32, torch.float64)
EXACT, ROUNDING = 1e-3, 0.05  # of the largest logit: what full precision, or half and quantised ones, may change
# The tree that models are checked with:  0 - 1 - 3 - 4, 0 - 2.  Its nodes are at other positions than its rows.
SEEN = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]).bool()
PATHS = [0, 1, 3, 4], [0, 2]
TEXTS = 9, 5  # tokens before it, in each row
PREFILL = {"cpu": 256, "cuda": 2048}  # positions of a prompt per forward: what is computed for them is large


class TargetModel:
    """A stock causal LM seen as the method sees it: `features` = last hidden state, `logits` = head(features).

    With `layers` set, the hidden states that enter those layers come before the last one, in order of depth: the
    features are then F = D * (layers + 1) wide. An EAGLE-3 head reads the first part; `logits` reads the last D.

    A target on CUDA turns off cuDNN's attention for the whole process, see `attention.turn_off_cudnn`.

    Args:
        fused: compute its decoder by `FusedDecoder` where that gives the same; else by the stock one.
        check: compare our logits of a tree with the model's own; skip it for a model that has passed.

    Raises:
        ValueError: a model that cannot be verified with a tree: no rollback of its cache, an attention
            implementation without arbitrary masks, or logits that are not finite, or not the model's own when computed
            our way.
    """

    def __init__(self, model: PreTrainedModel, *, fused: bool = False, check: bool = True) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        check_config(model, self.config)
        decoder = model.get_decoder()
        self.decoder: nn.Module = getattr(model, "model", decoder) if decoder is model else decoder  # Llama-4: itself
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        out_features = getattr(self.lm_head, "out_features", None)  # some quantised weights have another shape
        self.vocab_size: int = out_features or self.lm_head.weight.shape[0]
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
        self.fused: FusedDecoder | None = None
        self.stock_because: str | None = "it was not asked for"  # why `fused` is None
        self._hooking = Lock()
        self.masked_layers = MaskedLayers.of(self.config)
        # Llama-4 counts positions itself to scale queries: from the length of the cache, as if the tree were a chain.
        self.counts_positions = bool(getattr(self.config, "attn_temperature_tuning", False))
        self.decoder_layers = find_layers(self.decoder, self.config, type(model).__name__)
        if any(weight.is_cuda for weight in model.parameters()):
            turn_off_cudnn()
        expected = self._own_logits() if check else None
        if fused:
            self._use_fused(expected)
        if self.fused is None and expected is not None:
            try:
                self._require(expected)
            except ValueError as error:
                raise ValueError(
                    f"{type(model).__name__} is not supported: {error}; a target's logits must be lm_head(last hidden "
                    "state) with a scale and a softcap, and depend on no more than the positions and keys that a tree "
                    "mask shows") from error

    def _use_fused(self, expected: Tensor | None) -> None:
        """Compute with `FusedDecoder` where that gives the expected logits; else `stock_because` says why not."""
        try:
            if set(self.masked_layers.kinds) != {"full_attention"} or not self.reads_in_parts or self.counts_positions:
                raise Unfit("not every layer sees the whole text, or its positions are of a kind of their own")
            self.fused = FusedDecoder(self.decoder, self.decoder_layers, self.config)
            if expected is not None:
                self._require(expected)
            self.stock_because = None
        except Exception as error:  # kernels raise anything
            self.fused, self.stock_because = None, str(error)
            log.info("%s is computed by its stock decoder: %s", type(self.model).__name__, error)

    def pack(self, form: str | None, dtype: torch.dtype | None = None) -> None:
        """Replace the weights of plain linear layers on a CPU by packed ones, see `models.linear`.

        Args:
            dtype: what all is computed in from now on, of a model that is as it was loaded; None: the weights' own.
        """
        self.model.kept_digest = weights_digest(self.model)
        files = MappedFiles()
        for weight in self.model.parameters() if dtype is not None else ():
            files.give_back(weight)  # around each number that the digest has read the system maps many pages
        leave_files(self.model, files, but=nn.Linear)  # first, since a tied weight belongs to a linear layer too
        together = [joined for layer in self.fused.layers for joined in layer.joined] if self.fused else []
        pack_linears(self.model, form, files, dtype, together)
        leave_files(self.model, files, dtype=dtype)

    @property
    def computed_by(self) -> str:
        """What computes its forwards, for records."""
        return "fused" if self.fused else f"{self.config._attn_implementation} ({self.stock_because})"

    def use_attention(self, implementation: str) -> None:
        """Switch the stock decoder to another attention implementation if the logits stay the same.

        Raises:
            ValueError: they do not, or the model's class does not take implementations by name; nothing has changed.
        """
        before, fused = self.config._attn_implementation, self.fused
        try:
            expected, self.fused = self._own_logits(), None
            self.model.set_attn_implementation(implementation)
            if self.config._attn_implementation != implementation:
                raise ValueError("its class does not choose its attention by name")
            self._require(expected)
            self.stock_because = f"{implementation} was asked for"
        except Exception as error:  # kernels raise anything
            self.model.set_attn_implementation(before)
            self.fused = fused
            model = type(self.model).__name__
            raise ValueError(f"{model} stays with attention {before}, {implementation} fails: {error}") from error

    # The check -----------------------------------------------------------------------------------------------------
    # Whatever computes a target, the stock decoder, another attention or the fused decoder: our logits of a tree must
    # be those of the model's own forward over each of its paths, as plain texts. The tree stands in two rows, after
    # texts of different lengths; in one row where the model counts positions itself.

    @property
    def _checked(self) -> tuple[Tensor, Sequence[int]]:
        """[B, 9 + 5] tokens, of texts, then of the tree; and how long the text of each row is."""
        lengths = TEXTS[:1] if self.counts_positions else TEXTS
        tokens = torch.arange(len(lengths) * (TEXTS[0] + len(SEEN)), device=self.device).view(len(lengths), -1)
        return (tokens * 7 + 1) % self.vocab_size, lengths

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:  # [B, 5, V]
        """Those of the model's own forward, without a cache or a mask."""
        tokens, lengths = self._checked
        texts, trees = tokens[:, : TEXTS[0]], tokens[:, TEXTS[0] :]
        where = [(row, length, path) for row, length in enumerate(lengths) for path in PATHS]
        whole = pad_sequence([torch.cat([texts[row, :length], trees[row, path]]) for row, length, path in where], True)
        logits = self.model(input_ids=whole, use_cache=False).logits.float().to(self.output_device)
        if not logits.isfinite().all():
            raise ValueError(f"{type(self.model).__name__} is damaged, or not supported: its logits are not finite in "
                             f"{self.dtype}")
        own = logits.new_empty(*trees.shape, logits.shape[-1])
        for (row, length, path), found in zip(where, logits, strict=True):
            own[row, path] = found[length : length + len(path)]
        return own

    @torch.inference_mode()
    def _tree_logits(self) -> Tensor:  # [B, 5, V]
        """Ours."""
        tokens, lengths = self._checked
        cache = self.new_cache(tokens.shape[1], len(tokens))
        self.prefill(tokens[:, : TEXTS[0]], cache)
        cache.commit([0] * len(tokens), [range(length) for length in lengths])
        ancestors = SEEN.to(self.device).expand(len(tokens), -1, -1)
        positions = torch.tensor(lengths, device=self.device)[:, None] + ancestors.sum(-1) - 1
        return self.logits(self.verify(tokens[:, TEXTS[0] :], positions, ancestors, cache))

    def _require(self, expected: Tensor) -> None:
        """Raise ValueError unless our logits are as expected."""
        try:
            ours = self._tree_logits()
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"it cannot verify a tree ({error})") from error
        error = ((ours - expected).abs().max() / expected.abs().max()).item()
        quantised = getattr(self.model, "is_quantized", False)
        if not error <= (EXACT if self.dtype in FULL and not quantised else ROUNDING):
            raise ValueError(f"its logits of a tree are not those of its own forward (they differ by {error:.1g} of "
                             "the largest)")
        if quantised and error > EXACT:
            log.warning("%s is quantised so that its logits change with the tokens beside them, by up to %.1f%% of the "
                        "largest: where its best two are closer, the text may not be that of plain decoding",
                        type(self.model).__name__, 100 * error)

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

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
        dtype = dtype_of(self.lm_head)
        return dtype if dtype.is_floating_point else self.model.dtype

    def embeddings_on(self, device: torch.device) -> nn.Module:
        """The token embeddings; a copy where they live on another device, as with a `device_map`."""
        return self.embed_tokens if self.device == device else copy_to(self.embed_tokens, device)

    def digest(self) -> str:
        """What tells one target from another, whatever dtype it is loaded in: its shape and a sample of its weights."""
        return f"{type(self.model).__name__}/{self.hidden_size}/{self.vocab_size}/{weights_digest(self.model)}"

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

    def new_cache(self, capacity: int, batch: int = 1) -> TreeCache:
        """An empty cache for `capacity` positions of each sequence of a batch."""
        return TreeCache([device_of(layer) for layer in self.decoder_layers], capacity, batch)

    @property
    def feature_size(self) -> int:
        """F."""
        return self.hidden_size * (len(self.layers) + 1)

    def forward(
        self,
        tokens: Tensor,  # [B, N]
        positions: Tensor | None,  # [B, N]; None: those that come next in the cache
        ancestors: Tensor | None,  # [B, N, N] bool, or self; None: causal
        cache: TreeCache,  # to which the tokens' keys and values are appended
    ) -> Tensor:  # [B, N, F]
        """One forward: all that `prefill` and `verify` compute is computed here.

        This is the seam for other forwards: assign a callable of this signature, such as one that replays CUDA graphs.
        Everything above it stays as it is. A draft head has the same seam in `DraftHead.forward`.
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
        """What the stock decoder makes of tokens."""
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
        return torch.cat([self.forward(part, None, None, cache) for part in tokens.split(rows, 1)], 1)

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
        if self.counts_positions:
            cache.skew = positions[0] - torch.arange(prefix, prefix + len(positions[0]), device=positions.device)
        features = self.forward(tokens, positions, ancestors, cache)
        cache.skew = 0
        return features

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
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or not weight.is_floating_point():
            return None  # quantised, sharded or offloaded
        rows = OutputRows.of(self.lm_head, tokens, self.scale, self.softcap)
        sample = torch.linspace(-1, 2, self.hidden_size, device=weight.device).to(self.dtype)
        whole = self.logits(sample)[tokens]
        return rows if torch.allclose(rows(sample), whole, rtol=1e-2, atol=1e-2 * whole.abs().max().item()) else None


def prefill_rows(device: torch.device) -> int:
    """How many positions of a prompt are read in one forward."""
    return PREFILL.get(device.type, PREFILL["cuda"])


def check_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse models that are no causal LMs, or whose layers or attention cannot verify a tree.

    Args:
        config: of the language model.
    """
    name, kinds = type(model).__name__, kinds_of(config)
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not supported: a decoder-only causal LM with an output head is needed")
    unknown = kinds - {"full_attention", SLIDING, CHUNKED}  # those have a cache of rows of keys
    if unknown or (getattr(model, "_is_stateful", False) and not kinds):
        raise ValueError(
            f"{name} is not supported: it has layers of type {', '.join(sorted(unknown)) or 'recurrent state'}; "
            "only those of full, sliding or chunked attention can verify a tree and be rolled back to a path of it"
        )
    if config._attn_implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} takes no tree mask; "
            f"accepted: {', '.join(IMPLEMENTATIONS)} (attn_implementation= of load())"
        )


def find_layers(decoder: nn.Module, config: PreTrainedConfig, name: str) -> nn.ModuleList:
    """The decoder's list of layers, whatever it is called."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ValueError(f"{name} is not supported: its decoder has no list of layers to place a cache for")
