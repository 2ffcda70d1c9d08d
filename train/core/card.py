"""What a trained head does when it really decodes, and the model card that says so."""

from __future__ import annotations

import itertools
import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import eagle_fsd
from eagle_fsd.acceptance import Rule
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import read_lines
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel
from train.core.config import TrainingConfig
from train.core.estimate import last_answers


@dataclass(frozen=True)
class Decoded:
    """Greedy decoding of held-out prompts: tokens per target forward, tokens per second, tokens per answer."""

    tau: float
    tokens_per_second: float
    answer_tokens: float


def measure(
    target: TargetModel, head: DraftHead, documents: Documents, indices: Iterable[int], rules: dict[str, Rule],
    tree: TreeConfig, *, prompts: int, new_tokens: int,
) -> dict[str, Decoded]:
    """Decode held-out prompts greedily with every rule, and plainly ("plain": one token per forward), interleaved."""
    answers = itertools.islice(last_answers(documents, indices), prompts)
    model, alone = EagleModel(target, head), EagleModel(target, None)
    outputs: dict[str, list] = {name: [] for name in ("plain", *rules)}
    for number, (prompt, _) in enumerate(Progress(list(answers), desc="decoding", unit="prompt")):
        for name in outputs:
            options = {"max_new_tokens": new_tokens, "tree": tree, "acceptance": rules.get(name, "exact")}
            if number == 0:  # warm-up
                eagle_fsd.generate(prompt, alone if name == "plain" else model, **options)
            outputs[name].append(eagle_fsd.generate(prompt, alone if name == "plain" else model, **options))
    decoded = {}
    for name, results in outputs.items():
        lengths = [length + 1 for output in results for length in output.stats.accepted_lengths]
        decoded[name] = Decoded(
            statistics.fmean(lengths) if lengths else 1.0,
            statistics.median(output.stats.tokens_per_second for output in results),
            statistics.fmean(output.stats.new_tokens for output in results),
        )
    return decoded


def curve_of(output: Path) -> list[tuple[int, float]]:
    """(training tokens so far, estimated tau of exact) of each evaluation of a run."""
    taus = {line["step"]: line["tau"]["exact"] for line in read_lines(output / "eval.jsonl", repair=False)}
    curve, tokens = [], 0
    for line in read_lines(output / "train.jsonl", repair=False):
        tokens += line["tokens"]
        if line["step"] in taus:
            curve.append((tokens, taus[line["step"]]))
    return curve


def curve_text(curve: Sequence[tuple[int, float]]) -> str:
    """The curve as a table, and what its second half says of twice as many tokens."""
    rows = "\n".join(f"| {tokens / 1e6:.2f} M | {tau:.2f} |" for tokens, tau in curve)
    text = f"| training tokens | estimated tau of `exact` |\n|---|---|\n{rows}\n"
    late = [point for point in curve if 2 * point[0] >= curve[-1][0]]
    if len(late) < 3:
        return text
    gain = statistics.linear_regression([math.log2(tokens) for tokens, _ in late], [tau for _, tau in late]).slope
    return text + (f"\nA line through its second half over the logarithm of tokens gains {gain:+.2f} per doubling; "
                   "part of that is the falling learning rate, which a longer run would spread over more tokens.\n")


def write_card(
    directory: Path, config: TrainingConfig, steps: int, documents: int, estimated: dict[str, float],
    decoded: dict[str, Decoded], curve: Sequence[tuple[int, float]],
) -> None:
    """`README.md` of a head: how it was trained, tau as estimated and as decoded, and on the way."""
    base = decoded["plain"].tokens_per_second
    rows = []
    for name, d in decoded.items():
        guess = f"{estimated[name]:.2f}" if name in estimated else "1"
        rows.append(f"| {name} | {guess} | {d.tau:.2f} | {d.tokens_per_second:.1f} | "
                    f"{d.tokens_per_second / base:.2f}x | {d.answer_tokens:.0f} |")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    tree = [int(number) if number == int(number) else number for number in config.tree]
    text = f"""---
library_name: eagle_fsd
base_model: {config.target}
---

# EAGLE draft head for {config.target}

Trained by `train/train_draft_head.py` of eagle_fsd {eagle_fsd.__version__}: {steps} steps of up to
{config.batch_tokens} tokens on {documents} documents of `{config.data}`, learning rate {config.lr:g}, seed
{config.seed}. Objective: {config.objective}.

Greedy decoding of up to {config.decode_prompts} held-out prompts, up to {config.decode_tokens} tokens each, tree
{tree}, {config.target_dtype}, {device}, {platform.machine()}, torch {torch.__version__}, transformers
{transformers.__version__}. The quality that `fsd` costs is not measured here; measure it on your own task before you
use a threshold above 0.

| rule | tau, estimated from text | tau, decoded | tokens/s | over plain decoding | tokens per answer |
|---|---|---|---|---|---|
{chr(10).join(rows)}

tau = tokens per target forward. "plain" is one token per forward in the same engine.

{curve_text(curve)}"""
    (directory / "README.md").write_text(text, encoding="utf-8")
