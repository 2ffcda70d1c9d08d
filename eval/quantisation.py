"""Compare a target in int8 with the same target as stored: perplexity, and the KL divergence of its predictions.

    python -m eval.quantisation --likelihood spec_bench.jsonl --per-category 40 --out eval/results/qwen-int8

Perplexity is over the first --tokens tokens of each text, which is the first turn of a question without the chat
template. KL is the divergence of the int8 target from the stored one, in nats per token. For speed and quality of its
answers: `eagle-fsd benchmark --also int8`, and for many graded answers `eagle-fsd calibrate --also int8 --batch 16`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.questions import choose_questions
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.measure.methods import described, pair_text
from eagle_fsd.measure.records import markdown, write_record
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command
from eval.forwards import rotated_by
from eval.likelihood import log_probs

STORED, INT8 = "as stored", "int8"


@dataclass(frozen=True, kw_only=True)
class QuantisationArguments:
    """Options of `eval.quantisation`.

    Args:
        likelihood: JSON lines of questions, whose texts are read.
        per_category: use only the first questions of each category.
        tokens: most tokens of each text.
        blocks: also measure KL with rotations by blocks of these sizes; 1: with none, as before version 0.5.
        out: write OUT.json and OUT.md.
    """

    likelihood: Path
    pair: Loading = Loading()
    per_category: int | None = None
    tokens: int = 512
    blocks: tuple[int, ...] = ()
    out: Path


def likelihoods(targets: dict[str, TargetModel], texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Perplexity of each target; KL divergence and share of equal best tokens of the second and the first."""
    nats, divergence, same, count = dict.fromkeys(targets, 0.0), 0.0, 0, 0
    for ids in Progress(texts, desc="reading", unit="text"):
        log_p = {name: log_probs(target, ids) for name, target in targets.items()}
        for name, each in log_p.items():
            nats[name] -= each.gather(1, torch.tensor(ids[1:], device=each.device)[:, None]).sum().item()
        first, second = log_p.values()
        divergence += (first.exp() * (first - second)).sum().item()
        same += (first.argmax(-1) == second.argmax(-1)).sum().item()
        count += len(first)
    return {**{f"perplexity, {name}": math.exp(total / count) for name, total in nats.items()},
            "KL": divergence / count, "same best token": same / count, "tokens": count}


def run(args: QuantisationArguments) -> None:
    check_counts(args, "per_category")
    check_counts(args, "tokens", least=2)
    read = choose_questions([args.likelihood], args.per_category)
    models = {STORED: args.pair.load(), INT8: replace(args.pair, quantization="int8").load()}
    texts = [encode_prompt(question.turns[0], models[STORED])[: args.tokens] for question in read]
    texts = [ids for ids in texts if len(ids) > 1]
    if not texts:
        raise ValueError(f"{args.likelihood} has no text of 2 tokens or more")
    likelihood = likelihoods({name: model.target for name, model in models.items()}, texts)
    by_block = []
    for block in args.blocks:
        with rotated_by(block):
            int8 = replace(args.pair, quantization="int8").load()
        found = likelihoods({STORED: models[STORED].target, INT8: int8.target}, texts)
        by_block.append({"rotated by": block, **{name: found[name] for name in ("KL", "same best token")}})
    tables = "\n\n".join(markdown([{name: f"{value:.4g}" for name, value in row.items()} for row in rows])
                         for rows in ([likelihood], by_block) if rows)
    print(write_record(args.out, {
        **described(models[STORED]), "also": {INT8: described(models[INT8])}, "settings": option_record(args),
        "likelihood": likelihood, "by_block": by_block,
    }, f"{pair_text(models[STORED])}\n\n{len(texts)} texts of {args.likelihood.name}:\n\n{tables}"))


main = partial(run_command, "eval.quantisation", QuantisationArguments, run)

if __name__ == "__main__":
    sys.exit(main())
