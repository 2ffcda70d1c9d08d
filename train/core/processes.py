"""What concerns the processes of a run: accelerate's side of it, and stopping all of them."""

from __future__ import annotations

import datetime
import logging
import signal

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers

from train.core.config import TrainingConfig

log = logging.getLogger("train.train_draft_head")


def make_accelerator(config: TrainingConfig, cpu: bool) -> Accelerator:
    """Accelerate's side of the run, told what the settings say.

    Raises:
        ValueError: settings that accelerate's configuration contradicts or that sharding does not offer.
    """
    tracker = None if config.tracker == "none" else config.tracker
    if tracker and tracker not in [str(name) for name in get_available_trackers()]:
        if tracker == "wandb":
            raise ValueError("tracker wandb is asked for, and the package wandb is not installed")
        log.warning("the package %s is not installed: the run is logged to train.jsonl and eval.jsonl only", tracker)
        tracker = None
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, gradient_accumulation_steps=config.gradient_accumulation, cpu=cpu,
        log_with=tracker, project_dir=config.output if tracker else None,
        # The main process evaluates while the others wait.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(hours=6))],
    )
    if accelerator.gradient_accumulation_steps != config.gradient_accumulation:
        raise ValueError(
            f"gradient_accumulation is {config.gradient_accumulation} here and "
            f"{accelerator.gradient_accumulation_steps} in accelerate's configuration"
        )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if sharded and config.clip == "value":
        raise ValueError(f"clip: value does not work under {accelerator.distributed_type.value}; use clip: norm")
    if config.device_map and accelerator.num_processes > 1:
        raise ValueError("device_map spreads the target over all devices: launch one process, or use offline features")
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,  # asked for where no data loader is prepared
            "gradient_clipping": config.clip_at,
        }
    return accelerator


class Abandoned(Exception):
    """What was being done is not finished, since the run was asked to stop."""


class StopRequest:
    """Ctrl-C and SIGTERM ask for a stop after the present step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: whoever runs there handles signals
                break

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise Abandoned where this process was asked."""
        if self.asked:
            raise Abandoned

    def anywhere(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked, the same answer on all."""
        if accelerator.num_processes == 1:
            return self.asked
        return bool(accelerator.reduce(torch.tensor(float(self.asked), device=accelerator.device), "sum") > 0)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
