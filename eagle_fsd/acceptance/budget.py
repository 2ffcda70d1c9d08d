"""What fuzzy acceptance has cost a request, and a limit on it, after which decoding is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import Decision, Rule, Verification, make_rule, walk

EXACT_RULE = make_rule("exact")
# The text repeats itself when it ends in this many copies of a span, together of at least so many tokens.
COPIES, REPEATED_TOKENS, LONGEST_SPAN = 3, 12, 32


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the tokens end in copies of one span."""
    for span in range(1, LONGEST_SPAN + 1):
        length = max(COPIES * span, REPEATED_TOKENS)
        if length > len(tokens):
            break
        end = tokens[-length:]
        if end[span:] == end[:-span]:
            return True
    return False


def cycle_costs(verification: Verification, decision: Decision) -> list[float]:
    """What a cycle gives up, in nats.

    Sampling: the KL of its law to the target's, which is known before anything is drawn. The KL of a whole answer is
    the expected sum of these. Greedy: the regret of each token that it emits, log p of the target's best minus log p of
    the token taken, both after logits processors.
    """
    if not verification.greedy:
        assert decision.kl is not None
        return [decision.kl().item()]
    walked = walk(verification, decision)
    best = verification.warped_logits.amax(-1)  # [1, N]
    regrets = verification.of_parent(best) - verification.step_logits
    on_path = walked.accepted & verification.is_child
    last = walked.last[0]
    stop = best[0, last] - verification.warped_logits[0, last, walked.choice[0, last]]
    return [*regrets[on_path].tolist(), stop.item()]  # nodes of a path stand in the order of their levels


def decide_rows(
    budgets: Sequence[Budget], rule: Rule, verification: Verification, new_tokens: Sequence[Sequence[int]]
) -> Decision:
    """The decision of each row, under its own budget, as one."""
    if len(budgets) == 1:
        return budgets[0].decide(rule, verification, new_tokens[0])
    rows = enumerate(zip(budgets, new_tokens, strict=True))
    decisions = [budget.decide(rule, verification.row(at), new) for at, (budget, new) in rows]

    def joined(name: str, nothing: float) -> torch.Tensor | None:
        """A part that some rows may have and others not."""
        parts = [getattr(decision, name) for decision in decisions]
        some = next((part for part in parts if part is not None), None)
        if some is None:
            return None
        return torch.cat([torch.full_like(some, nothing) if part is None else part for part in parts])

    log_weights = torch.cat([decision.log_weights for decision in decisions])
    return Decision(log_weights, joined("divergence", math.nan), stop=joined("stop", 0))


class Budget:
    """What a request has given up, and a rule that decides while that stays within the limit.

    A cycle that would exceed the limit is decided by `exact`, and so are all that follow it; likewise from where the
    text starts to repeat. The check comes before anything is drawn, so the sum of the cycles' KL is within the limit
    on every path.

    Args:
        limit: nats per request, at least 0 (exact from the start); inf leaves the check for repetition only. None:
            nothing is limited, and only `regret` is counted.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.spent = 0.0
        self.regret = 0.0  # by how much the fuzzy tokens' raw logits were below the best: what rules with a memory see
        self._costs: Sequence[float] = ()  # of the last cycle's tokens, where the rule decided
        self.ended: str | None = None if limit is None or limit > 0 else "budget"  # why decoding is exact

    def allows(self, new_tokens: Sequence[int]) -> bool:
        """Whether a rule may decide the next cycle: not once the limit was met or the text repeats itself."""
        self._costs = ()
        if self.ended is None and self.limit is not None and repeats(new_tokens):
            self.ended = "repetition"
        return self.ended is None

    def pay(self, costs: Sequence[float]) -> bool:
        """Take what a cycle's tokens cost off the limit; False: they would exceed it, and `exact` has to decide.

        Args:
            costs: one for each token that a greedy cycle emits; when sampling one for the whole cycle's law.
        """
        if self.limit is None:
            return True
        cost = math.fsum(costs)
        if not math.isnan(cost) and self.spent + cost <= self.limit:
            self.spent, self._costs = self.spent + cost, costs
        else:
            self.ended = "budget"
        return self.ended is None

    def decide(self, rule: Rule, verification: Verification, new_tokens: Sequence[int]) -> Decision:
        """The rule's decision, or `exact`'s."""
        if self.limit is None:
            return rule(verification)
        if self.allows(new_tokens):
            decision = rule(verification)
            if decision.kl is None and not verification.greedy:
                raise ValueError(f"a budget needs a rule whose KL is known; that of {rule!r} is not")
            if self.pay(cycle_costs(verification, decision)):
                return decision
        return EXACT_RULE(verification)

    def keep(self, count: int, regrets: Sequence[float] = ()) -> None:
        """The answer keeps the first `count` tokens of the last cycle: give back what those behind them cost.

        When sampling they are charged, since the KL is that of the whole cycle's law.

        Args:
            regrets: of the cycle's tokens, 0 for those that the target itself drew.
        """
        self.spent = max(0.0, self.spent - math.fsum(self._costs[count:]))
        self.regret += math.fsum(regrets[:count])
