"""Train the demo pair from nothing: tokenizer, target and draft head, on text made on this machine.

    python -m train.demo --preset cpu --out checkpoints --work runs/demo
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data.documents import Documents
from eagle_fsd.experiments.cycles import log_cycles
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.models.loading import load_target
from eagle_fsd.models.target import TargetModel
from eagle_fsd.tuning.logs import store_log
from train.core.config import make_config
from train.demo.answers import greedy_answers, render
from train.demo.corpus import encode_answers, python_prefixes, train_tokenizer, training_documents
from train.demo.target import Stage, build_target, grow, train_stage
from train.demo.tasks import tasks
from train.features import write_features
from train.train_draft_head import train


@dataclass(frozen=True)
class Preset:
    """Sizes of a demo pair; `python_share` of the documents are pieces of source."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    documents: int
    python_share: float
    practice: tuple[str, ...]  # task families that are learned last and get more turns
    stages: tuple[Stage, ...]
    answers: int  # the target's own, for the head; beside them three times as many documents of fresh text
    head: dict  # settings of train.core.config.TrainingConfig
    installed: bool = False  # source of the installed packages too
    questions: int = 20_000  # tasks that the tokenizer is trained on
    answer_batch: int = 64  # answers generated at once


PRESETS = {
    "cpu": Preset(
        vocab_size=2048, hidden=192, intermediate=528, heads=6, kv_heads=2, documents=80_000,
        python_share=0.07, practice=("list", "table", "table", "string"),
        stages=(Stage(4, 5400, lr=2e-3), Stage(4, 500, lr=1.5e-3), Stage(8, 1100, lr=1.5e-3, decay=0.5),
                Stage(24, 200, lr=5e-4, decay=0.8, warmup=10, batch=4096)),
        answers=2048,
        head={"objective": "sparse", "steps": 8000, "batch_tokens": 4096, "lr": 5e-3, "warmup": 100,
              "head": {"intermediate_size": 768}, "tree": [16, 5, 3, 0.5], "eval_every": 2000, "save_every": 500},
    ),
    "gpu": Preset(
        vocab_size=4096, hidden=256, intermediate=704, heads=8, kv_heads=2,
        documents=2_000_000, python_share=0.1, practice=("list", "table") * 2,
        stages=(Stage(6, 8000, lr=3e-3, batch=65_536), Stage(24, 8000, lr=2e-3, decay=0.7, batch=65_536)),
        answers=50_000,
        head={"objective": "sparse", "steps": 12_000, "batch_tokens": 65_536, "lr": 1e-3, "warmup": 200,
              "head": {"intermediate_size": 1024}, "eval_every": 1000, "save_every": 1000},
    ),
}


def target_config(preset: Preset, layers: int, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=preset.vocab_size, hidden_size=preset.hidden, intermediate_size=preset.intermediate,
        num_hidden_layers=layers, num_attention_heads=preset.heads, num_key_value_heads=preset.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )


def make_text(preset: Preset, work: Path) -> tuple[PreTrainedTokenizerFast, Documents]:
    """The tokenizer and the training text, made once."""
    if not (work / "tokenizer").exists():
        train_tokenizer(preset.vocab_size, preset.questions).save_pretrained(work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    if not (work / "text").exists():
        documents = training_documents(tokenizer, preset.documents, python_share=preset.python_share, seed=1,
                                       practice=preset.practice, installed=preset.installed)
        documents.save(work / "text")
    return tokenizer, Documents.load(work / "text")


def train_target(preset: Preset, work: Path, device: str) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """All stages of the target, each kept in the work folder."""
    tokenizer, documents = make_text(preset, work)
    model = None
    for number, stage in enumerate(preset.stages):
        config = target_config(preset, stage.layers, tokenizer)
        done = work / f"target-stage{number}"
        if done.exists():
            model = LlamaForCausalLM.from_pretrained(done, dtype=torch.float32)
        else:
            model = build_target(config, seed=0) if model is None else grow(model, stage.layers)
            model = train_stage(
                model, stage, documents, seed=number, checkpoint=work / f"target-stage{number}.pt",
                device=device,
            )
            part = done.with_name(done.name + ".part")
            model.save_pretrained(part)
            part.rename(done)
    return model.eval(), tokenizer


def own_answers(
    split: str, count: int, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, checkpoint: Path, batch: int
) -> Documents:
    """The target's own greedy answers to tasks of a split."""
    prompts = render(tokenizer, list(tasks(split, seed=99, count=count)))
    answers = greedy_answers(model, tokenizer, prompts, batch=batch, checkpoint=checkpoint)
    return Documents.of(encode_answers(tokenizer, prompts, [answer + "<|end|>" for answer in answers]))


def head_text(preset: Preset, work: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """The head's text, `head-text` and `head-eval` in the work folder, made once."""
    batch = preset.answer_batch
    if not (work / "head-eval").exists():
        own_answers("heldout", 64, model, tokenizer, work / "answers-heldout.jsonl", batch).save(work / "head-eval")
    if not (work / "head-text").exists():
        own = own_answers("train", preset.answers, model, tokenizer, work / "answers.jsonl", batch)
        fresh = training_documents(tokenizer, 3 * preset.answers, python_share=3 * preset.python_share, seed=2,
                                   installed=preset.installed)
        own.joined(fresh).save(work / "head-text")


def train_draft(preset: Preset, work: Path, target: Path, device: str, output: Path | None = None) -> Path:
    """The demo head, which shares the target's embeddings; returns its folder, in `output` (default: work / head)."""
    model, _ = load_target(target, dtype="bfloat16", device=device)
    write_features(TargetModel(model, check=False), Documents.load(work / "head-text"), work / "features")
    return train(make_config({
        "target": target, "data": work / "head-text", "eval_data": str(work / "head-eval"),
        "output": output or work / "head", "features": str(work / "features"),
        "target_dtype": "float32" if device == "cpu" else "bfloat16", "tracker": "none", **preset.head,
    }), cpu=device == "cpu")


def log_trees(
    target: Path, head: Path, device: str, *, count: int = 30, temperatures: Sequence[float] = (0.0, 0.7),
    max_new_tokens: int = 128,
) -> None:
    """Cycles on held-out tasks and source, a fifth of `count`, beside the head: for `tree="auto"` to choose by."""
    model = eagle_fsd.load(target, head, device=device, tree=None)
    source = count // 5
    prompts = [*(task.messages for task in tasks("heldout", seed=98, count=count - source)),
               *(python_prefixes(300)[-source:] if source else [])]
    for temperature in temperatures:
        store_log(head, log_cycles(model, prompts, make_rule("exact"), temperature, max_new_tokens=max_new_tokens))


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """An ordinary HF directory in bf16, in shards of at most 15 MB."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, do_sample=False,
    )
    model.to("cpu", torch.bfloat16).save_pretrained(directory, max_shard_size="15MB")
    tokenizer.save_pretrained(directory)


def keep_freed_memory() -> None:
    """Restart with malloc settings that keep freed memory: 1.4 times the training speed on Linux."""
    settings = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}
    if sys.platform == "linux" and any(name not in os.environ for name in settings):
        command = sys.modules["__main__"].__spec__.name
        os.execve(sys.executable, [sys.executable, "-m", command, *sys.argv[1:]], {**os.environ, **settings})


@dataclass(frozen=True)
class Arguments:
    """Train the demo pair from nothing: tokenizer, target and draft head, on text made on this machine.

    Every stage leaves its result in the work folder and is skipped when that is there, and the training stages save
    themselves every few minutes: an interrupted run goes on where it was when the same command is given again.

    Args:
        preset: sizes of the pair, for this kind of machine.
        out: folder of the finished pair.
        work: folder of the stages.
        device: where both are trained; default CUDA where available, else the CPU.
    """

    preset: Literal["cpu", "gpu"] = "cpu"
    out: Path = Path("checkpoints")
    work: Path = Path("runs/demo")
    device: str | None = None


def make_pair(arguments: Arguments) -> None:
    """All stages, one after the other."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    preset, out, work = PRESETS[arguments.preset], arguments.out, arguments.work
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = train_target(preset, work, device)
    head_text(preset, work, model, tokenizer)
    target = work / "demo-target"
    save_target(model, tokenizer, target)
    head = train_draft(preset, work, target, device)
    save_head(load_head(head), out / "demo-draft", dtype=torch.bfloat16)
    shutil.copy(head / "README.md", out / "demo-draft")
    save_target(model, tokenizer, out / "demo-target")
    log_trees(out / "demo-target", out / "demo-draft", device)


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.demo")
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status("train.demo", lambda: make_pair(arguments),
                       stopped="stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
