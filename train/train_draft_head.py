"""Train a draft head for a target.

    accelerate launch train/train_draft_head.py --config train/configs/head.yaml target=T data=data/chat output=runs/h
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))  # launched as a file, this folder's parent is not on the path

from eagle_fsd.cli.arguments import parse_options  # noqa: E402
from eagle_fsd.cli.exits import exit_status  # noqa: E402
from train.config import read_config  # noqa: E402
from train.loop import train  # noqa: E402


@dataclass(frozen=True)
class Arguments:
    """Train a draft head for a target.

    Any number of processes and accelerate's own settings for FSDP or DeepSpeed (train/configs/). A run that was
    stopped, by Ctrl-C or by force, continues from its last saved state when the same command is given again.

    Args:
        config: YAML or JSON file with settings of TrainingConfig (train/config.py).
        overrides: settings that replace the file's, name=value with the value in YAML.
        wandb: log to Weights & Biases instead of TensorBoard.
        cpu: keep off a GPU that is there.
    """

    config: Path
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    wandb: bool = False
    cpu: bool = False


def run(arguments: Arguments) -> None:
    tracker = ["tracker=wandb"] if arguments.wandb else []
    train(read_config(arguments.config, [*arguments.overrides, *tracker]), cpu=arguments.cpu)


def main() -> int:
    arguments = parse_options(Arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status(
        "train_draft_head", lambda: run(arguments), (ValueError, OSError, ImportError, FloatingPointError),
        stopped="stopped; the same command continues",
    )


if __name__ == "__main__":
    sys.exit(main())
