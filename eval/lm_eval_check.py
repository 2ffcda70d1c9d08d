"""Whether lm-evaluation-harness gets the same answers from `eagle_fsd` as from its own `hf`, on local files.

    python -m eval.lm_eval_check --gsm8k ../shared/data/gsm8k_test.jsonl --limit 20 --out eval/results/lm-eval.json

Runs `hf`, `exact` and `fsd` through the harness' `simple_evaluate`, on held-out tasks of the bundled generator (as
chats) and on GSM8K where its file is given, and compares answer by answer. The exit status is 0 where all answers of
`exact` are those of `hf`, else 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.bundled import small_pair
from eagle_fsd.measure.records import environment, shown, write_json
from eval.command import run_command
from eval.report.tables import markdown
from train.tasks.generator import tasks

TASKS = Path(__file__).parent / "lm_eval"


@dataclass(frozen=True)
class LmEvalArguments:
    """What `eval.lm_eval_check` compares.

    Args:
        target: directory or hub id; without it the small bundled pair's.
        draft: directory or hub id of its draft head; without it the small bundled pair's.
        gsm8k: JSON lines of GSM8K.
        limit: questions of each task.
        max_gen_toks: for GSM8K, which the small target cannot do.
        threshold: of fsd.
        device: of all models.
        write: only write the generated tasks to this file.
        out: file for what is found.
    """

    target: str | None = None
    draft: str | None = None
    gsm8k: Path | None = None
    limit: int = 20
    max_gen_toks: int = 64
    threshold: float = 0.2
    device: str = "cpu"
    write: Path | None = None
    out: Path | None = None


def write_tasks(path: Path, count: int, seed: int = 1) -> None:
    """Held-out tasks with one user turn, as lines of {"question", "answer"}."""
    chosen = (task for task in tasks("heldout", seed=seed, count=4 * count) if len(task.messages) == 1)
    lines = [json.dumps({"question": task.messages[0]["content"], "answer": task.answer})
             for task, _ in zip(chosen, range(count), strict=False)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_task(folder: Path, name: str, data: Path) -> None:
    """The bundled task `name` with another file to read, in a folder for `--include_path`."""
    task = {"include": str(TASKS / f"{name}.yaml"), "task": name, "training_split": None, "fewshot_split": None,
            "dataset_kwargs": {"data_files": {"test": str(data.absolute())}, "cache_dir": str(folder / "cache")}}
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def evaluate(
    model: str, model_args: Mapping[str, object], task: str, folder: Path, **options
) -> tuple[dict[str, float], list[str]]:
    """Scores by filter, and the answers in order, of one run of the harness on a task of `write_task`."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import eagle_fsd.lm_eval.model  # noqa: F401  # registers `eagle_fsd`

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, dict(model_args), tasks=[task], task_manager=manager, bootstrap_iters=0, **options)
    scores = {name: float(value) for name, value in found["results"][task].items() if name.startswith("exact_match,")}
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return scores, [sample["resps"][0][0] for sample in samples]


def differing(answers: Sequence[str], reference: Sequence[str]) -> list[int]:
    return [number for number, (ours, theirs) in enumerate(zip(answers, reference, strict=True)) if ours != theirs]


def compare_models(args: LmEvalArguments) -> dict:
    """The record of all runs."""
    import lm_eval

    target, draft = (given or small for given, small in zip((args.target, args.draft), small_pair(), strict=True))
    pair = {"target": target, "draft": draft, "dtype": "float32", "tree": [16, 6, 3, 0.5]}
    models = {
        "hf": ("hf", {"pretrained": target, "dtype": "float32"}),
        "exact": ("eagle_fsd", pair | {"acceptance": "exact"}),
        f"fsd {args.threshold:g}": ("eagle_fsd", pair | {"acceptance": "fsd", "threshold": args.threshold}),
    }
    record = {**environment(), "lm_eval": lm_eval.__version__, "limit": args.limit, "tasks": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tasks(folder / "tasks.jsonl", args.limit)
        files = {"tasks_local": folder / "tasks.jsonl"} | ({"gsm8k_local": args.gsm8k} if args.gsm8k else {})
        for task, data in files.items():
            write_task(folder, task, data)
            chat = task == "tasks_local"
            rows, answers = {}, {}
            for name, (model, model_args) in models.items():
                scores, answers[name] = evaluate(
                    model, model_args, task, folder, limit=args.limit, device=args.device, apply_chat_template=chat,
                    gen_kwargs={"max_gen_toks": 256 if chat else args.max_gen_toks},
                )
                rows[name] = {
                    "model": model, "model_args": {key: shown(value) for key, value in model_args.items()},
                    "scores": scores, "differs_from_hf": differing(answers[name], answers["hf"]),
                }
            record["tasks"][task] = {"questions": len(answers["hf"]), "models": rows, "answers": answers}
    return record


def agreement_table(record: Mapping) -> str:
    return markdown({
        "task": task, "model": name, "exact match": ", ".join(f"{value:.1%}" for value in row["scores"].values()),
        "answers as `hf`": f"{found['questions'] - len(row['differs_from_hf'])} of {found['questions']}",
    } for task, found in record["tasks"].items() for name, row in found["models"].items())


def run(args: LmEvalArguments) -> int:
    """0 where all answers of `exact` are those of `hf`, else 1."""
    check_counts(args, "limit")
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        write_tasks(args.write, args.limit)
        return 0
    if args.gsm8k and not args.gsm8k.is_file():
        raise ValueError(f"--gsm8k {args.gsm8k} is no file")
    record = compare_models(args)
    print(agreement_table(record))
    if args.out:
        write_json(args.out, record)
    return int(any(found["models"]["exact"]["differs_from_hf"] for found in record["tasks"].values()))


main = partial(run_command, "eval.lm_eval_check", LmEvalArguments, run)

if __name__ == "__main__":
    sys.exit(main())
