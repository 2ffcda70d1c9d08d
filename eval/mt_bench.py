"""Answer MT-Bench in FastChat's file format, with the chat template, and compare the speed of answers files.

    python -m eval.mt_bench --questions mt_bench.jsonl --baseline --answers plain.jsonl
    python -m eval.mt_bench --questions mt_bench.jsonl --setting "fsd 0.2" --answers fsd.jsonl plain.jsonl
    python -m eval.mt_bench --answers fsd.jsonl exact.jsonl plain.jsonl --out runs/mt-bench

The fields of the file are listed in eagle_fsd/measure/answers.py. With several files, the command answers the questions
in the first one and compares the speed of each with the last (eval.speed); without --questions it only compares. A run
that was interrupted continues. `torchrun --nproc_per_node 2 -m eval.mt_bench ...` or `accelerate launch` splits the
questions over processes; compare such timings only with runs on the same number of processes. To compare methods on one
machine, prefer `eagle-fsd benchmark`, which interleaves them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState

from eagle_fsd import EagleModel
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.questions import Question, converse
from eagle_fsd.measure.answers import answer_record, digest_of, read_answers
from eagle_fsd.measure.methods import Method, assisted, described, engine, hf_generate
from eagle_fsd.measure.records import environment, record_path, write_json
from eagle_fsd.measure.settings import QuestionOptions, parse_setting
from eagle_fsd.utils.files import append_lines, check_same, only_writer, write_lines
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command
from eval.speed import check_files, read_note, speed

# Sampling temperatures by category, from FastChat's judge; other categories are greedy.
CATEGORY_TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}


@dataclass(frozen=True, kw_only=True)
class MtBenchArguments(QuestionOptions):
    """Options of `eval.mt_bench`.

    Args:
        answers: file for the answers, then files to compare it with, the baseline last.
        out: write the comparison to OUT.json, OUT.md and OUT.png.
        setting: rule, threshold and other options of generate, for example "fsd 0.2".
        tree: size of the draft tree. If omitted: the fastest known on this machine.
        baseline: answer with model.generate, which processes the whole conversation in each turn.
        assisted: answer with model.generate and the draft model, a causal LM, as its assistant_model, with this
            assistant_ensemble_weight; 1: lossless.
        reread: process it so with the setting too; otherwise a second turn processes only what is new, as in Chat.
        temperature: a number, or "category" for FastChat's temperatures.
        max_new_tokens: most tokens in the answer to a turn.
        num_choices: answers to each question, with consecutive seeds.
        seed: seed of the first answer.
        warm_up: answers without timing before the first question.
        model_id: name in the answers file. If omitted: the setting.
    """

    pair: Loading = Loading()
    answers: tuple[Path, ...]
    questions: tuple[Path, ...] = ()
    out: Path | None = None
    setting: str = "exact"
    tree: Tree = None
    baseline: bool = False
    assisted: float | None = None
    reread: bool = False
    temperature: str = "0"
    max_new_tokens: int = 1024
    num_choices: int = 1
    seed: int = 1
    warm_up: int = 3
    model_id: str | None = None

    @property
    def name(self) -> str:
        """The model id in the answers file."""
        name = "model.generate" if self.baseline else self.setting.replace(" ", "-")
        return self.model_id or (name if self.assisted is None else f"assisted-{self.assisted:g}")


def temperature_of(question: Question, temperature: str) -> float:
    """The temperature of a question; "category" selects FastChat's."""
    return CATEGORY_TEMPERATURES.get(question.category, 0.0) if temperature == "category" else float(temperature)


def method_of(model: EagleModel, temperature: float, seed: int, args: MtBenchArguments) -> Method:
    if args.baseline:
        return hf_generate(model, temperature=temperature, seed=seed)
    if args.assisted is not None:
        return assisted(model, weight=args.assisted, temperature=temperature, seed=seed)
    return engine(model, keep_history=not args.reread, temperature=temperature, seed=seed, tree=args.tree,
                  **parse_setting(args.setting)[1])


def answer_question(model: EagleModel, question: Question, args: MtBenchArguments) -> dict:
    """The record of one question."""
    by_choice = []
    for index in range(args.num_choices):
        method = method_of(model, temperature_of(question, args.temperature), args.seed + index, args)
        by_choice.append(converse(lambda chat, method=method: method(chat, args.max_new_tokens), question.turns))
    return answer_record(question, args.name, by_choice)


def check(args: MtBenchArguments) -> None:
    """Raise ValueError for bad options, before the models are loaded."""
    if args.temperature != "category":
        try:
            valid = float(args.temperature) >= 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f'--temperature must be a number of at least 0 or "category", got {args.temperature!r}')
    check_counts(args, "max_new_tokens", "num_choices", "per_category", "limit")
    check_counts(args, "warm_up", least=0)
    parse_setting(args.setting)
    if args.assisted is not None and (args.baseline or not 0 < args.assisted <= 1):
        raise ValueError(f"--assisted must be a weight in (0, 1], without --baseline, got {args.assisted}")
    if args.questions and len(args.answers) == 1:
        if args.out is not None:
            raise ValueError("--out needs a comparison: pass several files to --answers")
    else:
        check_files(args.answers, begun=not args.questions)


def settings_of(args: MtBenchArguments) -> dict:
    """The settings that must be the same when a run continues a file."""
    free = {
        "answers", "out",  # paths of results
        "questions", "per_category", "categories", "limit",  # answers are known by their questions
        "warm_up", "model_id",  # not measured, and a label
        "device", "device_map",  # `described` has the device
    }
    return {name: value for name, value in option_record(args).items() if name not in free}


def run(args: MtBenchArguments) -> None:
    """Answer the remaining questions in the first file, and compare it with the others.

    Raises:
        ValueError: bad questions or options; files that cannot be compared; or the first file has other settings, or
            another process writes it.
    """
    check(args)
    if args.questions:
        questions = args.chosen_questions()
        # Under torchrun, accelerate does not check whether there is a GPU.
        state = PartialState(cpu=args.pair.device == "cpu" or not torch.cuda.is_available())
        with only_writer(args.answers[0]) if state.is_main_process else nullcontext():
            answer_all(args, args.answers[0], questions, state)
        if not state.is_main_process:
            return
    if len(args.answers) > 1:
        print(speed(args.answers, args.out))


def answer_all(args: MtBenchArguments, path: Path, questions: Sequence[Question], state: PartialState) -> None:
    """Answer the remaining questions in the file, with all processes."""
    settings, note = settings_of(args), read_note(path)
    about = record_path(path, ".meta.json")
    if note is None and path.exists() and path.stat().st_size:
        raise ValueError(f"{path} has answers, but {about}, which records their settings, is missing: choose another "
                         "file or delete it")
    if note is not None:
        check_same(path, note["settings"], settings)
    state.wait_for_everyone()
    own_device = args.pair.device is None and args.pair.device_map is None
    model = (replace(args.pair, device=str(state.device)) if own_device else args.pair).load(args.tree)
    made_with = described(model) | {"processes": state.num_processes}
    if note is not None:
        check_same(path, note.get("made_with", {}), made_with)
    state.wait_for_everyone()  # all have compared before the note is written
    if state.is_main_process:
        target, head = model.described(stock=args.baseline)
        names = {"target": target, "head": None if args.baseline else head}
        write_json(about, {"environment": environment(), "settings": settings, "made_with": made_with, "names": names})
        read_answers(path, repair=True)
    state.wait_for_everyone()
    done = {record.get("asked") for record in read_answers(path)}
    state.wait_for_everyone()  # all processes must split the same questions: none writes before the others have read
    missing = [question for question in questions if digest_of(question) not in done]
    own = missing[state.process_index :: state.num_processes]
    for _ in range(args.warm_up if own else 0):
        chat = [{"role": "user", "content": own[0].turns[0]}]
        method_of(model, 0.0, args.seed, args)(chat, args.max_new_tokens)
    for question in Progress(own, desc=args.name, unit="question", quiet=not state.is_main_process):
        append_lines(path, [answer_question(model, question, args)])
    state.wait_for_everyone()
    if state.is_main_process:
        answers = {record.get("asked"): record for record in read_answers(path)}
        asked = [answers.pop(key) for key in dict.fromkeys(map(digest_of, questions)) if key in answers]
        write_lines(path, [*answers.values(), *asked])  # those to other questions are kept


main = partial(run_command, "eval.mt_bench", MtBenchArguments, run, stopped="stopped; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
