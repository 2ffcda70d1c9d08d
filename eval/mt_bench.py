"""MT-Bench speed: every question's turns through the chat template, answers in FastChat's file format.

    python -m eval.mt_bench --questions mt_bench.jsonl --acceptance fsd --threshold 0.2 --answers fsd.jsonl
    python -m eval.mt_bench --questions mt_bench.jsonl --baseline --answers plain.jsonl
    python -m eval.speed fsd.jsonl plain.jsonl

One line per question: question_id, answer_id, model_id, choices [{index, turns, idxs, new_tokens, wall_time}], tstamp;
idxs counts the target's forwards of each turn, and accept_lengths (as Spec-Bench writes it) the tokens of each. A run
that was stopped goes on with the questions that are missing. `torchrun --nproc_per_node 2 -m eval.mt_bench ...` or
`accelerate launch` on several GPUs splits the questions over processes (timings are then only comparable with runs on
as many).
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from accelerate import PartialState

import eagle_fsd
from eagle_fsd.cli.arguments import Acceptance, Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.files import append_lines, only_writer, read_lines, write_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import Question, converse
from eagle_fsd.measure.methods import Method, engine, hf_generate
from eagle_fsd.measure.records import environment, processes, record_path, shown, shown_settings, write_json
from eval.command import run_command
from eval.questions import load_questions

# Sampling temperatures by category, as FastChat's judge sets them; other categories are greedy.
CATEGORY_TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}


@dataclass(frozen=True, kw_only=True)
class MtBenchArguments:
    """What `eval.mt_bench` answers, and how.

    Args:
        answers: file that the answers are added to.
        questions: JSON lines: MT-Bench, Spec-Bench, HumanEval, GSM8K, prompts.
        generated: without questions: this many generated tasks.
        baseline: answer with model.generate.
        temperature: a number, or "category": as FastChat.
        max_new_tokens: of a turn.
        num_choices: answers to each question, each with the next seed.
        seed: of the noise, and of the generated tasks.
        warm_up: unmeasured answers before the first question.
        limit: only the first questions.
        model_id: name in the answers file; without it the rule's.
    """

    pair: Loading = Loading()
    decoding: Acceptance = Acceptance()
    answers: Path
    questions: Path | None = None
    generated: int = 80
    baseline: bool = False
    temperature: str = "0"
    max_new_tokens: int = 1024
    num_choices: int = 1
    seed: int = 1
    warm_up: int = 3
    limit: int | None = None
    model_id: str | None = None

    @property
    def name(self) -> str:
        """The model's in the answers file."""
        dial = "" if self.decoding.threshold is None else f"-{self.decoding.threshold:g}"
        rule = self.decoding.quality or f"{self.decoding.acceptance}{dial}"
        return self.model_id or ("model.generate" if self.baseline else rule)


def temperature_of(question: Question, temperature: str | float) -> float:
    """The temperature for a question; "category" follows FastChat."""
    return CATEGORY_TEMPERATURES.get(question.category, 0.0) if temperature == "category" else float(temperature)


def method_of(model: eagle_fsd.EagleModel, temperature: float, seed: int, args: MtBenchArguments) -> Method:
    if args.baseline:
        return hf_generate(model, temperature=temperature, seed=seed)
    return engine(model, temperature=temperature, seed=seed, **vars(args.decoding))


def answer_question(model: eagle_fsd.EagleModel, question: Question, args: MtBenchArguments) -> dict:
    """FastChat's record of one question, with the target's forwards as idxs and the tokens of each."""
    choices = []
    for index in range(args.num_choices):
        method = method_of(model, temperature_of(question, args.temperature), args.seed + index, args)
        answers = converse(lambda chat, method=method: method(chat, args.max_new_tokens), question.turns)
        counts = [len(answer.token_ids) for answer in answers]
        lengths = [answer.output.stats.accepted_lengths if answer.output else None for answer in answers]
        choices.append({
            "index": index, "turns": [answer.text for answer in answers],
            "idxs": [n - 1 if found is None else len(found) for n, found in zip(counts, lengths, strict=True)],
            "new_tokens": counts, "wall_time": [answer.seconds for answer in answers],
            "accept_lengths": [length + 1 for found in lengths for length in found or []],
        })
    return {"question_id": question.id, "category": question.category, "answer_id": uuid.uuid4().hex,
            "model_id": args.name, "choices": choices, "tstamp": time.time()}


def read_answers(path: Path, repair: bool = False) -> dict[int | str, dict]:
    """Answer records by question; `repair` as of `read_lines`.

    Raises:
        ValueError: a line that is no answer.
    """
    records = read_lines(path, repair)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("choices"), list) or "question_id" not in record:
            raise ValueError(f"{path}, line {number}: no answer of eval.mt_bench, it needs question_id and choices")
    return {record["question_id"]: record for record in records}


def read_note(about: Path) -> dict | None:
    """What was noted beside an answers file of how it was made; None where there is no note.

    Raises:
        ValueError: the note is damaged.
    """
    if not about.exists():
        return None
    try:
        noted = json.loads(about.read_text(encoding="utf-8"))
        if not isinstance(noted["settings"], dict):
            raise TypeError("its settings are no object")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{about} is damaged ({error!r}): delete it and the answers beside it") from error
    return noted


# What the files of earlier versions did not name.
ADDED_SETTINGS = {"compile": False, "attn_implementation": None, "device_map": None, "calibration": None,
                  "quality": None, "budget": None, "prepack": False}


def file_settings(args: MtBenchArguments) -> dict:
    """What a resumed file must have in common."""
    given = {**vars(args.pair), **vars(args), **vars(args.decoding)}
    names = ("target", "draft", "baseline", "acceptance", "threshold", "divergence", "temperature", "max_new_tokens",
             "seed", "num_choices", "dtype", *ADDED_SETTINGS)
    found = {name: given[name] for name in names}
    paths = shown_settings({name: found[name] for name in ("target", "draft", "calibration")
                            if found[name] is not None})
    return {**found, **paths, "tree": repr(given["tree"]), "questions": shown(args.questions)}


def check_options(args: MtBenchArguments) -> None:
    """Raise ValueError for options that would only fail after the models are loaded."""
    if args.temperature != "category":
        try:
            valid = float(args.temperature) >= 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f'--temperature must be a number of at least 0 or "category", got {args.temperature!r}')
    check_counts(args, "max_new_tokens", "num_choices", "generated", "limit")
    if not args.baseline:
        args.decoding.check()


def run(args: MtBenchArguments) -> None:
    """Answer what is missing in the answers file.

    Raises:
        ValueError: bad questions or options, or a file that was begun with other settings or that another process is
            writing.
    """
    check_options(args)
    questions = load_questions(args.questions, args.generated, args.seed, args.limit)
    state = processes(args.pair.device)
    with only_writer(args.answers) if state.is_main_process else nullcontext():
        answer_all(args, questions, state)


def check_note(args: MtBenchArguments) -> tuple[Path, dict]:
    """Where it is noted how the answers were made, and with which settings they are to be.

    Raises:
        ValueError: there are answers already, made with others or without a note.
    """
    about, settings = record_path(args.answers, ".meta.json"), file_settings(args)
    noted = read_note(about)
    if noted is None and args.answers.exists() and args.answers.stat().st_size:
        raise ValueError(f"{args.answers} has answers, and {about}, which says under which settings they were made, is "
                         "missing; choose another file or delete it")
    if noted is not None and ADDED_SETTINGS | noted["settings"] != settings:
        raise ValueError(f"{args.answers} was begun with other settings ({about}); choose another file or delete it")
    return about, settings


def answer_all(args: MtBenchArguments, questions: Sequence[Question], state: PartialState) -> None:
    """Answer what is missing, with all processes."""
    about, settings = check_note(args)
    state.wait_for_everyone()
    own_device = args.pair.device is None and args.pair.device_map is None
    model = (replace(args.pair, device=str(state.device)) if own_device else args.pair).load()
    if state.is_main_process:
        write_json(about, {"environment": environment(), "settings": settings, "processes": state.num_processes,
                           "dtype": str(model.target.dtype), "device": str(model.target.device),
                           "tree": None if args.baseline else model.describe_tree(args.decoding.tree)})
        read_answers(args.answers, repair=True)
    state.wait_for_everyone()
    done = read_answers(args.answers)
    state.wait_for_everyone()  # all share out the same questions: none answers before the others have read
    missing = [question for question in questions if question.id not in done]
    answer_missing(model, missing[state.process_index :: state.num_processes], args, state.is_main_process)
    state.wait_for_everyone()
    if state.is_main_process:
        answers = read_answers(args.answers)
        asked = {question.id: answers.pop(question.id) for question in questions if question.id in answers}
        write_lines(args.answers, [*asked.values(), *answers.values()])  # those that were not asked now are kept


def answer_missing(
    model: eagle_fsd.EagleModel, questions: Sequence[Question], args: MtBenchArguments, shows_progress: bool
) -> None:
    """Add the answers of one process to the file, one by one."""
    for _ in range(args.warm_up if questions else 0):
        chat = [{"role": "user", "content": questions[0].turns[0]}]
        method_of(model, 0.0, args.seed, args)(chat, args.max_new_tokens)
    for question in Progress(questions, desc=args.name, unit="question", quiet=not shows_progress):
        append_lines(args.answers, [answer_question(model, question, args)])


main = partial(run_command, "eval.mt_bench", MtBenchArguments, run, stopped="stopped; the same command goes on")

if __name__ == "__main__":
    sys.exit(main())
