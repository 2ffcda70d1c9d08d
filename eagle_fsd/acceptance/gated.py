"""A rule with other rules' gates behind it, such as `fsd+judge`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from .decision import Decision
from .rule import GatingRule, Rule
from .verification import Verification


@dataclass(frozen=True)
class Gated(Rule):
    """A rule decides with its dial, and gates veto: a fuzzy step is taken iff the rule and every gate let it pass.

    Made by `make_rule("fsd+judge", threshold, gate_threshold=...)`, or of rules with options of their own:
    `make_rule("fsd", 0.3, gates=[make_rule("fly", 0.8, window=3)])`. It is lossless where any of them is.

    Args:
        threshold: the first rule's dial.
        rule: the first rule, whose head guard and choice among siblings count.
        gates: at least one; of each its dial and what its gate reads.

    Raises:
        ValueError: the longest path among siblings together with a window, which it may leave.
    """

    rule: GatingRule = field(kw_only=True)
    gates: tuple[GatingRule, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        windowed = [part for part in self.parts if getattr(part, "window", 1) > 1]
        if windowed and self.rule.sibling == "longest":
            raise ValueError(f"sibling='longest' may leave the window of {windowed[0].window} tokens that "
                             f"{windowed[0].name!r} looked at: take another sibling, or window=1")
        object.__setattr__(self, "rule", replace(self.rule, threshold=self.threshold))

    @property
    def parts(self) -> tuple[GatingRule, ...]:
        return (self.rule, *self.gates)

    def each_part(self, change: Callable[[Rule], Rule]) -> Rule:
        return replace(self, rule=change(self.rule), gates=tuple(map(change, self.gates)))

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def threshold_limit(self) -> tuple[float, bool]:
        return self.rule.threshold_limit

    @property
    def threshold_scale(self) -> float:
        return self.rule.threshold_scale

    @property
    def reads_draft(self) -> bool:
        return any(part.reads_draft for part in self.parts)

    @property
    def reads_features(self) -> bool:
        return any(part.reads_features for part in self.parts)

    @property
    def remembers(self) -> bool:
        return any(part.remembers for part in self.parts)

    @property
    def looks_ahead(self) -> bool:
        return any(part.looks_ahead for part in self.parts)

    @property
    def knows_kl(self) -> bool:
        return all(part.knows_kl for part in self.parts)

    def is_lossless(self, greedy: bool) -> bool:
        return any(part.is_lossless(greedy) for part in self.parts)

    def decide(self, verification: Verification) -> Decision:
        return self.rule.descend(verification, self.passes(verification), self.knows_kl)

    def passes(self, verification: Verification) -> Tensor:
        """[B, N] bool: the fuzzy steps that all gates let pass."""
        passes = self.rule.passes(verification)
        for gate in self.gates:
            passes = passes & gate.passes(verification)
        return passes
