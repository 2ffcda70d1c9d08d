"""Is the chosen tree the right one? `tree="auto"` against a grid of fixed trees, the best of them on fresh prompts too.

    python -m eval.trees --out eval/results/trees

Every method answers every prompt in turn (interleaved). The grid's winner is chosen on the first prompts and measured
again, beside `auto`, on others, since the fastest of many is partly lucky. Alone on the machine. What `auto` costs
where a head is useless: eval.useless_head.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import eagle_fsd
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.measure.methods import Answer, Method, engine, interleaved
from eagle_fsd.measure.records import write_record
from eval.command import run_command
from eval.report.intervals import ratio_interval
from eval.report.tables import markdown, percent, span
from train.tasks.generator import tasks
from train.tasks.source import python_prefixes

GRID_NODES, GRID_DEPTHS, GRID_TOP_KS = (6, 10, 16, 24, 40), (4, 8, 14), (1, 2, 4)
PROMPT_KINDS = ("tasks", "python")


@dataclass(frozen=True)
class TreesArguments:
    """What `eval.trees` compares.

    Args:
        kinds: of prompts.
        grid_prompts: of each kind, for the whole grid.
        prompts: fresh ones for the winner.
        max_new_tokens: of an answer.
        draft_temperature: of the fixed trees.
        threads: of torch; without it as many as it takes.
        out: files for what is found, without suffix.
    """

    pair: Loading = Loading()
    kinds: tuple[Literal[PROMPT_KINDS], ...] = PROMPT_KINDS
    grid_prompts: int = 8
    prompts: int = 24
    max_new_tokens: int = 128
    draft_temperature: float = 0.5
    threads: int | None = None
    out: Path = Path("eval/results/trees")


def name_of(tree: TreeConfig) -> str:
    return f"{tree.total_tokens},{tree.depth},{tree.top_k}"


def timing_row(name: str, given: Sequence[Answer], reference: Sequence[Answer]) -> dict:
    """Speed of one method, and its time over another's with a 95% bootstrap interval over prompts."""
    ours, theirs = (np.array([answer.seconds for answer in each]) for each in (given, reference))
    lengths = [length + 1 for answer in given if answer.output for length in answer.output.stats.accepted_lengths]
    undrafted = [answer.output.stats.undrafted / max(1, answer.output.stats.target_forwards)
                 for answer in given if answer.output]
    return {
        "method": name, "tokens_per_second": sum(len(answer.token_ids) for answer in given) / ours.sum(),
        "seconds_per_answer": ours.mean(), "tau": statistics.fmean(lengths or [1]),
        "undrafted": statistics.fmean(undrafted), "time": ours.sum() / theirs.sum(),
        "interval": ratio_interval(ours, theirs),
    }


def timing_table(rows: Sequence[Mapping], reference: str) -> str:
    """The rows in Markdown. tau = tokens per target forward."""
    return markdown({
        "tree": row["method"], "tokens/s": f"{row['tokens_per_second']:.0f}",
        "s/answer": f"{row['seconds_per_answer']:.3f}",
        f"time over {reference}'s (95%)": f"{row['time']:.3f} ({span(row['interval'])})", "tau": f"{row['tau']:.2f}",
        "cycles without a tree": percent(row["undrafted"]),
    } for row in rows)


def prompts_of(kind: str, count: int, seed: int) -> list:
    """Prompts of one kind: tasks or python."""
    if kind == "tasks":
        return [task.messages for task in tasks("heldout", seed=seed, count=count)]
    prefixes = python_prefixes(100)[seed % 2 :: 2]  # none that two seeds share
    if count > len(prefixes):
        raise ValueError(f"there are {len(prefixes)} Python prefixes for a seed, {count} were asked for")
    return prefixes[:count]


def grid_trees(draft_temperature: float) -> list[TreeConfig]:
    """All shapes of the grid. Where fewer nodes can be scored than it says, with as many as can; none of them twice."""
    grid = itertools.product(GRID_NODES, GRID_DEPTHS, GRID_TOP_KS)
    shapes = (TreeConfig(*shape, draft_temperature) for shape in grid)
    return list(dict.fromkeys(replace(tree, total_tokens=tree.nodes) for tree in shapes))


def compare_with_grid(model: eagle_fsd.EagleModel, args: TreesArguments) -> dict:
    """Per kind of prompts the grid, its winner, and both `auto` and plain decoding beside it on fresh prompts."""
    auto = {"auto": engine(model, acceptance="exact")}
    plain = {"plain": engine(model, plain=True, acceptance="exact")}
    grid: dict[str, Method] = {name_of(tree): engine(model, acceptance="exact", tree=tree)
                               for tree in grid_trees(args.draft_temperature)}
    found = {}
    for kind in args.kinds:
        def measure(methods: dict, count: int, seed: int, repeats: int, kind: str = kind) -> list[dict]:
            answers = interleaved(methods, prompts_of(kind, count, seed), args.max_new_tokens, repeats)
            return [timing_row(name, given, answers["auto"]) for name, given in answers.items()]

        rows = measure({**auto, **grid}, args.grid_prompts, 5, 1)
        best = min(rows[1:], key=lambda row: row["seconds_per_answer"])["method"]
        confirmed = measure({**auto, best: grid[best], **plain}, args.prompts, 6, 2)
        found[kind] = {"grid": rows, "best": best, "confirmed": confirmed,
                       "best_is_faster_by": 1 / confirmed[1]["time"] - 1}
    return found


def run(args: TreesArguments) -> None:
    check_counts(args, "grid_prompts", "prompts")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.pair.load()
    if model.trees is None or not model.trees.logs:
        raise ValueError("this head has no log to choose a tree by: run eagle-fsd tune first")
    found = compare_with_grid(model, args)
    tree = model.describe_tree(None)
    sections = [f"Chosen: {tree}"]
    for kind, result in found.items():
        sections += [
            f"## {kind}: fresh prompts",
            f"The best of the grid, {result['best']}, against auto: {100 * result['best_is_faster_by']:+.1f}% speed.",
            timing_table(result["confirmed"], "auto"), f"## {kind}: the grid (nodes, depth, top_k)",
            timing_table(result["grid"], "auto")]
    print(write_record(args.out, {"tree": tree, "results": found}, "\n\n".join(sections)))


main = partial(run_command, "eval.trees", TreesArguments, run)

if __name__ == "__main__":
    sys.exit(main())
