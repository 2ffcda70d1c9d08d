"""Milliseconds of one decode cycle's parts, beside what memory and matrix units of the machine allow.

    python -m eval.benchmark --step --shape llama-3.1-8b
    python -m eval.benchmark --step --shape qwen2.5-7b --layers 4 --device cpu      # shortened

A target and a head of a published shape are built with random weights on the device; nothing is downloaded. A random
head guesses nothing, so that every cycle emits one token and starts from the same state; the draft reads three new
tokens in each. Parts are timed with a wait for the device before and after each, the whole cycle without; all of them
in turn, and the median counts.

The floor of a part is the longer of two times: its weights and keys and values, each moved once, at the rate of a large
copy (bytes read plus bytes written), and its matrix products at the rate of a large one. Both rates are measured in the
same run.

D hidden size, K top_k, L context, N nodes, V vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle_fsd.cli.app import parse_tree
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.experiments.records import write_record
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.models.loading import check_device, check_dtype
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel, fit_head
from eagle_fsd.trees.config import GPU_TREE, TreeConfig
from eagle_fsd.tuning.measuring import greedy_decoder, now, same_cycle
from eval.profile import CYCLE, timed_parts

SIZES = {"cuda": (2**30, 8192), "cpu": (2**28, 1024)}  # bytes copied and side of the matrices that rates are taken with
PHASES = {"draft": ("tree_building", "draft_forward"), "verify": ("verify_inputs", "head", "target_forward"),
          "accept": ("accept",), "commit": ("commit",), "other": (CYCLE,)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a target, as in its published config, and where its published head's differ."""

    sizes: dict
    model_type: str = "llama"
    head: dict = field(default_factory=dict)


SHAPES = {
    "llama-3.1-8b": Shape({
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8}),
    "llama-3.1-70b": Shape({
        "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8}),
    "qwen2.5-7b": Shape({
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4}, "qwen2"),
    "demo": Shape({
        "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 528, "num_hidden_layers": 24,
        "num_attention_heads": 6, "num_key_value_heads": 2}, head={"intermediate_size": 768}),
    "tiny": Shape({
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}),
}


def build(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, layers: int | None = None, positions: int = 131_072,
    attn_implementation: str | None = None,
) -> EagleModel:
    """A pair of this shape with random weights, made on the device.

    Args:
        layers: of the target in place of its own number.
    """
    sizes = {**shape.sizes, "max_position_embeddings": positions, "tie_word_embeddings": False,
             "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes |= {"num_hidden_layers": layers} if layers else {}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape.model_type, **sizes), dtype=dtype, attn_implementation=attn_implementation)
        head = DraftHead(LlamaConfig(**sizes | shape.head | {"num_hidden_layers": 1}))
    head.share_embeddings(None)
    target = TargetModel(model, check=False)  # random weights in half precision may miss its tolerance
    fit_head(head, target)
    return EagleModel(target, head)


# What the machine allows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Measured rates: bytes read and written per second by a large copy, operations per second of a large product."""

    copy: float
    matrix: float

    def floor(self, moved: float, operations: float) -> tuple[float, float]:
        """Milliseconds that so many bytes and so many operations take."""
        return 1000 * moved / self.copy, 1000 * operations / self.matrix


def fastest(work: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """Seconds of the fastest of several runs, after one unmeasured."""
    work()
    taken = []
    for _ in range(times):
        started = now(device)
        work()
        taken.append(now(device) - started)
    return min(taken)


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """Both rates, with tensors much larger than a CPU's caches and products large enough for a GPU."""
    size, side = SIZES.get(device.type, SIZES["cuda"])
    copied = torch.empty(2, size, dtype=torch.uint8, device=device).fill_(1)
    copy = 2 * size / fastest(lambda: copied[0].copy_(copied[1]), device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Machine(copy, 2 * side**3 / fastest(lambda: left @ right, device))


@dataclass(frozen=True)
class Work:
    """What a forward must move and compute: weights in bytes and number, keys and values in bytes per position."""

    weight_bytes: int
    weights: int
    key_bytes: int  # keys and values of one position, all layers
    attention: int  # operations per query and key, all layers

    @classmethod
    def of(cls, modules: Sequence[nn.Module], config, layers: int, width: int) -> Work:
        """Of modules that take part in full; `width`: bytes of a number in the cache."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameters = [p for module in modules for p in module.parameters()]
        return cls(
            sum(p.numel() * p.element_size() for p in parameters), sum(p.numel() for p in parameters),
            2 * layers * config.num_key_value_heads * size * width, 4 * layers * config.num_attention_heads * size)

    def floor(self, machine: Machine, nodes: int, context: int) -> tuple[float, float]:
        """Milliseconds of memory and of matrix units for `nodes` queries behind `context` keys."""
        return machine.floor(self.weight_bytes + context * self.key_bytes,
                             nodes * (2 * self.weights + (context + nodes) * self.attention))


# Measurement -------------------------------------------------------------------------------------------------


def bushy(nodes: int) -> TreeConfig:
    """A tree of so many nodes that costs a single further level of drafting."""
    top_k = next(k for k in range(1, nodes + 1) if 1 + k + k * k >= nodes)
    return TreeConfig(nodes, 2, top_k)


@torch.inference_mode()
def measure(
    pair: EagleModel, tree: TreeConfig, nodes: Sequence[int], context: int, rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Median seconds of each phase of each kind of cycle, and of whole cycles without waits in between."""
    target, head = pair.target, pair.draft
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    trees = {"cycle": tree, "shallow": replace(tree, depth=2), **{f"verify {n}": bushy(n) for n in nodes}}

    def cycle(tree: TreeConfig | None) -> Callable[[], object]:
        room = tree.nodes if tree else 1
        return same_cycle(greedy_decoder(target, head, prompt, tree, room, pair.graphs))

    cycles = {"plain": cycle(None), **{name: cycle(shape) for name, shape in trees.items()}}
    whole: dict[str, list[float]] = defaultdict(list)
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    device = target.output_device
    for number in tqdm(range(rounds + 1), desc="measuring", unit="round", disable=None):
        for name, once in cycles.items():
            started = now(device)
            once()
            taken = now(device) - started
            with timed_parts(pair, nested=False) as clock:
                once()
            if number:  # the first round warms up
                whole[name].append(taken)
                for phase, named in PHASES.items():
                    parts[name, phase].append(sum(clock.seconds.get(part, 0.0) for part in named))
    phases = {name: {phase: statistics.median(parts[name, phase]) for phase in PHASES} for name in cycles}
    return phases, {name: statistics.median(taken) for name, taken in whole.items()}


def rows_of(
    pair: EagleModel, machine: Machine, tree: TreeConfig, nodes: Sequence[int], context: int,
    phases: dict[str, dict[str, float]], whole: dict[str, float],
) -> list[dict]:
    """Each part's milliseconds beside its floor."""
    target, head, width = pair.target, pair.draft, pair.target.dtype.itemsize
    verify = Work.of([*target.decoder_layers, target.lm_head], target.config, len(target.decoder_layers), width)
    level = Work.of([head.fc, *head.layers, target.lm_head], head.config, 1, width)

    def joined(*floors: tuple[float, float]) -> tuple[float, float]:
        return sum(memory for memory, _ in floors), sum(matrix for _, matrix in floors)

    one_level = level.floor(machine, tree.top_k, context)
    draft = joined(*[one_level] * tree.depth)
    accept = machine.floor(4 * tree.nodes * target.vocab_size, 0)  # the target's logits in float32, read once
    cycle = joined(draft, verify.floor(machine, tree.nodes, context), accept)
    found = phases["cycle"]
    per_level = (found["draft"] - phases["shallow"]["draft"]) / (tree.depth - 2)
    table = [
        ("draft level", tree.top_k, per_level, one_level),
        ("draft phase", tree.nodes, found["draft"], draft),
        ("verify", 1, phases["plain"]["verify"], verify.floor(machine, 1, context)),
        *(("verify", n, phases[f"verify {n}"]["verify"], verify.floor(machine, n, context)) for n in nodes),
        ("accept", tree.nodes, found["accept"], accept),
        ("commit", tree.nodes, found["commit"], None),
        ("other", tree.nodes, found["other"], None),
        ("cycle", tree.nodes, whole["cycle"], cycle),
        ("plain cycle", 1, whole["plain"], verify.floor(machine, 1, context)),
    ]
    return [{"part": part, "nodes": count, "ms": 1000 * seconds,
             "memory_ms": floor and floor[0], "matrix_ms": floor and floor[1],
             "over_floor": floor and 1000 * seconds / max(floor)} for part, count, seconds, floor in table]


def table_of(rows: Sequence[dict]) -> str:
    """The rows in Markdown."""
    def shown(value: float | None, unit: str = "") -> str:
        return "" if value is None else f"{value:.3g}{unit}"

    lines = ["| part | nodes | ms | memory floor, ms | matrix floor, ms | over the floor |", "|---" * 6 + "|"]
    lines += [f"| {row['part']} | {row['nodes']} | {row['ms']:.3f} | {shown(row['memory_ms'])} | "
              f"{shown(row['matrix_ms'])} | {shown(row['over_floor'], 'x')} |" for row in rows]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    check_measurable(args)
    device = check_device(args.device)
    check_dtype(args.dtype)
    dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(args.dtype)
    dtype = dtype or getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    pair = build(SHAPES[args.shape], dtype, device, layers=args.layers, attn_implementation=args.attn_implementation)
    longest = args.context + max(args.tree.nodes, *args.nodes)
    compiled = args.compile and pair.compile(max_length=longest, warm_up=device.type == "cpu")
    machine = measure_machine(dtype, device)
    phases, whole = measure(pair, args.tree, args.nodes, args.context, args.rounds)
    rows = rows_of(pair, machine, args.tree, args.nodes, args.context, phases, whole)
    target = pair.target
    record = {
        "shape": args.shape, "layers": len(target.decoder_layers), "dtype": str(dtype), "device": device.type,
        "attention": target.config._attn_implementation, "context": args.context, "tree": repr(args.tree),
        "rounds": args.rounds, "compiled": compiled, "copy_gigabytes_per_second": machine.copy / 1e9,
        "matrix_teraoperations_per_second": machine.matrix / 1e12, "rows": rows, "phases": phases, "whole": whole,
    }
    print(write_record(args.out or Path(f"eval/results/step-{args.shape}.json"), record, f"""\
{args.shape}, {record['layers']} layers, {dtype}, {record['attention']}{", compiled" if compiled else ""},
{args.context} tokens of context, tree of {args.tree.nodes} nodes, depth {args.tree.depth}, top_k {args.tree.top_k};
medians of {args.rounds}. Copy {machine.copy / 1e9:.1f} GB/s, matrix products {machine.matrix / 1e12:.2f} TFLOP/s,
both measured here.

{table_of(rows)}"""))


def check_measurable(args: argparse.Namespace) -> None:
    """Raise for what cannot be measured, before anything is built."""
    check_counts(args, "context", least=4)
    check_counts(args, "rounds", "layers")
    if args.tree.depth < 3:
        raise ValueError(f"the time of a level is told from trees of depth 3 or more, got {args.tree.depth}")
    if min(args.nodes) < 2:
        raise ValueError(f"--nodes must be at least 2 (1 is always measured), got {min(args.nodes)}")
    shape = SHAPES[args.shape].sizes
    if max(args.tree.top_k, *(bushy(n).top_k for n in args.nodes)) > shape["vocab_size"]:
        raise ValueError(f"trees that wide exceed the vocabulary of {args.shape} ({shape['vocab_size']} tokens)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.benchmark --step", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="of the target (default: the shape's)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 60, 128], help="verified, beside 1")
    parser.add_argument("--tree", type=parse_tree, default=GPU_TREE, metavar="N,DEPTH,K", help="of the whole cycle")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, else bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--attn-implementation")
    parser.add_argument("--compile", action="store_true", help="as load(compile=True) does: forwards, or CUDA graphs")
    parser.add_argument("--threads", type=int, help="of torch (default: as it comes)")
    parser.add_argument("--out", type=Path, help="JSON file (default: eval/results/step-SHAPE.json)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return exit_status("eval.benchmark --step", lambda: run(args), (ValueError, TypeError, OSError))


if __name__ == "__main__":
    sys.exit(main())
