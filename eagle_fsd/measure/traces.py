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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..acceptance import Decision, Rule, Verification, Walk, walk
from ..acceptance.budget import EXACT_RULE, cycle_costs


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


def emitted(verification: Verification, walked: Walk, stop_ids: Collection[int] = ()) -> list[int]:
    """The tokens of a single row's cycle, up to the first that ends the answer."""
    path = walked.accepted[0].nonzero()[1:, 0]
    tokens = [*verification.tree.tokens[0, path].tolist(), walked.choice[0, walked.last[0]].item()]
    end = next((count for count, token in enumerate(tokens, 1) if token in stop_ids), len(tokens))
    return tokens[:end]


class Observer:
    """Decodes one request losslessly, as its rule, and notes what each of `rules` would have done in each cycle.

    Args:
        stop_ids: end tokens; what a rule would do behind them does not count.

    Attributes:
        traces: of each rule.
    """

    def __init__(self, rules: Mapping[str, Rule], stop_ids: Collection[int] = ()) -> None:
        self.rules, self.stop_ids = rules, stop_ids
        self.traces = {name: Trace() for name in rules}

    def __call__(self, verification: Verification) -> Decision:
        exact = EXACT_RULE(verification)
        said = emitted(verification, walk(verification, exact), self.stop_ids)
        for name, rule in self.rules.items():
            decision, trace = rule(verification), self.traces[name]
            walked = walk(verification, decision)
            known = verification.greedy or decision.kl is not None
            trace.lengths.append(walked.length.item())
            trace.costs.append(math.fsum(cycle_costs(verification, decision)) if known else None)
            trace.diverges |= emitted(verification, walked, self.stop_ids) != said
        return exact


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
