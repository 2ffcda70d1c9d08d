"""Comparison of decoding methods on questions: answer, time and grade, and log every record at once.

`eagle-fsd benchmark` compares decoding methods with `model.generate` (`benchmark.py`); `eagle-fsd calibrate` compares
settings of acceptance with exact (`compare_settings`).
"""

from __future__ import annotations

import logging
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ..batching.engine import Engine
from ..data.questions import Question, converse, converse_together
from ..loading.pair import EagleModel
from ..options.generate import GenerateOptions
from ..utils.checks import is_check
from ..utils.files import append_lines, check_same, only_writer, read_lines, write_lines
from ..utils.progress import Progress
from .answers import answer_record, digest_of, read_answers
from .grading import CODE_END, is_right
from .lost import lost_answers, lost_table
from .methods import Answer, Method, described, draft_model, engine, pair_text
from .records import bullets, decimals, markdown, percent, plot_comparison, record_path, with_span, write_record
from .settings import REFERENCE, CalibrationOptions, ComparisonOptions, read_settings
from .statistics import FEWEST, by_category, by_turn, cross_fitted, repetition

log = logging.getLogger(__name__)
DRAFTER = "drafter alone"
PLAIN = {"speculative": False, "tree": None}  # options of decoding without drafts


def compare(
    methods: Mapping[str, Method], questions: Sequence[Question], options: ComparisonOptions,
    about: Mapping[str, object], *, run: int = 1, warm_up: int = 2, warm_up_tokens: int = 32, timed: int | None = None,
    together: Mapping[str, Method] | None = None, workers: int = 1, rows: int = 1, minutes: float | None = None,
) -> list[dict]:
    """Answer every question with every method. A repeated call resumes an interrupted one.

    The answers are in OUT.answers/run_N, a file in FastChat's format for each method, with further fields (see
    `record_of`), and about.json.

    Args:
        methods: methods by name. A name must state everything in which its method differs from the others.
        about: what all methods have in common; answers are only resumed if it is the same.
        run: number of the run, from 1.
        warm_up: questions (batches of `rows`) answered first without being measured, with at most `warm_up_tokens` a
            turn.
        timed: number of questions to time, spread evenly; None: all. They are answered one at a time, each by all
            methods in an order that rotates, so that slow moments of the machine affect all methods alike.
        together: the same methods for the other questions, called from `workers` threads.
        rows: timed questions answered together; above 1, the methods answer lists of prompts.
        minutes: time from the warm-up on after which no further question is asked; None: all are.

    Returns:
        For each question that all methods have answered, its `id`, `category` and the `methods`' records (see
        `record_of`).

    Raises:
        ValueError: the answers belong to another comparison, or the first turn of a question cannot be answered.
    """
    folder = record_path(options.out, ".answers") / f"run_{run}"
    count = len(questions) if timed is None or together is None else min(timed, len(questions))
    timed_questions = [questions[number * len(questions) // count] for number in range(count)]
    names = list(methods)

    def ask(method: Method, group: Sequence[Question], most: int) -> list[list[Answer]]:
        try:
            if rows == 1:
                return [converse(lambda chat: method(chat, most), question.turns) for question in group]
            return converse_together(lambda chats: method(chats, most), [question.turns for question in group])
        except ValueError as error:
            if not is_check(error):
                raise
            raise ValueError(f"question {', '.join(str(question.id) for question in group)}: {error}") from error

    def answer(method: Method, name: str, group: Sequence[Question], is_timed: bool) -> list[dict]:
        return [{**answer_record(question, name, [answers]), "timed": is_timed,
                 **record_of(answers, question, options.run_code)}
                for question, answers in zip(group, ask(method, group, options.max_new_tokens), strict=True)]

    def file_of(name: str) -> Path:
        return folder / f"{re.sub(r'[^-+.,=_a-zA-Z0-9]+', '-', name).strip('-')}.jsonl"

    def log_records(records: Sequence[dict]) -> None:
        append_lines(file_of(records[0]["model_id"]), records)
        known.update({(record["asked"], record["model_id"]): record for record in records})

    def is_missing(question: Question, name: str, is_timed: bool) -> bool:
        record = known.get((digest_of(question), name))
        return record is None or is_timed and not record["timed"]

    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        known = known_records(folder, about)
        missing = [question for question in timed_questions if any(is_missing(question, name, True) for name in names)]
        groups = [missing[start : start + rows] for start in range(0, len(missing), rows)]
        for group in groups[:warm_up]:
            for method in methods.values():
                ask(method, group, min(warm_up_tokens, options.max_new_tokens))
        started = time.monotonic()
        for number, group in enumerate(Progress(groups, desc="timed", unit="question" if rows == 1 else "batch")):
            if number and minutes is not None and time.monotonic() - started > 60 * minutes:
                log.warning("stopped after %g minutes: %d of %d questions are missing, and the same command continues",
                            minutes, len(missing) - number * rows, len(questions))
                break
            found = {name: answer(methods[name], name, group, True)
                     for name in names[number % len(names) :] + names[: number % len(names)]}
            for records in found.values():  # of a question that all have answered, so that it was timed side by side
                log_records(records)
        pool = ThreadPoolExecutor(workers)
        try:
            for name in names:  # one after the other: rows without drafts would wait for the cycles of drafted ones
                jobs = [pool.submit(answer, together[name], name, [question], False) for question in questions
                        if question not in timed_questions and is_missing(question, name, False)]
                done = as_completed(jobs)
                for job in Progress(done, desc=f"batched, {name}", unit="answer", total=len(jobs)) if jobs else ():
                    log_records(job.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        order = {digest_of(question): number for number, question in enumerate(questions)}
        ordered = sorted(known.values(), key=lambda record: order.get(record["asked"], -1))
        for path in set(map(file_of, names)):  # each answer once, in the order of the questions
            write_lines(path, [record for record in ordered if file_of(record["model_id"]) == path])
    return [{"id": question.id, "category": question.category,
             "methods": {name: known[digest_of(question), name] for name in names}} for question in questions
            if all((digest_of(question), name) in known for name in names)]


def known_records(folder: Path, about: Mapping[str, object]) -> dict[tuple[str, str], dict]:
    """Read the answers of a run by question and method, or begin it. Of two answers, the later counts."""
    place, paths = folder / "about.json", sorted(folder.glob("*.jsonl"))
    header = (read_lines(place) or [None])[0]
    if header is None and not paths:
        append_lines(place, [about])
    else:
        check_same(folder, header, about)
    return {(record.get("asked"), record.get("model_id")): record for path in paths
            for record in read_answers(path, repair=True)}


def join_runs(by_run: Sequence[Sequence[Mapping]]) -> list[dict]:
    """The records of the first run, with `runs`, those of each run, and with `right` as the share of runs with a right
    answer. Questions that a run lacks are left out."""
    if len(by_run) == 1:
        return list(by_run[0])

    def joined(runs: Sequence[Mapping]) -> dict:
        rights = [record["right"] for record in runs]
        return {**runs[0], "runs": runs, "timed": all(record["timed"] for record in runs),
                "right": None if None in rights else statistics.mean(rights)}

    rest = [{(name, record["asked"]): record for line in lines for name, record in line["methods"].items()}
            for lines in by_run[1:]]
    return [{**line, "methods": {name: joined([record, *(each[name, record["asked"]] for each in rest)])
                                 for name, record in line["methods"].items()}} for line in by_run[0]
            if all((name, record["asked"]) in each for each in rest for name, record in line["methods"].items())]


def record_of(answers: Sequence[Answer], question: Question, run_code: bool) -> dict:
    """The record of the answers to a question's turns.

    Returns:
        the counts of all turns (see `counts_of`); by_turn: those of each, if there are several; right: None if there
        is nothing to compare with.
    """
    right = is_right(question, answers[-1].text, run_code=run_code)
    by_turn = [counts_of([answer]) for answer in answers] if len(question.turns) > 1 else []
    return {**counts_of(answers), "by_turn": by_turn,
            "right": None if right is None else bool(right and len(answers) == len(question.turns))}


def counts_of(answers: Sequence[Answer]) -> dict:
    """What is counted in answers.

    Returns:
        ids: their token ids; tokens: their number; seconds; forwards: verify forwards of the target, and emitted:
        tokens that they emitted (both 0 where unknown); lengths: accepted draft tokens of each; steps: forwards of the
        target after those of prompts (None: unknown); fuzzy: tokens that only the rule accepted; first_fuzzy: index of
        the first one; regret: nats, summed over the tokens; repeated: share of repeated 4-grams; cut_off: whether the
        length limit ended an answer (None for other engines).
    """
    outputs = [answer.output for answer in answers if answer.output]
    receipts = [receipt for output in outputs for receipt in output.receipts]
    lengths = [length for answer in answers for length in answer.accepted_lengths or ()]
    steps = [answer.steps for answer in answers]
    fuzzy = [at for at, receipt in enumerate(receipts) if receipt.source == "fuzzy"]
    ids = [token for answer in answers for token in answer.token_ids]
    return {
        "ids": ids, "tokens": len(ids),
        "seconds": sum(answer.seconds for answer in answers), "forwards": len(lengths),
        "emitted": sum(lengths) + len(lengths), "lengths": lengths, "steps": None if None in steps else sum(steps),
        "fuzzy": len(fuzzy), "first_fuzzy": fuzzy[0] if fuzzy else None,
        "regret": sum(receipt.regret for receipt in receipts), "repeated": repetition(ids),
        "cut_off": any(output.finish_reason == "length" for output in outputs) if outputs else None,
    }


def method_table(rows: Sequence[Mapping], reference: str) -> str:
    """The rows as a Markdown table, without empty columns; see `legend` for the headings."""
    table = [{
        "method": row["method"], "tokens/s": decimals(row["tokens_per_second"], 1),
        f"speed vs {reference} (95%)": ratio(row, "speedup", "x"),
        f"time per answer vs {reference} (95%)": ratio(row, "time"),
        "mean of each question's tokens/s": with_deviation(row, "mean_speed", 1),
        "s/answer": decimals(row["seconds_per_answer"]), "tokens/answer": decimals(row["tokens_per_answer"], 0),
        "tau": decimals(row["tau"]), "same answers": percent(row["same_answers"]),
        "same tokens": percent(row["same_tokens"]), "fuzzy tokens": percent(row["fuzzy_share"], 1),
        "regret/token": decimals(row["regret_per_token"], 3), "repeated 4-grams": percent(row["repeated"]),
        "cut off": percent(row["cut_off"]), **(accuracy_cells(row) if row["accuracy"] is not None else {}),
    } for row in rows]
    return markdown({heading: cell for heading, cell in cells.items() if any(row.get(heading) for row in table)}
                    for cells in table)


def with_deviation(row: Mapping, key: str, digits: int = 2, unit: str = "") -> str:
    """A mean over runs with its standard deviation, if there are several; empty if nothing was timed."""
    deviation = row[f"{key}_deviation"]
    return decimals(row[key], digits, unit) + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def ratio(row: Mapping, key: str, unit: str = "") -> str:
    """A ratio with its interval; empty if nothing was timed."""
    return "" if row[key] is None else with_span(f"{row[key]:.2f}{unit}", row[f"{key}_interval"])


def accuracy_cells(row: Mapping) -> dict[str, str]:
    change = change_interval(row)
    return {"accuracy": percent(row["accuracy"], 1),
            "lost, gained": f"{round(row['lost'], 1):g}, {round(row['gained'], 1):g}",
            "change in points (95%)": with_span(f"{0 - 100 * row['drop']:+.1f}", change, 1),
            "loss at most": decimals(100 * row["bound"], 1)}


def change_interval(row: Mapping) -> list[float] | None:
    """Interval of the change of accuracy in points; None: too few graded answers."""
    if row["drop_interval"] is None or row["graded"] < FEWEST:
        return None
    return sorted(-100 * end for end in row["drop_interval"])


def legend(rows: Sequence[Mapping], reference: str, texts: str, difference: str) -> str:
    """A legend of the headings of `page_text`.

    Args:
        texts: the method whose texts the others' are compared with.
        difference: why answers of lossless methods may differ from its, see `difference_text`.
    """
    graded = {
        "lost, gained": f"answers that are right with {reference} and wrong with the method, and the reverse",
        "change in points (95%)": "change of accuracy, with Tango's score interval (for several runs: bootstrap)",
        "loss at most": "one-sided 95% bound on the loss of accuracy in points, corrected for the number of methods",
    } if rows[0]["accuracy"] is not None else {}
    return bullets({
        "tokens/s": "new tokens divided by wall time, including prefill; an answer is all turns of a question",
        f"speed, time per answer vs {reference} (95%)": "ratios over the timed questions, with bootstrap intervals "
        f"over questions if there are at least {FEWEST}",
        "mean of each question's tokens/s": "as Spec-Bench has it; with several runs, their mean ± standard deviation",
        "tau": "tokens emitted per verify forward, including the target's own token and accepted copies from the text "
        '(Spec-Bench: mean accepted tokens). The EAGLE papers report tau of the head alone (text_drafts="off")',
        "same answers, same tokens": f"answers with the same tokens as {texts}'s; share of tokens before "
        f"the first difference. {difference}",
        "fuzzy tokens": "tokens that only the rule accepted: the target would have chosen others",
        "regret/token": "log-probability of the target's best token minus that of the emitted one: nats, mean over all "
        "tokens",
        "repeated 4-grams": "share of 4-grams that occurred earlier in the same answer",
        "cut off": "answers ended by the length limit", **graded,
    })


def difference_text(model: EagleModel, temperature: float, other: tuple[str, torch.dtype] | None, ours: bool) -> str:
    """Why texts of lossless methods may differ from those that they are compared with.

    Args:
        other: name and dtype of the reference, if it is not of our engine.
        ours: whether the texts that all are compared with are of our engine.
    """
    own, note = str(model.target.dtype).removeprefix("torch."), ""
    dtypes = {own}
    if other is not None:
        name, dtype = other[0], str(other[1]).removeprefix("torch.")
        if temperature:
            note = f" {name} samples from the same distribution with other noise, so texts differ from its."
        elif dtype != own:
            note = f" {name} computes in {dtype} and our engine in {own}, so texts may differ from its."
        dtypes |= set() if ours else {dtype}
    half = sorted(dtypes & {"float16", "bfloat16"})
    if temperature and not ours:
        return note.strip()
    if not half:
        return f"A lossless method has 100%, unless the two best tokens tie even in float32.{note}"
    return (f"A lossless method can have less than 100% in {' and '.join(half)}: forwards over one token and "
            "over several round differently. If the two best tokens tie, either can be chosen, and the texts differ "
            f"from there (docs/python.md, Lossless in half precision). In float32 they are the same.{note}")


def page_text(
    rows: Mapping[str, Sequence[Mapping]], turns: Mapping[str, Sequence[Mapping]], reference: str
) -> str:
    """The table of all questions; accepted tokens by position; the most important columns by turn and by category, if
    there are several."""
    text = method_table(rows["all"], reference)
    known = [row for row in rows["all"] if row["steps"] is not None]
    if known:
        text += ("\n\nForwards of the target per answer after the prompt's (Spec-Bench: decoding steps), and the share "
                 "that accepted the draft token at each position, of those that accepted all before it (n-alpha):\n\n"
                 ) + markdown({
            "method": row["method"], "forwards/answer": decimals(row["steps"], 1),
            **{f"{place}-alpha": percent(share) for place, share in enumerate(row["accepted"], 1)}} for row in known)
    if turns:
        text += f"\n\nTokens/s, speed as a multiple of {reference}'s (95%), and tau, by turn:\n\n" + markdown({
            "method": row["method"], **{turn: " / ".join(filter(None, (
                decimals(turn_rows[place]["tokens_per_second"], 1), ratio(turn_rows[place], "speedup", "x"),
                decimals(turn_rows[place]["tau"])))) for turn, turn_rows in turns.items()},
        } for place, row in enumerate(rows["all"]))
    if len(rows) > 1:
        text += (f"\n\nMean of each question's tokens/s as a multiple of {reference}'s (Spec-Bench: speedup), tau, and "
                 "accuracy, by category:\n\n") + markdown({
            "category": "overall" if category == "all" else category, "questions": group[0]["answers"],
            **{row["method"]: " / ".join(filter(None, (
                with_deviation(row, "mean_speedup", unit="x"), decimals(row["tau"]), percent(row["accuracy"], 1))))
               for row in group},
        } for category, group in rows.items())
    return text


def recommend(rows: Sequence[Mapping], reference: str, points: float) -> tuple[str | None, str]:
    """Recommend the fastest method that is significantly faster than the reference and loses little accuracy.

    Args:
        points: largest loss of accuracy in points, at one-sided 95% confidence.

    Returns:
        The name of the method, or None; and the recommendation as text.
    """
    others = [row for row in rows if row["method"] != reference]
    if any(row["accuracy"] is None for row in rows):
        return None, "No recommendation: these questions cannot be graded, so the loss of accuracy is unknown."
    accuracy = next(row["accuracy"] for row in rows if row["method"] == reference)
    if 100 * accuracy <= points:
        return None, (f"No recommendation: {reference} answers {percent(accuracy, 1)} correctly, too little to measure "
                      "a loss. Check the answers and how they are graded.")
    accurate = [row for row in others if 100 * row["bound"] <= points]
    if any(row["time_interval"] is None for row in rows):
        return None, f"No recommendation: it needs at least {FEWEST} timed questions."
    faster = [row for row in accurate if row["time_interval"][1] < 1]
    if not faster:
        why = (f"takes significantly less time than {reference} and loses at most {points:g} points" if accurate else
               f"loses at most {points:g} points of accuracy at 95% confidence ({rows[0]['graded']} answers)")
        return None, f"No recommendation: no setting {why}."
    best = min(faster, key=lambda row: row["time"])
    time = with_span(f"{best['time']:.2f} of {reference}'s time per answer", best["time_interval"])
    return best["method"], (
        f"Recommended: {best['method']}, {time}, at a loss of at most "
        f"{100 * best['bound']:.1f} points of accuracy (one-sided 95%, corrected for the choice among {len(others)}). "
        "No default was changed.")


def cross_fit_text(row: Mapping, reference: str, points: float) -> str:
    """The result of `cross_fitted` as a sentence."""
    time = with_span(f"{row['time']:.2f} of {reference}'s time per answer", row["time_interval"])
    change = with_span(f"{0 - 100 * row['drop']:+.1f} points of accuracy", change_interval(row), 1)
    return (f"Cross-fitted: the fastest setting that loses at most {points:g} points on one half of the questions "
            f"({' and '.join(row['chosen'])} on the two halves), measured on the other half: {time}, {change}.")


def store(
    model: EagleModel, records: Sequence[Mapping], reference: str, options: ComparisonOptions,
    about: Mapping[str, object], *, points: float | None = None, workers: int = 1, texts: str | None = None,
    baseline: torch.dtype | None = None, preface: str = "",
) -> tuple[dict[str, list[dict]], str]:
    """Store the rows of `compare`'s records as OUT.json and OUT.md.

    Args:
        points: largest loss of accuracy of a recommended method, in points; None: no recommendation.
        workers: recorded as it is.
        texts: a method of our engine, whose texts the others' are compared with; None: the reference.
        baseline: dtype of a reference other than our engine; None: our engine.
        preface: beginning of the page.

    Returns:
        The rows by category (see `method_rows`), and the page, which ends with the recommendation.
    """
    rows, turns = by_category(records, reference, texts), by_turn(records, reference, texts)
    name, conclusion, crossed = None, "", None
    if points is not None:
        name, conclusion = recommend(rows["all"], reference, points)
        crossed = cross_fitted(records, reference, points)
        conclusion += "" if crossed is None else f"\n\n{cross_fit_text(crossed, reference, points)}"
    lost = [] if model.tokenizer is None else lost_answers(records, reference, model.tokenizer.decode, DRAFTER)
    names = dict(zip(("target", "head"), model.described(), strict=True))
    result = {"workers": workers, "runs": options.runs, "points": points, "recommended": name,
              "conclusion": conclusion, "rows": rows, "turns": turns, "lost": lost, "cross_fitted": crossed,
              "names": names, "reference": reference, "texts": texts or reference,
              "baseline_dtype": baseline and str(baseline)}
    other = None if baseline is None else (reference, baseline)
    precision = "" if other is None else f", {reference} in {str(baseline).removeprefix('torch.')}"
    difference = difference_text(model, options.temperature, other, baseline is None or texts is not None)
    return rows, write_record(options.out, {**about, **result}, f"""\
{preface}{pair_text(model)}

{len(records)} questions, {rows["all"][0]["timed"]} of them timed{precision},
temperature {options.temperature:g}, at most {options.max_new_tokens} tokens a turn,
tree {model.describe_tree(options.tree)}{f", {options.runs} runs" if options.runs > 1 else ""}

{page_text(rows, turns, reference)}

{legend(rows["all"], reference, texts or reference, difference)}

{conclusion}

{lost_table(lost) if lost else ""}""".rstrip())


def answer_runs(
    model: EagleModel, options: ComparisonOptions, run: Callable[[ComparisonOptions, Mapping, int], list[dict]],
    more: Mapping[str, object],
) -> tuple[list[dict], dict]:
    """The joined records of all runs, and what they have in common.

    Args:
        run: answers all questions with the options of a run, what it depends on, and its number.
        more: further parts of what they depend on.
    """
    about = described(model, options) | more
    owns = [replace(options, seed=options.seed + number) for number in range(options.runs)]
    records = join_runs([run(own, about | {"seed": own.seed}, number) for number, own in enumerate(owns, 1)])
    if not records:
        raise ValueError("no question has been answered in all runs yet: the same command continues")
    return records, about


def setting_methods(
    model: EagleModel, settings: Sequence[str], options: ComparisonOptions,
    shared: Mapping[str, object] | None = None, batches: Engine | None = None,
) -> dict[str, Method]:
    """Methods for `exact`, these settings, and the draft model alone if the options ask for it, by name.

    Args:
        shared: further options of `generate` for all methods.
        batches: engine that decodes the requests. It decodes lossless ones without drafts, which gives the same tokens
            and is faster in a batch.
    """
    common = {"temperature": options.temperature, "seed": options.seed, "tree": options.tree,
              "text_drafts": options.text_drafts, **(shared or {})}
    methods = {name: common | setting for name, setting in read_settings(settings).items()}
    if batches is None:
        alone = {}
        if options.drafter_alone:
            drafter = draft_model(model, "--drafter-alone").model
            alone[DRAFTER] = engine(EagleModel.from_parts(drafter, None, model.tokenizer), **common | PLAIN)
        return {name: engine(model, **setting) for name, setting in methods.items()} | alone
    return {name: engine(model, ask=lambda prompt, **request: batches.submit(prompt, **request).result(),
                         **setting | (PLAIN if GenerateOptions(**setting).lossless else {}))
            for name, setting in methods.items()}


def compare_settings(
    model: EagleModel, others: Mapping[str, EagleModel], questions: Sequence[Question], options: CalibrationOptions
) -> str:
    """Answer questions with `exact` and with each setting, and store the comparison as OUT.json, OUT.md and OUT.png.

    Batches use one tree, `options.tree` or `model.default_tree`, so that fuzzy texts do not depend on the rest of the
    batch.

    Args:
        others: further forms of the pair by name, which answer with `exact`.

    Returns:
        The page, which ends with the recommendation.
    """
    shared = {"stop": CODE_END} if options.stop_after_code else {}
    forms = {"": (model, options.settings), **{f"{form}, ": (other, ()) for form, other in others.items()}}

    with ExitStack() as stack:
        batches = {} if options.batch == 1 else {form: stack.enter_context(Engine(
            pair, max_rows=options.batch, max_waiting=options.batch, prefixes=0,
            tree=options.tree or pair.default_tree)) for form, (pair, _) in forms.items()}

        def methods(own: CalibrationOptions, batched: bool) -> dict[str, Method]:
            return {f"{form}{name}": method for form, (pair, settings) in forms.items() for name, method in
                    setting_methods(pair, settings, own, shared, batches[form] if batched else None).items()}

        records, about = answer_runs(model, options, lambda own, about, number: compare(
            methods(own, False), questions, own, about, run=number, workers=options.batch, timed=options.timed,
            together=methods(own, True) if batches else None), shared | {
                "batch": options.batch, "also": {form: described(other) for form, other in others.items()}})
    rows, page = store(model, records, REFERENCE, options, about, points=options.points, workers=options.batch)
    plot_comparison(rows, REFERENCE, record_path(options.out, ".png"))
    return page
