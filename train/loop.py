"""A training run from its first step, or from its last saved state, to the finished head."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tqdm import tqdm

from train.config import TrainingConfig
from train.evaluation import Evaluation
from train.processes import StopRequest, make_accelerator
from train.run import Run
from train.states import Logs, comparable, resume, save_state

log = logging.getLogger("train.train_draft_head")


def train(config: TrainingConfig, *, cpu: bool = False) -> Path:
    """Train to the end; returns the folder of the finished head.

    Args:
        cpu: keep off an accelerator that is there.
    """
    output = Path(config.output)
    accelerator = make_accelerator(config, cpu)
    output.mkdir(parents=True, exist_ok=True)
    run = Run(config, accelerator)
    if config.evaluate:
        run.split.check_answers()
    resume(run)
    main = accelerator.is_main_process
    if main:
        log.info("%d process(es) on %s", accelerator.num_processes, accelerator.device.type)
    logs = Logs(output, run.step, main)
    evaluation = Evaluation(run, logs)
    if accelerator.log_with:
        accelerator.init_trackers("eagle_fsd", config={k: str(v) for k, v in comparable(config).items()})
    stop = StopRequest()
    bar = tqdm(total=run.steps, initial=run.step, desc="draft head", unit="step", disable=None if main else True,
               mininterval=2)
    try:
        take_steps(run, evaluation, logs, stop, bar)
    finally:
        bar.close()
        stop.restore()
    evaluation.finish()
    accelerator.end_training()
    return output / "head"


def take_steps(run: Run, evaluation: Evaluation, logs: Logs, stop: StopRequest, bar: tqdm) -> None:
    """All steps that are left, with what is saved, measured and logged between them.

    Raises:
        KeyboardInterrupt: the run was to stop; its state is saved.
    """
    config, accelerator = run.config, run.accelerator
    started, tokens = time.perf_counter(), 0
    while run.step < run.steps:
        record = run.train_step()
        tokens += record["tokens"]
        record["tokens_per_second"] = round(tokens / (time.perf_counter() - started), 1)
        logs.write("train", record)
        bar.update()
        if run.step % config.log_every == 0:
            bar.set_postfix(loss=f"{record['loss']:.3f}", top1=f"{record['top1'][0]:.3f}",
                            tok_s=f"{record['tokens_per_second']:.0f}", refresh=False)
            accelerator.log({"loss": record["loss"], "lr": record["lr"],
                             **{f"top1/step{i + 1}": a for i, a in enumerate(record["top1"])}}, step=run.step)
        stopping = stop.anywhere(accelerator)
        if run.step % config.save_every == 0 or run.step == run.steps or stopping:
            save_state(run)
        if stopping:
            raise KeyboardInterrupt
        if config.evaluate and run.step % config.eval_every == 0 and run.step < run.steps:
            evaluation.estimate()
            accelerator.wait_for_everyone()
