"""Methods side by side on questions: answered in turn, timed and graded, every record kept as it comes.

`eval.benchmark` compares decoding methods with `model.generate`; `eagle-fsd calibrate` compares settings of acceptance
with exact (`compare_settings`).
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..data.files import append_lines, only_writer, read_lines
from ..data.progress import Progress
from ..data.questions import Question, converse
from ..options import GenerateOptions
from ..pair import EagleModel
from .grading import CODE_END, is_right
from .methods import Answer, Method, described, engine, pair_text
from .records import bullets, decimals, markdown, percent, plot_comparison, record_path, with_span, write_record
from .settings import EXACT, CalibrationOptions, ComparisonOptions, read_settings
from .statistics import FEWEST, by_category, cross_fitted, repetition

if TYPE_CHECKING:
    from ..batching.engine import Engine


def compare(
    methods: Mapping[str, Method], questions: Sequence[Question], options: ComparisonOptions,
    about: Mapping[str, object], *, warm_up: int = 2, timed: int | None = None,
    together: Mapping[str, Method] | None = None, workers: int = 1,
) -> list[dict]:
    """Every method's record of every question; the same call goes on with what its log has.

    Args:
        methods: by names that say all in which they differ.
        about: what all methods have in common.
        timed: so many questions, spread evenly, are answered alone, each by all methods in an order that rotates, so
            that a slow moment of the machine meets all alike; None: all. `warm_up` of them come first, unmeasured.
        together: the same methods for the other questions, of which `workers` threads ask at once.

    Returns:
        For each question its `id`, `category` and the `methods`' records (see `record_of`).

    Raises:
        ValueError: the log was begun for something else, or the first turn of a question cannot be answered.
    """
    log = record_path(options.out, ".answers.jsonl")
    count = len(questions) if timed is None or together is None else min(timed, len(questions))
    alone = [questions[number * len(questions) // count] for number in range(count)]
    names = list(methods)

    def answer(method: Method, name: str, question: Question, is_timed: bool) -> dict:
        try:
            answers = converse(lambda chat: method(chat, options.max_new_tokens), question.turns)
        except ValueError as error:
            raise ValueError(f"question {question.id}: {error}") from error
        return {"asked": digest_of(question), "method": name, "timed": is_timed,
                **record_of(answers, question, options.run_code)}

    def keep(records: Sequence[dict]) -> None:
        append_lines(log, records)
        known.update({(record["asked"], record["method"]): record for record in records})

    def is_missing(question: Question, name: str, is_timed: bool) -> bool:
        record = known.get((digest_of(question), name))
        return record is None or is_timed and not record["timed"]

    with only_writer(log):
        known = known_records(log, about)
        missing = [question for question in alone if any(is_missing(question, name, True) for name in names)]
        for question in missing[:warm_up]:
            for method in methods.values():
                method([{"role": "user", "content": question.turns[0]}], min(32, options.max_new_tokens))
        for number, question in enumerate(Progress(missing, desc="in turn", unit="question")):
            runs: dict[str, list[dict]] = {name: [] for name in names}
            for shift in range(number, number + options.repeats):
                for name in names[shift % len(names) :] + names[: shift % len(names)]:
                    runs[name].append(answer(methods[name], name, question, True))
            keep([{**taken[0], "seconds": statistics.median(record["seconds"] for record in taken)}
                  for taken in runs.values()])
        rest = [(question, name) for name in names for question in questions  # rules are walked one by one
                if question not in alone and is_missing(question, name, False)]
        pool = ThreadPoolExecutor(workers)
        try:
            jobs = [pool.submit(answer, together[name], name, question, False) for question, name in rest]
            for job in Progress(as_completed(jobs), desc="together", unit="answer", total=len(jobs)) if jobs else ():
                keep([job.result()])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [{"id": question.id, "category": question.category,
             "methods": {name: known[digest_of(question), name] for name in names}} for question in questions]


def known_records(log: Path, about: Mapping[str, object]) -> dict[tuple[str, str], dict]:
    """The records of a log by question and method; a log that is not there is begun."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begun, *records = read_lines(log) or [None]
    if begun is None:
        append_lines(log, [about])
    elif begun != about:
        changed = [name for name in {**about, **begun} if begun.get(name) != about.get(name)]
        raise ValueError(f"{log} was begun with other {', '.join(changed)}: delete it or choose another place")
    return {(record["asked"], record["method"]): record for record in records}


def digest_of(question: Question) -> str:
    return hashlib.sha256(repr(astuple(question)).encode()).hexdigest()[:16]


def record_of(answers: Sequence[Answer], question: Question, run_code: bool) -> dict:
    """What is kept of the answers to a question's turns.

    Returns:
        turns: texts; ids; seconds; tokens; forwards of the target and the tokens that they `emitted` (0 where the
        engine is not ours); fuzzy: tokens that only the rule accepted; regret: nats below the target's best, summed
        over the tokens; repeated: share of repeated 4-grams; cut_off: by the length limit, None where the engine is not
        ours; right: None where there is nothing to compare with.
    """
    outputs = [answer.output for answer in answers if answer.output]
    receipts = [receipt for output in outputs for receipt in output.receipts]
    lengths = [length for output in outputs for length in output.stats.accepted_lengths]
    ids = [token for answer in answers for token in answer.token_ids]
    right = is_right(question, answers[-1].text, run_code=run_code)
    return {
        "turns": [answer.text for answer in answers], "ids": ids, "tokens": len(ids),
        "seconds": sum(answer.seconds for answer in answers), "forwards": len(lengths),
        "emitted": sum(lengths) + len(lengths), "fuzzy": sum(receipt.source == "fuzzy" for receipt in receipts),
        "regret": sum(receipt.regret for receipt in receipts), "repeated": repetition(ids),
        "cut_off": any(output.finish_reason == "length" for output in outputs) if outputs else None,
        "right": None if right is None else bool(right and len(answers) == len(question.turns)),
    }


def method_table(rows: Sequence[Mapping], reference: str) -> str:
    """The rows in Markdown; `legend` says what the headings mean."""
    return markdown({
        "method": row["method"], "tokens/s": decimals(row["tokens_per_second"], 1),
        f"speed vs {reference} (95%)": ratio(row, "speedup", "x"),
        f"time per answer vs {reference} (95%)": ratio(row, "time"),
        "s/answer": decimals(row["seconds_per_answer"]), "tokens/answer": decimals(row["tokens_per_answer"], 0),
        "tau": decimals(row["tau"]), "same answers": percent(row["same_answers"]),
        "same tokens": percent(row["same_tokens"]), "fuzzy tokens": percent(row["fuzzy_share"], 1),
        "regret/token": decimals(row["regret_per_token"], 3), "repeated 4-grams": percent(row["repeated"]),
        "cut off": percent(row["cut_off"]), **(accuracy_cells(row) if row["accuracy"] is not None else {}),
    } for row in rows)


def ratio(row: Mapping, key: str, unit: str = "") -> str:
    """A ratio with its interval; empty where nothing was timed."""
    return "" if row[key] is None else with_span(f"{row[key]:.2f}{unit}", row[f"{key}_interval"])


def accuracy_cells(row: Mapping) -> dict[str, str]:
    change = change_interval(row)
    return {"accuracy": percent(row["accuracy"], 1),
            "lost, gained": f"{round(row['lost'], 1):g}, {round(row['gained'], 1):g}",
            "change in points (95%)": with_span(f"{0 - 100 * row['drop']:+.1f}", change, 1),
            "loss at most": decimals(100 * row["bound"], 1)}


def change_interval(row: Mapping) -> list[float] | None:
    """Of the change of accuracy in points; None: too few answers are graded."""
    if row["drop_interval"] is None or row["graded"] < FEWEST:
        return None
    return sorted(-100 * end for end in row["drop_interval"])


def legend(rows: Sequence[Mapping], reference: str, parting: str) -> str:
    """What the headings of `method_table` mean.

    Args:
        parting: why lossless methods may have other answers than the reference's.
    """
    graded = {
        "lost, gained": f"answers that are right under {reference} and wrong here, and the reverse",
        "change in points (95%)": "of accuracy, with Tango's score interval (of several seeds: bootstrap)",
        "loss at most": "one-sided 95% bound in points, corrected for the number of methods",
    } if rows[0]["accuracy"] is not None else {}
    return bullets({
        "tokens/s": "new tokens over wall time, prompts included; an answer is all turns of a question",
        f"speed, time per answer vs {reference} (95%)": "ratios over the timed questions, with bootstrap intervals "
        f"over questions; of fewer than {FEWEST} questions there is none",
        "tau": "tokens emitted per forward of the target, its own token included; copies from the text count as well, "
        'where they are drafted. EAGLE\'s own tau is that of the head alone (text_drafts="off")',
        "same answers, same tokens": f"answers that are {reference}'s token by token; tokens before the first "
        f"difference. {parting}",
        "fuzzy tokens": "accepted by the rule alone: the target would have taken others",
        "regret/token": "log-probability of the target's best token less that of the token taken: nats, mean over all "
        "tokens",
        "repeated 4-grams": "share of an answer's 4-grams that it had before",
        "cut off": "answers that the length limit has ended", **graded,
    })


def parting_text(model: EagleModel, temperature: float, baseline: torch.dtype | None) -> str:
    """Why lossless methods may have other texts than the reference.

    Args:
        baseline: dtype of a reference that is not our engine.
    """
    if baseline is not None and temperature:
        return "A lossless method samples from model.generate's distribution, with other noise: other texts."
    half = {str(dtype).removeprefix("torch.") for dtype in (model.target.dtype, baseline)
            if dtype in (torch.float16, torch.bfloat16)}
    if not half:
        return "A lossless method has 100%, unless the two best tokens tie even in float32."
    return (f"A lossless method can have less in {' and '.join(sorted(half))}: forwards over one and over several "
            "tokens round differently; where the two best tokens tie either may be taken, and from there on the texts "
            "differ (docs/python.md, Lossless in half precision). In float32 they are the same.")


def page_text(rows: Mapping[str, Sequence[Mapping]], reference: str) -> str:
    """The table of all questions, and for each category, where there are several, the most important columns."""
    text = method_table(rows["all"], reference)
    if len(rows) > 1:
        text += f"\n\nTimes the speed of {reference}, tau, and accuracy, by category:\n\n" + markdown({
            "category": category, "questions": each[0]["answers"],
            **{row["method"]: " / ".join(filter(None, (
                decimals(row["speedup"], unit="x"), decimals(row["tau"]), percent(row["accuracy"], 1))))
               for row in each},
        } for category, each in rows.items())
    return text


def recommend(rows: Sequence[Mapping], reference: str, points: float) -> tuple[str | None, str]:
    """The fastest method that is surely faster than the reference and surely loses at most so many points of accuracy.

    Returns:
        Its name, or None; and what to say of it.
    """
    others = [row for row in rows if row["method"] != reference]
    if any(row["accuracy"] is None for row in rows):
        return None, "Nothing is recommended: these questions have no grader, so that what is lost is not known."
    accuracy = next(row["accuracy"] for row in rows if row["method"] == reference)
    if 100 * accuracy <= points:
        return None, (f"Nothing is recommended: {reference} answers {percent(accuracy, 1)} rightly, so that there is "
                      "nothing to lose; look at the answers and at how they are compared.")
    kept = [row for row in others if 100 * row["bound"] <= points]
    if any(row["time_interval"] is None for row in rows):
        return None, f"None is recommended: it takes {FEWEST} timed questions at least."
    faster = [row for row in kept if row["time_interval"][1] < 1]
    if not faster:
        why = f"is shown to lose at most {points:g} points of accuracy ({rows[0]['graded']} answers)" if not kept else \
            f"that loses at most {points:g} points takes surely less time per answer than {reference}"
        return None, f"None is recommended: no setting {why}."
    best = min(faster, key=lambda row: row["time"])
    time = with_span(f"{best['time']:.2f} of {reference}'s time per answer", best["time_interval"])
    return best["method"], (
        f"Recommended: {best['method']}, {time}, at a loss of at most "
        f"{100 * best['bound']:.1f} points of accuracy (one-sided 95%, corrected for the choice among {len(others)}). "
        "Nothing was set.")


def cross_fit_text(row: Mapping, reference: str, points: float) -> str:
    """What came of choosing on other questions, in a sentence."""
    time = with_span(f"{row['time']:.2f} of {reference}'s time per answer", row["time_interval"])
    change = with_span(f"{0 - 100 * row['drop']:+.1f} points of accuracy", change_interval(row), 1)
    return (f"Chosen on one half of the questions, as the fastest that loses at most {points:g} points there, and "
            f"judged on the other half, both ways ({' and '.join(row['chosen'])}): {time}, {change}.")


def store(
    model: EagleModel, records: Sequence[Mapping], reference: str, options: ComparisonOptions,
    about: Mapping[str, object], *, points: float | None = None, workers: int = 1, seeds: int = 1,
    baseline: torch.dtype | None = None, preface: str = "",
) -> tuple[dict[str, list[dict]], str]:
    """Store the rows of `compare`'s records as OUT.json and OUT.md.

    Args:
        points: of accuracy, that a recommended method loses at most; None: nothing is recommended.
        workers, seeds: for the record.
        baseline: dtype of a reference that is not our engine.
        preface: what the page begins with.

    Returns:
        The rows by category (see `method_rows`), and the page, which ends with the recommendation.
    """
    rows = by_category(records, reference)
    name, said, crossed = None, "", None
    if points is not None:
        name, said = recommend(rows["all"], reference, points)
        crossed = cross_fitted(records, reference, points)
        said += "" if crossed is None else f"\n\n{cross_fit_text(crossed, reference, points)}"
    names = dict(zip(("target", "head"), model.described(), strict=True))
    result = {"workers": workers, "seeds": seeds, "points": points, "recommended": name, "said": said, "rows": rows,
              "cross_fitted": crossed, "names": names, "baseline_dtype": baseline and str(baseline)}
    stored = "" if baseline is None else f", {reference} in {str(baseline).removeprefix('torch.')}"
    parting = parting_text(model, options.temperature, baseline)
    return rows, write_record(options.out, {**about, **result}, f"""\
{preface}{pair_text(model)}

{len(records)} questions, {rows["all"][0]["timed"]} of them timed{stored},
temperature {options.temperature:g}, at most {options.max_new_tokens} tokens a turn,
tree {model.describe_tree(options.tree)}{f", accuracy of {seeds} seeds" if seeds > 1 else ""}

{page_text(rows, reference)}

{legend(rows["all"], reference, parting)}

{said}""".rstrip())


def setting_methods(
    model: EagleModel, settings: Sequence[str], options: ComparisonOptions,
    shared: Mapping[str, object] | None = None, batches: Engine | None = None,
) -> dict[str, Method]:
    """`exact` and these settings by name.

    Args:
        shared: further options of `generate` for all.
        batches: decodes the requests, lossless ones without drafting: their tokens are the same, and drafting pays
            alone.
    """
    common = {"temperature": options.temperature, "seed": options.seed, "tree": options.tree, **(shared or {})}
    methods = {name: common | setting for name, setting in read_settings(settings).items()}
    if batches is None:
        return {name: engine(model, **each) for name, each in methods.items()}
    return {name: engine(model, ask=lambda prompt, **request: batches.submit(prompt, **request).result(),
                         speculative=not GenerateOptions.from_names(each).lossless, **each)
            for name, each in methods.items()}


def compare_settings(model: EagleModel, questions: Sequence[Question], options: CalibrationOptions) -> str:
    """Answer questions exactly and under settings, and store the comparison as OUT.json, OUT.md and OUT.png.

    With several seeds, accuracy is the mean over the options' seed and those after it; everything else is that of the
    first. Each seed has a log of its own. Batches are decoded with one tree, `options.tree` or `model.default_tree`, so
    that fuzzy texts do not depend on what else is in the batch.

    Returns:
        The page, which ends with the recommendation.
    """
    shared = {"stop": CODE_END} if options.stop_after_code else {}
    by_seed, joined = [], nullcontext()
    if options.batch > 1:
        from ..batching.engine import Engine  # needs packages of the extra `serve`

        joined = Engine(model, max_rows=options.batch, max_waiting=options.batch, prefixes=0,
                        tree=options.tree or model.default_tree)
    with joined as batches:
        for number in range(options.seeds):
            name = f".seed{options.seed + number}" if number else ""
            each = replace(options, seed=options.seed + number, out=record_path(options.out, name))
            alone = setting_methods(model, options.settings, each, shared)
            together = None if batches is None else setting_methods(model, options.settings, each, shared, batches)
            by_seed.append(compare(alone, questions, each, described(model, each) | shared, workers=options.batch,
                                   timed=0 if number else options.timed, together=together))
    rows, page = store(model, join_seeds(by_seed), EXACT, options, described(model, options) | shared,
                       points=options.points, workers=options.batch, seeds=options.seeds)
    plot_comparison(rows["all"], EXACT, record_path(options.out, ".png"))
    return page


def join_seeds(by_seed: Sequence[Sequence[Mapping]]) -> list[dict]:
    """The records of the first seed, `right` being the share of all seeds that were."""
    def shared(records: Sequence[Mapping]) -> dict:
        rights = [record["right"] for record in records]
        return {**records[0], "right": None if None in rights else statistics.mean(rights)}

    return [{**lines[0], "methods": {name: shared([line["methods"][name] for line in lines])
                                     for name in lines[0]["methods"]}} for lines in zip(*by_seed, strict=True)]
