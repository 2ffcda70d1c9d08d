"""Measure a head on held-out prompts: tau during training, optionally speed at the end, and the model card.

tau = tokens per target forward in lossless greedy decoding. The answers are the target's, the same for every head.
"""

from __future__ import annotations

import itertools
import json
import logging
import platform
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from accelerate.utils import broadcast_object_list, gather_object

import eagle_fsd
from eagle_fsd import EagleModel, Output
from eagle_fsd.cli.arguments import tree_text
from eagle_fsd.heads.catalogue import hub_id_of
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.utils.progress import Progress

from .config import TrainingConfig
from .objectives import objective_text
from .states import Logs
from .stopping import StopRequest, any_process
from .trainer import Trainer

log = logging.getLogger("train.train_draft_head")

TOGETHER = 16  # prompts in one batch


def tau_of(outputs: Iterable[Output]) -> float:
    """Mean over all cycles of all answers; 1 if all answers ended before the first cycle."""
    lengths = [length + 1 for output in outputs for length in output.stats.accepted_lengths]
    return statistics.fmean(lengths or [1])


def accepted_at(outputs: Iterable[Output], depth: int) -> list[float]:
    """Share of cycles that accept at least 1, 2, ..., `depth` tokens. Their sum is tau - 1."""
    lengths = [length for output in outputs for length in output.stats.accepted_lengths]
    return [sum(length >= place for length in lengths) / max(1, len(lengths)) for place in range(1, depth + 1)]


def decode(model: EagleModel, prompts: list[list[int]], config: TrainingConfig) -> list[Output]:
    """Decode `eval_tokens` tokens after each prompt. Only the head drafts; nothing is copied from the text."""
    outputs: list[Output] = []
    with Progress(desc="tau", unit="prompt", total=len(prompts), leave=False) as progress:
        for first in range(0, len(prompts), TOGETHER):
            batch = prompts[first : first + TOGETHER]
            outputs += eagle_fsd.generate(batch, model, max_new_tokens=config.eval_tokens, acceptance="exact",
                                          tree=config.tree, text_drafts="off")
            progress.update(len(batch))
    return outputs


def measure_speed(model: EagleModel, prompts: list[list[int]], config: TrainingConfig) -> dict[str, list[Output]]:
    """Answer some prompts one by one, alternating between plain decoding and decoding with the head."""
    models = {"plain": EagleModel.from_parts(model.target.model, None), "exact": model}
    outputs: dict[str, list[Output]] = {name: [] for name in models}
    for number, prompt in enumerate(Progress(prompts[: config.decode_prompts], desc="decoding", unit="prompt")):
        for name, each in models.items():
            for _ in range(1 + (number == 0)):  # the first prompt twice, to warm up
                output = eagle_fsd.generate(prompt, each, max_new_tokens=config.decode_tokens, acceptance="exact",
                                            tree=config.tree, text_drafts="off")
            outputs[name].append(output)
    return outputs


class Evaluation:
    """The evaluations of a run, which write `best` and `head` to its folder.

    Args:
        logs: logs with the run's earlier evaluations.
        stop: a request that aborts an evaluation.
    """

    def __init__(self, trainer: Trainer, logs: Logs, stop: StopRequest) -> None:
        self.trainer, self.config, self.logs, self.stop = trainer, trainer.config, logs, stop
        # A state is saved before its step is evaluated, so a resumed run may already have an evaluation of its step.
        lines, = broadcast_object_list([logs.read("eval")])  # the same on all processes, which evaluate together
        self.measured: dict[int, dict] = {line["step"]: line for line in lines if line["step"] <= trainer.step}

    @property
    def due(self) -> bool:
        """Whether the current step still has to be evaluated."""
        step, config = self.trainer.step, self.config
        regular = 0 < step < self.trainer.steps and step % config.eval_every == 0
        return config.evaluate and regular and step not in self.measured

    def measure(self) -> None:
        """Measure tau of the current head, each process on a share of the prompts, and save the head if it is the best
        so far. All processes must call it. A request to stop aborts the evaluation."""
        trainer, config, accelerator = self.trainer, self.config, self.trainer.accelerator
        head, step, outputs, started = trainer.current_head(), trainer.step, None, time.perf_counter()
        share = trainer.prompts[accelerator.process_index :: accelerator.num_processes]
        try:
            with self.stop.immediately():
                # Without CUDA graphs: there are few cycles, of many row counts.
                outputs = decode(EagleModel.from_parts(trainer.teacher.target.model, head, cuda_graphs=False), share,
                                 config)
        except KeyboardInterrupt:
            log.info("stopping: the evaluation of step %d was aborted", step)
        if any_process(accelerator, outputs is None):
            return
        outputs = gather_object(outputs)
        tau, accepted = tau_of(outputs), accepted_at(outputs, config.tree.depth)
        best = tau > max((line["tau"] for line in self.measured.values()), default=0.0)
        self.measured[step] = {"step": step, "tau": tau, "accepted": [round(share, 4) for share in accepted]}
        if not accelerator.is_main_process:
            return
        if best:
            self.save(head, "best", tau)
        self.logs.write("eval", self.measured[step])
        accelerator.log({"tau": tau}, step=step)
        log.info("step %d: tau %.3f, accepted by level %s (%.0f s)", step, tau,
                 " ".join(f"{share:.2f}" for share in accepted), time.perf_counter() - started)

    def save(self, head: DraftHead, name: str, tau: float | None) -> None:
        """Save the current head, its tau and, if it is measured, its card to a folder, replacing an earlier one."""
        output, part = self.config.output, self.config.output / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        save_head(head, part, dtype=torch.bfloat16 if self.config.target_dtype == "bfloat16" else torch.float32)
        self.write_evaluation(part, tau)
        if tau is not None:
            self.write_card(part)
        shutil.rmtree(output / name, ignore_errors=True)
        part.rename(output / name)

    def save_unmeasured(self, head: DraftHead) -> None:
        """Save the current head without its tau, in the main process."""
        if self.trainer.accelerator.is_main_process:
            self.save(head, "head", None)
            log.info("step %d: the head is in %s; it was not evaluated", self.trainer.step,
                     self.config.output / "head")

    def write_evaluation(self, directory: Path, tau: float | None, **more: object) -> None:
        """Write the measurements of the current head to its folder."""
        trainer = self.trainer
        record = {"step": trainer.step, "tau": tau, "data": trainer.digests["data"],
                  "learned": len(trainer.split.learned), **more}  # the dataset, and how many of its first documents
        (directory / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def write_card(self, directory: Path, compared: str = "") -> None:
        """Write the model card of the current head to its folder; see `card`."""
        text = card(self.trainer, self.logs.read("train"), self.measured, compared)
        (directory / "README.md").write_text(text, encoding="utf-8")

    def finish(self) -> None:
        """Save the head and, unless evaluations are off, its model card, optionally with a speed comparison.

        Raises:
            KeyboardInterrupt: the run was asked to stop.
        """
        trainer, config = self.trainer, self.config
        if config.evaluate and trainer.step not in self.measured:
            self.measure()
        head, target, directory = trainer.current_head(), trainer.teacher.target, config.output / "head"
        if not config.evaluate or trainer.step not in self.measured:
            self.save_unmeasured(head)
            if config.evaluate:
                raise KeyboardInterrupt
            return
        if not trainer.accelerator.is_main_process:
            return
        tau = self.measured[trainer.step]["tau"]
        self.save(head, "head", tau)
        if config.decode_prompts:
            with self.stop.immediately():
                outputs = measure_speed(EagleModel.from_parts(target.model, head), trainer.prompts, config)
            speeds = {name: statistics.median(output.stats.tokens_per_second for output in answers)
                      for name, answers in outputs.items()}
            self.write_evaluation(directory, tau, tokens_per_second=speeds)
            self.write_card(directory, comparison(config, outputs["exact"], speeds))
        log.info("the head is in %s, tau %.2f", directory, tau)


def comparison(config: TrainingConfig, outputs: list[Output], speeds: dict[str, float]) -> str:
    """The section of the card that compares decoding with and without the head.

    Args:
        outputs: answers with the head.
        speeds: median tokens/s.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"""
Lossless greedy decoding of {len(outputs)} held-out prompts, up to {config.decode_tokens} tokens each, tree
`{tree_text(config.tree)}`, {config.target_dtype}, {device}, {platform.machine()}, torch {torch.__version__},
transformers {transformers.__version__}:

| decoding | tau | tokens/s | over plain |
|---|---|---|---|
| plain | 1 | {speeds["plain"]:.1f} | 1x |
| with this head | {tau_of(outputs):.2f} | {speeds["exact"]:.1f} | {speeds["exact"] / speeds["plain"]:.2f}x |
"""


def card(trainer: Trainer, steps: list[dict], measured: dict[int, dict], compared: str) -> str:
    """The model card: how the head was trained, and tau over training tokens. It contains no local path.

    Args:
        steps: the lines of `train.jsonl`.
        measured: the lines of `eval.jsonl` by step.
        compared: the section from `comparison`, or an empty string.
    """
    config = trainer.config
    hub_id = hub_id_of(config.target)
    minutes = sum(line.get("seconds", 0.0) for line in steps) / 60
    duration = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
    tokens = itertools.accumulate(line["tokens"] for line in steps)
    curve = [f"| {count / 1e6:.2f} M | {each['tau']:.2f} | {' '.join(f'{x:.2f}' for x in each.get('accepted', []))} |"
             for line, count in zip(steps, tokens, strict=True) if (each := measured.get(line["step"]))]
    base_model = f"base_model: {hub_id}\n" if hub_id else ""
    return f"""---
library_name: eagle_fsd
{base_model}---

# EAGLE draft head for {hub_id or Path(config.target).name}

Trained by `{__package__}.train_draft_head` of eagle_fsd {eagle_fsd.__version__}: {trainer.step} steps of up to
{config.batch_tokens} tokens in {duration} on {len(trainer.split.learned)} documents of `{config.data.name}`,
objective `{objective_text(config.objective)}`, AdamW, learning rate {config.lr:g}, seed {config.seed}.
{compared}
tau = tokens per target forward in lossless greedy decoding with tree `{tree_text(config.tree)}`. `eagle-fsd calibrate`
measures the speed and quality of fuzzy acceptance on your own task.

| training tokens | tau, held-out text | share of forwards that accept at least 1, 2, ... drafted tokens |
|---|---|---|
{chr(10).join(curve)}
"""
