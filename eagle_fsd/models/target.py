"""Adapter over any causal LM of `transformers`: features, logits, caches and tree masks.

B batch, N tokens of a forward, L prefix length, D hidden size, F width of the features, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import IMPLEMENTATIONS, SPLIT
from .attention import without_cudnn
from .cache import TreeCache, cache_name
from .fused import FusedDecoder, Unfit
from .linear import dtype_of, pack_linears
from .masks import CHUNKED, SLIDING, MaskedLayers, kinds_of
from .memory import MappedFiles, leave_files
from .output import OutputRows, output_logits
from .placement import Lock, copy_to, device_of, weights_digest

log = logging.getLogger(__name__)

FULL = (torch.float32, torch.float64)
PARITY, HALF_PARITY = 1e-4, 2e-2  # how far features may differ between attentions, of their size
ROUNDING = 0.05  # of the largest logit, or of features: what half precision or quantised activations may change
PREFILL = {"cpu": 256, "cuda": 2048}  # positions of a prompt per forward: what is computed for them is large


class TargetModel:
    """A stock causal LM seen as the method sees it: `features` = last hidden state, `logits` = head(features).

    With `layers` set, the hidden states that enter those layers come before the last one, in order of depth: the
    features are then F = D * (layers + 1) wide. An EAGLE-3 head reads the first part; `logits` reads the last D.

    Its decoder is computed by `FusedDecoder` where that computes the same (`use_fused`), else by the stock one.

    Args:
        check: compare our logits with the model's own on a few tokens; skip it for a model that has passed.

    Raises:
        ValueError: a model that cannot be verified with a tree: no rollback of its cache, an attention
            implementation without arbitrary masks, or logits that are not finite, or not the model's own when computed
            our way.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
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
        if check:
            self._check_logits()
            if self.config._attn_implementation == SPLIT:  # not every class passes on all that it needs
                self.model.set_attn_implementation("eager")
                self.use_attention(SPLIT)

    def use_fused(self, *, check: bool = True) -> None:
        """Compute with `FusedDecoder` if it gives a tree the same features; else `stock_because` says why not.

        Args:
            check: compare them; skip it for a model that has passed.
        """
        try:
            if set(self.masked_layers.kinds) != {"full_attention"} or not self.reads_in_parts or self.counts_positions:
                raise Unfit("not every layer sees the whole text, or its positions are of a kind of their own")
            fused = FusedDecoder(self.decoder, self.decoder_layers, self.config)
            if check:
                self.fused, expected = None, self._tree_of_two_rows()
                self.fused = fused
                difference = ((self._tree_of_two_rows() - expected).norm() / expected.norm()).item()
                if not difference <= (PARITY if self.dtype in FULL else ROUNDING):  # in half precision ours is nearer
                    raise Unfit(f"the features of a tree differ by {difference:.1g} of their size")
            self.fused, self.stock_because = fused, None
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
        """Switch to another attention implementation if it gives a tree the same features.

        Raises:
            ValueError: it does not, or the model's class does not take implementations by name; nothing has changed.
        """
        before, fused, self.fused = self.config._attn_implementation, self.fused, None
        try:
            expected = self._tree_of_two_rows()
            self.model.set_attn_implementation(implementation)
            if self.config._attn_implementation != implementation:
                raise ValueError("its class does not choose its attention by name")
            difference = ((self._tree_of_two_rows() - expected).norm() / expected.norm()).item()
            if not difference <= (PARITY if self.dtype in FULL else HALF_PARITY):
                raise ValueError(f"the features of a tree differ by {difference:.1g} of their size")
            self.stock_because = f"{implementation} was asked for"
        except Exception as error:  # kernels raise anything
            self.model.set_attn_implementation(before)
            self.fused = fused
            model = type(self.model).__name__
            raise ValueError(f"{model} stays with attention {before}, {implementation} fails: {error}") from error

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Refuse models whose head, masks or positions do more than we know of: our logits must be the model's own."""
        name, device = type(self.model).__name__, self.device
        # Two tokens, then a tree 0 - 1 - 2, 0 - 3 - 4: its second branch is at other positions than its rows.
        tokens = torch.arange(7, device=device)[None] % self.vocab_size
        branches = torch.stack([tokens[0, [0, 1, 2, 3, 4]], tokens[0, [0, 1, 2, 5, 6]]])
        stock = self.model(input_ids=branches, use_cache=False).logits.float().to(self.output_device)
        if not stock.isfinite().all():
            raise ValueError(f"{name} is damaged, or not supported: its logits are not finite in {self.dtype}")
        stock = torch.cat([stock[0], stock[1, 3:]])
        ancestors = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]])
        ancestors, positions = ancestors.bool().to(device)[None], torch.tensor([[2, 3, 4, 3, 4]], device=device)
        cache = self.new_cache(7)
        try:
            features = [self.prefill(tokens[:, :2], cache), self.verify(tokens[:, 2:], positions, ancestors, cache)]
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is not supported: it cannot verify a tree ({error})") from error
        ours, largest = self.logits(torch.cat(features, 1))[0], stock.abs().max().item()
        if torch.allclose(stock, ours, rtol=1e-3, atol=1e-3 * largest):
            return
        error, quantised = (stock - ours).abs().max().item() / largest, getattr(self.model, "is_quantized", False)
        if not ((quantised or self.dtype not in FULL) and error <= ROUNDING):
            raise ValueError(
                f"{name} is not supported: its logits are not lm_head(last hidden state) with a scale and a softcap, "
                "or depend on more than the positions and keys that a tree mask shows"
            )
        if quantised:
            log.warning("%s is quantised so that its logits change with the tokens beside them, by up to %.1f%% of the "
                        "largest: where its best two are closer, the text may not be that of plain decoding", name,
                        100 * error)

    @torch.inference_mode()
    def _tree_of_two_rows(self) -> Tensor:
        """[2, 5, D] float32: features of a tree after 9 tokens in one row and after the first 5 in the other."""
        cache, lengths = self.new_cache(14, 2), [9, 5]
        tokens = (torch.arange(28, device=self.device).view(2, 14) * 7 + 1) % self.vocab_size
        self.prefill(tokens[:, :9], cache)
        cache.commit([0, 0], [range(length) for length in lengths])
        seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]])
        ancestors = seen.bool().to(self.device).expand(2, -1, -1)
        positions = torch.tensor(lengths, device=self.device)[:, None] + ancestors.sum(-1) - 1
        return self.verify(tokens[:, 9:], positions, ancestors, cache)[..., -self.hidden_size :].float()

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

    @without_cudnn()
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
            self.config._attn_implementation, ancestors, positions, cache.length, self.dtype,
            cache.visible(ancestors.device))
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
