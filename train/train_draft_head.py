"""Train a draft head for a target.

    accelerate launch train/train_draft_head.py --config train/configs/head.yaml target=T data=data/chat output=runs/h
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # launched as a file, this folder's parent is not on the path

from eagle_fsd.cli.arguments import parse_options  # noqa: E402
from eagle_fsd.cli.exits import exit_status  # noqa: E402
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
    run.close()
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
