"""Train the demo pair from nothing: tokenizer, target and draft head, on text made on this machine.

    python -m train.demo --preset cpu --out checkpoints --work runs/demo

Every stage leaves its result in the work folder and is skipped when that is there, and the training stages save
themselves every few minutes: an interrupted run goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_fsd.checkpoint import save_head
from eagle_fsd.draft import DraftHead
from eagle_fsd.target import TargetModel
from train.answers import greedy_answers, render
from train.corpus import Documents, encode_answers, train_tokenizer, training_documents
from train.head import HeadTraining, train_head
from train.target import Stage, build_target, grow, train_stage
from train.tasks import tasks

log = logging.getLogger("train.demo")


@dataclass(frozen=True)
class Preset:
    """Sizes of a demo pair; `batch` in tokens; `python_share` of the documents are pieces of source."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    documents: int
    batch: int
    python_share: float
    practice: tuple[str, ...]  # task families that are learned last and get more turns
    stages: tuple[Stage, ...]
    answers: int
    head_intermediate: int
    head: HeadTraining


PRESETS = {
    "cpu": Preset(
        vocab_size=2048, hidden=192, intermediate=528, heads=6, kv_heads=2, documents=80_000,
        batch=12_288, python_share=0.05, practice=("list", "table") * 3,
        stages=(Stage(4, 3200, lr=2e-3), Stage(4, 1400, lr=2e-3), Stage(4, 500, lr=1.5e-3, decay=0.9),
                Stage(16, 40, lr=2e-4, decay=0.8, warmup=5)),
        answers=1536, head_intermediate=768, head=HeadTraining(steps=450),
    ),
    "gpu": Preset(
        vocab_size=4096, hidden=256, intermediate=704, heads=8, kv_heads=2,
        documents=2_000_000, batch=65_536, python_share=0.1, practice=("list", "table") * 2,
        stages=(Stage(6, 8000, lr=3e-3), Stage(24, 8000, lr=2e-3, decay=0.7)),
        answers=50_000, head_intermediate=1024, head=HeadTraining(steps=12_000, batch=65_536),
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
        train_tokenizer(preset.vocab_size).save_pretrained(work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    if not (work / "text.npz").exists():
        documents = training_documents(tokenizer, preset.documents, python_share=preset.python_share, seed=1,
                                       practice=preset.practice)
        documents.save(work / "text.npz")
    return tokenizer, Documents.load(work / "text.npz")


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
                model, stage, documents, batch=preset.batch, seed=number,
                checkpoint=work / f"target-stage{number}.pt", device=device,
            )
            model.save_pretrained(done)
    return model.eval(), tokenizer


def answer_text(
    preset: Preset, work: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Documents:
    """Text for the head: the target's own greedy answers to training tasks, and as many documents of fresh text."""
    if not (work / "head-text.npz").exists():
        prompts = render(tokenizer, list(tasks("train", seed=99, count=preset.answers)))
        answers = greedy_answers(model, tokenizer, prompts, checkpoint=work / "answers.jsonl")
        own = Documents.of(encode_answers(tokenizer, prompts, [answer + "<|end|>" for answer in answers]))
        text = training_documents(tokenizer, preset.answers, python_share=4 * preset.python_share, seed=2)
        own.joined(text).save(work / "head-text.npz")
    return Documents.load(work / "head-text.npz")


def train_draft(
    preset: Preset, work: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, device: str
) -> DraftHead:
    """The demo head, which shares the target's embeddings."""
    model.to(device)
    documents = answer_text(preset, work, model, tokenizer)
    fields = target_config(preset, 1, tokenizer).to_dict() | {"intermediate_size": preset.head_intermediate}
    torch.manual_seed(1)
    head = DraftHead(LlamaConfig(**fields))
    head.share_embeddings(model.get_input_embeddings())
    head.to(device)
    return train_head(head, TargetModel(model), documents, preset.head, checkpoint=work / "head.pt")


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
        os.execve(sys.executable, [sys.executable, "-m", "train.demo", *sys.argv[1:]], {**os.environ, **settings})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    args.work.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[args.preset]
    model, tokenizer = train_target(preset, args.work, args.device)
    head = train_draft(preset, args.work, model, tokenizer, args.device)
    save_head(head, args.out / "demo-draft", dtype=torch.bfloat16)
    save_target(model, tokenizer, args.out / "demo-target")


if __name__ == "__main__":
    main()
