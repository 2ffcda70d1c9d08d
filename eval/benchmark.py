"""Speed and quality on held-out tasks and Python prefixes, all methods interleaved in one run.

    python -m eval.benchmark --tasks 100 --python 40 --accuracy-tasks 500 --out eval/results/benchmark.json
    python -m eval.benchmark --batch-sizes 1 2 4 8                         # batches of held-out tasks: eval.batches
    python -m eval.benchmark --batch-sizes 1 4 --prompt-lengths 64 512 2048
    python -m eval.benchmark --step --shape llama-3.1-8b                   # one cycle, random weights: eval.step

Every prompt is answered by every method before the next one, in an order that rotates; the first prompts are run
once unmeasured. Speed is a ratio of tokens/s over the same prompts; `--repeats` measures each answer several times
and takes the median. The table goes to standard output, everything else into the JSON file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import eagle_fsd
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.experiments.methods import Answer, Method, engine, hf_generate, interleaved
from eagle_fsd.experiments.records import environment, record_path, write_json, write_page, write_record
from eagle_fsd.experiments.search import BASELINE
from eval import batches, step
from eval.command import run_command
from eval.profile import profile_cycles
from eval.report.tables import markdown, percent
from train.tasks.generator import is_correct, tasks
from train.tasks.source import python_prefixes

LOOKUP = "prompt lookup"


@dataclass(frozen=True)
class BenchmarkArguments:
    """What `eval.benchmark` compares.

    Args:
        tasks: held-out tasks, timed.
        python: Python prefixes, timed.
        accuracy_tasks: held-out tasks for accuracy per family.
        unseen_tasks: the same in wordings never trained on.
        max_new_tokens: of an answer to a task.
        python_tokens: of the continuation of a prefix.
        repeats: timed runs of each answer, of which the median counts.
        threads: of torch.
        seed: of the tasks.
        tree: of exact and of the rules.
        fsd: thresholds of fsd.
        tilt: thresholds of tilt.
        batch_sizes: compare by batch size instead.
        prompt_lengths: compare by tokens of the prompt instead, on pieces of Python source.
        batch_prompts: prompts that every batch size answers.
        out: JSON file; without it eval/results/benchmark.json or batches.json.
    """

    pair: Loading = Loading()
    tasks: int = 100
    python: int = 40
    accuracy_tasks: int = 500
    unseen_tasks: int = 200
    max_new_tokens: int = 256
    python_tokens: int = 128
    repeats: int = 3
    threads: int = 2
    seed: int = 1
    tree: Tree = None
    fsd: tuple[float, ...] = (0.1, 0.3, 0.5)
    tilt: tuple[float, ...] = (0.5, 2.0)
    batch_sizes: tuple[int, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    batch_prompts: int = 16
    out: Path | None = None


def methods_of(
    model: eagle_fsd.EagleModel, tree: eagle_fsd.TreeConfig | None, fsd: Sequence[float], tilt: Sequence[float]
) -> dict[str, Method]:
    """The compared methods by name."""
    methods = {
        BASELINE: hf_generate(model),
        LOOKUP: hf_generate(model, prompt_lookup_num_tokens=10),
        "plain": engine(model, plain=True, acceptance="exact"),
        "exact": engine(model, acceptance="exact", tree=tree),
    }
    for name, dials in (("fsd", fsd), ("tilt", tilt)):
        for dial in dials:
            methods[f"{name} {dial:g}"] = engine(model, acceptance=name, threshold=dial, tree=tree)
    return methods


def method_rows(answers: dict[str, list[Answer]], correct: dict[str, list[bool]] | None) -> list[dict]:
    """One row per method."""
    def rate(name: str) -> float:
        return sum(len(a.token_ids) for a in answers[name]) / sum(a.seconds for a in answers[name])

    reference = [a.token_ids for a in answers[BASELINE]]
    rows = []
    for name, given in answers.items():
        lengths = [length for a in given if a.output for length in a.output.stats.accepted_lengths]
        sources = [r.source for a in given if a.output for r in a.output.receipts]
        rows.append({
            "method": name,
            "tokens_per_second": rate(name),
            "speedup": rate(name) / rate(BASELINE),
            "speedup_over_plain": rate(name) / rate("plain"),
            "tau": None if name == LOOKUP else sum(lengths) / len(lengths) + 1 if lengths else 1.0,
            "seconds_per_answer": statistics.mean(a.seconds for a in given),
            "tokens_per_answer": statistics.mean(len(a.token_ids) for a in given),
            "accuracy": statistics.mean(correct[name]) if correct else None,
            "same_as_greedy": statistics.mean(a.token_ids == r for a, r in zip(given, reference, strict=True)),
            "fuzzy_share": sources.count("fuzzy") / len(sources) if sources else 0.0,
        })
    return rows


def method_table(rows: Sequence[dict]) -> str:
    """The rows in Markdown. tau = tokens per target forward."""
    return markdown({
        "method": row["method"], "tokens/s": f"{row['tokens_per_second']:.0f}",
        "vs model.generate": f"{row['speedup']:.2f}x", "vs plain": f"{row['speedup_over_plain']:.2f}x",
        "tau": "" if row["tau"] is None else f"{row['tau']:.2f}", "s/answer": f"{row['seconds_per_answer']:.3f}",
        "tokens/answer": f"{row['tokens_per_answer']:.0f}",
        "accuracy": "" if row["accuracy"] is None else percent(row["accuracy"], 1),
        "= greedy": percent(row["same_as_greedy"]), "fuzzy tokens": percent(row["fuzzy_share"], 1),
    } for row in rows)


def family_accuracy(method: Method, count: int, max_new_tokens: int, *, seed: int, unseen_wording: bool) -> dict:
    """Accuracy of one method on fresh held-out tasks, per family and in all."""
    results = defaultdict(list)
    for task in tqdm(tasks("heldout", seed=seed, count=count, unseen_wording=unseen_wording), total=count,
                     desc="accuracy", unit="task", disable=None):
        right = is_correct(task, method(task.messages, max_new_tokens).text)
        results[task.family].append(right)
        results["all"].append(right)
    return {family: statistics.mean(right) for family, right in results.items()}


def run(args: BenchmarkArguments) -> None:
    check_counts(args, "tasks", "repeats", "batch_prompts")
    check_counts(args, "python", "accuracy_tasks", "unseen_tasks", least=0)
    torch.set_num_threads(args.threads)
    by_batch = bool(args.batch_sizes or args.prompt_lengths)
    out = args.out or Path("eval/results") / ("batches.json" if by_batch else "benchmark.json")
    (run_batches if by_batch else run_tables)(args, args.pair.load(), out)


def run_batches(args: BenchmarkArguments, model: eagle_fsd.EagleModel, out: Path) -> None:
    """Every batch size at every prompt length."""
    rows = batches.by_size(
        model, batches.batch_methods(model, args.tree, args.fsd), args.batch_sizes or [1],
        args.prompt_lengths or [None], prompts=args.batch_prompts, max_new_tokens=args.max_new_tokens,
        repeats=args.repeats, seed=args.seed)
    record = {"tree": model.describe_tree(args.tree), "dtype": str(model.target.dtype), "seed": args.seed,
              "repeats": args.repeats, "prompts": args.batch_prompts, "max_new_tokens": args.max_new_tokens,
              "rows": rows}
    print(write_record(out, record, batches.batch_table(rows)))


def run_tables(args: BenchmarkArguments, model: eagle_fsd.EagleModel, out: Path) -> None:
    """The tables of one prompt after the other, the profile and accuracy."""
    methods = methods_of(model, args.tree, args.fsd, args.tilt)
    questions = list(tasks("heldout", seed=args.seed, count=args.tasks))
    chats = [task.messages for task in questions]
    record: dict[str, object] = {
        "environment": environment(), "tree": model.describe_tree(args.tree), "dtype": str(model.target.dtype),
        "seed": args.seed, "repeats": args.repeats, "task_count": args.tasks, "python_count": args.python,
        "python_tokens": args.python_tokens, "accuracy_tasks": args.accuracy_tasks, "unseen_tasks": args.unseen_tasks,
    }
    tables: dict[str, str] = {}

    def note(name: str, title: str, found: list | dict) -> None:
        """Shown and stored at once, so that what has been measured is not lost with a later stage."""
        record[name] = found
        write_json(record_path(out, ".json"), record)
        if isinstance(found, list):
            tables[title] = method_table(found)
        print(f"\n{title}\n\n{tables[title] if title in tables else json.dumps(found, indent=1)}")

    answers = interleaved(methods, chats, args.max_new_tokens, args.repeats)
    correct = {name: [is_correct(task, answer.text) for task, answer in zip(questions, given, strict=True)]
               for name, given in answers.items()}
    note("tasks", f"Held-out tasks ({args.tasks})", method_rows(answers, correct))
    if args.python:
        answers = interleaved(methods, python_prefixes(args.python), args.python_tokens, args.repeats)
        note("python", f"Python prefixes ({args.python})", method_rows(answers, None))
    note("profile", "Milliseconds per cycle",
         profile_cycles(model, chats[:30], 128, acceptance="exact", tree=args.tree))
    for name, title, count, unseen in (
        ("accuracy", "Accuracy, greedy", args.accuracy_tasks, False),
        ("accuracy_unseen_wordings", "Accuracy, wordings never trained on", args.unseen_tasks, True),
    ):
        if count:
            note(name, title, family_accuracy(methods["exact"], count, args.max_new_tokens,
                                              seed=args.seed + 1 + unseen, unseen_wording=unseen))
    write_page(out, record["environment"], "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items()))


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--step" in words:
        return step.main([word for word in words if word != "--step"])
    return run_command("eval.benchmark", BenchmarkArguments, run, words)


if __name__ == "__main__":
    sys.exit(main())
