"""A target with its draft head and tokenizer, and how to load them."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .decoding.request import RequestParams
from .decoding.timing import known_latency
from .drafting.config import CPU_TREE, GPU_TREE, TreeConfig
from .drafting.curves import HeadCurves, known_curves, read_curves
from .drafting.sizing import Choice, Drafting, Pause, Sizing
from .heads.catalogue import display_name, find_pair
from .heads.checkpoint import load_head
from .heads.eagle import DraftHead
from .models import GROUPED, STOCK
from .models.linear import PackedLinear, check_quantization, packed_form
from .models.loading import check_device, load_compact, load_target
from .models.memory import MappedFiles, trim
from .models.target import TargetModel
from .options import LoadKeywords, LoadOptions, lists_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)
# Of targets that have passed the check of TargetModel, by whether the fused decoder was wanted: why it does not serve
# them; None: it does.
_checked: WeakKeyDictionary[PreTrainedModel, dict[bool, str | None]] = WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class EagleModel:
    """What `eagle_fsd.load` returns and `eagle_fsd.generate` takes; `target.model` is the model of transformers.

    Build one directly from loaded parts with `EagleModel.from_parts`. Without a draft head drafts are copied from the
    text alone.
    """

    target: TargetModel
    draft: DraftHead | None
    tokenizer: PreTrainedTokenizerBase | None = None
    tree: TreeConfig | None = None  # of requests that give none
    sizing: Sizing | None = None  # how large cycles are where no tree is given; None: `default_tree`
    # Where drafting has not paid lately, by temperature, for requests whose text does not depend on it.
    pauses: defaultdict[float, Pause] = field(default_factory=lambda: defaultdict(Pause), repr=False)

    # The target once more, in a dtype; None: the one that is stored unless another was asked for.
    load_stock: Callable[[torch.dtype | None], PreTrainedModel] | None = field(default=None, repr=False)
    names: tuple[str | None, str | None] = (None, None)  # of target and head: hub ids, or what a path ends in

    def __repr__(self) -> str:
        target, head = self.described()
        chosen = "auto" if self.sizing is not None else repr(self.default_tree)
        return f"EagleModel(target={target}, draft={head}, tree={chosen})"

    def described(self, *, stock: bool = False) -> tuple[str, str | None]:
        """Name, size and form of the target, or of `stock`; and name and size of the head where there is one."""
        model, head = self.stock if stock else self.target.model, self.draft
        dtype = str(model.dtype if stock else self.target.dtype).removeprefix("torch.")
        form = f"packed as {packed_form(model)}" if packed_form(model) else "plain weights"
        name = self.names[0] or Path(model.name_or_path).name or type(model).__name__
        target = f"{name} ({type(model).__name__}, {described_size(model)}, {dtype}, {form}, {self.target.device})"
        if head is None:
            return target, None
        return target, f"{self.names[1] or 'a head'} ({head.kind}, {described_size(head)})"

    @functools.cached_property
    def stock(self) -> PreTrainedModel:
        """The target as transformers loads it, to measure against: a second one where weights have been packed, in the
        dtype that is stored unless another was asked for.

        Raises:
            ValueError: packed weights of a model that was not made by `load`.
        """
        return self.stock_in(None)

    def stock_in(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """`stock`, in a dtype of its own choice; where no weights have been packed, the target itself."""
        if packed_form(self.target.model) is None:
            return self.target.model
        if self.load_stock is None:
            raise ValueError("the target's weights are packed, and it is not known where it was loaded from")
        return self.load_stock(dtype)

    @classmethod
    def from_parts(
        cls, target: PreTrainedModel, draft: DraftHead | None, tokenizer: PreTrainedTokenizerBase | None = None, *,
        fused: bool = True,
    ) -> EagleModel:
        """Join a causal LM and a head; the head is moved to the target's last device and dtype.

        Args:
            fused: compute the target by `FusedDecoder` where that gives the same; it reads the weights where they lie.

        Raises:
            TypeError: a part of the wrong type.
            ValueError: an unsupported target, or a head of another hidden size or vocabulary.
        """
        for name, part, kind in (("target", target, PreTrainedModel), ("draft", draft, torch.nn.Module),
                                 ("tokenizer", tokenizer, PreTrainedTokenizerBase)):
            if not isinstance(part, kind) and (part is not None or name == "target"):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(part).__name__}")
        before = _checked.setdefault(target, {})
        known = before.get(fused)
        adapter = TargetModel(target, fused=fused and known is None, check=fused not in before)
        before[fused] = adapter.stock_reason = known or adapter.stock_reason
        if draft is not None:
            fit_head(draft, adapter)
        return cls(adapter, draft, tokenizer)

    def prepack(self, quantization: str | None = None) -> None:
        """Replace weights on a CPU by ones in the layout that its kernels read; `load` does so unless told not to.

        The stock models still run; a copy of them has plain weights again. Their `state_dict` unpacks the weights.

        Args:
            quantization: "int8", or None: weights stored in 16 bits as they are, with the same results.

        Raises:
            ValueError: another quantization, or a processor without the instructions for it.
        """
        check_quantization(quantization)
        self.target.pack(quantization)
        if self.draft is not None:
            self.draft.pack(quantization, self.target.lm_head)
        trim()

    def size_cycles(self, beside: HeadCurves | None = None) -> None:
        """Have each cycle sized by what cycles cost on this machine, which is measured, and by curves: the user's own,
        those beside the head, or default ones."""
        latency = known_latency(self.target, self.draft)
        if self.draft is None:
            self.sizing = Sizing(latency, None)
        else:
            self.sizing = Sizing(latency, known_curves(beside, self.target, self.draft), self.draft.draft_vocab_size)

    def drafting(self, params: RequestParams) -> Drafting:
        """The drafting policy of requests with these parameters: their own tree, else as much as pays, else the model's
        default tree."""
        if not params.speculative:
            return Drafting(Choice(None))
        if params.tree is None and self.sizing is not None:
            # The text of a fuzzy rule depends on where drafting pauses, and must not depend on earlier requests.
            pause = self.pauses[params.temperature] if params.lossless else None
            return Drafting(self.sizing, params.temperature, pause)
        return Drafting(Choice(self.check_tree(params.tree or self.default_tree)))

    def check_tree(self, tree: TreeConfig) -> TreeConfig:
        """The tree, with a warning where it asks for more nodes than can be scored.

        Raises:
            ValueError: more children than the draft can name.
        """
        vocabulary = self.target.vocab_size if self.draft is None else self.draft.draft_vocab_size
        if tree.top_k > vocabulary:
            raise ValueError(f"TreeConfig.top_k {tree.top_k} exceeds the draft's vocabulary ({vocabulary} tokens)")
        if tree.total_tokens > tree.nodes:
            log.warning("TreeConfig.total_tokens lowered from %d to %d: depth %d with top_k %d scores no more nodes",
                        tree.total_tokens, tree.nodes, tree.depth, tree.top_k)
        return tree

    def describe_tree(self, tree: TreeConfig | None) -> str:
        """For records."""
        if tree is not None or self.sizing is None:
            return repr(tree or self.default_tree)
        if self.draft is None:
            return "auto: copies as far as they pay"
        most = self.sizing.largest
        return f"auto: as many nodes and levels as pay, at most {most.total_tokens}, {most.depth} of {most.top_k}"

    @property
    def default_tree(self) -> TreeConfig:
        """The tree used where none is given or chosen: by the device."""
        if self.tree is not None:
            return self.tree
        return GPU_TREE if self.target.device.type == "cuda" else CPU_TREE


def check_sizes(draft: DraftHead, target: TargetModel) -> None:
    """Check that the head was made for such a target.

    Raises:
        ValueError: hidden size or vocabulary differ.
    """
    ours = (draft.target_hidden_size, draft.config.vocab_size)
    wanted = (target.hidden_size, target.vocab_size)
    for what, have, want in zip(("hidden size", "vocabulary size"), ours, wanted, strict=True):
        if have != want:
            raise ValueError(f"the draft head does not fit the target: its {what} is {have}, the target's is {want}")


def fit_head(draft: DraftHead, target: TargetModel) -> None:
    """Move a head to such a target, and have the target hand out what it reads.

    Raises:
        ValueError: hidden size, vocabulary or layers differ.
    """
    check_sizes(draft, target)
    target.layers = draft.target_layers(len(target.decoder_layers))
    if draft.shares_embeddings:
        if draft.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"the draft head has no embeddings, and the target's are of size {target.hidden_size}, not "
                f"{draft.config.hidden_size}"
            )
        draft.share_embeddings(target.embeddings_on(target.output_device))
    draft.to(device=target.output_device, dtype=target.dtype).eval()
    if draft.token_map is not None and not (draft.output_rows and draft.output_rows.copied_from(target.lm_head)):
        draft.output_rows = target.output_rows(draft.token_map)
        if draft.output_rows is None:
            log.warning("the draft names %d of %d tokens, but the target's output layer has no plain rows to take: it "
                        "is computed whole", draft.draft_vocab_size, target.vocab_size)


def parameter_count(module: torch.nn.Module) -> int:
    """Of a model or head, packed layers included: what two layers share counts once, what a head takes from its target
    not at all."""
    count = sum(parameter.numel() for parameter in module.parameters())
    tied = module.get_output_embeddings() if isinstance(module, PreTrainedModel) and getattr(
        module.config.get_text_config(), "tie_word_embeddings", False) else None
    return count + sum(layer.out_features * (layer.in_features + layer.has_bias) for layer in module.modules()
                       if isinstance(layer, PackedLinear) and layer is not tied)


def described_size(module: torch.nn.Module) -> str:
    """Such as "135 M parameters"."""
    count = parameter_count(module)
    unit, letter = next(((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M")) if count >= unit), (1e3, "k"))
    return f"{count / unit:.3g} {letter} parameters"


@lists_options(LoadOptions, LoadKeywords, described=True)
def load(
    target: str | Path | None = None, draft: str | Path | None = None, **options: Unpack[LoadKeywords]
) -> EagleModel:
    """Load a target and its draft head.

    Args:
        target, draft, options: see `LoadOptions`.

    Raises:
        TypeError: an unknown option, or one of the wrong type.
        ValueError: a default target that is not installed, a target with several known heads, a bad option, damaged or
            missing files, a head that does not fit, an unsupported target or attention. A changed bit among a file's
            numbers goes unnoticed unless a number is no longer finite: the format has no checksum.
        OSError: a hub id that cannot be found or fetched, or a target's broken config.
        ImportError: a GGUF file without the package gguf.
    """
    asked = LoadOptions.from_names({"target": target, "draft": draft, **options})
    check_quantization(asked.quantization)
    if asked.quantization and (asked.device_map is not None or check_device(asked.device).type != "cpu"):
        raise ValueError(f"quantization={asked.quantization!r} is for a target on the CPU: give device=\"cpu\" without "
                         "device_map, or a quantization_config of transformers")
    target, draft = find_pair(asked.target, asked.draft)
    head = None if draft is None else load_head(draft)  # the smaller one first: its errors come before the long work
    curves = read_curves(draft) if asked.tree == "auto" and head is not None else None
    stock = asked.attn_implementation in STOCK
    load_it = {"device": asked.device, "device_map": asked.device_map, "trust_remote_code": asked.trust_remote_code,
               "quantization_config": asked.quantization_config,
               "attn_implementation": asked.attn_implementation if stock else None}
    fused, early = asked.attn_implementation is None, asked.prepack and asked.quantization is None
    if early and asked.device_map is None and check_device(asked.device).type == "cpu":
        model, tokenizer, dtype = load_compact(target, dtype=asked.dtype, **load_it)
        if not getattr(model, "is_quantized", False):
            pack_early(model, head, dtype, fused=fused)
    else:
        model, tokenizer = load_target(target, dtype=asked.dtype, **load_it)
    pair = EagleModel.from_parts(model, head, tokenizer, fused=fused)
    stored = None if asked.dtype == "auto" else asked.dtype
    pair.names = display_name(target), None if draft is None else display_name(draft)
    pair.load_stock = lambda dtype: load_target(target, dtype=dtype or stored, **load_it)[0].eval()
    set_attention(pair.target, asked.attn_implementation)
    if asked.prepack:
        pair.prepack(asked.quantization)
    if isinstance(asked.tree, TreeConfig):
        pair.tree = asked.tree
    elif asked.tree == "auto":
        if pair.target.output_device.type == "cpu":
            pair.size_cycles(curves)
        elif head is not None:
            pair.tree = replace(GPU_TREE, top_k=min(GPU_TREE.top_k, head.draft_vocab_size))
    return pair


def pack_early(model: PreTrainedModel, head: DraftHead | None, dtype: torch.dtype | None, *, fused: bool) -> None:
    """Pack a target's weights before its checks, which then compute what will be computed, and sooner.

    Args:
        head: one that is to fit; the rest is that of `TargetModel.pack` and `EagleModel.from_parts`.
    """
    adapter, rows = TargetModel(model, fused=fused, check=False), None  # fused: which layers are computed as one
    if head is not None:
        check_sizes(head, adapter)
        if head.token_map is not None:  # now, since a packed layer has to be unpacked for them
            rows = head.output_rows = adapter.output_rows(head.token_map)
    adapter.pack(None, dtype)
    if rows is not None:
        rows.pack(None, adapter.lm_head, MappedFiles(), dtype)
    trim()
    if dtype is None:
        return
    model.config.dtype = dtype
    plain = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    if plain:
        log.warning("%d linear layers hold numbers that float16 has not, and are kept in %s, which is slower "
                    '(dtype="bfloat16" may be faster): %s', len(plain), dtype, ", ".join(plain[:3]))


def set_attention(target: TargetModel, wanted: str | None) -> None:
    """Switch the target to the attention that `load` was asked for; where it cannot serve it, say why not.

    None: what is faster on its device and computes the same; nothing where the fused decoder has its own.
    """
    config, level = target.config, logging.WARNING
    stock = target.fused is None and target.device.type == "cpu"
    if wanted is None and stock and config._attn_implementation == "sdpa":
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        wanted, level = GROUPED if key_heads < config.num_attention_heads else None, logging.INFO
    if wanted not in (None, *STOCK):
        try:
            target.use_attention(wanted)
        except ValueError as error:
            log.log(level, "%s", error)


@functools.cache
def default_model() -> EagleModel:
    """The default pair, loaded once per process."""
    return load()
