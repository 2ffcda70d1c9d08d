"""Compare recipes for a draft head at equal training time.

    python -m eval.study --target T --data data/own --features data/own-features --out runs/study --minutes 25 \\
        --run "small=" --run "hass=--objective hass" --run "wide=--intermediate-size 3072" --seeds 0 1

Each run is train.train_draft_head with --recipe and these flags. Timing its first steps gives the number of steps that
fit into the minutes. All runs measure tau on the same held-out answers. OUT/study.md has the table. The same command
continues an interrupted study, and can add runs and seeds; a run of the same name with other flags, data, target or
minutes is an error.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tyro.conf import UseAppendAction

from eagle_fsd.data.documents import Documents
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.measure.records import bullets, decimals, markdown, shown, write_json, write_record
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.checks import check_choice, require_number
from eagle_fsd.utils.files import check_same, read_lines
from eagle_fsd.utils.installation import code_version, processor_name
from eval.command import option_record, run_command
from train.config import RECIPES
from train.teacher import read_index, target_digest

PROBE = 5, 25  # steps between which a run's speed is measured
ONE_EVALUATION = 1_000_000  # steps between two: only the last


@dataclass(frozen=True, kw_only=True)
class StudyArguments:
    """Options of `eval.study`.

    Args:
        target: directory, Hub ID or GGUF file of the target. If omitted: SmolLM2-135M-Instruct, as in eagle_fsd.load.
        data: dataset from train.prepare_data, whose last documents are held out.
        features: folder from train.features.
        out: folder of the runs and the table.
        run: "NAME=FLAGS", with flags of train.train_draft_head. (repeatable)
        recipe: recipe to which the flags are added.
        minutes: training time of each run, without evaluation.
        seeds: seeds with which each run is repeated.
        documents: number of held-out answers, of which 64 tokens are decoded.
    """

    target: str | None = None
    data: Path
    out: Path
    run: UseAppendAction[tuple[str, ...]]
    features: Path | None = None
    recipe: str = "small"
    minutes: float = 25.0
    seeds: tuple[int, ...] = (0,)
    documents: int = 96


def read_runs(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """The flags of each run by name.

    Raises:
        ValueError: a run does not have the form above, or two runs have the same name.
    """
    runs: dict[str, list[str]] = {}
    for text in texts:
        name, equals, flags = text.partition("=")
        if not equals or not name.isidentifier() or name in runs:
            raise ValueError(f'{text!r} is not "NAME=FLAGS", such as "hass=--objective hass", or its name is taken')
        runs[name] = shlex.split(flags)
    return runs


def train(args: StudyArguments, output: Path, flags: list[str], *more: str) -> list[str]:
    """Run the trainer, and return its command.

    Raises:
        ValueError: training failed.
    """
    command = ["-m", "train.train_draft_head", args.recipe, "--data", str(args.data), "--output", str(output)]
    command += ["--target", args.target] if args.target else []
    command += ["--features", str(args.features)] if args.features else []
    command += ["--decode-prompts", "24", *flags, *more]  # last: a run may override --features
    if subprocess.run([sys.executable, *command], check=False).returncode:
        raise ValueError(f"training failed, see above: python {shlex.join(command)}")
    return command


def steps_of(args: StudyArguments, flags: list[str], folder: Path) -> int:
    """The number of steps that fit into the minutes."""
    shutil.rmtree(folder, ignore_errors=True)
    train(args, folder, flags, "--steps", str(PROBE[1]), "--no-evaluate")
    seconds = [record["seconds"] for record in read_lines(folder / "train.jsonl")[PROBE[0] :]]
    shutil.rmtree(folder)
    return max(1, round(60 * args.minutes / statistics.median(seconds)))


def shared_facts(args: StudyArguments) -> dict[str, object]:
    """What the results of all runs depend on, as JSON values. `seeds` and `run` may grow; each run adds its flags."""
    target = TargetModel(load_target(args.target or default_target(), device="cpu")[0], check=False)
    return {"target": target_digest(target), "data": Documents.load(args.data).digest(),
            "features": None if args.features is None else read_index(args.features), "recipe": args.recipe,
            "minutes": args.minutes, "documents": args.documents, "processor": processor_name(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "eagle_fsd": code_version()}


def stored(path: Path, facts: Mapping[str, object]) -> dict | None:
    """What is stored for a run; None: nothing yet.

    Raises:
        ValueError: it depends on other `facts`.
    """
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    check_same(path, record.get("facts", {}), facts)
    return record


def measure(args: StudyArguments, name: str, flags: list[str], seed: int, facts: Mapping[str, object]) -> dict:
    """Train one run unless its result is stored, and return the result."""
    output = args.out / f"{name}-{seed}"
    result = output / "result.json"
    if not result.is_file():
        plan = args.out / f"{name}.plan.json"  # an interrupted run continues with the same number of steps
        if not plan.is_file():
            write_json(plan, {"facts": facts, "steps": steps_of(args, flags, args.out / f"{name}.probe")})
        steps = stored(plan, facts)["steps"]
        command = train(args, output, flags, "--steps", str(steps), "--seed", str(seed), "--eval-every",
                        str(ONE_EVALUATION), "--eval-documents", str(args.documents), "--eval-tokens", "64")
        last = read_lines(output / "train.jsonl")[-1]
        end = json.loads((output / "head/evaluation.json").read_text(encoding="utf-8"))
        end |= {"minutes": sum(line["seconds"] for line in read_lines(output / "train.jsonl")) / 60,
                "accepted": read_lines(output / "eval.jsonl")[-1]["accepted"]}
        write_json(result, {
            "facts": facts, "run": name, "seed": seed, "command": shlex.join(["python", *map(shown, command)]),
            "steps": steps, "loss": last["loss"], "top1": last["top1"], **end})
    return stored(result, facts)


def run(args: StudyArguments) -> None:
    check_choice("--recipe", args.recipe, tuple(RECIPES))
    require_number("--minutes", args.minutes, "a number above 0", lambda value: value > 0)
    runs = read_runs(args.run)
    shared = shared_facts(args)
    facts = {name: {**shared, "flags": shlex.join(map(shown, flags))} for name, flags in runs.items()}
    for name in runs:  # before anything is trained
        for path in (args.out / f"{name}.plan.json", *(args.out / f"{name}-{seed}/result.json" for seed in args.seeds)):
            stored(path, facts[name])
    rows = [measure(args, name, flags, seed, facts[name]) for name, flags in runs.items() for seed in args.seeds]
    table = markdown({
        "run": row["run"], "seed": row["seed"], "flags": row["facts"]["flags"] or "none", "steps": row["steps"],
        "minutes": f"{row['minutes']:.1f}", "tau": f"{row['tau']:.3f}",
        "accepted by level": " ".join(f"{share:.2f}" for share in row["accepted"]),
        "tokens/s, head / plain": " / ".join(
            decimals(row["tokens_per_second"][name], 1) for name in ("exact", "plain")),
    } for row in rows)
    print(write_record(args.out / "study", {"settings": option_record(args), "rows": rows}, f"""\
Target: {shown(args.target or "SmolLM2-135M-Instruct")}\\
Heads: recipe {args.recipe}, {args.minutes:g} minutes each; {args.documents} held-out answers

{table}

""" + bullets({
        "tau": "tokens emitted per forward pass of the target, including its own token, greedy, by the head alone",
        "accepted by level": "share of cycles that accept a token of that level of the tree"})))


main = partial(run_command, "eval.study", StudyArguments, run, stopped="stopped; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
