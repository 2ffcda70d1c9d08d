"""`EagleModel`: a target with its drafter and tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..captured.cycle import CapturedCycles
from ..decoding.request import Request
from ..drafting.config import CPU_TREE, GPU_TREE, TreeConfig
from ..drafting.drafter import Drafter
from ..drafting.language_model import DraftModel
from ..drafting.sizing import Drafting, HeadCurves, Plan, Sizing, nearly_greedy
from ..models.check import PASSED
from ..models.digest import weights_digest
from ..models.linear import check_quantization, packed_form, packed_layers
from ..models.memory import trim
from ..models.target import TargetModel, read_structure
from ..utils.files import remembered
from ..utils.installation import code_version
from .curves import known_curves
from .timing import known_latency

log = logging.getLogger(__name__)
_pairs: WeakKeyDictionary[Drafter, WeakSet[EagleModel]] = WeakKeyDictionary()  # by drafter
_fitting = threading.Lock()  # of drafters to targets
MOST_WARNED = 256  # kinds of warnings about requests: clients of a server may choose the names in them


@dataclass(eq=False, repr=False)
class EagleModel:
    """A target with its drafter and tokenizer: `eagle_fsd.load` returns it, `eagle_fsd.generate` takes it.

    `EagleModel.from_parts` builds one from loaded parts. `target.model` is the model of transformers. Without a
    drafter, drafts are only copied from the text.
    """

    target: TargetModel
    draft: Drafter | None
    tokenizer: PreTrainedTokenizerBase | None = None
    tree: TreeConfig | None = None  # for requests without a tree
    sizing: Sizing | None = None  # chooses the size of each cycle for requests without a tree; None: it is fixed
    captured: CapturedCycles | None = field(default=None, repr=False)  # see `load(cuda_graphs=)`; None: off

    # Loads the target again in a dtype; None: the dtype passed to `load`, else that of the checkpoint.
    load_stock: Callable[[torch.dtype | None], PreTrainedModel] | None = field(default=None, repr=False)
    names: tuple[str | None, str | None] = (None, None)  # of target and drafter: hub ids, or last parts of paths
    warned: set[tuple] = field(default_factory=set, repr=False)  # see `warn_once`

    def __repr__(self) -> str:
        target, head = self.described()
        chosen = "auto" if self.sizing is not None else repr(self.default_tree)
        return f"EagleModel(target={target}, draft={head}, tree={chosen})"

    def described(self, *, stock: bool = False) -> tuple[str, str | None]:
        """Name, size and form of the target (or of `stock`), and name, kind and size of the drafter; None: there is
        none."""
        model, draft = self.stock if stock else self.target.model, self.draft
        dtype = str(model.dtype if stock else self.target.dtype).removeprefix("torch.")
        form = f"packed as {packed_form(model)}" if packed_form(model) else "plain weights"
        name = self.names[0] or Path(model.name_or_path).name or type(model).__name__
        place = self.target.input_device
        target = f"{name} ({type(model).__name__}, {described_size(model)}, {dtype}, {form}, {place})"
        if draft is None:
            return target, None
        name = self.names[1] or draft.noun
        return target, f"{name} ({draft.kind}, {described_size(draft.module)})"

    @cached_property
    def stock(self) -> PreTrainedModel:
        """The target as transformers loads it, as a baseline. If the weights are packed, this loads a second model, in
        the dtype passed to `load` or else that of the checkpoint.

        Raises:
            ValueError: the weights are packed, and `load` did not make this model.
        """
        return self.stock_in(None)

    def stock_in(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """`stock` in another dtype; without packed weights, the target itself."""
        if packed_form(self.target.model) is None:
            return self.target.model
        if self.load_stock is None:
            raise ValueError("the target's weights are packed, and load() did not make this model: plain weights "
                             "cannot be loaded")
        return self.load_stock(dtype)

    @classmethod
    def from_parts(
        cls, target: PreTrainedModel, draft: Drafter | PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None, *, fused: bool = True,
        cuda_graphs: bool = True,
    ) -> EagleModel:
        """Join a causal LM and a drafter: a head, a smaller causal LM with the same tokens, or a `Drafter` of your own.
        A head is moved to the device of the target's output layer and to its dtype; others stay as they are.

        A head that drafts for another target already stays as it is: the pair gets a head of its own, which shares the
        weights if device and dtype are the same, and else copies them.

        Args:
            draft: a `DraftModel` has its own tokenizer, which is compared with the target's.
            fused: use `FusedDecoder` for causal LMs if it computes the same. It shares their weights.
            cuda_graphs: on CUDA, replay cycles from CUDA graphs where the fused decoder computes target and drafter.

        Raises:
            TypeError: a part of the wrong type.
            ValueError: an unsupported target or draft model, a head of another hidden size or vocabulary, or a draft
                model with other tokens.
        """
        for name, part, *kinds in (("target", target, PreTrainedModel), ("tokenizer", tokenizer,
                                   PreTrainedTokenizerBase), ("draft", draft, Drafter, PreTrainedModel)):
            if not isinstance(part, tuple(kinds)) and (part is not None or name == "target"):
                accepted = ", ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name} must be a {accepted}, got {type(part).__name__}")
        adapter = TargetModel(target, fused=fused)
        if isinstance(draft, PreTrainedModel):
            draft = DraftModel(draft, fused=fused)
        pair = cls(adapter, draft, tokenizer)
        with _fitting:
            if draft is not None and any(other.target.model is not target for other in list(_pairs.get(draft, ()))):
                pair.draft = draft = draft.separate(adapter)
            pair.fit()
            if draft is not None:
                _pairs.setdefault(draft, WeakSet()).add(pair)
        if cuda_graphs and adapter.output_device.type == "cuda" and CapturedCycles.support(adapter, draft):
            pair.captured = CapturedCycles(adapter, draft)
        return pair

    def fit(self) -> None:
        """Fit the drafter to the target, as `from_parts` does: it may have been moved or changed since.

        Raises:
            ValueError: see `from_parts`.
        """
        if self.draft is not None:
            self.draft.fit(self.target, self.tokenizer)

    def refresh(self) -> None:
        """Read both models again if their modules, forwards or hooks have changed since they were joined, so that
        decoding follows the current models.

        Raises:
            ValueError: `from_parts` would refuse the current models.
        """
        self.target.refresh()
        if self.draft is not None:
            self.draft.refresh_for(self.target)

    def prepack(self, quantization: str | None = None, draft_quantization: str | None = None) -> None:
        """Replace weights on a CPU by weights in the layout of its kernels. `load` does this by default.

        The stock models still run. A copy of them has plain weights, and their `state_dict` unpacks the weights.

        Args:
            quantization: "int8", "int8-fast", or None: the stored 16 bits, with the same results.
            draft_quantization: of a causal LM as the drafter; None: `quantization`.

        Raises:
            ValueError: an unknown quantization, or a processor without the instructions for it.
        """
        check_quantization(quantization)
        check_quantization(draft_quantization)
        self.target.pack(quantization)
        if self.draft is not None:
            self.draft.pack_for(self.target, draft_quantization or quantization)
        trim()

    def size_cycles(self, stored: HeadCurves | None = None) -> None:
        """Choose the size of each cycle by its latency on this machine and by the drafter's curves.

        Args:
            stored: curves stored beside the drafter. Curves that the user has fitted take precedence; without either,
                default curves apply.
        """
        latency = known_latency(self.target, self.draft)
        curves = None if self.draft is None else known_curves(stored, self.target, self.draft)
        self.sizing = Sizing(latency, curves, self._draft_vocabulary)

    @property
    def default_tree(self) -> TreeConfig:
        """The tree of requests without one, if `sizing` does not choose it: `tree`, else one for the device, with no
        more children per node than the drafter has tokens."""
        tree = CPU_TREE if self.target.output_device.type == "cpu" else GPU_TREE
        return self.tree or replace(tree, top_k=min(tree.top_k, self._draft_vocabulary))

    def largest_plan(self, requests: Sequence[Request], tree: TreeConfig | None = None) -> Plan:
        """The largest cycle of a batch of these requests.

        If temperatures differ, the first row's selects the curves, which only predict acceptance.

        Args:
            tree: a request's own replaces it only if all requests are lossless, since the text of a fuzzy request
                depends on the tree. None: a request's own, else `sizing` chooses, else `default_tree`.
        """
        drafted = [request for request in requests if request.options.speculative]
        if not drafted:
            return Plan(self.default_tree, drafts=False)
        own = [request.options.tree for request in drafted if request.options.tree is not None]
        if own and (tree is None or all(request.lossless for request in drafted)):
            tree = own[0]
        if tree is None and self.sizing is not None:
            return self.sizing.of(len(requests), drafted[0].options.temperature)
        return Plan(tree or self.default_tree, drafts=self.draft is not None)

    def drafting(self, requests: Sequence[Request]) -> Drafting:
        """The drafting policy of requests that share tree, rule, temperature and `speculative`."""
        options, pause = requests[0].options, None
        # The text of a fuzzy rule depends on where drafting pauses, and must not depend on earlier requests.
        if options.tree is None and self.sizing is not None and options.speculative and options.lossless:
            pause = self.sizing.pauses[nearly_greedy(options.temperature)]
        return Drafting(self.largest_plan, pause)

    def describe_tree(self, tree: TreeConfig | None) -> str:
        """The tree, or how it is chosen, in words for records."""
        if tree is not None or self.sizing is None:
            return repr(tree or self.default_tree)
        if self.draft is None:
            return "auto: copies as far as they pay"
        most = self.sizing.largest_tree
        return f"auto: as many nodes and levels as pay, at most {most.total_tokens}, {most.depth} of {most.top_k}"

    def check_tree(self, tree: TreeConfig) -> TreeConfig:
        """Return the tree. Warn if it has more nodes than can be scored.

        Raises:
            ValueError: it has more children per node than the draft has tokens.
        """
        if tree.top_k > self._draft_vocabulary:
            raise ValueError(f"TreeConfig.top_k {tree.top_k} exceeds the draft's vocabulary "
                             f"({self._draft_vocabulary} tokens)")
        if tree.total_tokens > tree.nodes:
            self.warn_once("TreeConfig.total_tokens lowered from %d to %d: depth %d with top_k %d scores no more nodes",
                           tree.total_tokens, tree.nodes, tree.depth, tree.top_k)
        return tree

    def warn_once(self, message: str, *args: object) -> None:
        """Log a warning about a request, unless one was logged that differs in numbers at most: a server or a loop
        makes many requests alike."""
        kind = message, *(arg for arg in args if isinstance(arg, str))
        if kind not in self.warned and len(self.warned) < MOST_WARNED:
            self.warned.add(kind)
            log.warning(message, *args)

    @property
    def _draft_vocabulary(self) -> int:
        return self.target.vocab_size if self.draft is None else self.draft.draft_vocab_size


def check_once(target: PreTrainedModel, *, fused: bool) -> None:
    """Check a target as `EagleModel.from_parts` does, unless an earlier process on this machine has; the user's cache
    directory remembers its result.

    Raises:
        ValueError: see `CausalLM`.
    """
    facts = (type(target).__name__, target.config.to_json_string(), target.config._attn_implementation,
             weights_digest(target), str(target.dtype), fused, code_version(), torch.__version__,
             transformers.__version__)
    reason = remembered("checked", facts, lambda: TargetModel(target, fused=fused).stock_reason,
                        lambda reason: reason is None or isinstance(reason, str))
    PASSED[target] = {(fused, read_structure(target)): reason}


def parameter_count(module: torch.nn.Module) -> int:
    """Number of parameters of a model or head, packed layers included. Weights that two layers share count once;
    weights that a head shares with its target do not count."""
    count = sum(parameter.numel() for parameter in module.parameters())
    tied = module.get_output_embeddings() if isinstance(module, PreTrainedModel) and getattr(
        module.config.get_text_config(), "tie_word_embeddings", False) else None
    return count + sum(layer.out_features * (layer.in_features + layer.has_bias) for layer in packed_layers(module)
                       if layer is not tied)


def described_size(module: torch.nn.Module) -> str:
    """The number of parameters in words, such as "135 M parameters"."""
    count = parameter_count(module)
    unit, letter = next(((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M")) if count >= unit), (1e3, "k"))
    return f"{count / unit:.3g} {letter} parameters"
