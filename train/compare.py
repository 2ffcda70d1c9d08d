"""Compare training objectives at equal training time.

    python -m train.compare --target TARGET --data DATA --eval-data HELD_OUT --work runs/compare --seconds 60

Every objective trains for the same time with each of three learning rates; its best rate is run with two more seeds
for tau; fuzzy rules are decoded with the first head. Objectives whose names begin with `eagle3` train EAGLE-3 heads.
The time is turned into a number of steps by a first measurement of seconds per step (features from disk; all objectives
in turn, the median of three rounds after one that warms up), which has to be alone on the machine, as the last one of
tokens/s; what lies between may be disturbed. tau is measured by real
greedy decoding of held-out tasks, accuracy for `fsd` on more of them. Finished runs are kept in `results.jsonl` and
not repeated; `about.json` says what they depend on, and a work folder is not continued with anything else.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tyro.extras import literal_type_from_choices

import eagle_fsd
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import append_lines, only_writer, read_lines, save_atomically
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.heads.eagle3 import default_layers
from eagle_fsd.measure.methods import Answer, engine, interleaved
from eagle_fsd.measure.records import shown_settings, write_record
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel
from train.core.config import make_config
from train.core.objectives import OBJECTIVES
from train.features import write_features
from train.tasks.generator import is_correct, tasks
from train.train_draft_head import train

log = logging.getLogger("train.compare")

RULES: dict[str, dict] = {  # name in the records -> options of eagle_fsd.generate
    "exact": {"acceptance": "exact"},
    "fsd 0.1": {"acceptance": "fsd", "threshold": 0.1},
    "fsd 0.3": {"acceptance": "fsd", "threshold": 0.3},
}
TREE = (32, 16, 2, 0.5)  # one of 5 levels would hide all beyond a tau of 6
NEW_TOKENS = 256
ROUNDS = 3  # of timings that count


def of_eagle3(objective: str) -> bool:
    """Whether it trains the other kind of head, which reads features of its own."""
    return objective.startswith("eagle3")


@dataclass(frozen=True)
class Arguments:
    """Compare training objectives at equal training time.

    Args:
        data: dataset that is learned.
        eval_data: dataset for the held-out loss.
        target: directory or hub id.
        work: folder of the runs, in which an interrupted comparison goes on.
        objectives: which are compared; those whose names begin with eagle3 train EAGLE-3 heads.
        seconds: training time of each run.
        batch_tokens: of one step.
        intermediate_size: of the heads.
        rates: learning rates that are tried.
        seeds: runs with the best of them.
        draft_vocab_size: of EAGLE-3 heads; default all of the target's tokens.
        prompts: held-out tasks that tau is measured on.
        tasks: held-out tasks that accuracy is measured on.
        device: where everything runs; default CUDA where available, else the CPU.
        out: where the record goes, without .json and .md.
    """

    data: Path
    eval_data: Path
    target: str = "checkpoints/small-target"
    work: Path = Path("runs/compare")
    objectives: tuple[literal_type_from_choices(OBJECTIVES), ...] = tuple(
        name for name in OBJECTIVES if not of_eagle3(name))
    seconds: float = 60.0
    batch_tokens: int = 4096
    intermediate_size: int = 768
    rates: tuple[float, ...] = (3e-3, 8e-3, 2e-2)
    seeds: int = 3
    draft_vocab_size: int | None = None
    prompts: int = 32
    tasks: int = 64
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    out: Path = Path("eval/results/objectives")


def begin(args: Arguments) -> None:
    """Write into the work folder what its records depend on, before the first one.

    Raises:
        ValueError: it holds records of something else, or records of which nobody knows what they depend on.
    """
    paths = {name: getattr(args, name) for name in ("target", "data", "eval_data", "device")}
    numbers = ("seconds", "batch_tokens", "intermediate_size", "draft_vocab_size", "prompts", "tasks")
    about = {**shown_settings(paths), **{name: getattr(args, name) for name in numbers},
             "tree": list(TREE), "new_tokens": NEW_TOKENS, "rules": RULES}
    path = args.work / "about.json"
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        changed = [f"{name} {begun.get(name)!r} (now {value!r})" for name, value in about.items()
                   if begun.get(name) != value]
        if changed:
            raise ValueError(f"{args.work} was begun with another {', '.join(changed)}; choose another --work")
        return
    found = [name for name in ("results.jsonl", "steps.jsonl", "timing") if (args.work / name).exists()]
    if found:
        raise ValueError(f"{args.work} holds {', '.join(found)} but no about.json to say what was measured (older "
                         "versions wrote none): it cannot be continued; choose another --work")
    args.work.mkdir(parents=True, exist_ok=True)
    save_atomically(path, lambda part: part.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8"))


def run_settings(args: Arguments, objective: str, lr: float, seed: int, steps: int, output: Path) -> dict:
    published = objective == "eagle"
    head = {"intermediate_size": args.intermediate_size}
    if of_eagle3(objective):
        head |= {"kind": "eagle3", "draft_vocab_size": args.draft_vocab_size}
    return {
        "target": args.target, "data": args.data, "eval_data": str(args.eval_data), "output": output,
        "features": str(features_folder(args, objective)), "objective": objective, "lr": lr, "seed": seed,
        "steps": steps, "batch_tokens": args.batch_tokens, "warmup": max(1, steps // 20),
        "clip": "value" if published else "norm", "target_dtype": "float32", "head": head, "tree": list(TREE),
        "save_every": 10**6, "evaluate": False, "tracker": "none",
    }


def features_folder(args: Arguments, objective: str) -> Path:
    return args.work / ("features-eagle3" if of_eagle3(objective) else "features")


def prepare_features(args: Arguments) -> None:
    """What the heads of these objectives read, written once."""
    model, _ = load_target(args.target, dtype="bfloat16", device=args.device)
    target, documents = TargetModel(model, check=False), Documents.load(args.data)
    for wide in {of_eagle3(objective) for objective in args.objectives}:
        target.layers = default_layers(len(target.decoder_layers)) if wide else ()
        write_features(target, documents, features_folder(args, "eagle3" if wide else "eagle"))


def timing(args: Arguments, objective: str, number: int) -> float:
    """Seconds per step of a short run, without its start and its evaluation."""
    output = args.work / "timing" / f"{objective}-{number}"
    if not (output / "head").exists():
        train(make_config(run_settings(args, objective, 1e-3, 0, 24, output)), cpu=args.device == "cpu")
    lines = read_lines(output / "train.jsonl")
    tokens = itertools.accumulate(line["tokens"] for line in lines)
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, lines, strict=True)]
    return (seconds[-1] - seconds[3]) / (len(lines) - 4)


def measure_steps(args: Arguments) -> dict[str, float]:
    """Seconds per step of each objective, all under the same conditions; once per work folder."""
    path = args.work / "steps.jsonl"
    known = {line["objective"]: line["seconds"] for line in read_lines(path)}
    wanted = [objective for objective in args.objectives if objective not in known]
    found = {objective: [] for objective in wanted}
    for number in range(ROUNDS + 1):  # the first work of a process is slower: memory is yet to be claimed
        for objective in wanted:
            seconds = timing(args, objective, number)
            found[objective] += [seconds] if number else []
    append_lines(path, [{"objective": objective, "seconds": statistics.median(rounds), "rounds": rounds}
                        for objective, rounds in found.items()])
    return known | {objective: statistics.median(rounds) for objective, rounds in found.items()}


def head_folder(args: Arguments, objective: str, lr: float, seed: int) -> Path:
    return args.work / f"{objective}-{lr:g}-{seed}"


def measured(
    args: Arguments, per_step: float, objective: str, lr: float, seed: int, rules: tuple[str, ...]
) -> dict:
    """The record of one run and these rules, made where it is not there yet."""
    path = args.work / "results.jsonl"
    wanted = {"objective": objective, "lr": lr, "seed": seed, "rules": list(rules)}
    for record in read_lines(path):
        if all(record[name] == value for name, value in wanted.items()):
            return record
    steps = max(20, round(args.seconds / per_step))
    settings = run_settings(args, objective, lr, seed, steps, head_folder(args, objective, lr, seed))
    head = train(make_config(settings), cpu=args.device == "cpu")
    record = {**wanted, "steps": steps, "seconds_per_step": per_step}
    for rule in rules:
        record |= decode(args, head, rule)
    append_lines(path, [record])
    return record


def load(args: Arguments, head: Path) -> EagleModel:
    """The pair, with one tree for all heads."""
    return eagle_fsd.load(args.target, head, device=args.device, tree=TreeConfig(*TREE))


def decode(args: Arguments, head: Path, rule: str) -> dict:
    """tau, length and accuracy of one rule of RULES by real decoding; `exact` on fewer tasks, its accuracy is known."""
    count = args.prompts if rule == "exact" else args.tasks
    answer = engine(load(args, head), **RULES[rule])
    chosen = list(tasks("heldout", seed=11, count=count))
    answers = [answer(task.messages, NEW_TOKENS) for task in Progress(chosen, desc=rule, unit="task")]
    return {
        f"tau {rule}": tau(answers),
        f"length {rule}": statistics.fmean(len(a.token_ids) for a in answers),
        f"accuracy {rule}": statistics.fmean(is_correct(t, a.text) for t, a in zip(chosen, answers, strict=True)),
    }


def tau(answers: list[Answer]) -> float:
    return statistics.fmean(length + 1 for a in answers for length in a.output.stats.accepted_lengths)


def speeds(args: Arguments, rows: list[dict]) -> None:
    """Add tokens/s and seconds per answer of each objective's first head to its row, all interleaved."""
    heads = {row["objective"]: load(args, head_folder(args, row["objective"], row["lr"], 0) / "head") for row in rows}
    methods = {(name, rule): engine(model, **options)
               for name, model in heads.items() for rule, options in RULES.items()}
    prompts = [task.messages for task in tasks("heldout", seed=11, count=args.prompts)]
    answers = interleaved(methods, prompts, NEW_TOKENS, repeats=1)
    for row in rows:
        for rule in RULES:
            given = answers[row["objective"], rule]
            seconds = sum(a.seconds for a in given)
            row[f"tokens/s {rule}"] = sum(len(a.token_ids) for a in given) / seconds
            row[f"seconds {rule}"] = seconds / len(given)


def compare(args: Arguments) -> list[dict]:
    """One row per objective: its best rate, means over seeds."""
    paces, rows = measure_steps(args), []
    for objective in args.objectives:
        log.info("%s: %.3f s/step", objective, paces[objective])
        one = functools.partial(measured, args, paces[objective], objective)
        tried = {lr: one(lr, 0, ("exact",)) for lr in args.rates}
        best = max(tried, key=lambda lr: tried[lr]["tau exact"])
        first = one(best, 0, tuple(RULES))
        runs = [first, *(one(best, seed, ("exact",)) for seed in range(1, args.seeds))]
        numbers = {name: [run[name] for run in runs] for name in runs[-1] if isinstance(runs[-1][name], float)}
        rows.append({"objective": objective, "steps": runs[0]["steps"],
                     "rates": {f"{lr:g}": run["tau exact"] for lr, run in tried.items()},
                     **first, **{name: statistics.fmean(values) for name, values in numbers.items()}, "lr": best,
                     "sd tau exact": statistics.stdev(numbers["tau exact"]) if len(runs) > 1 else None})
        log.info("%s: tau %.3f at lr %g", objective, rows[-1]["tau exact"], best)
    speeds(args, rows)
    return rows


def table(rows: list[dict], baseline: str = "eagle") -> str:
    """The Markdown table of all objectives, best first."""
    base = next((row["tau exact"] for row in rows if row["objective"] == baseline), None)
    fuzzy = [rule for rule in RULES if rule != "exact"]
    lines = ["| objective | lr | s/step | steps | tau exact (sd) | over `eagle` | tokens/s exact | "
             + " | ".join(f"{rule}: tau | tokens/s | s/answer | tokens/answer | accuracy" for rule in fuzzy) + " |",
             "|---" * (7 + 5 * len(fuzzy)) + "|"]
    for row in sorted(rows, key=lambda row: -row["tau exact"]):
        gain = f"{100 * (row['tau exact'] / base - 1):+.1f}%" if base else "-"
        cells = " | ".join(
            f"{row[f'tau {rule}']:.2f} | {row[f'tokens/s {rule}']:.0f} | {row[f'seconds {rule}']:.2f} | "
            f"{row[f'length {rule}']:.0f} | {100 * row[f'accuracy {rule}']:.0f}%" for rule in fuzzy
        )
        spread = "one seed" if row["sd tau exact"] is None else f"{row['sd tau exact']:.3f}"
        lines.append(f"| {row['objective']} | {row['lr']:g} | {row['seconds_per_step']:.2f} | {row['steps']} | "
                     f"{row['tau exact']:.3f} ({spread}) | {gain} | {row['tokens/s exact']:.0f} | "
                     f"{cells} |")
    return "\n".join(lines)


def run(args: Arguments) -> None:
    """Compare, and write the record."""
    check_counts(args, "batch_tokens", "intermediate_size", "seeds", "draft_vocab_size", "prompts", "tasks")
    args.work.mkdir(parents=True, exist_ok=True)
    with only_writer(args.work):
        begin(args)
        prepare_features(args)
        rows = compare(args)
    print(write_record(args.out, {"arguments": shown_settings(vars(args)), "rows": rows}, table(rows)))


def keep_freed_memory() -> None:
    """Restart with malloc settings that keep freed memory: 1.4 times the training speed on Linux."""
    settings = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}
    if sys.platform == "linux" and any(name not in os.environ for name in settings):
        command = sys.modules["__main__"].__spec__.name
        os.execve(sys.executable, [sys.executable, "-m", command, *sys.argv[1:]], {**os.environ, **settings})


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.compare")
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status("train.compare", lambda: run(arguments),
                       stopped="stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
