"""Compare a pair in int8 with the same pair as stored: perplexity, speed and quality.

    python -m eval.quantisation --likelihood spec_bench.jsonl --questions humaneval.jsonl --per-category 40 \\
        --run-code --out eval/results/qwen-int8

Perplexity is the target's over the first --tokens tokens of each text in --likelihood, which is the first turn of a
question without the chat template. Both forms answer --questions losslessly and in turn; `eval.benchmark`
explains the columns. With --batch only --timed questions are answered in turn, and the others in batches, without
drafts. KL is the divergence of the int8 target from the stored one, in nats per token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import choose_questions
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.measure.comparison import compare, store
from eagle_fsd.measure.grading import CODE_END, check_gradable
from eagle_fsd.measure.methods import Method, described, engine
from eagle_fsd.measure.records import markdown
from eagle_fsd.measure.settings import ComparisonOptions, QuestionOptions
from eagle_fsd.models.target import TargetModel
from eval.command import option_record, run_command
from eval.forwards import rotated_by
from eval.likelihood import log_probs

STORED, INT8 = "as stored", "int8"


@dataclass(frozen=True, kw_only=True)
class QuantisationArguments(ComparisonOptions, QuestionOptions):
    """Options of `eval.quantisation`.

    Args:
        likelihood: JSON lines of questions, whose texts measure perplexity; --per-category applies to them too.
        tokens: most tokens of each text.
        batch: number of questions to answer together, except the timed ones; 1: answer and time every question alone.
        timed: with --batch, number of questions to answer alone, interleaved, for timing.
        stop_after_code: end answers after their first fenced code block.
        blocks: also measure KL with rotations by blocks of these sizes; 1: with none, as before version 0.5.
    """

    likelihood: Path
    pair: Loading = Loading()
    tokens: int = 512
    batch: int = 1
    timed: int = 24
    stop_after_code: bool = False
    blocks: tuple[int, ...] = ()
    tree: Tree = None


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


def in_batches(model: EagleModel, stack: ExitStack, rows: int, **options: object) -> Method:
    """Answers of many threads in batches, without drafts: they are the same as with them."""
    from eagle_fsd.batching.engine import Engine  # needs packages of the extra `serve`

    batches = stack.enter_context(Engine(model, max_rows=rows, max_waiting=rows, prefixes=0, tree=model.default_tree))
    return engine(model, ask=lambda prompt, **request: batches.submit(prompt, **request).result(), speculative=False,
                  **options)


def run(args: QuantisationArguments) -> None:
    check_counts(args, "per_category", "limit", "max_new_tokens", "repeats", "batch")
    check_counts(args, "timed", least=0)
    check_counts(args, "tokens", least=2)
    questions, read = args.chosen_questions(), choose_questions([args.likelihood], args.per_category)
    check_gradable(questions, args.run_code)
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
    stop = {"stop": CODE_END} if args.stop_after_code else {}
    options = {"acceptance": "exact", "temperature": args.temperature, "seed": args.seed, "tree": args.tree,
               **stop}
    methods = {name: engine(model, **options) for name, model in models.items()}
    about = described(models[STORED], args) | stop | {"batch": args.batch, "also": {INT8: described(models[INT8])}}
    with ExitStack() as stack:
        together = None if args.batch == 1 else {
            name: in_batches(model, stack, args.batch, **options) for name, model in models.items()}
        records = compare(methods, questions, args, about, timed=args.timed, together=together, workers=args.batch)
    table = "\n\n".join(markdown([{name: f"{value:.4g}" for name, value in row.items()} for row in rows])
                        for rows in ([likelihood], by_block) if rows)
    about |= {"settings": option_record(args), "likelihood": likelihood, "by_block": by_block}
    print(store(models[STORED], records, STORED, args, about, workers=args.batch,
                preface=f"{len(texts)} texts of {args.likelihood.name}:\n\n{table}\n\n")[1])


main = partial(run_command, "eval.quantisation", QuantisationArguments, run,
               stopped="stopped; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
