"""Answers to a question file, in FastChat's format; `--ray` spreads the questions over every machine of a Ray cluster.

    python -m eval.answers --questions prompts.jsonl --answers answers.jsonl --acceptance fsd --threshold 0.2
    python -m eval.answers --ray auto --workers 8 --gpus 1 --questions prompts.jsonl --answers answers.jsonl

What is answered, the options and the file are those of `eval.mt_bench`, whose times are only comparable within one
kind of machine. A run that was stopped goes on with the questions that are missing; a question whose worker is lost is
asked again elsewhere. The target and the head must be found on every machine under the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.files import append_lines, only_writer, write_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import Question
from eagle_fsd.measure.records import environment, write_json
from eval import mt_bench
from eval.command import run_command
from eval.mt_bench import MtBenchArguments, answer_question, method_of, read_answers
from eval.questions import load_questions

TRIES = 3  # of a question whose worker was lost


@dataclass(frozen=True, kw_only=True)
class AnswersArguments(MtBenchArguments):
    """What is answered, and by whom.

    Args:
        ray: address of a Ray cluster: auto for the one that this machine belongs to, local for one of this machine
            alone. Without it this process answers.
        workers: processes that answer, each with a pair of its own; without it as many as the cluster has room for.
        cpus: cores of a worker.
        gpus: GPUs of a worker.
    """

    ray: str | None = None
    workers: int | None = None
    cpus: int = 1
    gpus: float = 0.0


class Worker:
    """A pair in a process of its own, somewhere in the cluster."""

    def __init__(self, args: AnswersArguments) -> None:
        self.args, self.model = args, args.pair.load()
        for _ in range(args.warm_up):
            method_of(self.model, 0.0, args.seed, args)([{"role": "user", "content": "Hello"}], 16)

    def answer(self, question: Question) -> dict:
        """FastChat's record of a question."""
        return answer_question(self.model, question, self.args)

    def described(self) -> dict:
        """What the answers are made with."""
        target = self.model.target
        return {"dtype": str(target.dtype), "device": str(target.device), "environment": environment(),
                "tree": None if self.args.baseline else self.model.describe_tree(self.args.decoding.tree)}


def run(args: AnswersArguments) -> None:
    """Answer what is missing in the answers file.

    Raises:
        ValueError: bad questions or options, or a file that was begun with other settings or that another process is
            writing.
        ImportError: `--ray` without the package.
        OSError: the cluster cannot be reached.
    """
    if args.ray is None:
        mt_bench.run(args)
        return
    check_counts(args, "workers", "cpus")
    if args.gpus < 0:
        raise ValueError(f"--gpus must be at least 0, got {args.gpus}")
    mt_bench.check_options(args)
    questions = load_questions(args.questions, args.generated, args.seed, args.limit)
    with only_writer(args.answers):
        about, settings = mt_bench.check_note(args)
        done = read_answers(args.answers, repair=True)
        missing = [question for question in questions if question.id not in done]
        if missing:
            answer_in_cluster(args, missing, lambda made_with, workers: write_json(
                about, {**made_with, "settings": settings, "processes": workers}))
        answers = read_answers(args.answers)
        asked = {question.id: answers.pop(question.id) for question in questions if question.id in answers}
        write_lines(args.answers, [*asked.values(), *answers.values()])


def answer_in_cluster(args: AnswersArguments, questions: Sequence[Question], note) -> None:
    """Add the answers of all workers to the file, as they come."""
    ray = connected(args.ray)
    kind = ray.remote(num_cpus=args.cpus, num_gpus=args.gpus, max_restarts=-1, max_task_retries=TRIES)(Worker)
    count = min(args.workers or room(ray.available_resources(), ray.nodes(), args), len(questions))
    workers = [kind.remote(args) for _ in range(count)]
    note(ray.get(workers[0].described.remote()), count)
    left, running = list(reversed(questions)), {}
    for worker in workers:
        running[worker.answer.remote(left.pop())] = worker
    progress = iter(Progress(questions, desc=args.name, unit="question"))
    while running:
        (ready,), _ = ray.wait(list(running))
        worker = running.pop(ready)
        append_lines(args.answers, [ray.get(ready)])
        next(progress, None)
        if left:
            running[worker.answer.remote(left.pop())] = worker
        else:  # its place may be what another worker waits for
            ray.kill(worker)
    next(progress, None)


def connected(address: str):
    """Ray, with a cluster.

    Raises:
        ImportError: it is not installed.
        OSError: there is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--ray needs a further package: pip install 'eagle_fsd[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise OSError(f"there is no Ray cluster at {address!r}: {error}") from error
    return ray


def room(free: dict[str, float], nodes: Sequence[dict], args: AnswersArguments) -> int:
    """How many workers the cluster has room for, none of which lies on two machines.

    Raises:
        ValueError: for none.
    """
    def fitting(resources: dict[str, float]) -> int:
        fits = int(resources.get("CPU", 0) // args.cpus)
        return min(fits, int(resources.get("GPU", 0) / args.gpus)) if args.gpus else fits

    fits = min(fitting(free), sum(fitting(node["Resources"]) for node in nodes if node["Alive"]))
    if fits < 1:
        raise ValueError(f"the cluster has no room for a worker of {args.cpus} cores and {args.gpus:g} GPUs on a "
                         f"machine; free in all are {free.get('CPU', 0):g} and {free.get('GPU', 0):g}")
    return fits


main = partial(run_command, "eval.answers", AnswersArguments, run, stopped="stopped; the same command goes on")

if __name__ == "__main__":
    sys.exit(main())
