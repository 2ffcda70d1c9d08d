"""`eagle-fsd tune`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .arguments import Loading
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """Fit how often a head's tokens are accepted on your prompts, by which tree="auto" sizes each cycle.

    Answers the prompts' first turns with a wide draft tree, greedily and at temperature 1, and notes which nodes were
    accepted. The curves, some 150 numbers, are kept in your cache directory and used whenever the pair is loaded.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval.
        limit: use only the first prompts.
        max_new_tokens: of each answer.
        out: the head's directory, to store the curves there for whoever loads the head.
    """

    prompts: Path
    limit: int = 24
    max_new_tokens: int = 96
    out: Path | None = None
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.questions import read_questions
        from ..drafting.curves import own_place, store_curves
        from ..measure.cycles import fit_curves

        check_counts(self, "limit", "max_new_tokens")
        prompts = [[{"role": "user", "content": question.turns[0]}]
                   for question in read_questions(self.prompts)[: self.limit]]
        if self.out is not None and not (self.out.is_dir() and os.access(self.out, os.W_OK)):
            raise ValueError(f"--out {self.out} is no directory that can be written")
        model = self.pair.load()
        if model.draft is None:
            raise ValueError("there are no curves to fit without a draft head: give one with --draft")
        found = fit_curves(model, prompts, self.max_new_tokens)
        out = self.out or own_place(model.target, model.draft)
        out.mkdir(parents=True, exist_ok=True)
        print(f"curves of {len(prompts)} answers stored in {store_curves(out, found)}")
