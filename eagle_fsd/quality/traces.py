"""What other settings would have done in the cycles of a lossless answer.

One lossless pass over the prompts shows every cycle's verification to every setting (a rule with its dial) and notes
what it would have done: how many tokens it would have accepted, what it would have given up, and whether it would have
said something else. A setting that would have emitted the lossless tokens in every cycle of an answer gives that
answer, cycle by cycle; only the others have to be generated again to know what became of them. A rule with a memory is
shown an answer that has given up nothing, so behind its first fuzzy token it would have done less than is noted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..acceptance import Decision, Rule, Verification, Walk, walk
from ..acceptance.budget import EXACT_RULE, cycle_costs

T = TypeVar("T")


@dataclass
class Trace:
    """What one setting would have done in the cycles of one lossless answer."""

    lengths: list[int] = field(default_factory=list)  # accepted draft tokens
    costs: list[float | None] = field(default_factory=list)  # nats, see `cycle_costs`; None where not known
    diverges: bool = False  # whether any cycle would have emitted other tokens, or fewer at a time


def joined(traces: Sequence[Trace]) -> Trace:
    """Of one setting, traces of cycles that follow each other."""
    return Trace([length for trace in traces for length in trace.lengths],
                 [cost for trace in traces for cost in trace.costs], any(trace.diverges for trace in traces))


def by_request(cycles: Sequence[Sequence[T]], counts: Sequence[int]) -> Iterator[list[T]]:
    """What was noted of each request of a batch, of what was noted of each row in each cycle.

    A cycle's rows are the requests that were not finished then, in their order.

    Args:
        counts: how many cycles each request took.
    """
    if len(counts) == 1:
        yield [row for (row,) in cycles]
        return
    for number, count in enumerate(counts):
        yield [cycles[cycle][sum(other > cycle for other in counts[:number])] for cycle in range(count)]


def emitted(verification: Verification, walked: Walk, stop_ids: Collection[int] = ()) -> list[int]:
    """The tokens of a single row's cycle, up to the first that ends the answer."""
    path = walked.accepted[0].nonzero()[1:, 0]
    tokens = [*verification.tree.tokens[0, path].tolist(), walked.choice[0, walked.last[0]].item()]
    end = next((count for count, token in enumerate(tokens, 1) if token in stop_ids), len(tokens))
    return tokens[:end]


class Observer:
    """Decodes losslessly, as a rule for `generate`, and notes what each of `rules` would have done in each cycle.

    Args:
        stop_ids: end tokens; what a rule would do behind them does not count.
    """

    def __init__(self, rules: Mapping[str, Rule], stop_ids: Collection[int] = ()) -> None:
        self.rules, self.stop_ids = rules, stop_ids
        self._cycles: list[list[dict[str, Trace]]] = []  # of each row what each rule would have done in that cycle

    def __call__(self, verification: Verification) -> Decision:
        rows = len(verification.tree.tokens)
        alone = [verification] if rows == 1 else map(verification.row, range(rows))
        self._cycles.append([self._noted(row) for row in alone])
        return EXACT_RULE(verification)

    def _noted(self, verification: Verification) -> dict[str, Trace]:
        """A cycle of a single row."""
        said = emitted(verification, walk(verification, EXACT_RULE(verification)), self.stop_ids)
        found = {}
        for name, rule in self.rules.items():
            decision = rule(verification)
            walked = walk(verification, decision)
            known = verification.greedy or decision.kl is not None
            found[name] = Trace(
                [walked.length.item()], [math.fsum(cycle_costs(verification, decision)) if known else None],
                emitted(verification, walked, self.stop_ids) != said)
        return found

    def notes(self, counts: Sequence[int]) -> list[dict[str, Trace]]:
        """Of each request, after the one call of `generate`, the trace of each rule; see `by_request`."""
        return [{name: joined([cycle[name] for cycle in cycles]) for name in self.rules}
                for cycles in by_request(self._cycles, counts)]


def predict(traces: Sequence[Trace]) -> dict[str, float | None]:
    """What the traces of all answers say about a setting, without generating.

    Returns:
        tau: mean over the lossless cycles. cost: nats per emitted token, None where not known. diverging: share of
        answers that change, at most.
    """
    lengths = [length + 1 for trace in traces for length in trace.lengths] or [1]
    costs = [cost for trace in traces for cost in trace.costs]
    return {"tau": statistics.fmean(lengths), "cost": None if None in costs else sum(costs) / sum(lengths),
            "diverging": statistics.fmean(trace.diverges for trace in traces)}
