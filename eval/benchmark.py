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

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm

import eagle_fsd
from eagle_fsd.cli.app import load_pair, model_options, parse_tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.experiments.methods import Answer, Method, engine, hf_generate, interleaved
from eagle_fsd.experiments.records import environment, record_path, write_record
from eagle_fsd.experiments.search import BASELINE
from eval import batches, step
from eval.profile import profile
from train.demo.corpus import python_prefixes
from train.demo.tasks import is_correct, tasks

LOOKUP = "prompt lookup"


def methods_of(
    model: eagle_fsd.EagleModel, tree: eagle_fsd.TreeConfig | None, fsd: list[float], tilt: list[float]
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


def summarise(answers: dict[str, list[Answer]], correct: dict[str, list[bool]] | None) -> list[dict]:
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


def table(rows: list[dict]) -> str:
    """The rows in Markdown. tau = tokens per target forward."""
    lines = [
        "| method | tokens/s | vs model.generate | vs plain | tau | s/answer | tokens/answer | accuracy | = greedy "
        "| fuzzy tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        accuracy = "" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}%"
        tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
        lines.append(
            f"| {row['method']} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x | "
            f"{row['speedup_over_plain']:.2f}x | {tau} | {row['seconds_per_answer']:.3f} | "
            f"{row['tokens_per_answer']:.0f} | {accuracy} | {100 * row['same_as_greedy']:.0f}% | "
            f"{100 * row['fuzzy_share']:.1f}% |"
        )
    return "\n".join(lines)


def family_accuracy(method: Method, count: int, max_new_tokens: int, *, seed: int, unseen_wording: bool) -> dict:
    """Accuracy of one method on fresh held-out tasks, per family and in all."""
    results = defaultdict(list)
    for task in tqdm(tasks("heldout", seed=seed, count=count, unseen_wording=unseen_wording), total=count,
                     desc="accuracy", unit="task", disable=None):
        right = is_correct(task, method(task.messages, max_new_tokens).text)
        results[task.family].append(right)
        results["all"].append(right)
    return {family: statistics.mean(right) for family, right in results.items()}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[model_options()])
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks, timed")
    parser.add_argument("--python", type=int, default=40, help="Python prefixes, timed")
    parser.add_argument("--accuracy-tasks", type=int, default=500, help="held-out tasks for accuracy per family")
    parser.add_argument("--unseen-tasks", type=int, default=200, help="the same in wordings never trained on")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--python-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=parse_tree)
    parser.add_argument("--fsd", type=float, nargs="*", default=[0.1, 0.3, 0.5])
    parser.add_argument("--tilt", type=float, nargs="*", default=[0.5, 2.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="compare by batch size instead")
    parser.add_argument("--prompt-lengths", type=int, nargs="+",
                        help="compare by tokens of the prompt instead, on pieces of Python source")
    parser.add_argument("--batch-prompts", type=int, default=16, help="prompts that every batch size answers")
    parser.add_argument("--out", type=Path, help="JSON file (default: eval/results/benchmark.json or batches.json)")
    return parser


def main() -> None:
    if "--step" in sys.argv[1:]:
        sys.exit(step.main([argument for argument in sys.argv[1:] if argument != "--step"]))
    parser = build_parser()
    args = parser.parse_args()
    try:
        check_counts(args, "tasks", "repeats", "batch_prompts")
        check_counts(args, "python", "accuracy_tasks", "unseen_tasks", least=0)
    except ValueError as error:
        parser.error(str(error))
    by_batch = bool(args.batch_sizes or args.prompt_lengths)
    args.out = args.out or Path("eval/results") / ("batches.json" if by_batch else "benchmark.json")
    torch.set_num_threads(args.threads)
    model = load_pair(args)
    (run_batches if by_batch else run_tables)(args, model)


def run_batches(args: argparse.Namespace, model: eagle_fsd.EagleModel) -> None:
    """Every batch size at every prompt length."""
    rows = batches.by_size(
        model, batches.batch_methods(model, args.tree, args.fsd), args.batch_sizes or [1],
        args.prompt_lengths or [None], prompts=args.batch_prompts, max_new_tokens=args.max_new_tokens,
        repeats=args.repeats, seed=args.seed)
    record = {"tree": model.describe_tree(args.tree), "dtype": str(model.target.dtype), "seed": args.seed,
              "repeats": args.repeats, "prompts": args.batch_prompts, "max_new_tokens": args.max_new_tokens,
              "rows": rows}
    print(write_record(args.out, record, batches.table(rows)))


def run_tables(args: argparse.Namespace, model: eagle_fsd.EagleModel) -> None:
    """The tables of one prompt after the other, the profile and accuracy."""
    methods = methods_of(model, args.tree, args.fsd, args.tilt)
    questions = list(tasks("heldout", seed=args.seed, count=args.tasks))
    record = {
        "environment": environment(), "tree": model.describe_tree(args.tree), "dtype": str(model.target.dtype),
        "seed": args.seed, "repeats": args.repeats, "task_count": args.tasks, "python_count": args.python,
        "python_tokens": args.python_tokens, "accuracy_tasks": args.accuracy_tasks, "unseen_tasks": args.unseen_tasks,
    }

    def store() -> None:
        """After every stage: what has been measured is not lost with a later one."""
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record_path(args.out, ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    answers = interleaved(methods, [t.messages for t in questions], args.max_new_tokens, args.repeats)
    correct = {name: [is_correct(t, a.text) for t, a in zip(questions, given, strict=True)]
               for name, given in answers.items()}
    record["tasks"] = summarise(answers, correct)
    store()
    print(f"\nHeld-out tasks ({args.tasks})\n\n{table(record['tasks'])}")

    if args.python:
        answers = interleaved(methods, python_prefixes(args.python), args.python_tokens, args.repeats)
        record["python"] = summarise(answers, None)
        store()
        print(f"\nPython prefixes ({args.python})\n\n{table(record['python'])}")

    record["profile"] = profile(model, [t.messages for t in questions[:30]], 128, acceptance="exact", tree=args.tree)
    store()
    print("\nMilliseconds per cycle:", json.dumps(record["profile"], indent=1))
    if args.accuracy_tasks:
        record["accuracy"] = family_accuracy(
            methods["exact"], args.accuracy_tasks, args.max_new_tokens, seed=args.seed + 1, unseen_wording=False)
        store()
        print("\nAccuracy, greedy:", json.dumps(record["accuracy"], indent=1))
    if args.unseen_tasks:
        record["accuracy_unseen_wordings"] = family_accuracy(
            methods["exact"], args.unseen_tasks, args.max_new_tokens, seed=args.seed + 2, unseen_wording=True)
        print("\nAccuracy, wordings never trained on:", json.dumps(record["accuracy_unseen_wordings"], indent=1))
    store()
    about = record["environment"]
    record_path(args.out, ".md").write_text(
        f"# {record_path(args.out, '').name}\n\n`{about['command']}` at {about['commit']}\n\n"
        f"## Held-out tasks\n\n{table(record['tasks'])}\n"
        + (f"\n## Python prefixes\n\n{table(record['python'])}\n" if args.python else ""))


if __name__ == "__main__":
    main()
