"""Is the chosen tree the right one? `tree="auto"` against a grid of fixed trees, the best of them on fresh prompts too.

    python -m eval.trees --out eval/results/trees

Every method answers every prompt in turn (interleaved). The grid's winner is chosen on the first prompts and measured
again, beside `auto`, on others, since the fastest of many is partly lucky. Also: prompts that no head can know (random
tokens), on which `auto` should cost no more than plain decoding. Alone on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import eagle_fsd
from eagle_fsd.cli import exit_status, load_pair, model_options
from eagle_fsd.config import TreeConfig
from eagle_fsd.methods import Answer, Method, engine, interleaved
from eval.bootstrap import interval
from eval.environment import environment
from train.corpus import python_prefixes
from train.tasks import tasks

NODES, DEPTHS, TOP_KS = (6, 10, 16, 24, 40), (4, 8, 14), (1, 2, 4)
KINDS = ("tasks", "python", "random")


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
        "seconds_per_answer": ours.mean(), "tau": statistics.fmean(lengths), "undrafted": statistics.fmean(undrafted),
        "time": ours.sum() / theirs.sum(),
        "interval": interval(len(ours), lambda picks: ours[picks].sum(1) / theirs[picks].sum(1)),
    }


def table(rows: Sequence[Mapping], reference: str) -> str:
    lines = [f"| tree | tokens/s | s/answer | time over {reference}'s (95%) | tau | cycles without a tree |",
             "|---" * 6 + "|"]
    lines += [f"| {row['method']} | {row['tokens_per_second']:.0f} | {row['seconds_per_answer']:.3f} | "
              f"{row['time']:.3f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f}) | {row['tau']:.2f} | "
              f"{100 * row['undrafted']:.0f}% |" for row in rows]
    return "\n".join(lines)


def prompts_of(kind: str, count: int, seed: int, vocabulary: int) -> list:
    """Prompts of one kind: tasks, python or random tokens."""
    if kind == "tasks":
        return [task.messages for task in tasks("heldout", seed=seed, count=count)]
    if kind == "python":
        prefixes = python_prefixes(100)[seed % 2 :: 2]  # none that two seeds share, none of the demo head's log
        if count > len(prefixes):
            raise ValueError(f"there are {len(prefixes)} Python prefixes for a seed, {count} were asked for")
        return prefixes[:count]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, 64), generator=generator).tolist()


def compare(model: eagle_fsd.EagleModel, args: argparse.Namespace) -> dict:
    """The grid, its winner on fresh prompts, and random tokens."""
    auto = {"auto": engine(model, acceptance="exact")}
    plain = {"plain": engine(model, plain=True, acceptance="exact")}
    grid: dict[str, Method] = {}
    for shape in itertools.product(NODES, DEPTHS, TOP_KS):
        tree = TreeConfig(*shape, draft_temperature=args.draft_temperature)
        if tree.nodes == tree.total_tokens:  # others would be smaller trees of another name
            grid[name_of(tree)] = engine(model, acceptance="exact", tree=tree)
    found = {}
    for kind in args.kinds:
        def measure(methods: dict, count: int, seed: int, repeats: int, reference: str, kind: str = kind) -> list[dict]:
            prompts = prompts_of(kind, count, seed, model.target.vocab_size)
            answers = interleaved(methods, prompts, args.max_new_tokens, repeats)
            return [row_of(name, given, answers[reference]) for name, given in answers.items()]

        if kind == "random":
            found[kind] = {"confirmed": measure({**auto, **plain}, args.prompts, 7, 3, "plain")}
            continue
        rows = measure({**auto, **grid}, args.grid_prompts, 5, 1, "auto")
        best = min(rows[1:], key=lambda row: row["seconds_per_answer"])["method"]
        found[kind] = {"grid": rows, "best": best, "confirmed": measure(
            {**auto, best: grid[best], **plain}, args.prompts, 6, 2, "auto")}
    return found


def run(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_pair(args)
    if model.trees is None:
        raise ValueError("this head has no log to choose a tree by: run eagle-fsd tune first")
    found = compare(model, args)
    record = {"environment": environment(), "tree": model.describe_tree(None), "results": found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = f"# {args.out.name}\n\n`{record['environment']['command']}` at {record['environment']['commit']}\n\n" \
           f"Chosen: {record['tree']}\n"
    for kind, result in found.items():
        text += f"\n## {kind}: fresh prompts\n\n{table(result['confirmed'], 'plain' if kind == 'random' else 'auto')}\n"
        if "grid" in result:
            text += f"\n## {kind}: the grid (nodes, depth, top_k)\n\n{table(result['grid'], 'auto')}\n"
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


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
