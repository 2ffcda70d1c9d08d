"""Measure the latency of a target's forward pass and of whole decode cycles, by number of nodes.

    python -m eval.forwards --forms stock fused int8 --nodes 1 8 16 32 --context 300 --out eval/results/smollm2-forwards
    python -m eval.forwards --nodes 1 8 16 --context 2000 --endpoints llama.cpp=http://127.0.0.1:8081/v1 --out runs/long
    python -m eval.forwards --shape llama-3.1-8b --device cuda --nodes 1 16 60 128 --rows 1 8 --out runs/llama-8b

The models are a pair, or a target and a head (or a causal LM that drafts) of published shapes with random weights,
created on the device without a download. All parts run in turn, each synchronised with the device, and the median
counts. Cycles are timed with drafting and follow a context of random tokens, which makes acceptance rare; their trees
have the depth and top_k of --tree. The floor of a forward pass is the larger of two: to read the layers' weights once,
and to compute their multiply-adds. Both rates are measured in the same run, with products of a large weight in the same
form, with one row and with many. For an endpoint, a prompt of --context tokens is timed with 1 and with 33 new
tokens, and the difference gives the time per token.

N nodes, R rows, L context.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from tyro.conf import UseAppendAction

from eagle_fsd import EagleModel, TreeConfig
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.drafting.sizing import Drafting, Plan
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.loading.timing import seconds_of
from eagle_fsd.measure.endpoints import UNCACHED, ask, read_endpoints
from eagle_fsd.measure.methods import described, pair_text
from eagle_fsd.measure.records import decimals, markdown, record_path, save_plot, write_json, write_record
from eagle_fsd.measure.settings import parse_setting
from eagle_fsd.models.linear import Int8, is_int8, pack, packed_form
from eagle_fsd.models.loading import check_device
from eagle_fsd.options.generate import GenerateOptions
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command

log = logging.getLogger(__name__)
FORMS = {"stock": {"attn_implementation": "sdpa", "prepack": False}, "fused": {}, "int8": {"quantization": "int8"},
         "int8-fast": {"quantization": "int8-fast"}}
UNROTATED = "int8-unrotated"
MORE_TOKENS = 32  # tokens of an endpoint after the first
LARGE = 4096, 32768  # inputs and outputs of the weight that measures the rates
# Sizes from the published configs; a head is one layer of the same size.
SHAPES = {
    "llama-3.1-8b": ("llama", {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "qwen2.5-7b": ("qwen2", {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4}),
    "qwen2.5-0.5b": ("qwen2", {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2}),
    "tiny": ("llama", {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}),
}


@dataclass(frozen=True)
class ForwardsArguments:
    """Options of `eval.forwards`.

    Args:
        forms: forms of target and head: stock transformers modules, our fused decoder, or int8; this without
            batch-invariant attention (int8-fast), and also without rotation, as before version 0.5 (int8-unrotated).
        shape: use random weights of this shape instead of a pair.
        draft_shape: draft with a causal LM of this shape, which gets the target's vocabulary, instead of a head.
        nodes: numbers of nodes in a forward pass.
        rows: batch sizes.
        tree: depth and top_k of all draft trees.
        settings: acceptance rules of the cycles.
        context: tokens in the cache.
        endpoints: servers to compare with, as "NAME=URL" or "NAME=URL#MODEL".
        rounds: timed runs of each part, of which the median counts.
        captured: first time cycles and their programs as on CUDA (uncaptured on a CPU), one after the other without
            waiting for the device between them. OUT.json has the rows so far.
        draft_vocabularies: numbers of tokens that the head can draft in those cycles; 0: all.
        out: write OUT.json, OUT.md and OUT.png.
    """

    out: Path
    pair: Loading = Loading()
    forms: tuple[Literal[(*FORMS, UNROTATED)], ...] = ("fused",)
    shape: Literal[tuple(SHAPES)] | None = None
    draft_shape: Literal[tuple(SHAPES)] | None = None
    nodes: tuple[int, ...] = (1, 4, 8, 16, 32, 60)
    rows: tuple[int, ...] = (1,)
    tree: Tree = TreeConfig(60, 5, 4)
    settings: tuple[str, ...] = ("exact", "fsd 0.3")
    context: int = 512
    endpoints: UseAppendAction[tuple[str, ...]] = ()
    rounds: int = 20
    captured: bool = False
    draft_vocabularies: tuple[int, ...] = (0,)


def build_pair(
    name: str, dtype: torch.dtype, device: torch.device, draft_name: str | None = None
) -> EagleModel:
    """A target of a shape, and a causal LM of a shape or else a head, with random weights, created on the device."""
    common = {"max_position_embeddings": 131_072, "tie_word_embeddings": False, "bos_token_id": None,
              "eos_token_id": None, "pad_token_id": None}

    def model_of(name: str, **sizes: int) -> PreTrainedModel:
        kind, own = SHAPES[name]
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common | own | sizes), dtype=dtype)

    torch.manual_seed(0)
    with torch.device(device):
        target = model_of(name)
        if draft_name is not None:
            draft = model_of(draft_name, vocab_size=target.config.vocab_size)
        else:
            draft = DraftHead(LlamaConfig(**common | SHAPES[name][1] | {"num_hidden_layers": 1}))
            draft.share_embeddings(None)
    model = EagleModel.from_parts(target, draft)
    if device.type == "cuda":
        model.prepack()  # as `load` does
    return model


def forward_of(model: EagleModel, nodes: int, rows: int, context: int, output: bool) -> Callable[[], object]:
    """A forward pass over a chain of nodes after the context, optionally with the output layer; restores the cache."""
    target = model.target
    cache = target.new_cache(context + nodes, rows)
    tokens = torch.arange(rows * (context + nodes), device=target.input_device).view(rows, -1) % target.vocab_size
    target.prefill(tokens[:, :context], cache)
    positions = torch.arange(context, context + nodes, device=target.input_device).expand(rows, -1)  # [R, N]
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool, device=target.input_device).tril()

    def once() -> None:
        features = target.verify(tokens[:, context:], positions, ancestors, cache)
        cache.truncate(context)
        if output:
            target.logits(features)

    return once


def prefill_of(model: EagleModel, prompt: torch.Tensor) -> Callable[[], object]:  # [1, L]
    """A prefill of the target."""
    target = model.target
    cache = target.new_cache(prompt.shape[1])

    def once() -> None:
        cache.truncate(0)
        target.logits(target.prefill(prompt.to(target.input_device), cache)[:, -1:])

    return once


def endpoint_parts(
    model: EagleModel, endpoints: Mapping[str, tuple[str, str]], context: int
) -> dict[tuple[str, int, int], Callable[[], object]]:
    """Requests that continue a text of `context` tokens (of the target's tokenizer) by one token and by more."""
    if not endpoints:
        return {}
    words = model.tokenizer.encode("The fox sees a house, and the house has seven rooms. " * context,
                                   add_special_tokens=False)
    text = model.tokenizer.decode(words[:context])
    parts = {}
    for name, (url, served) in endpoints.items():
        for tokens, part in ((1, f"{name} prompt"), (1 + MORE_TOKENS, f"{name} prompt and {MORE_TOKENS} tokens")):
            body = {"model": served, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            parts[part, context, 1] = partial(ask, f"{url}/completions", {**body, **UNCACHED})
    return parts


def batch_of(
    model: EagleModel, prompts: Sequence[list[int]], cycles: int, tree: TreeConfig | None,
    captured: CapturedCycles | None = None, **options: object,
) -> Batch:
    """A batch after prefill, with room for `cycles` cycles. It always uses this tree; None: no drafts."""
    room = cycles * (1 + (tree.depth if tree else 0)) + 1
    options = GenerateOptions(**{**options, "tree": tree, "text_drafts": "off", "max_new_tokens": room,
                                          "ignore_eos": True, "seed": 0})
    plan = Plan(tree or model.default_tree, drafts=tree is not None)
    batch = Batch(model.target, model.draft if tree else None, make_requests(model, prompts, options),
                  Drafting(lambda _: plan), captured=captured)
    for number in range(len(prompts)):
        cycle.prefill(batch, number)
    return batch


def prompt_of(model: EagleModel, args: ForwardsArguments) -> torch.Tensor:  # [L]
    """Random tokens."""
    limit = model.target.max_positions or sys.maxsize
    context = min(args.context, limit - max(args.nodes) - 2 * args.rounds - 2)
    return torch.randint(model.target.vocab_size, (max(4, context),), generator=torch.Generator().manual_seed(0))


def parts_of(model: EagleModel, args: ForwardsArguments) -> dict[tuple[str, int, int], Callable[[], object]]:
    """The parts to time, by name, nodes and rows."""
    parts: dict[tuple[str, int, int], Callable[[], object]] = {}
    prompt = prompt_of(model, args)
    parts["prompt", len(prompt), 1] = prefill_of(model, prompt[None])
    for rows in args.rows:
        new = partial(batch_of, model, [prompt.tolist()] * rows, args.rounds + 1)
        for nodes in args.nodes:
            parts["forward", nodes, rows] = forward_of(model, nodes, rows, len(prompt), output=False)
            parts["forward and output layer", nodes, rows] = forward_of(model, nodes, rows, len(prompt), output=True)
            if nodes == 1:
                parts["cycle without drafting", 1, rows] = partial(cycle.step, new(tree=None, acceptance="exact"))
                continue
            tree = replace(args.tree, total_tokens=nodes)
            for name, options in map(parse_setting, args.settings):
                parts[f"cycle, {name}", tree.nodes, rows] = partial(cycle.step, new(tree=tree, **options))
    return parts


@torch.inference_mode()
def measure(
    models: Mapping[str, EagleModel], args: ForwardsArguments, endpoints: Mapping[str, tuple[str, str]]
) -> list[dict]:
    """Median milliseconds of each part, and their quartiles."""
    parts = {(f"{form} {part}", nodes, rows): once for form, model in models.items()
             for (part, nodes, rows), once in parts_of(model, args).items()}
    model = next(iter(models.values()))
    device = model.target.output_device
    parts |= endpoint_parts(model, endpoints, args.context)
    times: dict[tuple[str, int, int], list[float]] = {part: [] for part in parts}
    for _ in Progress(range(args.rounds + 1), desc="measuring", unit="round"):
        for part, once in parts.items():
            times[part].append(1000 * seconds_of(once, device))
    rows = []
    for (part, nodes, count), (_, *values) in times.items():  # the first round warms up
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
        rows.append({"part": part if len(args.rows) == 1 else f"{part}, {count} rows", "nodes": nodes, "rows": count,
                     "ms": statistics.median(values), "quartiles": [quarters[0], quarters[2]]})
    medians = {row["part"]: row["ms"] for row in rows}
    rows += [{"part": f"{name} token", "nodes": 1, "rows": 1, "ms": (
        medians[f"{name} prompt and {MORE_TOKENS} tokens"] - medians[f"{name} prompt"]) / MORE_TOKENS}
        for name in endpoints]
    return sorted(rows, key=lambda row: (row["rows"], row["part"], row["nodes"]))


def captured_parts(model: EagleModel, args: ForwardsArguments) -> Iterator[dict]:
    """Milliseconds of cycles as captured programs, and of each program. A part that fails is logged and left out."""
    prompt = prompt_of(model, args).tolist()
    for vocabulary in args.draft_vocabularies:
        pair, words = model, ""
        if vocabulary:
            model.draft.limit_vocabulary(torch.arange(vocabulary))
            pair, words = EagleModel.from_parts(model.target.model, model.draft), f", {vocabulary} tokens drafted"
            if pair.target.input_device.type == "cuda":
                pair.prepack()
        captured = CapturedCycles(pair.target, pair.draft)
        for rows, nodes in itertools.product(args.rows, args.nodes):
            for name, options in map(parse_setting, args.settings[: 1 if nodes == 1 else None]):
                tree = replace(args.tree, total_tokens=nodes) if nodes > 1 else None
                part = f"{name}{words}{'' if len(args.rows) == 1 else f', {rows} rows'}"
                times = captured_times(pair, captured, [prompt] * rows, args.rounds, tree, options)
                try:
                    for label, milliseconds in times:
                        yield {"part": f"captured {label}, {part}", "nodes": nodes, "rows": rows, "ms": milliseconds,
                               "graphs": repr(captured.failed or "captured")}
                except Exception:  # such as no memory: the others may run
                    log.exception("%s of %s nodes and %s rows failed", part, nodes, rows)
                gc.collect()
        if vocabulary:
            model.draft.limit_vocabulary(None)


@torch.inference_mode()
def captured_times(
    pair: EagleModel, captured: CapturedCycles, prompts: Sequence[list[int]], rounds: int, tree: TreeConfig | None,
    options: Mapping[str, object],
) -> Iterator[tuple[str, float]]:
    """Milliseconds of a cycle, and of each of its programs."""
    device = pair.target.output_device
    batch = batch_of(pair, prompts, 3 * rounds + 4, tree, captured, **options)
    for _ in range(4):  # programs are captured
        cycle.step(batch)
    for request in batch.requests:
        if request.error is not None:
            raise request.error

    def several(once: Callable[[], object]) -> float:
        def all_rounds() -> None:
            for _ in range(rounds):
                once()

        return 1000 * statistics.median(seconds_of(all_rounds, device) for _ in range(3)) / rounds

    yield "cycle", several(partial(cycle.step, batch))
    home = captured.known(batch)
    latest = {key[0]: program for key, program in home.pool.programs.items()}
    before = [(buffers.lengths, buffers.lengths.clone()) for buffers in home.buffers.values()]
    walk = latest["walk"]

    def walk_again() -> None:
        for lengths, saved in before:
            lengths.copy_(saved)
        walk()

    for name, program in (latest | {"walk": walk_again}).items():
        yield name, several(program)


@contextmanager
def rotated_by(block: int) -> Iterator[None]:
    """Within the context weights are packed as int8 with rotations by at most this block size, and their form is named
    by it; 1: with none."""
    own, pack = Int8.BLOCK, Int8.__init__

    def named(self: Int8, *weights: object) -> None:
        pack(self, *weights)
        self.NAME = self.NAME.replace("rotated", f"rotated by {block}" if block > 1 else "unrotated")

    Int8.BLOCK, Int8.__init__ = block, named
    try:
        yield
    finally:
        Int8.BLOCK, Int8.__init__ = own, pack


@torch.inference_mode()
def rates_of(model: EagleModel) -> dict[str, float]:
    """Weights read per second in a product with one row, and multiply-adds per second in one with 1,024 rows. Takes the
    best of several products with a weight in the form of the model's layers."""
    device, dtype, inputs = model.target.input_device, model.target.dtype, LARGE[0]
    holder = nn.Sequential(nn.Linear(*LARGE, bias=False, device=device, dtype=dtype))
    if packed_form(model.target.model):
        pack(holder, "int8" if is_int8(model.target.model) else None)

    def fastest(rows: int) -> float:
        ones = torch.ones(rows, inputs, device=device, dtype=dtype)
        return min(seconds_of(lambda: holder(ones), device) for _ in range(6))

    weights = LARGE[0] * LARGE[1]
    return {"weights_read_per_second": weights / fastest(1), "multiply_adds_per_second": 1024 * weights / fastest(1024)}


def floor_of(model: EagleModel, rates: Mapping[str, float], rows: int) -> float:
    """Milliseconds for the products of one forward pass at these rates."""
    weights = sum(layer.in_features * layer.out_features for layer in model.target.decoder_layers.modules()
                  if isinstance(layer, nn.Linear))
    return 1000 * weights * max(1 / rates["weights_read_per_second"], rows / rates["multiply_adds_per_second"])


def latency_table(rows: Sequence[Mapping]) -> str:
    """Milliseconds: a row per part, a column per number of nodes."""
    cells = {(row["part"], row["nodes"]): row["ms"] for row in rows}
    nodes, parts = sorted({row["nodes"] for row in rows}), dict.fromkeys(row["part"] for row in rows)
    return markdown({"milliseconds": part, **{str(count): decimals(cells.get((part, count)), 1) for count in nodes}}
                    for part in parts)


def plot_forwards(rows: Sequence[Mapping], path: Path) -> None:
    """Plot milliseconds over the number of nodes, a line for each part with several numbers of nodes. The programs of
    captured cycles are left out.

    Args:
        rows: see `run`.
    """
    def draw(axes: Any) -> None:
        for part in dict.fromkeys(row["part"] for row in rows):
            line = sorted((row for row in rows if row["part"] == part), key=lambda row: row["nodes"])
            program = part.startswith("captured ") and not part.startswith("captured cycle")
            if len(line) > 1 and not program:
                axes.plot([row["nodes"] for row in line], [row["ms"] for row in line], marker="o", label=part)
        axes.set(xlabel="nodes", ylabel="milliseconds", ylim=(0, None))
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    save_plot(path, 10, 4.5, draw)


def run(args: ForwardsArguments) -> None:
    check_counts(args, "context", least=4)
    check_counts(args, "rounds")
    if min(args.nodes, default=0) < 1 or min(args.rows, default=0) < 1:
        raise ValueError(f"--nodes and --rows must be at least 1, got {args.nodes} and {args.rows}")
    list(map(parse_setting, args.settings))  # reject a bad setting before anything is loaded
    endpoints = read_endpoints(args.endpoints)
    if endpoints and args.shape is not None:
        raise ValueError("--endpoints needs a pair: a --shape has no tokenizer")
    if args.draft_shape is not None and (args.shape is None or any(args.draft_vocabularies)):
        raise ValueError("--draft-shape needs a --shape of the target, and no --draft-vocabularies, which are of heads")
    if args.shape is None:
        models = {}
        for form in args.forms:
            with rotated_by(1) if form == UNROTATED else nullcontext():
                models[form] = replace(args.pair, tree=None, **FORMS.get(form, FORMS["int8-fast"])).load()
    else:
        device = check_device(args.pair.device)
        small = torch.float32 if device.type == "cpu" else torch.bfloat16
        dtype = small if args.pair.dtype == "auto" else getattr(torch, args.pair.dtype)
        models = {"random": build_pair(args.shape, dtype, device, args.draft_shape)}
    model = next(iter(models.values()))
    captured = []
    for row in captured_parts(model, args) if args.captured else ():
        captured.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        write_json(record_path(args.out, ".json"), {"rows": captured})
    target, rates = model.target, {form: rates_of(each) for form, each in models.items()}
    weights = {form: packed_form(each.target.model) or "plain" for form, each in models.items()}
    rows = captured + measure(models, args, endpoints)
    for form, each in models.items():
        rows += [{"part": f"{form} floor of a forward", "nodes": count, "rows": 1,
                  "ms": floor_of(each, rates[form], count)} for count in args.nodes]
    cuda = target.output_device.type == "cuda"
    record = {"settings": option_record(args), **described(model), "weights": weights, "rates": rates, "rows": rows,
              "computed_by": {form: each.target.computed_by for form, each in models.items()},
              "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None}
    speeds = ", ".join(f"{form} {rate['weights_read_per_second'] / 1e9:.1f} G weights and "
                       f"{rate['multiply_adds_per_second'] / 1e9:.0f} G multiply-adds" for form, rate in rates.items())
    shapes = " with ".join(filter(None, (args.shape, args.draft_shape)))
    about = (f"{shapes or pair_text(model)}\n\n{len(target.decoder_layers)} layers, {target.dtype}; "
             f"weights: {', '.join(f'{form} {packed}' for form, packed in weights.items())}; "
             f"{args.context} tokens of context, trees of depth {args.tree.depth} and top_k {args.tree.top_k}; medians "
             f"of {args.rounds} rounds. Rates of the floors, per second: {speeds}.")
    print(write_record(args.out, record, f"{about}\n\n{latency_table(sorted(rows, key=lambda row: row['part']))}"))
    plot_forwards(rows, record_path(args.out, ".png"))


main = partial(run_command, "eval.forwards", ForwardsArguments, run)

if __name__ == "__main__":
    sys.exit(main())
