"""Train a draft head for a target.

    accelerate launch train/train_draft_head.py --config train/configs/head.yaml target=T data=data/chat output=runs/h
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # launched as a file, this folder's parent is not on the path

from eagle_fsd.cli.arguments import parse_options  # noqa: E402
from eagle_fsd.cli.exits import exit_status  # noqa: E402
from eagle_fsd.data.files import only_writer  # noqa: E402
from eagle_fsd.data.progress import Progress  # noqa: E402
from train.core.config import TrainingConfig, read_config  # noqa: E402
from train.core.evaluation import Evaluation  # noqa: E402
from train.core.processes import StopRequest, make_accelerator  # noqa: E402
from train.core.run import Run  # noqa: E402
from train.core.states import Logs, comparable, resume, save_state  # noqa: E402

log = logging.getLogger("train.train_draft_head")


@dataclass(frozen=True)
class Arguments:
    """Train a draft head for a target.

    Any number of processes and accelerate's own settings for FSDP or DeepSpeed (train/configs/). A run that was
    stopped, by Ctrl-C or by force, continues from its last saved state when the same command is given again.

    Args:
        config: YAML or JSON file with settings of TrainingConfig (train/core/config.py).
        overrides: settings that replace the file's, name=value with the value in YAML.
        wandb: log to Weights & Biases instead of TensorBoard.
        cpu: keep off a GPU that is there.
    """

    config: Path
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    wandb: bool = False
    cpu: bool = False


def train(config: TrainingConfig, *, cpu: bool = False) -> Path:
    """Train to the end; returns the folder of the finished head.

    Args:
        cpu: keep off an accelerator that is there.

    Raises:
        ValueError: settings, data and target that do not fit together, or a folder that another process is writing.
    """
    accelerator, output = make_accelerator(config, cpu), Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    with only_writer(output) if accelerator.is_main_process else nullcontext():
        take_run(Run(config, accelerator))
        accelerator.end_training()
    return output / "head"


def take_run(run: Run) -> None:
    """A run from its last state to its end."""
    config, accelerator = run.config, run.accelerator
    if config.evaluate:
        run.split.check_answers()
    resume(run)
    main = accelerator.is_main_process
    if main:
        log.info("%d process(es) on %s", accelerator.num_processes, accelerator.device.type)
    logs = Logs(run.output, run.step, main)
    stop = StopRequest()
    evaluation = Evaluation(run, logs, stop)
    if accelerator.log_with:
        accelerator.init_trackers("eagle_fsd", config={k: str(v) for k, v in comparable(config).items()})
    try:
        with Progress(desc="draft head", unit="step", total=run.steps, done=run.step, quiet=not main) as progress:
            take_steps(run, evaluation, logs, stop, progress)
    finally:
        stop.restore()
    evaluation.finish()
    run.close()


def take_steps(run: Run, evaluation: Evaluation, logs: Logs, stop: StopRequest, progress: Progress) -> None:
    """All steps that are left, with what is saved, measured and logged between them.

    Raises:
        KeyboardInterrupt: the run was to stop; its state is saved.
    """
    config, accelerator = run.config, run.accelerator
    started, tokens = time.perf_counter(), 0
    while run.step < run.steps:
        if evaluation.due:  # also what was abandoned when the run was stopped
            evaluation.estimate()
            accelerator.wait_for_everyone()
            stop_if_asked(run, stop)
        record = run.train_step()
        tokens += record["tokens"]
        record["tokens_per_second"] = round(tokens / (time.perf_counter() - started), 1)
        logs.write("train", record)
        shown = {"loss": f"{record['loss']:.3f}", "top1": f"{record['top1'][0]:.3f}",
                 "tokens/s": f"{record['tokens_per_second']:.0f}"}
        progress.update(**shown)
        if run.step % config.log_every == 0:
            accelerator.log({"loss": record["loss"], "lr": record["lr"],
                             **{f"top1/step{i + 1}": a for i, a in enumerate(record["top1"])}}, step=run.step)
        if run.step % config.save_every == 0 or run.step == run.steps:
            save_state(run)
        stop_if_asked(run, stop)


def stop_if_asked(run: Run, stop: StopRequest) -> None:
    if stop.anywhere(run.accelerator):
        save_state(run)
        raise KeyboardInterrupt


def main() -> int:
    arguments = parse_options(Arguments)
    overrides = [*arguments.overrides, *(["tracker=wandb"] if arguments.wandb else [])]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status(
        "train_draft_head", lambda: train(read_config(arguments.config, overrides), cpu=arguments.cpu),
        also=(FloatingPointError,), stopped="stopped; the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())
