"""What a request leaves behind: its answer, where each token came from, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import NamedTuple


class Receipt(NamedTuple):
    """How one token came to be.

    Args:
        token: its id, as in `token_ids`.
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

    token: int
    source: str
    divergence: float | None
    logprob: float
    regret: float
    exact_because: str | None = None
    drafter: str | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(repr=False)
class Stats:
    """What a request cost. `accepted_lengths` counts accepted draft tokens per verify cycle, before any cut.

    The seconds of a request in a batch are those that it waited: they pass for all its requests at once.

    With a budget, `budget_spent` is what fuzzy acceptance has cost in nats, and `exact_from` the number of new tokens
    after which decoding returned to exact, with the reason in `exact_because`: "budget" or "repetition".
    `undrafted` counts verify forwards without a draft tree.
    `proposed` and `accepted` count drafted tokens by who drafted them, "head", "text" or "grammar", before any cut.
    `computed_by` names what computed the target's forwards: "fused", or the attention of the stock decoder, and why.
    """

    new_tokens: int = 0
    target_forwards: int = 0  # verify forwards; the prefill is not counted
    accepted_lengths: list[int] = field(default_factory=list, repr=False)
    prefill_seconds: float = 0.0  # up to and including the first token
    decode_seconds: float = 0.0
    budget_spent: float | None = None
    exact_from: int | None = None
    exact_because: str | None = None
    undrafted: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
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

    def __repr__(self) -> str:
        """What is asked first, then what differs from the defaults; seconds to the millisecond."""
        found: dict[str, object] = {"new_tokens": self.new_tokens, "tokens_per_second": self.tokens_per_second,
                                    "mean_accepted_length": self.mean_accepted_length}
        for each in fields(self):
            plain = each.default if each.default_factory is MISSING else each.default_factory()
            if each.repr and getattr(self, each.name) != plain:
                found[each.name] = getattr(self, each.name)
        texts = {name: repr(round(value, 3) if isinstance(value, float) else dict(value) if isinstance(value, Counter)
                            else value) for name, value in found.items()}
        return f"Stats({', '.join(f'{name}={text}' for name, text in texts.items())})"


@dataclass(repr=False)
class Output:
    """Result of `eagle_fsd.generate`. `token_ids` are the new tokens only, an end token included."""

    token_ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"; of an engine's request also "cancelled"
    seed: int
    stats: Stats
    receipts: list[Receipt]
    text: str | None = None  # without the stop string; None where the model has no tokenizer

    def __repr__(self) -> str:
        answer = f"token_ids={self.token_ids}" if self.text is None else f"text={self.text!r}"
        return f"Output({answer}, finish_reason={self.finish_reason!r}, seed={self.seed}, stats={self.stats!r})"
