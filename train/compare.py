"""Compare training objectives at equal training time on the demo pair.

    python -m train.compare --work runs/compare --seconds 60

Every objective trains for the same wall-clock time (alone on the machine, features from disk) with each of three
learning rates; its best rate is run with two more seeds. tau is measured by real greedy decoding of held-out tasks,
accuracy for `fsd` on held-out tasks. Finished runs are kept in `results.jsonl` and not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

import eagle_fsd
from eagle_fsd.config import TreeConfig
from eagle_fsd.model import load_target
from eagle_fsd.target import TargetModel
from eval.environment import environment
from train.config import make_config
from train.data import Documents
from train.features import write_features
from train.objectives import OBJECTIVES
from train.tasks import is_correct, tasks
from train.train_draft_head import train

log = logging.getLogger("train.compare")

RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (0, 1, 2)
THRESHOLDS = (0.1, 0.3)
TREE = (16, 5, 3, 0.5)


def run_settings(args: argparse.Namespace, objective: str, lr: float, seed: int, steps: int, output: Path) -> dict:
    published = objective == "eagle"
    return {
        "target": args.target, "data": args.data, "eval_data": str(args.eval_data), "output": output,
        "features": str(args.work / "features"), "objective": objective, "lr": lr, "seed": seed, "steps": steps,
        "batch_tokens": args.batch_tokens, "warmup": max(1, steps // 20), "clip": "value" if published else "norm",
        "target_dtype": "float32", "head": {"intermediate_size": args.intermediate_size}, "tree": list(TREE),
        "save_every": 10**6, "evaluate": False, "tracker": "none",
    }


def seconds_per_step(args: argparse.Namespace, objective: str) -> float:
    """Measured over a short run, without its start and its evaluation."""
    output = args.work / "timing" / objective
    if not (output / "head").exists():
        train(make_config(run_settings(args, objective, 1e-3, 0, 12, output)), cpu=args.device == "cpu")
    lines = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    tokens = itertools.accumulate(line["tokens"] for line in lines)
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, lines, strict=True)]
    return (seconds[-1] - seconds[1]) / (len(lines) - 2)


def results(path: Path) -> Iterator[dict]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def measured(args: argparse.Namespace, objective: str, lr: float, seed: int, accuracy: bool) -> dict:
    """The record of one run, made where it is not there yet."""
    path = args.work / "results.jsonl"
    wanted = {"objective": objective, "lr": lr, "seed": seed, "accuracy_measured": accuracy}
    for record in results(path):
        if all(record[name] == value for name, value in wanted.items()):
            return record
    per_step = seconds_per_step(args, objective)
    steps = max(20, round(args.seconds / per_step))
    output = args.work / f"{objective}-{lr:g}-{seed}"
    started = time.perf_counter()
    head = train(make_config(run_settings(args, objective, lr, seed, steps, output)), cpu=args.device == "cpu")
    record = {**wanted, "steps": steps, "seconds_per_step": per_step, "run_seconds": time.perf_counter() - started}
    record |= decode(args, head, accuracy)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record


def decode(args: argparse.Namespace, head: Path, accuracy: bool) -> dict:
    """tau of exact and of fsd at two thresholds and, where asked for, accuracy of fsd, by real decoding."""
    model = eagle_fsd.load(args.target, head, device=args.device)
    chosen = list(tasks("heldout", seed=11, count=args.tasks if accuracy else args.prompts))
    rules = {"exact": ("exact", None), **{f"fsd {t:g}": ("fsd", t) for t in THRESHOLDS}}
    found: dict[str, float] = {}
    for name, (rule, threshold) in rules.items():
        lengths, correct, sizes, seconds = [], [], [], 0.0
        count = len(chosen) if accuracy and rule == "fsd" else args.prompts
        for task in tqdm(chosen[:count], desc=name, unit="task", disable=None, leave=False):
            output = eagle_fsd.generate(
                task.messages, model, acceptance=rule, threshold=threshold, tree=TreeConfig(*TREE), max_new_tokens=256
            )
            lengths += [length + 1 for length in output.stats.accepted_lengths]
            correct.append(is_correct(task, output.text or ""))
            sizes.append(output.stats.new_tokens)
            seconds += output.stats.prefill_seconds + output.stats.decode_seconds
        found |= {f"tau {name}": statistics.fmean(lengths), f"tokens/s {name}": sum(sizes) / seconds,
                  f"length {name}": statistics.fmean(sizes)}
        if count == len(chosen) and accuracy:
            found[f"accuracy {name}"] = statistics.fmean(correct)
    return found


def compare(args: argparse.Namespace) -> list[dict]:
    """One row per objective: its best rate, means over seeds."""
    rows = []
    for objective in args.objectives:
        tried = {lr: measured(args, objective, lr, SEEDS[0], False) for lr in RATES}
        best = max(tried, key=lambda lr: tried[lr]["tau exact"])
        runs = [measured(args, objective, best, seed, True) for seed in SEEDS]
        numbers = {name: [run[name] for run in runs] for name in runs[0] if isinstance(runs[0][name], float)}
        rows.append({"objective": objective, "lr": best, "steps": runs[0]["steps"],
                     "rates": {f"{lr:g}": run["tau exact"] for lr, run in tried.items()},
                     **{name: statistics.fmean(values) for name, values in numbers.items()},
                     "sd tau exact": statistics.stdev(numbers["tau exact"])})
        log.info("%s: tau %.3f at lr %g", objective, rows[-1]["tau exact"], best)
    return rows


def table(rows: list[dict], baseline: str = "eagle") -> str:
    """The Markdown table of all objectives, best first."""
    base = next((row["tau exact"] for row in rows if row["objective"] == baseline), None)
    lines = ["| objective | lr | s/step | steps | tau exact (sd) | over `eagle` | tokens/s exact | "
             + " | ".join(f"tau fsd {t:g} | accuracy | tokens" for t in THRESHOLDS) + " |",
             "|---" * (7 + 3 * len(THRESHOLDS)) + "|"]
    for row in sorted(rows, key=lambda row: -row["tau exact"]):
        gain = f"{100 * (row['tau exact'] / base - 1):+.1f}%" if base else "-"
        fuzzy = " | ".join(
            f"{row[f'tau fsd {t:g}']:.2f} | {100 * row[f'accuracy fsd {t:g}']:.0f}% | {row[f'length fsd {t:g}']:.0f}"
            for t in THRESHOLDS
        )
        lines.append(f"| {row['objective']} | {row['lr']:g} | {row['seconds_per_step']:.2f} | {row['steps']} | "
                     f"{row['tau exact']:.3f} ({row['sd tau exact']:.3f}) | {gain} | {row['tokens/s exact']:.0f} | "
                     f"{fuzzy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/demo-target")
    parser.add_argument("--work", type=Path, default=Path("runs/compare"))
    parser.add_argument("--data", type=Path, default=Path("runs/demo/head-text"))
    parser.add_argument("--eval-data", type=Path, default=Path("runs/demo/head-eval"))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each run")
    parser.add_argument("--batch-tokens", type=int, default=12_288)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--prompts", type=int, default=32, help="held-out tasks that tau is measured on")
    parser.add_argument("--tasks", type=int, default=96, help="held-out tasks that accuracy is measured on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("eval/results/objectives"), help="of the .json and .md")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    args.work.mkdir(parents=True, exist_ok=True)
    model, _ = load_target(args.target, dtype="bfloat16", device=args.device)
    write_features(TargetModel(model, check=False), Documents.load(args.data), args.work / "features")
    rows = compare(args)
    record = {"environment": environment(), "arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
