"""A target with its draft head and tokenizer, and how to load them."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakSet

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .acceptance import make_rule
from .acceptance.judge import LearnedJudge
from .data.sources import check_source
from .drafting.choice import AutoTree, describe_tree
from .drafting.config import CPU_TREE, GPU_TREE, TreeConfig
from .drafting.logs import TreeLog, read_logs, with_own_logs
from .drafting.machine import known_latency, use_fastest_attention
from .drafting.policy import Pause
from .engine.compiled import compile_forwards
from .engine.graphs import GraphCycles, why_no_graphs
from .heads.catalogue import find_pair
from .heads.checkpoint import load_head
from .heads.eagle import DraftHead
from .measure.calibrations import Calibration, read_calibrations
from .measure.judges import read_judge
from .measure.promises import parse_promise
from .models.implementations import GROUPED, STOCK
from .models.loading import load_target
from .models.placement import pack_linears, unpack_linears, weights_digest
from .models.target import TargetModel
from .options import LoadOptions

log = logging.getLogger(__name__)
_checked: WeakSet[PreTrainedModel] = WeakSet()  # targets that have passed the checks of TargetModel


@dataclass(eq=False)
class EagleModel:
    """What `eagle_fsd.load` returns and `eagle_fsd.generate` takes.

    Build one directly from loaded parts with `EagleModel.from_parts`. Without a draft head decoding is plain.
    """

    target: TargetModel
    draft: DraftHead | None
    tokenizer: PreTrainedTokenizerBase | None = None
    calibrations: Sequence[Calibration] = ()  # those stored beside the head
    judge: LearnedJudge | None = None  # that stored beside the head, for the rule `judge`
    tree: TreeConfig | None = None  # of requests that give none
    trees: AutoTree | None = None  # what chooses the tree where none is given; None: `default_tree`
    # Where drafting has not paid lately, by temperature, for requests whose text does not depend on it.
    pauses: defaultdict[float, Pause] = field(default_factory=lambda: defaultdict(Pause), repr=False)
    graphs: GraphCycles | None = field(default=None, repr=False)  # CUDA graphs for single prompts, see `compile`

    @classmethod
    def from_parts(
        cls, target: PreTrainedModel, draft: DraftHead | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> EagleModel:
        """Join a causal LM and a head; the head is moved to the target's last device and dtype.

        Raises:
            TypeError: a part of the wrong type.
            ValueError: an unsupported target, or a head of another hidden size or vocabulary.
        """
        for name, part, kind in (("target", target, PreTrainedModel), ("draft", draft, torch.nn.Module),
                                 ("tokenizer", tokenizer, PreTrainedTokenizerBase)):
            if not isinstance(part, kind) and (part is not None or name == "target"):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(part).__name__}")
        adapter = TargetModel(target, check=target not in _checked)
        _checked.add(target)
        if draft is not None:
            fit_head(draft, adapter)
        return cls(adapter, draft, tokenizer)

    def __getstate__(self) -> dict:
        """For copies and pickles: without CUDA graphs, which belong to this process and its caches."""
        return {**vars(self), "graphs": None}

    def compile(self, *, batches: bool = False, warm_up: bool = True, max_length: int = 4096) -> bool:
        """Take the framework's overhead from the cycles; what cannot be stays as it is, and the log says why.

        On a CPU the forwards of trees are compiled, in place. On CUDA drafting and verifying are captured as graphs,
        for single prompts without a `Session`, per tree and for texts of up to 256, 384, 512, 768 tokens and so on.
        The models must not be changed afterwards, but for the values of their weights. `load(compile=True)` does the
        same before it measures latencies.

        Args:
            batches: on a CPU: also for lists of prompts, which need graphs of their own; without, they run uncompiled.
            warm_up: compile now (minutes for 24 layers on two cores, less the second time; with a progress bar), or
                capture the graphs of the usual tree, and check the result. False: in the middle of the first answers,
                unchecked.
            max_length: on CUDA: longest text, prompt and answer, that graphs serve; their caches are of that size.

        Returns:
            Whether the target is compiled, or has graphs, now.

        Raises:
            ValueError: a bad `max_length`.
        """
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length!r}")
        if self.target.device.type != "cuda":
            for part in self._parts():
                unpack_linears(part)
            done = compile_forwards(self.target, self.draft, batches=batches, warm_up=warm_up)
            self._measure_again()
            return done
        self.graphs = None
        reason = why_no_graphs(self.target)
        if reason is None:
            self.graphs = GraphCycles(self.target, self.draft, min(max_length, self.target.max_positions or max_length))
            self._measure_again()
            return not warm_up or self.warm_up_graphs()
        log.warning("%s runs without CUDA graphs: %s", type(self.target.model).__name__, reason)
        return False

    def prepack(self) -> None:
        """Keep a second copy of bfloat16 weights on a CPU in the layout that its kernels read: same results, sooner.

        `load` does so unless it is told not to. `compile` undoes it.
        """
        for part in self._parts():
            pack_linears(part)

    def _parts(self) -> list[torch.nn.Module]:
        rows = getattr(self.draft, "output_rows", None)
        parts = (self.target.model, self.draft, None if rows is None else rows.layer)
        return [part for part in parts if part is not None]

    def _measure_again(self) -> None:
        """Have the tree chosen by the present latencies."""
        if self.trees is not None and self.draft is not None:
            self.choose_trees(self.trees.logs, stopping=self.trees.stopping, default=self.trees.default)

    def choose_trees(self, logs: Sequence[TreeLog], *, stopping: bool, default: TreeConfig) -> None:
        """Have the tree chosen by these logs, see `AutoTree`, and the models' latencies, which are measured."""
        assert self.draft is not None
        latency = known_latency(self.target, self.draft)
        single = None if self.graphs is None else known_latency(self.target, self.draft, self.graphs)
        self.trees = AutoTree(logs, latency, stopping=stopping, default=default, single=single)

    def warm_up_graphs(self) -> bool:
        """Capture the graphs of greedy decoding, lossless and at the calibrated threshold, with a progress bar.

        Returns:
            Whether they are there now; else everything runs without.
        """
        assert self.graphs is not None
        kinds: list[tuple[TreeConfig | None, bool]] = [(None, False)]
        if self.draft is not None:
            for threshold in {0.0, self.default_threshold("js", 0.0, None) or 0.0}:
                rule = make_rule("fsd", threshold=threshold)
                tree = self.default_tree if self.trees is None else self.trees.of(rule, 0.0).tree
                kinds += [(tree, threshold > 0)] if tree is not None else []
        if self.graphs.warm_up(kinds):
            return True
        self.graphs = None
        self._measure_again()
        return False

    def _circumstances(self, temperature: float, tree: TreeConfig | None) -> dict[str, object]:
        assert self.draft is not None
        return {"target": self.target.digest(), "head": weights_digest(self.draft), "dtype": str(self.target.dtype),
                "temperature": float(temperature), "tree": self.tree_name(tree)}

    def tree_name(self, tree: TreeConfig | None) -> str:
        """What results under a tree are known by: a chosen one differs from machine to machine."""
        return "auto" if tree is None and self.trees is not None else repr(tree or self.default_tree)

    def describe_tree(self, tree: TreeConfig | None, temperature: float = 0.0) -> str:
        """For records: the tree of `exact`, a chosen one too."""
        if tree is not None or self.trees is None:
            given = tree or self.default_tree
            return repr(given) if given.confidence is None else describe_tree(given)
        chosen = self.trees.of(make_rule("exact"), temperature).tree
        return "auto: " + ("no draft tree" if chosen is None else describe_tree(chosen))

    def calibrated(self, promise: str, temperature: float, tree: TreeConfig | None = None) -> Calibration:
        """The stored calibration for a promise such as "accuracy_drop<=1%".

        One for another target, head, dtype, temperature or tree is taken with a warning where there is no better one,
        unless its rule keeps the promise anywhere.

        Raises:
            ValueError: there is none for the promise.
        """
        wanted = str(parse_promise(promise))
        known = [entry for entry in self.calibrations if entry.promise == wanted]
        if not known:
            stored = ", ".join(sorted({entry.promise for entry in self.calibrations})) or "none"
            raise ValueError(f"the head is not calibrated for {wanted} (calibrated: {stored}); run eagle-fsd calibrate")
        ours = self._circumstances(temperature, tree)

        def differing(entry: Calibration) -> list[str]:
            return [name for name, value in ours.items() if getattr(entry, name) != value]

        best = min(known, key=lambda entry: len(differing(entry)))
        for name in () if best.holds_anywhere(temperature == 0) else differing(best):
            log.warning("%s was calibrated with %s %s, not %s: the promise may not hold", wanted, name,
                        getattr(best, name), ours[name])
        return best

    def default_threshold(self, divergence: str | None, temperature: float, tree: TreeConfig | None) -> float | None:
        """That of fsd where none is given: of the strictest promise about accuracy that was calibrated under the very
        same circumstances; None where there is none."""
        if not self.calibrations or self.draft is None:
            return None
        ours = self._circumstances(temperature, tree)
        found = [entry for entry in self.calibrations if entry.promise.startswith("accuracy_drop")
                 and entry.options["rule"] in ("fsd", "exact")
                 and all(getattr(entry, name) == value for name, value in ours.items())]
        strictest = min(found, key=lambda entry: parse_promise(entry.promise).limit, default=None)
        if strictest is None:
            return None
        options = {"threshold": 0.0, "divergence": "js", **strictest.options}
        usual = options.keys() <= {"rule", "threshold", "divergence"} and options["divergence"] in (divergence, None)
        return options["threshold"] if options["rule"] == "exact" or usual else None

    @property
    def default_tree(self) -> TreeConfig:
        """The tree used where none is given or chosen: by the device."""
        if self.tree is not None:
            return self.tree
        return GPU_TREE if self.target.device.type == "cuda" else CPU_TREE


def fit_head(draft: DraftHead, target: TargetModel) -> None:
    """Check that the head was made for such a target, move it there and have the target hand out what it reads.

    Raises:
        ValueError: hidden size, vocabulary or layers differ.
    """
    ours = (draft.target_hidden_size, draft.config.vocab_size)
    wanted = (target.hidden_size, target.vocab_size)
    for what, have, want in zip(("hidden size", "vocabulary size"), ours, wanted, strict=True):
        if have != want:
            raise ValueError(f"the draft head does not fit the target: its {what} is {have}, the target's is {want}")
    target.layers = draft.target_layers(len(target.decoder_layers))
    if draft.shares_embeddings:
        if draft.config.hidden_size != target.hidden_size:
            raise ValueError(
                f"the draft head has no embeddings, and the target's are of size {target.hidden_size}, not "
                f"{draft.config.hidden_size}"
            )
        draft.share_embeddings(target.embeddings_on(target.output_device))
    draft.to(device=target.output_device, dtype=target.dtype).eval()
    if draft.token_map is not None and not (draft.output_rows and draft.output_rows.belong_to(target.lm_head.weight)):
        draft.output_rows = target.output_rows(draft.token_map)
        if draft.output_rows is None:
            log.warning("the draft names %d of %d tokens, but the target's output layer has no plain rows to take: it "
                        "is computed whole", draft.draft_vocab_size, target.vocab_size)


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict | None = None,
    tp_plan: str | dict[str, str] | None = None,
    quantization_config: object | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    calibration: str | Path | None = None,
    tree: TreeConfig | str | None = "auto",
    compile: bool = False,
    prepack: bool = True,
) -> EagleModel:
    """Load a target and its draft head.

    Args:
        target, draft, dtype, device, device_map, tp_plan, quantization_config, attn_implementation,
            trust_remote_code, calibration, tree, compile, prepack: see `LoadOptions`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a draft without a target, a target whose head is not known, a bad option, damaged or missing files,
            a head that does not fit, an unsupported target or attention. A changed bit among a file's numbers goes
            unnoticed unless a number is no longer finite: the format has no checksum.
        OSError: a hub id that cannot be found or fetched, or a target's broken config.
        ImportError: a GGUF file without the package gguf.
    """
    options = LoadOptions.of(locals())
    target, draft = find_pair(options.target, options.draft)
    head = load_head(draft)  # the smaller one first: its errors come before the long work
    beside = check_source("calibration", draft if calibration is None else calibration)
    if calibration is not None and not Path(beside).is_dir():
        raise ValueError(f"calibration must be a directory, there is none at {beside!r}")
    calibrations, judge = read_calibrations(beside), read_judge(draft)
    chosen = read_logs(beside) if tree == "auto" and calibration is not None else []
    logs = chosen or (read_logs(draft) if tree == "auto" else [])
    model, tokenizer = load_target(
        target, dtype=dtype, device=device, device_map=device_map, tp_plan=tp_plan,
        quantization_config=quantization_config,
        attn_implementation=attn_implementation if attn_implementation in STOCK else None,
        trust_remote_code=trust_remote_code,
    )
    pair = EagleModel.from_parts(model, head, tokenizer)
    set_attention(pair.target, attn_implementation)
    pair.calibrations, pair.judge = calibrations, judge
    if prepack:
        pair.prepack()
    if compile:
        pair.compile(warm_up=pair.target.device.type != "cuda")
    if isinstance(tree, TreeConfig):
        pair.tree = tree
    elif tree == "auto":
        logs = chosen or with_own_logs(logs, pair.target, head)
        if not logs:
            log.info("no log to choose a tree by: taking %s (eagle-fsd tune makes one)", pair.default_tree)
        default = replace(pair.default_tree, top_k=min(pair.default_tree.top_k, head.draft_vocab_size))
        pair.choose_trees(logs, stopping=pair.target.output_device.type == "cpu", default=default)
    if pair.graphs is not None:
        pair.warm_up_graphs()
    return pair


def set_attention(target: TargetModel, wanted: str | None) -> None:
    """Switch the target to the attention that `load` was asked for; where it cannot serve it, say why not.

    None: what is faster on its device and computes the same.
    """
    config, level = target.config, logging.WARNING
    if wanted is None and target.device.type == "cpu" and config._attn_implementation == "sdpa":
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        wanted, level = GROUPED if key_heads < config.num_attention_heads else None, logging.INFO
    if wanted == "auto":
        use_fastest_attention(target)
    elif wanted not in (None, *STOCK):
        try:
            target.use_attention(wanted)
        except ValueError as error:
            log.log(level, "%s", error)


@functools.cache
def default_model() -> EagleModel:
    """The default pair, loaded once per process."""
    return load()
