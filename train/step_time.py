"""How much of a training step is not the models' own work.

    python -m train.step_time --data runs/demo/head-text

Times whole steps of the script (data, features, loss, optimiser, logging) against the bare sum of the target's forward
and the head's forward and backward on the same batches, step by step in turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.experiments.records import write_record
from train.config import make_config
from train.run import Run
from train.states import Logs


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_step(run: Run) -> float:
    """Seconds of the target's forward and the head's forward and backward on the next step's batch."""
    indices = run.schedule.batch(run.step)
    tokens, learned = (torch.from_numpy(a).to(run.accelerator.device) for a in run.documents.collate(indices))
    synchronize()
    started = time.perf_counter()
    features = run.teacher.features(indices, tokens)
    with run.accelerator.autocast():
        loss, _ = run.model(features, tokens, learned)
    loss.backward()
    synchronize()
    seconds = time.perf_counter() - started
    run.optimizer.zero_grad()
    return seconds


@dataclass(frozen=True)
class Arguments:
    """Time whole training steps against the models' own work in them.

    Args:
        target: directory or hub id.
        data: dataset of train.prepare_data.
        objective: what is trained.
        batch_tokens: of one step.
        steps: how many are timed, after two that warm up.
        out: the record.
    """

    target: str = "checkpoints/demo-target"
    data: str = "runs/demo/head-text"
    objective: str = "aligned"
    batch_tokens: int = 12_288
    steps: int = 20
    out: Path = Path("eval/results/step_time.json")


def time_steps(run: Run, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of whole steps, and of the models alone on the same batches."""
    logs, whole, bare = Logs(run.output, 0, True), [], []
    for number in range(steps + 2):
        if number % 2:  # whichever comes second finds warm memory
            bare.append(bare_step(run))
        started = time.perf_counter()
        logs.write("train", run.train_step())
        synchronize()
        whole.append(time.perf_counter() - started)
        if not number % 2:
            run.step -= 1  # the same batch
            bare.append(bare_step(run))
            run.step += 1
    return whole[2:], bare[2:]


def measure(arguments: Arguments) -> None:
    """Write the record, and show it."""
    check_counts(arguments, "batch_tokens", "steps")
    with tempfile.TemporaryDirectory() as folder:
        config = make_config({
            "target": arguments.target, "data": arguments.data, "output": folder, "objective": arguments.objective,
            "batch_tokens": arguments.batch_tokens, "steps": 10**6, "head": {"intermediate_size": 768},
            "tracker": "none",
        })
        whole, bare = time_steps(Run(config, Accelerator(mixed_precision=config.mixed_precision)), arguments.steps)
    record = {
        "objective": arguments.objective, "batch_tokens": arguments.batch_tokens,
        "seconds_per_step": statistics.median(whole), "models_alone": statistics.median(bare),
        "ratio": sum(whole) / sum(bare),
    }
    print(write_record(arguments.out, record, (
        f"{arguments.objective}, {arguments.batch_tokens} tokens: {record['seconds_per_step']:.3f} s/step, the models "
        f"alone {record['models_alone']:.3f}; ratio of the sums {record['ratio']:.3f}")))


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.step_time")
    return exit_status("train.step_time", lambda: measure(arguments), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
