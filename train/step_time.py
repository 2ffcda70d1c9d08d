"""How much of a training step is not the models' own work.

    python -m train.step_time --data runs/demo/head-text

Times whole steps of the script (data, features, loss, optimiser, logging) against the bare sum of the target's forward
and the head's forward and backward on the same batches, step by step in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from eagle_fsd.experiments.records import write_record
from train.config import make_config
from train.train_draft_head import Logs, Run


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_step(run: Run) -> float:
    """Seconds of the target's forward and the head's forward and backward on the next step's batch."""
    indices = run.schedule.batch(run.step)
    tokens, learned = (torch.from_numpy(a).to(run.accelerator.device) for a in run.documents.collate(indices))
    synchronize()
    started = time.perf_counter()
    features = run.features(indices, tokens)
    with run.accelerator.autocast():
        loss, _ = run.model(features, tokens, learned)
    loss.backward()
    synchronize()
    seconds = time.perf_counter() - started
    run.optimizer.zero_grad()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/demo-target")
    parser.add_argument("--data", default="runs/demo/head-text")
    parser.add_argument("--objective", default="aligned")
    parser.add_argument("--batch-tokens", type=int, default=12_288)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("eval/results/step_time.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config({
            "target": args.target, "data": args.data, "output": folder, "objective": args.objective,
            "batch_tokens": args.batch_tokens, "steps": 10**6, "head": {"intermediate_size": 768}, "tracker": "none",
        })
        run = Run(config, Accelerator(mixed_precision=config.mixed_precision))
        logs, whole, bare = Logs(Path(folder), 0, True), [], []
        for number in range(args.steps + 2):
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
            if number < 2:  # warm-up
                whole, bare = [], []
    record = {
        "objective": args.objective, "batch_tokens": args.batch_tokens,
        "seconds_per_step": statistics.median(whole), "models_alone": statistics.median(bare),
        "ratio": sum(whole) / sum(bare),
    }
    print(write_record(args.out, record, (
        f"{args.objective}, {args.batch_tokens} tokens: {record['seconds_per_step']:.3f} s/step, the models alone "
        f"{record['models_alone']:.3f}; ratio of the sums {record['ratio']:.3f}")))


if __name__ == "__main__":
    main()
