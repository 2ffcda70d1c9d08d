"""`eagle-fsd tune`."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Measuring, RuleName, ShardedLoading
from .exits import check_counts


@dataclass(frozen=True)
class TuneCommand:
    """Log cycles on your prompts, for tree="auto" to choose by.

    Answers the prompts' first turns with a wide draft tree and notes which nodes were accepted. From this log, stored
    beside the head, and the machine's latency the fastest tree is chosen whenever the pair is loaded. One log per rule,
    threshold and temperature; a request takes the nearest.

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
        from ..experiments.cycles import log_cycles
        from ..models.parallel import of_first
        from ..tuning.choice import choose, describe_tree
        from ..tuning.logs import read_logs, store_log
        from ..tuning.machine import known_latency

        given = self.measuring
        rule = make_rule(self.acceptance, self.threshold, given.divergence)
        check_counts(self, "limit")
        prompts = [[{"role": "user", "content": question.turns[0]}]
                   for question in read_questions(given.prompts)[: self.limit]]
        out = given.directory(self.pair, "tree.json")
        read_logs(out)
        model = self.pair.load()
        found = log_cycles(model, prompts, rule, given.temperature, max_new_tokens=given.max_new_tokens,
                           seed=given.seed)
        path = of_first(model.target.group, lambda: store_log(out, found))
        assert model.draft is not None
        choice = choose(found.cycles, known_latency(model.target, model.draft),
                        stopping=model.target.output_device.type == "cpu")
        what = "no draft tree" if choice.tree is None else describe_tree(choice.tree)
        print(f"{len(found.cycles)} cycles stored in {path}{given.where_to_load()}. On this machine: {what}; "
              f"{choice.rate:.1f} tokens/s expected")
