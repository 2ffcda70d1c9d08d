"""What a request leaves behind: its answer, where each token came from, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Receipt(NamedTuple):
    """How one token came to be.

    Args:
        source: "target" (drawn by the target after the accepted path), "exact" (a draft token that the target
            itself would have drawn there) or "fuzzy" (one that the target would not have drawn).
        divergence: between target and draft at the token's position, where the rule computed it; else None.
        logprob: the token's log-probability (nats) under the target, before temperature and other processors.
        regret: that of the target's best token there minus `logprob`: 0 for the best token itself.
        exact_because: why the rule no longer decided, see `Stats`; None where it did, or there was no budget.
        drafter: who drafted the token: "head", else "text" where it is a copy, or "grammar" where a grammar left little
            choice; None: it was not drafted.
        top: the target's most likely tokens there with their log-probabilities, as many as `top_logprobs=` asked for.
    """

    source: str
    divergence: float | None
    logprob: float
    regret: float
    exact_because: str | None = None
    drafter: str | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass
class Stats:
    """What a request cost. `accepted_lengths` counts accepted draft tokens per verify cycle, before any cut.

    The seconds of a request in a batch are those that it waited: they pass for all its requests at once.

    With a budget, `budget_spent` is what fuzzy acceptance has cost in nats, and `exact_from` the number of new tokens
    after which decoding returned to exact, with the reason in `exact_because`: "budget" or "repetition".
    `undrafted` counts verify forwards without a draft tree; `plain_because` says why a whole request had none.
    `proposed` and `accepted` count drafted tokens by who drafted them, "head", "text" or "grammar", before any cut.
    `computed_by` names what computed the target's forwards: "fused", or the attention of the stock decoder, and why.
    """

    new_tokens: int = 0
    target_forwards: int = 0  # verify forwards; the prefill is not counted
    accepted_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # up to and including the first token
    decode_seconds: float = 0.0
    budget_spent: float | None = None
    exact_from: int | None = None
    exact_because: str | None = None
    undrafted: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    plain_because: str | None = None
    computed_by: str | None = None
    prefill_tokens: int = 0  # positions that the prefill processed: the prompt without what a `Session` held of it

    @property
    def mean_accepted_length(self) -> float:
        """Acceptance length tau: tokens per verify forward, accepted draft tokens plus the target's own one."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) + 1 if self.accepted_lengths else 1.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over prefill plus decode time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0


@dataclass
class Output:
    """Result of `eagle_fsd.generate`. `token_ids` are the new tokens only, an end token included."""

    token_ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"; of an engine's request also "cancelled"
    seed: int
    stats: Stats
    receipts: list[Receipt] = field(repr=False)
    text: str | None = None  # without the stop string; None where the model has no tokenizer
