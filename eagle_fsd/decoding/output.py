"""The result of a request: its answer, a receipt for each token, and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple


class Receipt(NamedTuple):
    """How one token was drafted and accepted, and what it cost.

    Args:
        token: its id, as in `token_ids`.
        source: "target" (drawn by the target after the accepted path), "exact" (a draft token that the target
            would have drawn as well) or "fuzzy" (a draft token that the target would not have drawn).
        divergence: between target and draft at the token's position; None: the rule did not compute it.
        logprob: log-probability of the token (nats) under the target, before temperature and other processors.
        regret: log-probability of the target's best token minus `logprob` (nats); 0 for the best token itself.
        exact_because: why the rule no longer applied, see `Stats`; None: it applied, or there was no budget.
        drafter: origin of the draft token: "head" (or a small causal LM in its place), "text" (a copy) or "grammar"
            (forced); None: it was not drafted.
        top: the target's most likely tokens at the position with their log-probabilities, see `top_logprobs=`.
    """

    token: int
    source: str
    divergence: float | None
    logprob: float
    regret: float
    exact_because: str | None = None
    drafter: str | None = None
    top: Sequence[tuple[int, float]] = ()


def counted(what: str, kind: Callable[[], object] = int, by: str | None = None) -> Any:
    """A field of 0, or of an empty `Counter`, that the endpoint's metrics contain.

    Args:
        what: it counts. by: the label of the keys of a `Counter`.
    """
    return field(default_factory=kind, metadata={"what": what, "by": by})


@dataclass(repr=False)
class Counts:
    """What decoding counts for a request, see `Stats`, and an engine for all of its requests."""

    drafts: int = field(default=0, repr=False)
    undrafted: int = counted("verify forwards without draft tokens of the request")
    proposed: Counter[str] = counted("verified draft tokens, by drafter", Counter, "drafter")
    accepted: Counter[str] = counted("accepted draft tokens, by drafter", Counter, "drafter")

    def add(self, counts: Counts) -> None:
        """Add those of a request, which another thread may be decoding."""
        for item in fields(Counts):
            mine, value = getattr(self, item.name), getattr(counts, item.name)
            if isinstance(mine, Counter):
                mine.update(Counter(value))  # a copy: the other thread may add keys during the update
            else:
                setattr(self, item.name, mine + value)


@dataclass(repr=False)
class Stats(Counts):
    """Statistics of a request. Counts of draft tokens include those after the end of the answer.

    The seconds of a request in a batch are wall-clock time, which all its requests share.

    Attributes:
        accepted_lengths: draft tokens accepted by each verify forward, without the target's own;
            `mean_accepted_length` is their mean plus 1.
        budget_spent: with a budget, the total regret of fuzzy tokens in nats.
        exact_from: with a budget, the number of new tokens after which decoding became exact.
        exact_because: the reason for it, "budget" or "repetition".
        drafts, undrafted: verify forwards with draft tokens of this request, and without.
        proposed, accepted: draft tokens by drafter, "head", "text" or "grammar".
        computed_by: implementation of the target's forwards: "fused", or the attention of the stock decoder, and why.
    """

    new_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list, repr=False)
    prefill_seconds: float = 0.0  # up to and including the first token
    decode_seconds: float = 0.0
    budget_spent: float | None = None
    exact_from: int | None = None
    exact_because: str | None = None
    computed_by: str | None = None
    prefill_tokens: int = 0  # positions that the prefill processed: those of the prompt that were not cached

    @property
    def target_forwards(self) -> int:
        """Number of verify forwards. That of the prompt, which gives the first token, is not counted."""
        return len(self.accepted_lengths)

    @property
    def mean_accepted_length(self) -> float:
        """Acceptance length tau: tokens per verify forward, that is accepted draft tokens plus the target's own."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) + 1 if self.accepted_lengths else 1.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens divided by prefill and decode time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else 0.0

    @property
    def speculative_decoding(self) -> dict[str, Any]:
        """Acceptance in the fields of `metrics.speculative_decoding`, which vLLM reports for a request. On trees:

        - `num_spec_steps`: drafts, that is cycles that verified draft tokens of this request. vLLM's counter is
          `num_drafts`.
        - `num_draft_tokens`: draft tokens verified: all nodes of the trees but the roots, siblings included.
        - `num_accepted_draft_tokens`: draft tokens on the accepted paths, without the target's own tokens.
        - `mean_acceptance_length`: 1 + accepted / drafts. `mean_accepted_length` also counts cycles without a draft.
        - `draft_acceptance_rate`: accepted / verified. At most one of several siblings is accepted, so that a tree
          lowers this rate and raises the one before.
        - `acceptance_histogram`: at j, the number of drafts with j accepted tokens.
        - `num_accepted_tokens_per_pos`: at d, accepted tokens at depth d + 1, that is drafts with more than d. vLLM
          has these as counters of the server only.

        There is no `num_spec_tokens`: each cycle has a draft of its own size.
        """
        lengths = Counter(self.accepted_lengths)
        lengths[0] -= self.undrafted  # in such a cycle no token can be accepted
        drafted, accepted = self.proposed.total(), sum(self.accepted_lengths)
        return {
            "mean_acceptance_length": 1 + accepted / max(1, self.drafts),
            "draft_acceptance_rate": accepted / max(1, drafted),
            "acceptance_histogram": [lengths[length] for length in range(max(lengths) + 1)],
            "num_spec_steps": self.drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_accepted_tokens_per_pos": accepted_by_position(lengths),
        }

    def __repr__(self) -> str:
        """The main numbers, then the fields that differ from their defaults, rounded to three decimals."""
        shown: dict[str, object] = {"new_tokens": self.new_tokens, "tokens_per_second": self.tokens_per_second,
                                    "mean_accepted_length": self.mean_accepted_length,
                                    "target_forwards": self.target_forwards}
        for item in fields(self):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if item.repr and getattr(self, item.name) != default:
                shown[item.name] = getattr(self, item.name)
        texts = {name: repr(round(value, 3) if isinstance(value, float) else dict(value) if isinstance(value, Counter)
                            else value) for name, value in shown.items()}
        return f"Stats({', '.join(f'{name}={text}' for name, text in texts.items())})"


def accepted_by_position(lengths: Mapping[int, int]) -> list[int]:
    """Accepted draft tokens by depth in the tree, the first at depth 1.

    Args:
        lengths: number of cycles by the number of tokens that each accepted.
    """
    longest = max(lengths, default=0)
    return [sum(count for length, count in lengths.items() if length > depth) for depth in range(longest)]


@dataclass(repr=False)
class Output:
    """The result of `eagle_fsd.generate`. `token_ids` are the new tokens, an end token included.

    Attributes:
        generation_config: the fields of the model's generation config that the answer follows, such as
            `{"repetition_penalty": 1.1}`. Options override them.
    """

    token_ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"; in an engine also "cancelled"
    seed: int
    stats: Stats
    receipts: list[Receipt]
    text: str | None = None  # without the stop string; None where the model has no tokenizer
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        answer = f"token_ids={self.token_ids}" if self.text is None else f"text={self.text!r}"
        followed = f"generation_config={self.generation_config}, " if self.generation_config else ""
        return (f"Output({answer}, finish_reason={self.finish_reason!r}, seed={self.seed}, {followed}"
                f"stats={self.stats!r})")
