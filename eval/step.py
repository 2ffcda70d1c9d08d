"""Milliseconds of one decode cycle's parts, beside what memory and matrix units of the machine allow.

    python -m eval.benchmark --step --shape llama-3.1-8b
    python -m eval.benchmark --step --shape qwen2.5-7b --layers 4 --device cpu      # shortened

A target and a head of a published shape are built with random weights on the device; nothing is downloaded. A random
head guesses nothing, so that a cycle of `exact` emits one token; one of `fsd` 0.3 may take more. All start from the
same state; the draft reads three new tokens in each. Parts are timed with a wait for the device before and after each,
the whole cycle without; all of them in turn, and the median counts. With --kernels, torch's profiler says which
operations take the most time.

The floor of a part is the longer of two times: its weights and keys and values, each moved once, at the rate of a large
copy (bytes read plus bytes written), and its matrix products at the rate of a large one. Both rates are measured in the
same run.

D hidden size, K top_k, L context, N nodes, V vocabulary.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from eagle_fsd.acceptance import Rule, make_rule
from eagle_fsd.acceptance.budget import EXACT_RULE
from eagle_fsd.cli.arguments import Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.config import GPU_TREE, TreeConfig
from eagle_fsd.drafting.measuring import greedy_decoder, now, same_cycle
from eagle_fsd.measure.records import write_record
from eagle_fsd.models.loading import check_device, check_dtype
from eagle_fsd.pair import EagleModel
from eval.command import run_command
from eval.floors import Rates, Work, measure_rates
from eval.profile import CYCLE, timed_parts
from eval.report.tables import markdown
from eval.shapes import SHAPES, ShapeName, build_pair

PHASES = {"draft": ("tree_building", "draft_forward"), "verify": ("verify_inputs", "target_forward", "target_output"),
          "accept": ("accept",), "commit": ("commit",), "other": (CYCLE,)}
FUZZY = "fuzzy cycle"
PROFILED = 5  # cycles


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    """What `eval.benchmark --step` measures.

    Args:
        shape: of the target and its head.
        layers: of the target, in place of the shape's.
        nodes: verified, beside 1.
        tree: of the whole cycle.
        context: tokens behind which a cycle begins.
        rounds: of all cycles; the median counts.
        kernels: so many operations of a cycle are listed, those that take the most time.
        dtype: auto: float32 on a CPU, else bfloat16.
        device: without it CUDA where available, else the CPU.
        attn_implementation: of the target; see docs/attention.md.
        compile: as load(compile=True) does: forwards, or CUDA graphs.
        threads: of torch; without it as many as it takes.
        out: JSON file; without it eval/results/step-SHAPE.json.
    """

    shape: ShapeName
    layers: int | None = None
    nodes: tuple[int, ...] = (8, 16, 32, 60, 128)
    tree: Tree = GPU_TREE
    context: int = 512
    rounds: int = 20
    kernels: int = 0
    dtype: str = "auto"
    device: str | None = None
    attn_implementation: str | None = None
    compile: bool = False
    threads: int | None = None
    out: Path | None = None


def bushy(nodes: int) -> TreeConfig:
    """A tree of so many nodes that costs a single further level of drafting."""
    top_k = next(k for k in range(1, nodes + 1) if 1 + k + k * k >= nodes)
    return TreeConfig(nodes, 2, top_k)


def repeated(
    pair: EagleModel, context: int, tree: TreeConfig | None, rule: Rule = EXACT_RULE
) -> Callable[[], object]:
    """A cycle behind so many random tokens, from the same state each time; without a tree plain decoding."""
    prompt = torch.randint(pair.target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    room = tree.nodes if tree else 1
    return same_cycle(greedy_decoder(pair.target, pair.draft, prompt, tree, room, pair.graphs, rule=rule))


@torch.inference_mode()
def kernel_rows(pair: EagleModel, tree: TreeConfig, context: int, count: int) -> list[dict]:
    """Of a cycle of `exact` the operations that take the most time by themselves, as torch's profiler sees them: on
    CUDA the kernels' own time there."""
    device = pair.target.output_device
    once, kinds = repeated(pair, context, tree), [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    for _ in range(3):
        once()
    now(device)  # waits for it
    with profile(activities=kinds) as found:
        for _ in range(PROFILED):
            once()
        now(device)
    rows = found.key_averages()
    taken = "self_cpu_time_total"
    if device.type == "cuda":  # not the operators too, which have their kernels' time
        taken, rows = "self_device_time_total", [row for row in rows if row.device_type == DeviceType.CUDA]
    rows = sorted(rows, key=lambda row: -getattr(row, taken))[:count]
    return [{"operation": row.key, "calls": row.count / PROFILED, "microseconds": getattr(row, taken) / PROFILED}
            for row in rows]


@torch.inference_mode()
def measure_cycles(
    pair: EagleModel, tree: TreeConfig, nodes: Sequence[int], context: int, rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Median seconds of each phase of each kind of cycle, and of whole cycles without waits in between."""
    trees = {"cycle": tree, "shallow": replace(tree, depth=2), **{f"verify {n}": bushy(n) for n in nodes}}
    cycles = {"plain": repeated(pair, context, None),
              **{name: repeated(pair, context, shape) for name, shape in trees.items()},
              FUZZY: repeated(pair, context, tree, make_rule("fsd", 0.3))}
    whole: dict[str, list[float]] = defaultdict(list)
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    device = pair.target.output_device
    for number in Progress(range(rounds + 1), desc="measuring", unit="round"):
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


def part_rows(
    pair: EagleModel, rates: Rates, tree: TreeConfig, nodes: Sequence[int], context: int,
    phases: dict[str, dict[str, float]], whole: dict[str, float],
) -> list[dict]:
    """Each part's milliseconds beside its floor."""
    target, head, width = pair.target, pair.draft, pair.target.dtype.itemsize
    verify = Work.of([*target.decoder_layers, target.lm_head], target.config, len(target.decoder_layers), width)
    level = Work.of([head.fc, *head.layers, target.lm_head], head.config, 1, width)

    def total(*floors: tuple[float, float]) -> tuple[float, float]:
        return sum(memory for memory, _ in floors), sum(matrix for _, matrix in floors)

    one_level = level.floor(rates, tree.top_k, context)
    draft = total(*[one_level] * tree.depth)
    accept = rates.floor(4 * tree.nodes * target.vocab_size, 0)  # the target's logits in float32, read once
    cycle = total(draft, verify.floor(rates, tree.nodes, context), accept)
    found = phases["cycle"]
    per_level = (found["draft"] - phases["shallow"]["draft"]) / (tree.depth - 2)
    table = [
        ("draft level", tree.top_k, per_level, one_level),
        ("draft phase", tree.nodes, found["draft"], draft),
        ("verify", 1, phases["plain"]["verify"], verify.floor(rates, 1, context)),
        *(("verify", n, phases[f"verify {n}"]["verify"], verify.floor(rates, n, context)) for n in nodes),
        ("accept", tree.nodes, found["accept"], accept),
        ("commit", tree.nodes, found["commit"], None),
        ("other", tree.nodes, found["other"], None),
        ("cycle", tree.nodes, whole["cycle"], cycle),
        ("accept, fsd", tree.nodes, phases[FUZZY]["accept"], accept),
        ("cycle, fsd", tree.nodes, whole[FUZZY], cycle),
        ("plain cycle", 1, whole["plain"], verify.floor(rates, 1, context)),
    ]
    return [{"part": part, "nodes": count, "ms": 1000 * seconds,
             "memory_ms": floor and floor[0], "matrix_ms": floor and floor[1],
             "over_floor": floor and 1000 * seconds / max(floor)} for part, count, seconds, floor in table]


def part_table(rows: Sequence[dict]) -> str:
    """The rows in Markdown."""
    def rounded(value: float | None, unit: str = "") -> str:
        return "" if value is None else f"{value:.3g}{unit}"

    return markdown({
        "part": row["part"], "nodes": row["nodes"], "ms": f"{row['ms']:.3f}",
        "memory floor, ms": rounded(row["memory_ms"]), "matrix floor, ms": rounded(row["matrix_ms"]),
        "over the floor": rounded(row["over_floor"], "x"),
    } for row in rows)


def kernel_table(rows: Sequence[dict]) -> str:
    """The rows in Markdown, if there are any."""
    return markdown({"operation": row["operation"][:80], "calls of a cycle": f"{row['calls']:g}",
                     "microseconds": f"{row['microseconds']:.0f}"} for row in rows) if rows else ""


def run(args: StepArguments) -> None:
    check_measurable(args)
    device = check_device(args.device)
    check_dtype(args.dtype)
    dtype = {"auto": torch.float32 if device.type == "cpu" else torch.bfloat16}.get(args.dtype)
    dtype = dtype or getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    pair = build_pair(SHAPES[args.shape], dtype, device, layers=args.layers,
                      attn_implementation=args.attn_implementation)
    longest = args.context + max(args.tree.nodes, *args.nodes)
    compiled = args.compile and pair.compile(max_length=longest, warm_up=device.type == "cpu")
    rates = measure_rates(dtype, device)
    phases, whole = measure_cycles(pair, args.tree, args.nodes, args.context, args.rounds)
    rows = part_rows(pair, rates, args.tree, args.nodes, args.context, phases, whole)
    kernels = kernel_rows(pair, args.tree, args.context, args.kernels) if args.kernels else []
    target = pair.target
    record = {
        "shape": args.shape, "layers": len(target.decoder_layers), "dtype": str(dtype), "device": device.type,
        "attention": target.config._attn_implementation, "context": args.context, "tree": repr(args.tree),
        "rounds": args.rounds, "compiled": compiled, "copy_gigabytes_per_second": rates.copy / 1e9,
        "matrix_teraoperations_per_second": rates.matrix / 1e12, "rows": rows, "phases": phases, "whole": whole,
        "kernels": kernels,
    }
    print(write_record(args.out or Path(f"eval/results/step-{args.shape}.json"), record, f"""\
{args.shape}, {record['layers']} layers, {dtype}, {record['attention']}{", compiled" if compiled else ""},
{args.context} tokens of context, tree of {args.tree.nodes} nodes, depth {args.tree.depth}, top_k {args.tree.top_k};
medians of {args.rounds}. Copy {rates.copy / 1e9:.1f} GB/s, matrix products {rates.matrix / 1e12:.2f} TFLOP/s,
both measured here.

{part_table(rows)}

{kernel_table(kernels)}"""))


def check_measurable(args: StepArguments) -> None:
    """Raise for what cannot be measured, before anything is built."""
    check_counts(args, "context", least=4)
    check_counts(args, "rounds", "layers")
    check_counts(args, "kernels", least=0)
    if args.tree.depth < 3:
        raise ValueError(f"the time of a level is told from trees of depth 3 or more, got {args.tree.depth}")
    if min(args.nodes, default=0) < 2:
        raise ValueError(f"--nodes must be at least 2 (1 is always measured), got {args.nodes}")
    shape = SHAPES[args.shape].sizes
    if max(args.tree.top_k, *(bushy(n).top_k for n in args.nodes)) > shape["vocab_size"]:
        raise ValueError(f"trees that wide exceed the vocabulary of {args.shape} ({shape['vocab_size']} tokens)")


main = partial(run_command, "eval.benchmark --step", StepArguments, run)

if __name__ == "__main__":
    sys.exit(main())
