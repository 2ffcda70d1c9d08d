"""The methods of `eagle-fsd benchmark`, interleaved in one run.

Every method answers a question, with all its turns, before the next question; the order of the methods rotates. The
first questions are also answered once without timing, after which forwards are compiled and captured. As in a chat,
later turns process only what is new, in our engine and in servers with a prompt cache; `model.generate` processes the
whole conversation in each turn. With --rows, so many questions are one batch, whose answers share its time.

"EAGLE-2 (head alone)" drafts with the head only (text_drafts="off"), as published; `exact` and the settings also copy
drafts from the text. If the drafter is a causal LM, transformers' assisted generation is a method, too: with the same
weights of both models, lossless or with an `assistant_ensemble_weight`. Speed is new tokens per second of wall time,
including prompts.

`model.generate` computes in the dtype of the stored weights, which is a user's baseline for speed; our engine may
compute in another (float32 on a CPU). So texts are compared with those of our engine without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..captured.cycle import CapturedCycles
from ..data.questions import Question
from ..drafting.language_model import DraftModel
from ..heads.eagle import DraftHead
from ..heads.eagle3 import Eagle3Head
from ..inputs.prompts import encode_prompt
from ..loading.pair import EagleModel
from .comparison import answer_runs, compare, setting_methods, store
from .endpoints import endpoint_method
from .methods import Method, assisted, described, engine, hf_generate
from .records import plot_speeds, record_path
from .settings import BenchmarkOptions

BASELINE, STATIC, LOOKUP = "model.generate", "model.generate, static cache", "prompt lookup"
UNDRAFTED, COPIES = "no drafting", "exact, no head"
ALIGNED = 256  # positions of a static cache are a multiple


def head_alone(model: EagleModel) -> str:
    """The name of `exact` without text drafts, which is the published method."""
    if not isinstance(model.draft, DraftHead):
        return "exact, no copies"
    return f"{'EAGLE-3' if isinstance(model.draft, Eagle3Head) else 'EAGLE-2'} (head alone)"


def longest(model: EagleModel, questions: Sequence[Question], max_new_tokens: int) -> int:
    """Positions that any of these conversations needs, and some more: answers may be tokenised in another way."""
    most = 0
    for question in questions:
        chat = [message for turn in question.turns
                for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": "."})]
        most = max(most, len(encode_prompt(chat[:-1], model)) + len(question.turns) * max_new_tokens)
    return ALIGNED * (most // ALIGNED + 1)


def without_head(model: EagleModel) -> EagleModel:
    """The pair without its drafter, which only copies."""
    headless = EagleModel(model.target, None, model.tokenizer)
    if model.captured is None:
        headless.size_cycles()
    else:  # on a GPU, as `load` makes it
        headless.captured = CapturedCycles(model.target, None)
    return headless


def own_methods(
    model: EagleModel, headless: EagleModel | None, settings: Sequence[str], args: BenchmarkOptions
) -> dict[str, Method]:
    """The methods of our engine by name.

    Args:
        headless: see `without_head`; None: it does not answer.
    """
    shared = {"keep_history": args.keeps_history}
    options = {"temperature": args.temperature, "seed": args.seed, **shared}
    methods = {UNDRAFTED: engine(model, speculative=False, **options)}
    if model.draft is not None:
        methods[head_alone(model)] = engine(model, acceptance="exact", text_drafts="off", tree=args.tree, **options)
    methods |= setting_methods(model, settings, args, shared)
    if headless is not None:
        methods[COPIES] = engine(headless, acceptance="exact", **options)
    return methods


def benchmark(
    model: EagleModel, others: Mapping[str, EagleModel], endpoints: Mapping[str, tuple[str, str]],
    questions: Sequence[Question], args: BenchmarkOptions,
) -> str:
    """Answer questions with all methods, and store the comparison as OUT.json, OUT.md and OUT.png.

    Args:
        others: further forms of the pair by name.
        endpoints: see `read_endpoints`.

    Returns:
        The page.

    Raises:
        ValueError: a method to leave out is not there, or fewer than two are left.
    """
    if args.then is not None:
        questions = [replace(question, turns=(*question.turns, args.then)) for question in questions]
    forms = {"": (model, args.settings), **{f"{form}, ": (other, ()) for form, other in others.items()}}
    headless = {form: without_head(pair) if args.without_head else None for form, (pair, _) in forms.items()}
    static = longest(model, questions, args.max_new_tokens) if args.static else None

    def methods(own: BenchmarkOptions) -> tuple[dict[str, Method], dict[str, Method], dict[str, Method]]:
        """Those of transformers on the stock model, of our engine, and others, by name."""
        sampling = {"temperature": own.temperature, "seed": own.seed}
        stock = {BASELINE: hf_generate(model, **sampling)}
        if static is not None:
            stock[STATIC] = hf_generate(model, **sampling, static=static)
        others = {name: endpoint_method(model, *place, **sampling, keep_history=not own.reread)
                  for name, place in endpoints.items()}
        if own.rows == 1:
            stock[LOOKUP] = hf_generate(model, **sampling, prompt_lookup_num_tokens=10)
            others |= {f"assisted generation{'' if weight == 1 else f', weight {weight:g}'}": assisted(
                model, weight=weight, **sampling) for weight in own.assisted if isinstance(model.draft, DraftModel)}
        return stock, {f"{form}{name}": method for form, (pair, settings) in forms.items()
                       for name, method in own_methods(pair, headless[form], settings, own).items()}, others

    stock, ours, rest = methods(args)
    left = [name for name in (*stock, *ours, *rest) if name not in args.leave_out]
    if len(left) < 2 or not {*stock, *ours, *rest} >= set(args.leave_out):
        raise ValueError(f"--leave-out takes names of methods and leaves at least two, got {list(args.leave_out)} of "
                         f"{[*stock, *ours, *rest]}")
    history = "kept" if args.keeps_history else "read again"
    records, about = answer_runs(model, args, lambda own, about, number: compare(
        {name: each[name] for each in methods(own) for name in left if name in each}, questions, own, about,
        run=number, warm_up=args.warm_up, warm_up_tokens=args.max_new_tokens, rows=args.rows, minutes=args.minutes), {
            "history": history, "endpoints": endpoints, "rows": args.rows,
            "also": {form: described(other) for form, other in others.items()}})
    preface = ""
    if max(len(question.turns) for question in questions) > 1:
        preface = f"Later turns: history {history}, by {BASELINE} always read again\n\n"
    if args.rows > 1:
        preface += f"Batches of {args.rows} questions: tokens/s of a batch, s/answer as a share of it\n\n"
    rows, page = store(model, records, left[0], args, about, texts=next((name for name in left if name in ours), None),
                       preface=preface, baseline=model.stock.dtype if left[0] in stock else None)
    plot_speeds(rows, record_path(args.out, ".png"), left[0])
    return page
