"""A pair trained and measured from nothing on one GPU in about 25 minutes, without a download.

    while python -m eval.gpu_study --minutes 8; test $? = 75; do :; done     # 75: not finished as yet
    python -m eval.gpu_study --size toy --device cpu --work runs/toy --out runs/toy/study     # seconds on a CPU

The target (150M parameters) learns the Python source that is installed on the machine and the verifiable tasks, the
head then learns the target. How many steps fit into the time that each stage has is measured first. A call works at
most `--minutes`: training is interrupted as by Ctrl-C and goes on with the next call, measurements begin only where
they fit. Everything is kept in `--work`; the results go to `--out`.JSON and `--out`.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.experiments.records import write_record
from eagle_fsd.models.loading import check_device
from eval.batches import batch_table
from eval.benchmark import method_table
from eval.command import run_command
from eval.report.tables import markdown, percent, span
from eval.study import STUDY_SIZES, Study
from train.demo.demo import keep_freed_memory

log = logging.getLogger("eval.gpu_study")

UNFINISHED_STATUS = 75  # exit status


@dataclass(frozen=True)
class GpuStudyArguments:
    """What `eval.gpu_study` trains and measures.

    Args:
        size: of the study.
        minutes: that this call works.
        work: folder of everything that is made; the next call goes on with it.
        out: files for what is found, without suffix.
    """

    pair: Loading = Loading()
    size: Literal[tuple(STUDY_SIZES)] = "gpu"
    minutes: float = 7.5
    work: Path = Path("runs/gpu-study")
    out: Path = Path("eval/results/gpu-study")


def accuracy_table(rows: Sequence[Mapping]) -> str:
    """The rows of the stage `accuracy` in Markdown. tau = tokens per target forward."""
    return markdown({
        "method": row["method"], "tasks": row["prompts"], "accuracy": percent(row["accuracy"], 1),
        "tokens/answer": f"{row['tokens_per_answer']:.0f}", "s/answer": f"{row['seconds_per_answer']:.3f}",
        "time over exact's (95%)": f"{row['time']:.3f} ({span(row['interval'])})", "tau": f"{row['tau']:.2f}",
    } for row in rows)


def page(study: Study) -> str:
    """The results in Markdown."""
    found, spent = study.state["results"], study.state["seconds"]
    seconds = ", ".join(f"{name} {taken:.0f}" for name, taken in spent.items())
    return "\n\n".join([
        f"Target: {found['target']['parameters'] / 1e6:.1f}M parameters, {found['target']['layers']} layers, hidden "
        f"size {found['target']['hidden_size']}, {found['text']['tokens'] / 1e6:.1f}M tokens of text; steps "
        f"{study.state['steps']}. {found['tree']['tree']}. {study.model.target.dtype}, greedy, at most "
        f"{study.size.new_tokens} new tokens. Seconds per stage, {sum(spent.values()):.0f} in all: {seconds}.",
        "## Held-out tasks", method_table(found["tasks"]["rows"]),
        "## Python prefixes", method_table(found["python"]["rows"]),
        "## Accuracy of other tasks", accuracy_table(found["accuracy"]["rows"]), "## Batches of tasks",
        batch_table(found["batches"]["rows"])])


def run(args: GpuStudyArguments) -> int:
    """One call; 0 where the study is finished."""
    if args.pair.target or args.pair.draft:
        raise ValueError("the study trains its own pair: leave --target and --draft out")
    if not args.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {args.minutes}")
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    device = check_device(args.pair.device)
    args.work.mkdir(parents=True, exist_ok=True)
    options = {name: getattr(args.pair, name)
               for name in ("dtype", "device_map", "attn_implementation", "trust_remote_code", "compile")}
    options["compile"] |= device.type == "cuda"  # graphs, for plain decoding as for drafting
    study = Study(STUDY_SIZES[args.size], args.work, str(device), options)
    if not study.run(60 * args.minutes):
        log.info("not finished: the same command goes on")
        return UNFINISHED_STATUS
    record = {"size": args.size, "load": options, **study.state}
    print(write_record(args.out, record, page(study)))
    return 0


main = partial(run_command, "eval.gpu_study", GpuStudyArguments, run)

if __name__ == "__main__":
    sys.exit(main())
