"""`eagle-fsd tune`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .arguments import Loading
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """Fit a drafter's acceptance curves to your prompts, so that tree="auto" chooses better draft trees.

    Answers the first turn of each prompt with a wide draft tree, greedily and at temperature 1, and records which nodes
    are accepted. The curves, about 150 numbers, go to your cache directory; every later load of the pair uses them.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval.
        limit: use only the first prompts.
        max_new_tokens: most tokens per answer.
        out: directory of the drafter, to store the curves with it instead of in your cache.
    """

    prompts: Path
    limit: int = 24
    max_new_tokens: int = 96
    out: Path | None = None
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.questions import read_questions
        from ..loading.curves import own_place, store_curves
        from ..measure.cycles import fit_curves

        check_counts(self, "limit", "max_new_tokens")
        prompts = [[{"role": "user", "content": question.turns[0]}]
                   for question in read_questions(self.prompts)[: self.limit]]
        if self.out is not None and not (self.out.is_dir() and os.access(self.out, os.W_OK)):
            raise ValueError(f"--out must be a writable directory, got {self.out}")
        model = self.pair.load()
        if model.draft is None:
            raise ValueError("curves need a drafter: name one with --draft")
        out = self.out or own_place(model.target, model.draft)
        curves = fit_curves(model, prompts, self.max_new_tokens)
        out.mkdir(parents=True, exist_ok=True)
        print(f"stored the curves of {len(prompts)} prompts in {store_curves(out, curves)}")
