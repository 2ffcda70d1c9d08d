"""`eagle-fsd tune`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Suppress

from .arguments import Decoding, Loading
from .exits import check_counts


@dataclass(frozen=True)
class TuneDecoding(Decoding):
    """How tokens are drawn, where an answer ends, and which drafted tokens are kept."""

    seed: int | None = 0
    tree: Suppress[object] = None


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """Log cycles on your prompts, for tree="auto" to choose by.

    Answers the prompts' first turns with a wide draft tree and notes which nodes were accepted. From this log, kept in
    your cache directory, and the machine's latency the fastest tree is chosen whenever the pair is loaded. One log per
    rule, threshold, head guard and temperature; a request takes the nearest.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval.
        limit: use only the first prompts.
        out: the head's directory, to store the log there for whoever loads the head.
    """

    prompts: Path
    limit: int = 48
    out: Path | None = None
    pair: Loading = Loading()
    decoding: TuneDecoding

    def run(self) -> None:
        from ..data.questions import read_questions
        from ..drafting.autotree import choose, describe_tree
        from ..drafting.logs import LEAST_CYCLES, own_logs, read_logs, store_log
        from ..engine.timing import known_latency
        from ..measure.cycles import log_cycles

        def check_cycles(most: int) -> None:
            if most < LEAST_CYCLES:
                raise ValueError(f"too few cycles to choose a tree by: {most}, at least {LEAST_CYCLES} are needed. "
                                 "Give more prompts or a larger --max-new-tokens")

        check_counts(self, "limit")
        prompts = [[{"role": "user", "content": question.turns[0]}]
                   for question in read_questions(self.prompts)[: self.limit]]
        check_cycles(len(prompts) * self.decoding.max_new_tokens)
        if self.out is not None and not (self.out.is_dir() and os.access(self.out, os.W_OK)):
            raise ValueError(f"--out {self.out} is no directory that can be written")
        model = self.pair.load()
        if model.draft is None:
            raise ValueError("there is no tree to choose without a draft head: give one with --draft")
        out = self.out or own_logs(model.target, model.draft)
        out.mkdir(parents=True, exist_ok=True)
        read_logs(out)  # one that is damaged is known before the long work
        found = log_cycles(model, prompts, self.decoding)
        check_cycles(len(found.cycles))
        choice = choose(found.cycles, known_latency(model.target, model.draft),
                        stopping=model.target.output_device.type == "cpu")
        what = "no draft tree" if choice.tree is None else describe_tree(choice.tree)
        print(f"{len(found.cycles)} cycles stored in {store_log(out, found)}. On this machine: {what}; "
              f"{choice.rate:.1f} tokens/s expected")
