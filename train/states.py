"""What a run leaves on disk to be continued from: its states and its logs."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import torch

from eagle_fsd.data.files import append_lines, read_lines, write_lines
from train.core.config import TrainingConfig
from train.core.run import Run

DAMAGED = ".damaged"  # of a state that could not be read

log = logging.getLogger("train.train_draft_head")


def save_state(run: Run) -> None:
    """Everything that is needed to continue bit by bit, complete or not there at all. All processes must call it."""
    accelerator, states = run.accelerator, run.output / "states"
    part, final = states / f"step-{run.step}.part", states / f"step-{run.step}"
    if final.exists():
        return
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
        states.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        record = {"step": run.step, "config": comparable(run.config)}
        (part / "run.json").write_text(json.dumps(record, indent=1) + "\n")
        part.rename(final)
        for old in saved_states(run.output)[: -run.config.keep]:
            shutil.rmtree(old)


def resume(run: Run) -> None:
    """Continue from the last complete state that can be read, where there is one.

    A damaged state (a disk that was full, a machine that went down) is set aside under another name.

    Raises:
        ValueError: it was made with other settings, or the machines do not see the same folder; none can be read.
    """
    states, accelerator = saved_states(run.output), run.accelerator
    if accelerator.num_processes > 1:
        seen = accelerator.gather(torch.tensor([len(states)], device=accelerator.device))
        if int(seen.min()) != int(seen.max()):
            raise ValueError(f"{run.output} is not the same folder for all machines, which have to write into one")
    damaged: list[tuple[Path, str]] = []
    for state in reversed(states):
        why = load(run, state)
        if why is None:
            break
        damaged.append((state, why))
    if damaged and len(damaged) == len(states):
        state, why = damaged[0]
        raise ValueError(f"no state of {run.output} can be read ({state.name}: {why}); delete {state.parent} to begin "
                         "anew, or choose another output")
    accelerator.wait_for_everyone()
    for state, why in damaged if accelerator.is_main_process else ():
        aside = state.with_name(state.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        state.rename(aside)
        log.warning("%s is damaged (%s): now %s, the run continues from an older state", state, why, aside.name)
    if states:
        log.info("continuing at step %d", run.step)


def load(run: Run, state: Path) -> str | None:
    """Continue from a state; why it cannot be read on some process, else None.

    Raises:
        ValueError: it was made with other settings.
    """
    why, record, accelerator = None, {}, run.accelerator
    try:
        record = json.loads((state / "run.json").read_text())
        made_with, step = record["config"], int(record["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"run.json: {error!r}"
    else:
        changed = [k for k, v in comparable(run.config).items() if made_with.get(k) != v]
        if changed:
            raise ValueError(
                f"{run.output} holds a run with another {', '.join(changed)}; choose another output or delete it"
            )
        try:
            accelerator.load_state(str(state))
            run.step = step
        except Exception as error:  # whatever torch, pickle and safetensors raise at what is no file of theirs
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}"
    failed = torch.tensor(float(why is not None), device=accelerator.device)
    if accelerator.num_processes > 1 and accelerator.reduce(failed, "sum") > 0:
        return why or "another process cannot read it"
    return why


def comparable(config: TrainingConfig) -> dict:
    """The settings that a resumed run has to share."""
    free = ("output", "evaluate", "save_every", "keep", "log_every", "eval_every", "eval_tokens", "eval_thresholds",
            "tracker", "decode_prompts", "decode_tokens")
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in values.items() if name not in free}


def saved_states(output: Path) -> list[Path]:
    """Complete states, oldest first."""
    found = [path for path in (output / "states").glob("step-*") if (path / "run.json").is_file()]
    whole = [path for path in found if path.suffix not in (".part", DAMAGED)]
    return sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))


class Logs:
    """`train.jsonl` and `eval.jsonl` of a run, on the main process; a resumed run drops the lines behind its state."""

    def __init__(self, output: Path, step: int, enabled: bool) -> None:
        self.output, self.enabled = output, enabled
        for name in ("train", "eval"):
            path = output / f"{name}.jsonl"
            if enabled and path.exists():
                write_lines(path, [record for record in read_lines(path) if record["step"] <= step])

    def write(self, name: str, record: dict) -> None:
        if self.enabled:
            append_lines(self.output / f"{name}.jsonl", [record])
