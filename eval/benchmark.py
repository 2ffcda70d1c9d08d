"""Speed and quality of decoding methods on public question sets, interleaved in one run.

    python -m eval.benchmark --questions mt_bench.jsonl --max-new-tokens 128 --out eval/results/smollm2-mt-bench
    python -m eval.benchmark --questions spec_bench.jsonl --per-category 5 --temperature 0.7 --out runs/sampled
    python -m eval.benchmark --questions humaneval.jsonl gsm8k_test.jsonl --per-category 40 --run-code --out runs/code

Every question, with all its turns, is answered by every method before the next one, in an order that rotates; the
first questions are run once unmeasured. Speed is new tokens over wall time, prompts included. Answers are kept as they
come, in OUT.answers.jsonl: a run that was stopped goes on with the questions that are missing.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from eagle_fsd import EagleModel
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.files import only_writer
from eagle_fsd.measure.comparison import EXACT, compare, page_text, read_settings
from eagle_fsd.measure.grading import CODE
from eagle_fsd.measure.methods import Method, described, engine, hf_generate
from eagle_fsd.measure.records import record_path, write_record
from eagle_fsd.measure.statistics import by_category
from eval.command import chosen_questions, noted, run_command
from eval.plots import plot_speeds

BASELINE, LOOKUP, UNDRAFTED = "model.generate", "prompt lookup", "no drafting"


@dataclass(frozen=True)
class BenchmarkArguments:
    """What `eval.benchmark` compares.

    Args:
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, MBPP, GSM8K, IFEval, or prompts.
        per_category: only the first questions of each category.
        settings: rules with their thresholds, and other options of generate, beside exact.
        max_new_tokens: of a turn.
        temperature: 0 is greedy; otherwise sampling.
        run_code: allow the generated programs of HumanEval and MBPP to be run, to grade them; else they are not graded.
        warm_up: questions that are answered once unmeasured.
        repeats: timed runs of each question, of which the median counts.
        threads: of torch; without it what OMP_NUM_THREADS says, or torch.
        seed: of the noise.
        tree: of exact and of the settings.
        out: where the record goes, without .json and .md.
    """

    questions: tuple[Path, ...]
    out: Path
    pair: Loading = Loading()
    per_category: int | None = None
    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3")
    max_new_tokens: int = 128
    temperature: float = 0.0
    run_code: bool = False
    warm_up: int = 2
    repeats: int = 1
    threads: int | None = None
    seed: int = 1
    tree: Tree = None


def methods_of(model: EagleModel, args: BenchmarkArguments) -> dict[str, Method]:
    """The compared methods by name."""
    sampling = {"temperature": args.temperature, "seed": args.seed}
    settings = {EXACT: {"acceptance": EXACT}, **read_settings(args.settings)}
    return {
        BASELINE: hf_generate(model, **sampling),
        LOOKUP: hf_generate(model, **sampling, prompt_lookup_num_tokens=10),
        UNDRAFTED: engine(model, plain=True, acceptance=EXACT, **sampling),
        **{name: engine(model, tree=args.tree, **sampling | options) for name, options in settings.items()},
    }


def run(args: BenchmarkArguments) -> None:
    check_counts(args, "max_new_tokens", "per_category", "repeats", "threads")
    check_counts(args, "warm_up", least=0)
    read_settings(args.settings)
    questions = chosen_questions(args.questions, args.per_category)
    if any(question.category in CODE for question in questions) and not args.run_code:
        logging.getLogger("eval.benchmark").warning("programs are not graded: --run-code allows them to be run")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = args.pair.load()
    about = described(model, args.tree, temperature=args.temperature, seed=args.seed,
                      max_new_tokens=args.max_new_tokens, repeats=args.repeats, run_code=args.run_code)
    log = record_path(args.out, ".answers.jsonl")
    with only_writer(log):
        found = compare(methods_of(model, args), questions, log, about, max_new_tokens=args.max_new_tokens,
                        run_code=args.run_code, warm_up=args.warm_up, repeats=args.repeats)
    rows = by_category(found, BASELINE)
    print(write_record(args.out, {"settings": noted(args), **about, "rows": rows}, f"""\
{len(found)} questions, {about["dtype"]}, temperature {args.temperature:g}, at most {args.max_new_tokens} tokens a turn,
tree {model.describe_tree(args.tree, args.temperature)}

{page_text(rows, BASELINE)}"""))
    plot_speeds(rows, record_path(args.out, ".png"))


main = partial(run_command, "eval.benchmark", BenchmarkArguments, run, stopped="stopped; the same command goes on")

if __name__ == "__main__":
    sys.exit(main())
