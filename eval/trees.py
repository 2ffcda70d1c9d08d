"""Is the chosen tree the right one? `tree="auto"` against a grid of fixed trees, the best of them on fresh prompts too.

    python -m eval.trees --out eval/results/trees

Every method answers every prompt in turn (interleaved). The grid's winner is chosen on the first prompts and measured
again, beside `auto`, on others, since the fastest of many is partly lucky. Alone on the machine. What `auto` costs
where a head is useless: eval.useless_head.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import eagle_fsd
from eagle_fsd.cli.app import load_pair, model_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.experiments.methods import Answer, Method, engine, interleaved
from eagle_fsd.experiments.records import write_record
from eagle_fsd.trees.config import TreeConfig
from eval.report.intervals import interval
from train.demo.corpus import python_prefixes
from train.demo.tasks import tasks

NODES, DEPTHS, TOP_KS = (6, 10, 16, 24, 40), (4, 8, 14), (1, 2, 4)
KINDS = ("tasks", "python")


def name_of(tree: TreeConfig) -> str:
    return f"{tree.total_tokens},{tree.depth},{tree.top_k}"


def row_of(name: str, given: Sequence[Answer], reference: Sequence[Answer]) -> dict:
    """Speed of one method, and its time over another's with a 95% bootstrap interval over prompts."""
    ours, theirs = (np.array([answer.seconds for answer in each]) for each in (given, reference))
    lengths = [length + 1 for answer in given if answer.output for length in answer.output.stats.accepted_lengths]
    undrafted = [answer.output.stats.undrafted / max(1, answer.output.stats.target_forwards)
                 for answer in given if answer.output]
    return {
        "method": name, "tokens_per_second": sum(len(answer.token_ids) for answer in given) / ours.sum(),
        "seconds_per_answer": ours.mean(), "tau": statistics.fmean(lengths or [1]),
        "undrafted": statistics.fmean(undrafted), "time": ours.sum() / theirs.sum(),
        "interval": interval(len(ours), lambda picks: ours[picks].sum(1) / theirs[picks].sum(1)),
    }


def table(rows: Sequence[Mapping], reference: str) -> str:
    lines = [f"| tree | tokens/s | s/answer | time over {reference}'s (95%) | tau | cycles without a tree |",
             "|---" * 6 + "|"]
    lines += [f"| {row['method']} | {row['tokens_per_second']:.0f} | {row['seconds_per_answer']:.3f} | "
              f"{row['time']:.3f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f}) | {row['tau']:.2f} | "
              f"{100 * row['undrafted']:.0f}% |" for row in rows]
    return "\n".join(lines)


def prompts_of(kind: str, count: int, seed: int) -> list:
    """Prompts of one kind: tasks or python."""
    if kind == "tasks":
        return [task.messages for task in tasks("heldout", seed=seed, count=count)]
    prefixes = python_prefixes(100)[seed % 2 :: 2]  # none that two seeds share, none of the demo head's log
    if count > len(prefixes):
        raise ValueError(f"there are {len(prefixes)} Python prefixes for a seed, {count} were asked for")
    return prefixes[:count]


def grid_trees(draft_temperature: float) -> list[TreeConfig]:
    """All shapes of the grid. Where fewer nodes can be scored than it says, with as many as can; none of them twice."""
    shapes = (TreeConfig(*shape, draft_temperature) for shape in itertools.product(NODES, DEPTHS, TOP_KS))
    return list(dict.fromkeys(replace(tree, total_tokens=tree.nodes) for tree in shapes))


def compare(model: eagle_fsd.EagleModel, args: argparse.Namespace) -> dict:
    """Per kind of prompts the grid, its winner, and both `auto` and plain decoding beside it on fresh prompts."""
    auto = {"auto": engine(model, acceptance="exact")}
    plain = {"plain": engine(model, plain=True, acceptance="exact")}
    grid: dict[str, Method] = {name_of(tree): engine(model, acceptance="exact", tree=tree)
                               for tree in grid_trees(args.draft_temperature)}
    found = {}
    for kind in args.kinds:
        def measure(methods: dict, count: int, seed: int, repeats: int, kind: str = kind) -> list[dict]:
            answers = interleaved(methods, prompts_of(kind, count, seed), args.max_new_tokens, repeats)
            return [row_of(name, given, answers["auto"]) for name, given in answers.items()]

        rows = measure({**auto, **grid}, args.grid_prompts, 5, 1)
        best = min(rows[1:], key=lambda row: row["seconds_per_answer"])["method"]
        confirmed = measure({**auto, best: grid[best], **plain}, args.prompts, 6, 2)
        found[kind] = {"grid": rows, "best": best, "confirmed": confirmed,
                       "best_is_faster_by": 1 / confirmed[1]["time"] - 1}
    return found


def run(args: argparse.Namespace) -> None:
    check_counts(args, "grid_prompts", "prompts")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_pair(args)
    if model.trees is None or not model.trees.logs:
        raise ValueError("this head has no log to choose a tree by: run eagle-fsd tune first")
    found = compare(model, args)
    tree = model.describe_tree(None)
    sections = [f"Chosen: {tree}"]
    for kind, result in found.items():
        sections += [
            f"## {kind}: fresh prompts",
            f"The best of the grid, {result['best']}, against auto: {100 * result['best_is_faster_by']:+.1f}% speed.",
            table(result["confirmed"], "auto"), f"## {kind}: the grid (nodes, depth, top_k)",
            table(result["grid"], "auto")]
    print(write_record(args.out, {"tree": tree, "results": found}, "\n\n".join(sections)))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[model_options()])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--grid-prompts", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=24, help="fresh ones for the winner")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-temperature", type=float, default=0.5, help="of the fixed trees")
    parser.add_argument("--threads", type=int, help="of torch (default: as it comes)")
    parser.add_argument("--out", type=Path, default=Path("eval/results/trees"))
    return parser


def main() -> int:
    args = build_parser().parse_args()
    return exit_status("eval.trees", lambda: run(args), (ValueError, TypeError, OSError))


if __name__ == "__main__":
    sys.exit(main())
