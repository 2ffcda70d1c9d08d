"""Mine mismatches of a pair and find out which of them matter.

    python -m train.mine --target T --draft D --questions gsm8k_train.jsonl --out data/mined.jsonl

The target answers each question exactly. Where a walk stops although the tree had a child that a loose rule would take,
that child is tried in its place. On every other question each is tried alone, on the others in sequence: a harmless one
stays, and the next is tried on top of it. An interrupted run loses at most the running group of questions.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import eagle_fsd
from eagle_fsd.checks import check_interval
from eagle_fsd.cli.arguments import Tree, parse_options, tree_text
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.files import only_writer
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import Question, read_questions
from eagle_fsd.measure.experiment import fingerprint
from eagle_fsd.measure.grading import CODE
from eagle_fsd.measure.ifeval import check_instructions
from eagle_fsd.models.loading import check_dtype
from eagle_fsd.models.placement import weights_digest
from eagle_fsd.pair import EagleModel
from eagle_fsd.prompts import check_length, encode_prompt
from train.data.regeneration import begin_store
from train.mining.rollouts import Decoding
from train.mining.store import append_group
from train.mining.trails import MODES, Labels, follow

GROUP = 2  # times as many questions as are drafted together are mined before any is written


@dataclass(frozen=True)
class Arguments:
    """Mine mismatches of a pair and find out which of them matter.

    The label outcome goes on exactly behind the substitute: harmful iff the answer comes to something else than the
    target's own does, or does not end; an own answer that does not end within --max-new-tokens gets none. The label
    likelihood needs no answer: harmful iff the rest of the target's own answer becomes less likely by more than
    --nats. An interrupted run continues.

    Args:
        target: directory, hub id or GGUF file.
        draft: draft head, a directory or hub id.
        questions: JSON lines file, as for eval.benchmark; of each question the first turn is asked.
        out: JSON lines file; the features go into a folder beside it.
        label: how harm is told.
        nats: of the label likelihood, above which it is harm.
        floor: least probability of a substitute, in those of the target's own token.
        most: mismatches of a question that are tried, chosen by the seed.
        limit: only the first questions.
        max_new_tokens: of an answer.
        batch: answers that are drafted together, each joining as another ends; four times as many where nothing is
            drafted, twice as many questions in a group.
        tree: of drafting; default the pair's for its device.
        run_code: run the programs of answers, in a limited subprocess.
        dtype: as in eagle_fsd.load.
        device: where the pair goes.
        trust_remote_code: allow a target to run code from its repository.
        seed: of the choice.
    """

    target: str
    draft: str
    questions: Path
    out: Path
    label: Literal["outcome", "likelihood", "both"] = "outcome"
    nats: float = 1.0
    floor: float = 0.01
    most: int = 8
    limit: int | None = None
    max_new_tokens: int = 512
    batch: int = 16
    tree: Tree = None
    run_code: bool = False
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    seed: int = 0


def read_checked(arguments: Arguments) -> list[Question]:
    """The questions, after all checks that need no model.

    Raises:
        ValueError: an option out of range, or a question that the label cannot be had for.
    """
    check_counts(arguments, "most", "limit", "batch", "max_new_tokens")
    check_dtype(arguments.dtype)
    if not 0 < arguments.floor <= 1:
        raise ValueError(f"--floor must be above 0 and at most 1, got {arguments.floor}")
    check_interval("--nats", arguments.nats, float("inf"), False)
    if not arguments.questions.is_file():
        raise ValueError(f"--questions {arguments.questions} does not exist")
    questions = read_questions(arguments.questions)[: arguments.limit]
    check_instructions(questions)
    for question in questions if arguments.label != "likelihood" else ():
        if question.answer is None and question.tests is None:
            raise ValueError(f"question {question.id} has no answer to tell outcomes by: take --label likelihood")
        if question.category in CODE and not arguments.run_code:
            raise ValueError(f"question {question.id} is graded by running programs: allow it with --run-code, or take "
                             "--label likelihood")
    return questions


def mine(model: EagleModel, questions: Sequence[Question], arguments: Arguments) -> dict:
    """Mine what the file does not hold; returns counts of what it holds then.

    Raises:
        ValueError: the file was begun for something else or is being written; a question too long for the target.
    """
    tree = arguments.tree or model.default_tree
    decoding = Decoding(model, tree, arguments.floor, arguments.max_new_tokens, arguments.batch)
    labels = Labels(arguments.label != "likelihood", arguments.label != "outcome", arguments.nats, arguments.most,
                    arguments.seed, arguments.run_code, lambda token: model.tokenizer.decode([token]))
    prompts = [_prompt(question, model) for question in questions]
    about = {
        "target": model.target.digest(), "head": weights_digest(model.draft), "dtype": str(model.target.dtype),
        "device": str(model.target.device), "threads": torch.get_num_threads(),
        "questions": fingerprint(questions), "file": arguments.questions.name, "tree": tree_text(tree),
        **{name: getattr(arguments, name) for name in ("label", "nats", "floor", "most", "max_new_tokens", "batch",
                                                       "run_code", "seed")},
    }
    counts: Counter[str] = Counter()
    answers = itertools.count(1)
    with only_writer(arguments.out):
        finished = begin_store(arguments.out, about)
        for line in finished:
            count_line(counts, line, line["rows"])
        done = {line["question"] for line in finished}
        left = [number for number, question in enumerate(questions) if question.id not in done]
        begin = 1 + max((line["group"] for line in finished), default=-1)
        with Progress(desc="mining", unit="question", total=len(questions), done=len(done)) as progress:
            size = GROUP * arguments.batch
            for group, first in enumerate(range(0, len(left), size), begin):
                numbers = left[first : first + size]
                trails = follow([labels.trail(questions[number], prompts[number], MODES[number % 2])
                                 for number in numbers], decoding,
                                lambda: progress.update(0, answers=next(answers), mismatches=counts["mismatches"]))
                append_group(arguments.out, group, trails)
                for trail in trails:
                    count_line(counts, trail.about, trail.rows)
                progress.update(len(numbers), mismatches=counts["mismatches"])
    return dict(counts)


def count_line(counts: Counter[str], about: Mapping, rows: Sequence[dict]) -> None:
    """Add a question to the counts."""
    counts["questions"] += 1
    counts["own answers that are right"] += bool(about["own_right"])
    counts["own answers that were cut"] += not about["own_ended"]
    counts["mismatches"] += len(rows)
    for label in ("outcome", "likelihood"):
        if any(label in row for row in rows):
            counts[f"harmful by {label}"] += sum(row.get(label, False) for row in rows)


def _prompt(question: Question, model: EagleModel) -> list[int]:
    try:
        ids = encode_prompt([{"role": "user", "content": question.turns[0]}], model)
        check_length(len(ids), 1, model)
    except ValueError as error:
        raise ValueError(f"question {question.id}: {error}") from error
    return ids


def run(arguments: Arguments) -> dict:
    """Load the pair and mine; see `mine`."""
    questions = read_checked(arguments)
    model = eagle_fsd.load(
        arguments.target, arguments.draft, dtype=arguments.dtype, device=arguments.device,
        trust_remote_code=arguments.trust_remote_code, tree=None)
    return mine(model, questions, arguments)


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.mine")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status("train.mine", lambda: print(json.dumps(run(arguments), indent=1)),
                       stopped="stopped; the same command continues", flags=True)


if __name__ == "__main__":
    sys.exit(main())
