"""Train a draft head for a target.

    python -m train.train_draft_head --target T --conversations chats.jsonl --output runs/head
    python -m train.train_draft_head hass --target T --data data/chat --output runs/head
    torchrun --nproc-per-node 8 -m train.train_draft_head hass --target T --data data/chat --output runs/head

The default recipe is `small` on a CPU and `hass` on a GPU. Training runs on any number of processes; --shard divides
the head over them. After Ctrl-C or a crash, the same command continues from the last saved state.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import uuid
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data.conversations import read_records
from eagle_fsd.data.documents import is_dataset
from eagle_fsd.data.gguf import target_source
from eagle_fsd.heads.catalogue import default_target
from eagle_fsd.measure.records import tokenizer_digests
from eagle_fsd.models.loading import bfloat16_is_faster
from eagle_fsd.utils.files import check_same, only_writer
from eagle_fsd.utils.progress import Progress

from . import features, prepare_data
from .config import RECIPES, TrainingConfig
from .evaluation import Evaluation
from .schedule import check_size
from .states import Logs, depends_on, resume, save_state
from .stopping import StopRequest, any_process
from .teacher import form_name, read_index
from .trainer import Trainer, make_accelerator

log = logging.getLogger("train.train_draft_head")

FEW_TOKENS = 100_000  # learned tokens below which a warning is logged
ANSWER_TOKENS = 512  # most tokens of each answer with --conversations


def train(config: TrainingConfig) -> Path:
    """Train to the end, and return the folder of the finished head.

    Raises:
        ValueError: settings, data and target do not match, or another process writes the folder.
    """
    config = resolved(config)
    accelerator = make_accelerator(config)
    config.output.mkdir(parents=True, exist_ok=True)
    with only_writer(config.output) if accelerator.is_main_process else nullcontext():
        trainer = Trainer(config, accelerator)
        while not resume(trainer):
            trainer.close()
            del trainer  # and its target, before another one is loaded
            trainer = Trainer(config, accelerator)
        if accelerator.is_main_process:
            log.info("%d process(es) on %s", accelerator.num_processes, accelerator.device.type)
            if trainer.step == 0:  # once, not when it resumes
                warn_of_little(trainer)
        if accelerator.log_with:
            accelerator.init_trackers("eagle_fsd", config={k: str(v) for k, v in depends_on(trainer).items()},
                                      init_kwargs=tracker_run(trainer) if accelerator.is_main_process else {})
        stop = StopRequest()
        try:
            logs = Logs(trainer)
            evaluation = Evaluation(trainer, logs, stop)
            take_steps(trainer, evaluation, logs, stop)
            evaluation.finish()
        finally:
            stop.restore()
        trainer.close()
        accelerator.end_training()
    return config.output / "head"


def resolved(config: TrainingConfig) -> TrainingConfig:
    """Replace "auto" settings by their values on this machine, and --conversations by a dataset, made if it is missing.

    Raises:
        ValueError: both conversations and a dataset, or neither; conversations with several processes; see also
            `prepare_data.run`; too few conversations to hold one out, or others than those already answered.
    """
    if bool(config.conversations) == (config.data is not None):
        raise ValueError("pass either --conversations or --data")
    if config.quantization and config.data is not None and config.features is None:
        raise ValueError(f"--quantization needs stored features: run {__package__}.features --quantization int8, and "
                         "pass --features")
    config = replace(config, target=config.target or default_target())
    on_cpu = config.cpu or not torch.cuda.is_available()
    half = not on_cpu or "auto" in (config.target_dtype, config.mixed_precision) and bfloat16_is_faster()
    if config.target_dtype == "auto" and config.features is not None:
        config = replace(config, target_dtype=read_index(config.features)["dtype"].removeprefix("torch."))
    if config.target_dtype == "auto":
        config = replace(config, target_dtype="bfloat16" if half else "float32")
    if config.mixed_precision == "auto":
        config = replace(config, mixed_precision="bf16" if half else "no")
    if not config.conversations:
        return config
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"--conversations needs a single process: run {__package__}.prepare_data first, and pass "
                         "--data")
    data, stored = config.output / "data", config.output / "features"
    if is_dataset(data):
        check_unchanged(config, data)
    else:
        if config.evaluate and config.eval_data is None:  # before they are answered
            count = sum(record.messages is not None for source in config.conversations
                        for record in read_records(source, unanswered=True))
            check_size(count, ", ".join(config.conversations), "usable conversations")
        prepare_data.run(prepare_data.Arguments(
            target=config.target, out=data, data=config.conversations, regenerate="greedy",
            max_new_tokens=ANSWER_TOKENS, quantization=config.quantization, trust_remote_code=config.trust_remote_code))
    config = replace(config, data=data)
    if on_cpu and config.head == "eagle2" and config.features is None:
        features.run(features.Arguments(target=config.target, data=data, out=stored, dtype=config.target_dtype,
                                        quantization=config.quantization, trust_remote_code=config.trust_remote_code),
                     answered_by=prepare_data.answers_of(data).get("target"))
        config = replace(config, features=stored)
    return config


def check_unchanged(config: TrainingConfig, data: Path) -> None:
    """Raise ValueError if a dataset was made of other conversations, or in another way. Features and trainer compare
    its target, when they have loaded it."""
    summary, made_by = json.loads((data / "summary.json").read_text(encoding="utf-8")), prepare_data.answers_of(data)
    names, found = (summary.get("data") or [], summary.get("sha256") or [])
    wanted = {"conversations": [digest or name for name, digest in zip(
                  config.conversations, prepare_data.digests(config.conversations), strict=True)],
              "quantization": form_name(config.quantization), **tokenizer_digests(AutoTokenizer.from_pretrained(
                  target_source(config.target), trust_remote_code=config.trust_remote_code))}
    recorded = {name: made_by.get(name) for name in wanted}
    recorded["conversations"] = [digest or name for name, digest in zip(names, found, strict=False)]
    check_same(data, recorded, wanted, "choose another output, or delete that folder")


def tracker_run(trainer: Trainer) -> dict[str, dict]:
    """What each tracker needs to know of the run: its name, and where a resumed one continues. The run's id is kept in
    its folder."""
    config = trainer.config
    path = config.output / "run_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    name, run_id = config.run_name or config.output.resolve().name, path.read_text(encoding="utf-8")
    return {"wandb": {"name": name, "id": run_id, "resume": "allow"}, "tensorboard": {"purge_step": trainer.step + 1}}


def warn_of_little(trainer: Trainer) -> None:
    """Warn of a run too short for its warm-up, and of too little data."""
    config, learned = trainer.config, trainer.split.learned
    if config.warmup >= trainer.steps:
        log.warning("the warm-up of %d steps would take the whole run of %d: it takes a tenth (--warmup)",
                    config.warmup, trainer.steps)
    count = trainer.documents.learnable(learned)
    if count < FEW_TOKENS:
        log.warning("%d documents with %d tokens to learn are few: the head will learn them by heart, and predict "
                    "other texts badly. The bundled heads learned 370,000 tokens and more; more questions, or "
                    "prepare_data --self-prompted, give more", len(learned), count)


def take_steps(trainer: Trainer, evaluation: Evaluation, logs: Logs, stop: StopRequest) -> None:
    """Take the remaining steps; save, evaluate and log between them.

    Raises:
        KeyboardInterrupt: the run was asked to stop, and its state and head are saved.
    """
    config, accelerator = trainer.config, trainer.accelerator
    started, tokens = time.perf_counter(), 0
    saved = started
    with Progress(desc="draft head", unit="step", total=trainer.steps, done=trainer.step,
                  quiet=not accelerator.is_main_process) as progress:
        while trainer.step < trainer.steps:
            if evaluation.due:  # or was aborted when the run stopped
                evaluation.measure()
                accelerator.wait_for_everyone()
                stop_if_requested(trainer, evaluation, stop)
            before = time.perf_counter()
            record = trainer.train_step()
            record["seconds"] = round(time.perf_counter() - before, 4)
            tokens += record["tokens"]
            record["tokens_per_second"] = round(tokens / (time.perf_counter() - started), 1)
            logs.write("train", record)
            progress.update(**{"loss": f"{record['loss']:.3f}", "top1": f"{record['top1'][0]:.3f}",
                               "tokens/s": f"{record['tokens_per_second']:.0f}"})
            if trainer.step % config.log_every == 0:
                accelerator.log({"loss": record["loss"], "lr": record["lr"],
                                 **{f"top1/step{i + 1}": a for i, a in enumerate(record["top1"])}}, step=trainer.step)
            overdue = any_process(accelerator, time.perf_counter() - saved >= 60 * config.save_minutes)
            if overdue or trainer.step % config.save_every == 0 or trainer.step == trainer.steps:
                save_state(trainer)
                saved = time.perf_counter()
            stop_if_requested(trainer, evaluation, stop)


def stop_if_requested(trainer: Trainer, evaluation: Evaluation, stop: StopRequest) -> None:
    if any_process(trainer.accelerator, stop.requested):
        save_state(trainer)
        evaluation.save_unmeasured(trainer.current_head())
        raise KeyboardInterrupt


def main() -> int:
    words = sys.argv[1:]
    if words and not words[0].startswith("-") and words[0] not in RECIPES:
        print(f"unknown recipe {words[0]!r}; accepted: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    if not words or words[0].startswith("--") and not {"--help", "-h"} & set(words):
        words = ["hass" if torch.cuda.is_available() and "--cpu" not in words else "small", *words]
    recipes = {name: TrainingConfig(output=tyro.MISSING, **settings) for name, (_, settings) in RECIPES.items()}
    abouts = {name: about for name, (about, _) in RECIPES.items()}
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)  # it logs every saved file
    program = f"python -m {__spec__.name}"

    def parse() -> TrainingConfig:
        if words[0] in RECIPES:  # by itself: tyro's hints would name the flags of every recipe
            return parse_options(TrainingConfig, words[1:], program=f"{program} {words[0]}",
                                 description=abouts[words[0]], default=recipes[words[0]])
        return parse_options(tyro.extras.subcommand_type_from_defaults(recipes, abouts), words, program=program,
                             description=__doc__.replace("-m train.", f"-m {__package__}."))

    return exit_status(__spec__.name, lambda: train(parse()), also=(FloatingPointError,),
                       stopped="stopped; the same command continues")


if __name__ == "__main__":
    sys.exit(main())
