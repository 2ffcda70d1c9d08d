"""Sampling with drafts of the most probable tokens (before) and with the target's own noise (noise), interleaved.

    python -m eval.coupling --questions mt_bench.jsonl --per-category 2 --out eval/results/smollm2-noise

Fixed trees, first turns alone; a record OUT-t1-16 for each temperature and number of nodes. An interrupted run goes on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eagle_fsd import TreeConfig
from eagle_fsd.api import generate
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.engine.request import Request
from eagle_fsd.measure.comparison import compare_and_store
from eagle_fsd.measure.methods import engine
from eagle_fsd.measure.settings import ComparisonOptions
from eval.command import chosen_questions, run_command

WEIGHT = Request.noise_weight


@dataclass(frozen=True, kw_only=True)
class CouplingArguments(ComparisonOptions):
    """What is compared.

    Args:
        questions: JSON lines.
        per_category: only the first questions of each category. every: only each so-manieth question of a file.
        temperatures: of the runs.
    """

    questions: tuple[Path, ...]
    pair: Loading = Loading()
    per_category: int | None = None
    every: int = 1
    temperatures: tuple[float, ...] = (1.0, 0.7, 0.3)
    max_new_tokens: int = 96
    settings: tuple[str, ...] = ()


def asked(model, coupled, prompt, **options):
    Request.noise_weight = WEIGHT if coupled else lambda self, rule: 0.0
    try:
        return generate(prompt, model, **options)
    finally:
        Request.noise_weight = WEIGHT


def run(args: CouplingArguments) -> None:
    questions = chosen_questions(args.questions, args.per_category, args.run_code)[:: args.every]
    questions = [replace(question, turns=question.turns[:1]) for question in questions]
    model = replace(args.pair, tree=None).load()
    for temperature in args.temperatures:
        for tree, sources in ((TreeConfig(16, 5, 4), ("off",)), (TreeConfig(8, 4, 2), ("off",))):
            methods = {}
            for text in sources:
                for name, coupled in (("before", False), ("noise", True)):
                    methods[name + ", with text" * (text == "auto")] = engine(
                        model, ask=partial(asked, model, coupled), temperature=temperature, seed=args.seed, tree=tree,
                        text_drafts=text)
            out = args.out.with_name(f"{args.out.name}-t{temperature:g}-{tree.total_tokens}")
            given = replace(args, temperature=temperature, tree=tree, out=out)
            print(compare_and_store(model, methods, "before", questions, given)[1])


main = partial(run_command, "eval.coupling", CouplingArguments, run)

if __name__ == "__main__":
    sys.exit(main())
