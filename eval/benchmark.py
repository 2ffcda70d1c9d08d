"""Speed and quality of decoding methods on public question sets, interleaved in one run.

    python -m eval.benchmark --questions mt_bench.jsonl --max-new-tokens 128 --out eval/results/smollm2-mt-bench
    python -m eval.benchmark --questions spec_bench.jsonl --per-category 5 --temperature 0.7 --out runs/sampled
    python -m eval.benchmark --questions mt_bench.jsonl --endpoints "llama.cpp=http://127.0.0.1:8081/v1" --out runs/both
    python -m eval.benchmark --questions humaneval.jsonl gsm8k_test.jsonl --per-category 40 --run-code --out runs/code
    python -m eval.benchmark --questions humaneval.jsonl --limit 16 --rows 8 --static --minutes 5 --out runs/batches

Every method answers a question, with all its turns, before the next question; the order of the methods rotates. The
first questions are also answered once without timing, after which forwards are compiled and captured. As in a chat,
later turns process only what is new, in our engine and in servers with a prompt cache; `model.generate` processes the
whole conversation in each turn. With --rows, so many questions are one batch, whose answers share its time.

"EAGLE-2 (head alone)" drafts with the head only (text_drafts="off"), as published; `exact` and the settings also copy
drafts from the text. If the drafter is a causal LM, transformers' assisted generation is a method, too: with the same
weights of both models, lossless or with an `assistant_ensemble_weight`. Speed is new tokens per second of wall time,
including prompts. OUT.answers.jsonl stores the answers, so that the same command continues an interrupted run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from tyro.conf import UseAppendAction

from eagle_fsd import EagleModel
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.questions import Question
from eagle_fsd.drafting.language_model import DraftModel
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.measure.comparison import compare, setting_methods, store
from eagle_fsd.measure.grading import check_gradable
from eagle_fsd.measure.methods import Method, assisted, described, engine, hf_generate
from eagle_fsd.measure.records import record_path
from eagle_fsd.measure.settings import ComparisonOptions, QuestionOptions, read_settings
from eval.command import run_command
from eval.endpoints import endpoint_method, read_endpoints
from eval.plots import plot_speeds

FORMS = {"int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"}}
BASELINE, STATIC, LOOKUP = "model.generate", "model.generate, static cache", "prompt lookup"
UNDRAFTED, COPIES = "no drafting", "exact, no head"
ALIGNED = 256  # positions of a static cache are a multiple


def head_alone(model: EagleModel) -> str:
    """The name of `exact` without text drafts, which is the published method."""
    if isinstance(model.draft, DraftModel):
        return "exact, no copies"
    return f"{'EAGLE-3' if isinstance(model.draft, Eagle3Head) else 'EAGLE-2'} (head alone)"


@dataclass(frozen=True, kw_only=True)
class BenchmarkArguments(ComparisonOptions, QuestionOptions):
    """Options of `eval.benchmark`.

    Args:
        settings: rules with thresholds and other options of generate: "fsd 0.3" "fsd 0.5 head_guard=none".
        then: additional last turn of every question, for example "Now add type hints, and return the whole program."
        without_head: also compare decoding with text drafts but no head.
        static: also compare model.generate with a static cache, which transformers compiles on a GPU.
        leave_out: names of methods to leave out. The others are compared with the first of them.
        assisted: weights of the target in assisted generation; 1: lossless.
        also: further forms of the pair to compare, without --settings: int8 weights, or computed in bfloat16.
        reread: process the whole conversation in each turn, without the caches of earlier turns.
        endpoints: servers to compare with, as "NAME=URL" or "NAME=URL#MODEL"; see eval/endpoints.py.
        rows: questions to answer in one batch. Above 1, later turns process the whole conversation, and there is no
            prompt lookup and no assisted generation, which take one prompt.
        minutes: time from the warm-up on after which no further question is asked. The results are those so far, and
            the same command continues.
        warm_up: questions (with --rows, batches) to answer once without timing.
    """

    pair: Loading = Loading()
    then: str | None = None
    without_head: bool = False
    static: bool = False
    leave_out: tuple[str, ...] = ()
    also: tuple[Literal[tuple(FORMS)], ...] = ()
    reread: bool = False
    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3")
    max_new_tokens: int = 128
    assisted: tuple[float, ...] = (1.0, 0.7)
    endpoints: UseAppendAction[tuple[str, ...]] = ()
    rows: int = 1
    minutes: float | None = None
    warm_up: int = 2
    seed: int = 1
    tree: Tree = None


def keeps_history(args: BenchmarkArguments) -> bool:
    return not args.reread and args.rows == 1


def longest(model: EagleModel, questions: Sequence[Question], max_new_tokens: int) -> int:
    """Positions that any of these conversations needs, and some more: answers may be tokenised in another way."""
    most = 0
    for question in questions:
        chat = [message for turn in question.turns
                for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": "."})]
        most = max(most, len(encode_prompt(chat[:-1], model)) + len(question.turns) * max_new_tokens)
    return ALIGNED * (most // ALIGNED + 1)


def own_methods(model: EagleModel, settings: Sequence[str], args: BenchmarkArguments) -> dict[str, Method]:
    """The methods of our engine by name."""
    shared = {"keep_history": keeps_history(args)}
    options = {"temperature": args.temperature, "seed": args.seed, **shared}
    methods = {UNDRAFTED: engine(model, speculative=False, **options)}
    if model.draft is not None:
        methods[head_alone(model)] = engine(model, acceptance="exact", text_drafts="off", tree=args.tree, **options)
    methods |= setting_methods(model, settings, args, shared)
    if args.without_head:
        headless = EagleModel(model.target, None, model.tokenizer)
        if model.captured is None:
            headless.size_cycles()
        else:  # on a GPU, as `load` makes it
            headless.captured = CapturedCycles(model.target, None)
        methods[COPIES] = engine(headless, acceptance="exact", **options)
    return methods


def methods_of(
    model: EagleModel, others: Mapping[str, EagleModel], args: BenchmarkArguments,
    endpoints: Mapping[str, tuple[str, str]], questions: Sequence[Question],
) -> dict[str, Method]:
    """The compared methods by name.

    Args:
        others: further forms of the pair by name.

    Raises:
        ValueError: a method to leave out is not there, or fewer than two are left.
    """
    sampling = {"temperature": args.temperature, "seed": args.seed}
    assistants = {f"assisted generation{'' if weight == 1 else f', weight {weight:g}'}": assisted(
        model, weight=weight, **sampling) for weight in args.assisted} if isinstance(model.draft, DraftModel) else {}
    alone = {LOOKUP: hf_generate(model, **sampling, prompt_lookup_num_tokens=10), **assistants}
    static = longest(model, questions, args.max_new_tokens) if args.static else None
    methods = {
        BASELINE: hf_generate(model, **sampling),
        **({STATIC: hf_generate(model, **sampling, static=static)} if args.static else {}),
        **(alone if args.rows == 1 else {}),
        **own_methods(model, args.settings, args),
        **{f"{form}, {name}": method for form, other in others.items()
           for name, method in own_methods(other, (), args).items()},
        **{name: endpoint_method(model, *place, **sampling, keep_history=not args.reread)
           for name, place in endpoints.items()},
    }
    left = {name: method for name, method in methods.items() if name not in args.leave_out}
    if len(left) < 2 or not methods.keys() >= set(args.leave_out):
        raise ValueError(f"--leave-out takes names of methods and leaves at least two, got {list(args.leave_out)} of "
                         f"{list(methods)}")
    return left


def run(args: BenchmarkArguments) -> None:
    check_counts(args, "max_new_tokens", "per_category", "limit", "repeats", "rows")
    check_counts(args, "warm_up", least=0)
    read_settings(args.settings)
    if args.rows > 1 and args.endpoints:
        raise ValueError(f"--rows {args.rows} is for batches in this process: leave out --endpoints (eval.clients asks "
                         "several at a time)")
    questions = args.chosen_questions()
    check_gradable(questions, args.run_code)
    if args.then is not None:
        questions = [replace(question, turns=(*question.turns, args.then)) for question in questions]
    endpoints = read_endpoints(args.endpoints)
    model = args.pair.load(args.tree)
    others = {form: replace(args.pair, **FORMS[form]).load(args.tree) for form in args.also}
    about = described(model, args) | {"history": "kept" if keeps_history(args) else "read again",
                                      "endpoints": endpoints, "rows": args.rows,
                                      "also": {form: described(other) for form, other in others.items()}}
    methods = methods_of(model, others, args, endpoints, questions)
    records = compare(methods, questions, args, about, warm_up=args.warm_up, warm_up_tokens=args.max_new_tokens,
                      rows=args.rows, minutes=args.minutes)
    reference = next(iter(methods))
    later = f"Later turns: history {about['history']}, by {BASELINE} always read again\n\n"
    preface = later if max(len(question.turns) for question in questions) > 1 else ""
    if args.rows > 1:
        preface += f"Batches of {args.rows} questions: tokens/s of a batch, s/answer as a share of it\n\n"
    rows, page = store(model, records, reference, args, about, preface=preface,
                       baseline=None if reference == UNDRAFTED else model.stock.dtype)
    print(page)
    plot_speeds(rows, record_path(args.out, ".png"))


main = partial(run_command, "eval.benchmark", BenchmarkArguments, run, stopped="stopped; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
