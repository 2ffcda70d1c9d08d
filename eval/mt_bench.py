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

import argparse
import json
import sys
import time
import uuid
from pathlib import Path

from tqdm import tqdm

import eagle_fsd
from eagle_fsd.acceptance import RULES
from eagle_fsd.cli.app import load_pair, model_options, parse_tree
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.files import append_lines, read_lines, write_lines
from eagle_fsd.data.questions import Question, converse
from eagle_fsd.experiments.methods import Method, engine, hf_generate
from eagle_fsd.experiments.records import environment, processes, record_path, shown, shown_settings
from eval.questions import load_questions

# Sampling temperatures by category, as FastChat's judge sets them; other categories are greedy.
CATEGORY_TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}


def temperature_of(question: Question, temperature: str | float) -> float:
    """The temperature for a question; "category" follows FastChat."""
    return CATEGORY_TEMPERATURES.get(question.category, 0.0) if temperature == "category" else float(temperature)


def method_of(model: eagle_fsd.EagleModel, temperature: float, seed: int, args: argparse.Namespace) -> Method:
    if args.baseline:
        return hf_generate(model, temperature=temperature, seed=seed)
    return engine(model, temperature=temperature, seed=seed, tree=args.tree, acceptance=args.acceptance,
                  threshold=args.threshold, divergence=args.divergence)


def answer_question(model: eagle_fsd.EagleModel, question: Question, args: argparse.Namespace) -> dict:
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
            "model_id": args.model_id, "choices": choices, "tstamp": time.time()}


def read_answers(path: Path, repair: bool = False) -> dict[int | str, dict]:
    """Answer records by question; `repair` as of `read_lines`."""
    return {record["question_id"]: record for record in read_lines(path, repair)}


LOADED = {"compile": False, "attn_implementation": None, "device_map": None}  # what files of before did not name


def settings(args: argparse.Namespace) -> dict:
    """What a resumed file must have in common."""
    names = ("target", "draft", "baseline", "acceptance", "threshold", "divergence", "temperature", "max_new_tokens",
             "seed", "num_choices", "dtype", *LOADED)
    found = {name: getattr(args, name) for name in names}
    paths = shown_settings({name: found[name] for name in ("target", "draft") if found[name] is not None})
    return {**found, **paths, "tree": repr(args.tree), "questions": shown(args.questions)}


def run(args: argparse.Namespace) -> None:
    """Answer what is missing in the answers file.

    Raises:
        ValueError: bad questions or options, or a file that was begun with other settings.
    """
    questions = load_questions(args.questions, args.generated, args.seed, args.limit)
    state = processes(args.device)
    about = record_path(args.answers, ".meta.json")
    if about.exists() and LOADED | json.loads(about.read_text())["settings"] != settings(args):
        raise ValueError(f"{args.answers} was begun with other settings ({about}); choose another file or delete it")
    state.wait_for_everyone()
    if args.device_map is None:
        args.device = args.device or state.device
    model = load_pair(args)
    if state.is_main_process:
        args.answers.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "settings": settings(args), "processes": state.num_processes,
                  "dtype": str(model.target.dtype), "device": str(model.target.device),
                  "tree": None if args.baseline else model.describe_tree(args.tree)}
        about.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        read_answers(args.answers, repair=True)
    state.wait_for_everyone()
    done = read_answers(args.answers)
    state.wait_for_everyone()  # all share out the same questions: none answers before the others have read
    missing = [question for question in questions if question.id not in done]
    mine = missing[state.process_index :: state.num_processes]
    for _ in range(args.warm_up if mine else 0):
        method_of(model, 0.0, args.seed, args)([{"role": "user", "content": mine[0].turns[0]}], args.max_new_tokens)
    bar = tqdm(mine, desc=args.model_id, unit="question", disable=None if state.is_main_process else True)
    for question in bar:
        append_lines(args.answers, [answer_question(model, question, args)])
    state.wait_for_everyone()
    if state.is_main_process:
        answers = read_answers(args.answers)
        asked = {question.id: answers.pop(question.id) for question in questions if question.id in answers}
        write_lines(args.answers, [*asked.values(), *answers.values()])  # those that were not asked now are kept


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[model_options()])
    parser.add_argument("--questions", type=Path, help="JSON lines: MT-Bench, Spec-Bench, HumanEval, GSM8K, prompts")
    parser.add_argument("--generated", type=int, default=80, help="without --questions: this many generated tasks")
    parser.add_argument("--answers", type=Path, required=True, help="file that the answers are added to")
    parser.add_argument("--baseline", action="store_true", help="answer with model.generate")
    parser.add_argument("--acceptance", choices=RULES, default="fsd")
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--divergence", help="that fsd and fsd_paper gate on (default: js)")
    parser.add_argument("--tree", type=parse_tree, metavar="N,DEPTH,K[,T]")
    parser.add_argument("--temperature", default="0", help='a number, or "category": as FastChat (default: 0)')
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--num-choices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=3, help="unmeasured answers before the first question")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--model-id", help="name in the answers file")
    return parser


def check(args: argparse.Namespace) -> argparse.Namespace:
    """Options that would only fail after the models are loaded."""
    if args.temperature != "category":
        try:
            valid = float(args.temperature) >= 0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f'--temperature must be a number of at least 0 or "category", got {args.temperature!r}')
    check_counts(args, "max_new_tokens", "num_choices", "generated", "limit")
    if not args.baseline:
        eagle_fsd.make_rule(args.acceptance, args.threshold)
    dial = "" if args.threshold is None else f"-{args.threshold:g}"
    args.model_id = args.model_id or ("model.generate" if args.baseline else f"{args.acceptance}{dial}")
    return args


def main() -> int:
    args = build_parser().parse_args()
    return exit_status("eval.mt_bench", lambda: run(check(args)), (ValueError, TypeError, OSError),
                       stopped="stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
