"""`eagle-fsd tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Measuring, RuleName, ShardedLoading
from .exits import check_counts

if TYPE_CHECKING:
    from ..drafting.logs import TreeLog


@dataclass(frozen=True)
class TuneCommand:
    """Log cycles on your prompts, for tree="auto" to choose by.

    Answers the prompts' first turns with a wide draft tree and notes which nodes were accepted. From this log, kept in
    your cache directory or with --out stored elsewhere, and the machine's latency the fastest tree is chosen whenever
    the pair is loaded. One log per rule, threshold and temperature; a request takes the nearest.

    Args:
        acceptance: the rule.
        threshold: its dial; without it the rule's lossless end.
        limit: use only the first prompts.
    """

    measuring: Measuring
    acceptance: RuleName = "exact"
    threshold: float | None = None
    limit: int = 48
    pair: ShardedLoading = ShardedLoading()

    def run(self) -> None:
        from ..acceptance import make_rule
        from ..data.questions import read_questions
        from ..drafting.choice import choose, describe_tree
        from ..drafting.logs import FILE, own_logs, read_logs
        from ..drafting.machine import known_latency
        from ..measure.cycles import log_cycles
        from ..models.parallel import of_first

        given = self.measuring
        rule = make_rule(self.acceptance, self.threshold, given.divergence, given.gate_threshold)
        check_counts(self, "limit")
        prompts = [[{"role": "user", "content": question.turns[0]}]
                   for question in read_questions(given.prompts)[: self.limit]]
        check_cycles(len(prompts) * given.max_new_tokens)
        if given.out is not None:
            read_logs(given.directory(self.pair, FILE))
        model = self.pair.load()
        assert model.draft is not None
        out = given.out or own_logs(model.target, model.draft)
        out.mkdir(parents=True, exist_ok=True)
        read_logs(out)
        found = log_cycles(model, prompts, rule, given.temperature, max_new_tokens=given.max_new_tokens,
                           seed=given.seed)
        check_cycles(len(found.cycles))
        kept, said = of_first(model.target.group, lambda: keep_larger(out, found))
        choice = choose(kept.cycles, known_latency(model.target, model.draft),
                        stopping=model.target.output_device.type == "cpu")
        what = "no draft tree" if choice.tree is None else describe_tree(choice.tree)
        print(f"{said}{given.where_to_load()}. On this machine: {what}; {choice.rate:.1f} tokens/s expected")


def check_cycles(most: int) -> None:
    """Raise ValueError where a log cannot have or has not enough cycles to choose a tree by."""
    from ..drafting.logs import LEAST_CYCLES

    if most < LEAST_CYCLES:
        raise ValueError(f"too few cycles to choose a tree by: {most}, at least {LEAST_CYCLES} are needed. Give more "
                         "prompts or a larger --max-new-tokens")


def keep_larger(out: Path, found: TreeLog) -> tuple[TreeLog, str]:
    """Store a log unless there is one of more cycles; returns the one that is there then, and what became of it."""
    from ..drafting.logs import FILE, read_logs, store_log

    known = next((entry for entry in read_logs(out) if entry.key == found.key), None)
    if known is not None and len(known.cycles) > len(found.cycles):
        return known, (f"{len(found.cycles)} cycles were logged, and {out / FILE} keeps its log of "
                       f"{len(known.cycles)}: delete it to begin anew")
    return found, f"{len(found.cycles)} cycles stored in {store_log(out, found)}"
