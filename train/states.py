"""The files from which a run resumes: its states and its logs."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import torch
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

from eagle_fsd.utils.files import append_lines, check_same, read_lines, write_lines

from .config import TrainingConfig
from .stopping import any_process
from .trainer import Trainer

log = logging.getLogger("train.train_draft_head")

# Settings that may change when a run resumes, and why.
CHANGEABLE = {
    "output": "a run is where its states are: folders may move",
    "evaluate": "it measures, and `split` has the documents that it keeps from training",
    "eval_documents": "`split` has the documents that are measured",
    "eval_every": "only how often tau is measured",
    "decode_prompts": "speed is measured once, after training",
    "decode_tokens": "speed is measured once, after training",
    "save_every": "only how often states are saved",
    "save_minutes": "only how often states are saved",
    "keep": "only how many states are kept",
    "log_every": "only how often the tracker is told",
    "tracker": "only where values are logged too",
    "run_name": "only how the tracker calls the run",
    "cpu": "devices differ by rounding, and the dtypes are compared",
}
# Settings that are names or paths: their content is compared, `Trainer.digests`.
NAMES = ("conversations", "data", "eval_data", "features", "init_from", "target")


def save_state(trainer: Trainer) -> None:
    """Atomically save all that an exact continuation needs. All processes must call it."""
    accelerator, states = trainer.accelerator, trainer.config.output / "states"
    part, final = states / f"part-{trainer.step}", states / f"step-{trainer.step}"
    if final.exists():
        return
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
        states.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        record = {"step": trainer.step, "config": depends_on(trainer)}
        (part / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.rename(final)
        rotate_checkpoints(str(states), trainer.config.keep, checkpoint_prefix="step")


def resume(trainer: Trainer) -> bool:
    """Resume from the last complete state, if there is one. All processes must call it.

    Returns:
        False if the state is unreadable. It is then renamed, and because the trainer may have loaded a part of it, the
        caller must try again with a new trainer.

    Raises:
        ValueError: the state depends on something else than the run, or the machines do not share the folder.
    """
    output, accelerator = trainer.config.output, trainer.accelerator
    states = saved_states(output)
    if accelerator.num_processes > 1:
        counts = accelerator.gather(torch.tensor([len(states)], device=accelerator.device))
        if int(counts.min()) != int(counts.max()):
            raise ValueError(f"{output} is not the same folder on all machines: use a shared one")
    if not states:
        return True
    recorded, fault = {}, None
    try:
        record = json.loads((states[-1] / "run.json").read_text(encoding="utf-8"))
        recorded, step = defaults() | record["config"], int(record["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        fault = error
    if fault is None:
        check_same(output, recorded, depends_on(trainer),
                   "choose another output, or delete it. --init-from HEAD trains a finished head further")
    try:
        if fault is None:
            accelerator.load_state(str(states[-1]))
    except (MemoryError, torch.OutOfMemoryError, PermissionError):  # which do not mean that the state is bad
        raise
    except Exception as error:  # torch, pickle and safetensors raise many kinds for a bad file
        fault = error
    if any_process(accelerator, fault is not None):
        if accelerator.is_main_process:
            aside = states[-1].with_name(f"unreadable-{states[-1].name}")
            shutil.rmtree(aside, ignore_errors=True)
            states[-1].rename(aside)
            before = states[-2].name if len(states) > 1 else "the beginning"
            log.warning("%s is unreadable (%r) and was renamed to %s: continuing from %s", states[-1], fault,
                        aside.name, before)
        accelerator.wait_for_everyone()
        return False
    trainer.step = step
    log.info("continuing at step %d", step)
    return True


def depends_on(trainer: Trainer) -> dict:
    """All that must be the same when a run resumes: settings, and the digests of what they name."""
    settings = dataclasses.asdict(trainer.config)
    fixed = {name: value for name, value in settings.items() if name not in (*CHANGEABLE, *NAMES)}
    return json.loads(json.dumps(fixed | trainer.digests))


def defaults() -> dict:
    """Those of the settings, for states of a version that did not have all of them."""
    values = {field.name: field.default for field in dataclasses.fields(TrainingConfig)
              if field.default is not dataclasses.MISSING and field.name not in (*CHANGEABLE, *NAMES)}
    return json.loads(json.dumps(values, default=dataclasses.asdict))


def saved_states(output: Path) -> list[Path]:
    """Complete states, oldest first."""
    return [Path(path) for path in sort_checkpoints(str(output / "states"), "step")]


class Logs:
    """`train.jsonl` and `eval.jsonl`, written by the main process. A resumed run drops the lines after its state."""

    def __init__(self, trainer: Trainer) -> None:
        self.output, self.enabled = trainer.config.output, trainer.accelerator.is_main_process
        for name in ("train", "eval"):
            path = self.output / f"{name}.jsonl"
            if self.enabled and path.exists():
                write_lines(path, [record for record in read_lines(path) if record["step"] <= trainer.step])

    def read(self, name: str) -> list[dict]:
        return read_lines(self.output / f"{name}.jsonl", repair=False)

    def write(self, name: str, record: dict) -> None:
        if self.enabled:
            append_lines(self.output / f"{name}.jsonl", [record])
