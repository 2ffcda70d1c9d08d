"""Milliseconds of a target's forward and of whole decode cycles, by number of nodes.

    python -m eval.forwards --nodes 1 8 16 32 60 --out eval/results/smollm2-forwards
    python -m eval.forwards --shape llama-3.1-8b --device cuda --nodes 1 16 60 128 --rows 1 8 --out runs/llama-8b

A pair, or a target and a head of a published shape with random weights, made on the device: nothing is downloaded. All
parts are run in turn, with a wait for the device before and after each, and the median counts. Cycles follow a context
of random tokens, of which hardly any are accepted; they are timed whole, drafting included, with trees of the depth and
top_k of --tree. The floor of a forward is the time in which the machine reads the weights once, at the rate of a large
copy (bytes read plus bytes written), measured in the same run.

N nodes, R rows, L context.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle_fsd import EagleModel, TreeConfig
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.config import Choice
from eagle_fsd.engine.decoder import Decoder
from eagle_fsd.engine.timing import seconds_of
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.measure.methods import described
from eagle_fsd.measure.records import markdown, record_path, write_record
from eagle_fsd.measure.settings import parse_setting
from eagle_fsd.models.loading import check_device
from eagle_fsd.options import GenerateOptions
from eagle_fsd.requests import make_requests
from eval.command import noted, run_command
from eval.plots import plot_forwards

COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes, to measure the rate of a copy
# Sizes as in the published configs; a head is one layer of the same.
SHAPES = {
    "llama-3.1-8b": ("llama", {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "llama-3.1-70b": ("llama", {
        "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8}),
    "qwen2.5-7b": ("qwen2", {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4}),
    "tiny": ("llama", {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}),
}


@dataclass(frozen=True)
class ForwardsArguments:
    """What `eval.forwards` measures.

    Args:
        shape: random weights of this shape in place of a pair.
        layers: of the target, in place of the shape's.
        nodes: verified in a forward.
        rows: of a batch.
        tree: its depth and top_k are those of all cycles.
        settings: rules of the cycles.
        context: tokens before.
        rounds: of all parts; the median counts.
        threads: of torch; without it what OMP_NUM_THREADS says, or torch.
        out: where the record goes, without .json and .md.
    """

    out: Path
    pair: Loading = Loading()
    shape: Literal[tuple(SHAPES)] | None = None
    layers: int | None = None
    nodes: tuple[int, ...] = (1, 4, 8, 16, 32, 60)
    rows: tuple[int, ...] = (1,)
    tree: Tree = TreeConfig(60, 5, 4)
    settings: tuple[str, ...] = ("exact", "fsd 0.3")
    context: int = 512
    rounds: int = 20
    threads: int | None = None


def build_pair(name: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> EagleModel:
    """A pair of a shape with random weights, made on the device."""
    kind, sizes = SHAPES[name]
    sizes = {**sizes, "max_position_embeddings": 131_072, "tie_word_embeddings": False, "bos_token_id": None,
             "eos_token_id": None, "pad_token_id": None, **({"num_hidden_layers": layers} if layers else {})}
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype)
        head = DraftHead(LlamaConfig(**sizes | {"num_hidden_layers": 1}))
    head.share_embeddings(None)
    return EagleModel.from_parts(target, head)


def forward_of(model: EagleModel, nodes: int, rows: int, context: int, output: bool) -> Callable[[], object]:
    """A forward over a chain of nodes after the context, with or without the output layer; the cache stays as it is."""
    target = model.target
    cache = target.new_cache(context + nodes, rows)
    tokens = torch.arange(rows * (context + nodes), device=target.device).view(rows, -1) % target.vocab_size
    target.prefill(tokens[:, :context], cache)
    positions = torch.arange(context, context + nodes, device=target.device).expand(rows, -1)  # [R, N]
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool, device=target.device).tril()

    def once() -> None:
        features = target.verify(tokens[:, context:], positions, ancestors, cache)
        cache.truncate(context)
        if output:
            target.logits(features)

    return once


def decoder_of(
    model: EagleModel, prompts: Sequence[list[int]], cycles: int, tree: TreeConfig | None, **options: object
) -> Decoder:
    """A decoder that has read these prompts, with room for so many cycles; always with this tree, None: undrafted."""
    room = cycles * (1 + (tree.depth if tree else 0)) + 1
    given = GenerateOptions.from_names({**options, "tree": tree, "max_new_tokens": room, "ignore_eos": True, "seed": 0})
    decoder = Decoder(model.target, model.draft if tree else None, make_requests(model, prompts, given),
                      lambda count: Choice(tree))
    decoder.prefill()
    return decoder


def parts_of(model: EagleModel, args: ForwardsArguments) -> dict[tuple[str, int, int], Callable[[], object]]:
    """What is timed, by name, nodes and rows."""
    parts: dict[tuple[str, int, int], Callable[[], object]] = {}
    limit = model.target.max_positions or sys.maxsize
    context = min(args.context, limit - max(args.nodes) - 2 * args.rounds - 2)
    prompt = torch.randint(model.target.vocab_size, (max(4, context),), generator=torch.Generator().manual_seed(0))
    for rows in args.rows:
        cycle = partial(decoder_of, model, [prompt.tolist()] * rows, args.rounds + 1)
        for nodes in args.nodes:
            parts["forward", nodes, rows] = forward_of(model, nodes, rows, len(prompt), output=False)
            parts["forward and output layer", nodes, rows] = forward_of(model, nodes, rows, len(prompt), output=True)
            if nodes == 1:
                parts["cycle without drafting", 1, rows] = cycle(tree=None, acceptance="exact").step
                continue
            tree = replace(args.tree, total_tokens=nodes)
            for name, options in map(parse_setting, args.settings):
                parts[f"cycle, {name}", tree.nodes, rows] = cycle(tree=tree, **options).step
    return parts


@torch.inference_mode()
def measure(model: EagleModel, args: ForwardsArguments) -> list[dict]:
    """Median milliseconds of each part, and the spread between its quartiles."""
    parts, device = parts_of(model, args), model.target.output_device
    taken: dict[tuple[str, int, int], list[float]] = {part: [] for part in parts}
    for _ in Progress(range(args.rounds + 1), desc="measuring", unit="round"):
        for part, once in parts.items():
            taken[part].append(1000 * seconds_of(once, device))
    rows = []
    for (part, nodes, count), (_, *values) in taken.items():  # the first round warms up
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
        rows.append({"part": part if len(args.rows) == 1 else f"{part}, {count} rows", "nodes": nodes, "rows": count,
                     "ms": statistics.median(values), "quartiles": [quarters[0], quarters[2]]})
    return sorted(rows, key=lambda row: (row["rows"], row["part"], row["nodes"]))


def copy_rate(device: torch.device) -> float:
    """Bytes that a large copy reads and writes per second: the fastest of several."""
    size = COPIED.get(device.type, COPIED["cuda"])
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(seconds_of(lambda: target.copy_(source), device) for _ in range(6))


def latency_table(rows: Sequence[Mapping], floor: float) -> str:
    """Milliseconds: a row per number of nodes, a column per part."""
    cells = {(row["part"], row["nodes"]): row["ms"] for row in rows}
    parts = list(dict.fromkeys(row["part"] for row in rows))
    nodes = sorted({row["nodes"] for row in rows})
    return markdown({"nodes": count, **{part: f"{cells[part, count]:.2f}" if (part, count) in cells else ""
                                        for part in parts}, "floor of a forward": f"{floor:.2f}"} for count in nodes)


def run(args: ForwardsArguments) -> None:
    check_counts(args, "context", least=4)
    check_counts(args, "rounds", "layers", "threads")
    if min(args.nodes, default=0) < 1 or min(args.rows, default=0) < 1 or args.tree is None:
        raise ValueError(f"--nodes and --rows take numbers of at least 1, got {args.nodes} and {args.rows}")
    list(map(parse_setting, args.settings))  # a bad one is refused before anything is loaded
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.shape is None:
        model = args.pair.load()
    else:
        device = check_device(args.pair.device)
        small = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = build_pair(args.shape, small if args.pair.dtype == "auto" else getattr(torch, args.pair.dtype), device,
                           args.layers)
    target = model.target
    rows, rate = measure(model, args), copy_rate(target.output_device)
    weights = sum(p.numel() * p.element_size() for p in target.decoder_layers.parameters())
    cuda = target.output_device.type == "cuda"
    record = {"settings": noted(args), **described(model), "attention": target.config._attn_implementation,
              "weight_bytes": weights, "copy_bytes_per_second": rate, "rows": rows,
              "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None}
    said = (f"{args.shape or 'the pair'}, {len(target.decoder_layers)} layers, {target.dtype}, attention "
            f"{record['attention']}; {args.context} tokens before, trees of depth {args.tree.depth} and top_k "
            f"{args.tree.top_k}; milliseconds, medians of {args.rounds}. The floor is the time in which the layers' "
            f"{weights / 1e9:.3g} GB are read once, at the {rate / 1e9:.1f} GB/s of a copy.")
    print(write_record(args.out, record, f"{said}\n\n{latency_table(rows, 1000 * weights / rate)}"))
    plot_forwards(rows, record_path(args.out, ".png"))


main = partial(run_command, "eval.forwards", ForwardsArguments, run)

if __name__ == "__main__":
    sys.exit(main())
