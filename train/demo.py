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

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from train.corpus import pack, train_tokenizer
from train.target import Stage, build_target, grow, train_stage

log = logging.getLogger("train.demo")


@dataclass(frozen=True)
class Preset:
    """Sizes of a demo pair. `python_share`: share of rows that are source only (others end in source too)."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    rows: int
    length: int
    batch: int
    python_share: float
    stages: tuple[Stage, ...]


PRESETS = {
    "cpu": Preset(
        vocab_size=2048, hidden=192, intermediate=528, heads=6, kv_heads=2, rows=60_000, length=384, batch=32,
        python_share=0.12, stages=(Stage(4, 3600, lr=4e-3), Stage(16, 600, lr=3e-3, decay=0.7)),
    ),
    "gpu": Preset(
        vocab_size=4096, hidden=256, intermediate=704, heads=8, kv_heads=2, rows=600_000, length=512, batch=128,
        python_share=0.2, stages=(Stage(6, 8000, lr=3e-3), Stage(24, 8000, lr=2e-3, decay=0.7)),
    ),
}


def target_config(preset: Preset, layers: int, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=preset.vocab_size, hidden_size=preset.hidden, intermediate_size=preset.intermediate,
        num_hidden_layers=layers, num_attention_heads=preset.heads, num_key_value_heads=preset.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )


def make_text(preset: Preset, work: Path) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """The tokenizer and the packed rows, made once."""
    if not (work / "tokenizer").exists():
        train_tokenizer(preset.vocab_size).save_pretrained(work / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    if not (work / "learned.npy").exists():
        tokens, learned = pack(tokenizer, preset.rows, preset.length, python_share=preset.python_share, seed=1)
        np.save(work / "tokens.npy", tokens)
        np.save(work / "learned.npy", learned)
    return tokenizer, np.load(work / "tokens.npy"), np.load(work / "learned.npy")


def train_target(preset: Preset, work: Path, device: str, compile_layers: bool) -> tuple:
    """All stages of the target; returns the model and its tokenizer and saves both in `work/target`."""
    tokenizer, tokens, learned = make_text(preset, work)
    model, first_row = None, 0
    for number, stage in enumerate(preset.stages):
        config = target_config(preset, stage.layers, tokenizer)
        done = work / f"target-stage{number}"
        if done.exists():
            model = LlamaForCausalLM.from_pretrained(done, dtype=torch.float32)
        else:
            model = build_target(config, seed=0) if model is None else grow(model, stage.layers)
            model = train_stage(
                model, stage, (tokens, learned), batch=preset.batch, first_row=first_row,
                checkpoint=work / f"target-stage{number}.pt", device=device, compile_layers=compile_layers,
            )
            model.save_pretrained(done)
        first_row += stage.steps * preset.batch
    return model.eval(), tokenizer


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
    parser.add_argument("--compile", action="store_true", help="compile the layers (needs a C++ compiler)")
    args = parser.parse_args()
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    args.work.mkdir(parents=True, exist_ok=True)
    preset = PRESETS[args.preset]
    model, tokenizer = train_target(preset, args.work, args.device, args.compile)
    save_target(model, tokenizer, args.out / "demo-target")


if __name__ == "__main__":
    main()
