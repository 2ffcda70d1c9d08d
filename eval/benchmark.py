"""Speed and quality of all methods on public question sets, interleaved in one run.

    python -m eval.benchmark --questions mt_bench.jsonl --max-new-tokens 128 --out eval/results/smollm2-mt-bench
    python -m eval.benchmark --questions spec_bench.jsonl --per-category 5 --temperature 0.7 --out runs/sampled
    python -m eval.benchmark --questions humaneval.jsonl gsm8k_test.jsonl --per-category 40 --run-code --out runs/code
    python -m eval.benchmark --batch-sizes 1 2 4 8                  # batches: eval.batches
    python -m eval.benchmark --step --shape llama-3.1-8b            # one cycle, random weights: eval.step

Every question, with all its turns, is answered by every method before the next one, in an order that rotates; the
first questions are run once unmeasured. Speed is new tokens over wall time, prompts included. Answers are kept as they
come, in OUT.answers.jsonl: a run that was stopped goes on with the questions that are missing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import eagle_fsd
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.files import append_lines, only_writer, read_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import Question, converse, read_questions
from eagle_fsd.measure.experiment import fingerprint
from eagle_fsd.measure.grading import CODE, is_right
from eagle_fsd.measure.ifeval import check_instructions
from eagle_fsd.measure.methods import Answer, Method, engine, hf_generate
from eagle_fsd.measure.records import record_path, write_record
from eagle_fsd.measure.search import BASELINE
from eval import batches, step
from eval.command import noted, run_command
from eval.profile import profile_cycles
from eval.report.intervals import interval
from eval.report.plots import plot_speeds
from eval.report.tables import markdown, percent, span
from eval.speed import speedup

LOOKUP, PLAIN = "prompt lookup", "plain"
ALL = "all"  # categories


@dataclass(frozen=True)
class BenchmarkArguments:
    """What `eval.benchmark` compares.

    Args:
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, or prompts with answers.
        per_category: only the first questions of each category.
        max_new_tokens: of a turn.
        temperature: 0 is greedy.
        run_code: allow the generated programs of HumanEval and MBPP to be run, to grade them; else they are not graded.
        warm_up: questions that are answered once unmeasured.
        threads: of torch; without it what OMP_NUM_THREADS says, or torch.
        seed: of the noise.
        tree: of exact and of the rules.
        fsd: thresholds of fsd.
        tilt: thresholds of tilt.
        profile: questions that a cycle's parts are measured on.
        batch_sizes: compare by batch size instead, on generated tasks.
        prompt_lengths: compare by tokens of the prompt instead, on pieces of Python source.
        batch_prompts: prompts that every batch size answers.
        repeats: timed runs of each batch, of which the median counts.
        out: where the record goes, without .json and .md.
    """

    pair: Loading = Loading()
    questions: tuple[Path, ...] = ()
    per_category: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    run_code: bool = False
    warm_up: int = 2
    threads: int | None = None
    seed: int = 1
    tree: Tree = None
    fsd: tuple[float, ...] = (0.1, 0.3)
    tilt: tuple[float, ...] = ()
    profile: int = 4
    batch_sizes: tuple[int, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    batch_prompts: int = 16
    repeats: int = 3
    out: Path | None = None


def methods_of(
    model: eagle_fsd.EagleModel, tree: eagle_fsd.TreeConfig | None, fsd: Sequence[float], tilt: Sequence[float],
    temperature: float = 0.0, seed: int = 0,
) -> dict[str, Method]:
    """The compared methods by name."""
    sampling = {"temperature": temperature, "seed": seed}
    methods = {
        BASELINE: hf_generate(model, **sampling),
        LOOKUP: hf_generate(model, **sampling, prompt_lookup_num_tokens=10),
        PLAIN: engine(model, plain=True, acceptance="exact", **sampling),
        "exact": engine(model, acceptance="exact", tree=tree, **sampling),
    }
    for name, dials in (("fsd", fsd), ("tilt", tilt)):
        for dial in dials:
            methods[f"{name} {dial:g}"] = engine(model, acceptance=name, threshold=dial, tree=tree, **sampling)
    return methods


def chosen_questions(paths: Iterable[Path], per_category: int | None) -> list[Question]:
    """The questions of all files, of each category the first ones."""
    counts: dict[str, int] = {}
    chosen = []
    for question in (question for path in paths for question in read_questions(path)):
        counts[question.category] = counts.get(question.category, 0) + 1
        if per_category is None or counts[question.category] <= per_category:
            chosen.append(question)
    check_instructions(chosen)
    return chosen


def has_code(questions: Sequence[Question]) -> bool:
    """Whether answers to some of them are programs."""
    return any(question.category in CODE for question in questions)


def record_of(answers: Sequence[Answer], question: Question, run_code: bool) -> dict:
    """What is kept of a method's answers to a question's turns."""
    outputs = [answer.output for answer in answers if answer.output]
    sources = [receipt.source for output in outputs for receipt in output.receipts]
    graded = question.category not in CODE or run_code
    return {
        "turns": [answer.text for answer in answers], "tokens": sum(len(answer.token_ids) for answer in answers),
        "ids": [answer.token_ids for answer in answers], "seconds": sum(answer.seconds for answer in answers),
        "emitted": [length + 1 for output in outputs for length in output.stats.accepted_lengths],
        "fuzzy": sources.count("fuzzy"),
        "right": is_right(question, answers[-1].text, run_code=run_code) if graded else None,
    }


def answer_all(
    methods: dict[str, Method], questions: Sequence[Question], log: Path, about: dict, *, max_new_tokens: int,
    run_code: bool, warm_up: int,
) -> list[dict]:
    """Every method's record of every question; those found in `log` are not answered again.

    Raises:
        ValueError: the log was begun for something else.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun, *found = read_lines(log) or [None]
    if begun is None:
        append_lines(log, [about])
    elif begun != about:
        raise ValueError(f"{log} was begun for something else; choose another --out or delete it")
    done = {(line["category"], line["id"]) for line in found}
    names = list(methods)
    if len(found) < len(questions):
        for question in questions[:warm_up]:
            for method in methods.values():
                method([{"role": "user", "content": question.turns[0]}], 32)
    for number, question in enumerate(Progress(questions, desc="questions", unit="question")):
        if (question.category, question.id) in done:
            continue
        shift, records = number % len(names), {}
        for name in names[shift:] + names[:shift]:
            answers = converse(lambda chat, method=methods[name]: method(chat, max_new_tokens), question.turns)
            records[name] = record_of(answers, question, run_code)
        found.append({"category": question.category, "id": question.id,
                      "methods": {name: records[name] for name in names}})
        append_lines(log, found[-1:])
    return found


def method_rows(found: Sequence[dict]) -> list[dict]:
    """One row per method, of records of `answer_all`."""
    def column(name: str, key: str) -> np.ndarray:
        return np.array([line["methods"][name][key] for line in found], float)

    def same(name: str, reference: str) -> float:
        return float(np.mean([line["methods"][name]["ids"] == line["methods"][reference]["ids"] for line in found]))

    rows = []
    for name in found[0]["methods"]:
        tokens, seconds = column(name, "tokens"), column(name, "seconds")
        times, rate = {}, tokens.sum() / seconds.sum()
        for reference, key in ((BASELINE, "speedup"), (PLAIN, "speedup_over_plain")):
            theirs = column(reference, "tokens"), column(reference, "seconds")
            times[key] = float(speedup(tokens, seconds, *theirs, axis=-1))
            times[f"{key}_interval"] = interval(speedup, tokens, seconds, *theirs)
        emitted = [count for line in found for count in line["methods"][name]["emitted"]]
        right = [line["methods"][name]["right"] for line in found if line["methods"][name]["right"] is not None]
        rows.append({
            "method": name, "tokens_per_second": float(rate), **times,
            "tau": None if name == LOOKUP else sum(emitted) / len(emitted) if emitted else 1.0,
            "seconds_per_answer": float(seconds.mean()), "tokens_per_answer": float(tokens.mean()),
            "accuracy": sum(right) / len(right) if right else None, "graded": len(right),
            "same_as_generate": same(name, BASELINE), "same_as_plain": same(name, PLAIN),
            "fuzzy_share": float(column(name, "fuzzy").sum() / tokens.sum()),
        })
    return rows


def method_table(rows: Sequence[dict]) -> str:
    """The rows in Markdown. tau = tokens per target forward."""
    graded = any(row["accuracy"] is not None for row in rows)
    return markdown({
        "method": row["method"], "tokens/s": f"{row['tokens_per_second']:.1f}",
        "vs model.generate (95%)": f"{row['speedup']:.2f}x ({span(row['speedup_interval'])})",
        "vs plain": f"{row['speedup_over_plain']:.2f}x", "tau": "" if row["tau"] is None else f"{row['tau']:.2f}",
        "s/answer": f"{row['seconds_per_answer']:.2f}", "tokens/answer": f"{row['tokens_per_answer']:.0f}",
        **({"correct": "" if row["accuracy"] is None else percent(row["accuracy"], 1)} if graded else {}),
        "= model.generate": percent(row["same_as_generate"]), "= plain": percent(row["same_as_plain"]),
        "fuzzy tokens": percent(row["fuzzy_share"], 1),
    } for row in rows)


def by_category(found: Sequence[dict]) -> dict[str, list[dict]]:
    """The rows of each category, and of all questions."""
    groups: dict[str, list[dict]] = {}
    for line in found:
        groups.setdefault(line["category"], []).append(line)
    rows = {category: method_rows(lines) for category, lines in groups.items()}
    return rows | ({ALL: method_rows(found)} if len(rows) > 1 else {ALL: next(iter(rows.values()))})


def category_table(rows: dict[str, list[dict]], counts: dict[str, int]) -> str:
    """Speed over model.generate by category and method, tau in brackets."""
    return markdown({
        "category": category, "questions": str(counts[category]),
        **{row["method"]: f"{row['speedup']:.2f}x" + ("" if row["tau"] in (None, 1.0) else f" ({row['tau']:.2f})")
           for row in found if row["method"] != BASELINE},
    } for category, found in rows.items())


def run(args: BenchmarkArguments) -> None:
    check_counts(args, "max_new_tokens", "repeats", "batch_prompts", "per_category", "threads")
    check_counts(args, "warm_up", "profile", least=0)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    by_batch = bool(args.batch_sizes or args.prompt_lengths)
    if not by_batch and not args.questions:
        raise ValueError("there is nothing to ask: give --questions (or --batch-sizes, --step)")
    if not by_batch and args.out is None:
        raise ValueError("--out is missing: where the record goes, such as eval/results/mt-bench")
    questions = chosen_questions(args.questions, args.per_category)
    if has_code(questions) and not args.run_code:
        logging.getLogger("eval.benchmark").warning("programs are not graded: --run-code allows them to be run")
    model = args.pair.load()
    if by_batch:
        run_batches(args, model, args.out or Path("eval/results/batches"))
    else:
        run_questions(args, model, questions, args.out)


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


def run_questions(args: BenchmarkArguments, model: eagle_fsd.EagleModel, questions: list[Question], out: Path) -> None:
    """All methods on all questions, the tables by category, and where a cycle's time goes."""
    methods = methods_of(model, args.tree, args.fsd, args.tilt, args.temperature, args.seed)
    about = {"questions": fingerprint(questions), "target": model.target.digest(), "methods": list(methods),
             "dtype": str(model.target.dtype), "temperature": args.temperature, "seed": args.seed,
             "max_new_tokens": args.max_new_tokens, "tree": model.tree_name(args.tree),
             "code_graded": args.run_code and has_code(questions)}
    log = record_path(out, ".answers.jsonl")
    with only_writer(log):
        found = answer_all(methods, questions, log, about, max_new_tokens=args.max_new_tokens, run_code=args.run_code,
                           warm_up=args.warm_up)
    rows = by_category(found)
    counts = {category: sum(line["category"] == category for line in found) for category in rows} | {ALL: len(found)}
    record = {"settings": noted(args), "tree": model.describe_tree(args.tree, args.temperature), **about,
              "counts": counts, "rows": rows}
    chats = [[{"role": "user", "content": question.turns[0]}] for question in questions[: args.profile]]
    text = f"{len(found)} questions, {record['dtype']}, temperature {args.temperature:g}, at most " \
           f"{args.max_new_tokens} tokens a turn, tree {record['tree']}\n\n{method_table(rows[ALL])}"
    if len(rows) > 2:
        text += f"\n\nTimes model.generate's speed, tau in brackets:\n\n{category_table(rows, counts)}"
    for name, options in (("exact", {"acceptance": "exact"}), ("fsd", {"acceptance": "fsd", "threshold": 0.3})):
        if chats:
            profile = profile_cycles(model, chats, 64, tree=args.tree, **options)
            record[f"profile_{name}"] = profile
            parts = ", ".join(f"{part.replace('_', ' ')} {ms:.1f}" for part, ms in profile["ms_per_cycle"].items())
            text += f"\n\nA cycle of `{name}` takes {profile['total_ms']:.1f} ms: {parts}; outside the models' " \
                    f"forwards {percent(profile['outside_forwards_share'], 1)}."
    print(write_record(out, record, text))
    print(plot_speeds(rows, record_path(out, ".png")))


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--step" in words:
        return step.main([word for word in words if word != "--step"])
    return run_command("eval.benchmark", BenchmarkArguments, run, words,
                       stopped="stopped; the same command continues")


if __name__ == "__main__":
    sys.exit(main())
