"""One request: what was asked for, the text so far, and the answer in it.

T positions that the draft has not read, F width of the target's features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import Rule, make_rule
from ..drafting.config import TreeConfig
from ..drafting.coupling import couple_copies
from ..drafting.text import Copies, TextSource
from ..models.target import TargetModel
from ..text import StopStrings
from .grammar import Grammar
from .output import Output, Receipt, Stats

EXACT = make_rule("exact")
# The text repeats itself when it ends in this many copies of a span, together of at least so many tokens.
COPIES, REPEATED_TOKENS, LONGEST_SPAN = 3, 12, 32


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestParams:
    """What was asked for beside the prompt: checked, and the same until the answer ends. See `GenerateOptions`.

    Args:
        budget: nats of regret that fuzzy tokens may cost; None: no limit.
        processors: of logits, warpers included. alike: what they were made of, where their result does not depend on
            the tokens before: one call serves all requests of an equal one. None: they are called for each row alone.
        eos_ids, stop_ids: tokens that end the answer. criteria: of `transformers`; they see the whole text.
        padding: token ids before the prompt that processors and criteria see, as in `model.generate`.
        speculative: whether anything is drafted.
        tree: that of this request; None: the caller's choice. The rows of an engine share one, see `Engine.submit`.
        top_logprobs: likeliest tokens in each receipt.
        within: the tokens after and up to which the rule decides, in prompt and answer; None: everywhere.
    """

    max_new_tokens: int
    rule: Rule = EXACT
    temperature: float = 0.0
    seed: int = 0
    budget: float | None = None
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    alike: object = None
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    criteria: Sequence[Callable] = ()
    padding: Sequence[int] = ()
    speculative: bool = True
    tree: TreeConfig | None = None
    top_logprobs: int = 0
    within: tuple[int, int] | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the text is what the target alone would write."""
        return self.rule.is_lossless(self.greedy)

    def noise_weight(self, rule: Rule) -> float:
        """How much the noise that the target draws with counts in drafts where this rule decides, see `Coupling`; 0: a
        rule that looks at how probable the children are, and not only at which of them is drawn, wants the most
        probable ones."""
        if self.greedy:
            return 0.0
        return EXACT.noise_weight if rule.is_lossless(self.greedy) else rule.noise_weight


class Emission(NamedTuple):
    """What one forward of the target emitted for a request; the first one is the prefill's single token."""

    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False
    error: Exception | None = None  # what a processor or a user's rule raised: nothing was emitted
    proposed: dict[str, int] = {}  # drafted nodes by who drafted them; never changed

    @property
    def tokens(self) -> list[int]:
        return [receipt.token for receipt in self.receipts]


class Request:
    """The state of one request.

    Args:
        prompt: token ids.
        stop_strings: ends the answer where one is complete.
        copies: drafts from its own text, beside the head's; None: there are none.
        grammar: drafts what it forces; it is one of the processors too.
    """

    def __init__(
        self, prompt: Sequence[int], params: RequestParams, *, stop_strings: StopStrings | None = None,
        copies: TextSource | None = None, grammar: Grammar | None = None,
    ) -> None:
        self.prompt, self.params = list(prompt), params
        self.stop_strings, self.copies, self.grammar = stop_strings, copies, grammar
        # The text: prompt and all emitted tokens, those after the answer's end included, as in the caches.
        self.tokens = list(prompt)  # the last one is the root once decoding has begun
        self._features: list[Tensor] = []  # parts of `features`
        # The answer.
        self.receipts: list[Receipt] = []
        self.reason: str | None = None  # why it ended, "error" and "cancelled" included; None: it goes on
        self.error: BaseException | None = None
        self.stats = Stats()
        self._begun: float | None = None  # seconds of a clock
        self._text: Tensor | None = None  # [1, padding, prompt and room for the answer], for criteria
        # Whether the rule decides.
        self.closed: str | None = None  # why it no longer does: "budget" or "repetition"
        self.spent = 0.0  # regret of the answer's fuzzy tokens, in nats
        self.inside = params.within is None  # whether marks of `within` let it decide about the next token
        self._pass_marks(prompt)
        if params.budget == 0 and not params.lossless:
            self._close("budget", 0)

    def begin(self, target: TargetModel) -> None:
        """The target is about to read the prompt."""
        self._begun = time.perf_counter()
        self.stats.computed_by = target.computed_by
        if self.params.criteria:
            room = [0] * self.params.max_new_tokens
            self._text = torch.tensor([[*self.params.padding, *self.prompt, *room]], device=target.device)

    # For a cycle ------------------------------------------------------------------------------------------------

    @property
    def features(self) -> Tensor | None:
        """[T, F] of the positions before the last T tokens: the draft's next input."""
        if len(self._features) > 1:
            self._features = [torch.cat(self._features)]
        return self._features[0] if self._features else None

    @features.setter
    def features(self, features: Tensor | None) -> None:
        self._features = [] if features is None else [features]

    def add_features(self, features: Tensor) -> None:
        """Those of the next positions, [A + 1, F]."""
        self._features.append(features)

    @property
    def context(self) -> list[int]:
        """What processors see of the text before the root."""
        return [*self.params.padding, *self.tokens[:-1]]

    def current_rule(self) -> Rule:
        """The rule of the next cycle: `exact` from where the budget is spent or the text repeats itself."""
        if self.params.lossless:
            return EXACT
        if self.closed is None and self.params.budget is not None and repeats(self.tokens[len(self.prompt) :]):
            self._close("repetition", len(self.receipts))
        return EXACT if self.closed else self.params.rule

    @property
    def left(self) -> float:
        """Nats of the budget that fuzzy tokens may still cost."""
        return math.inf if self.params.budget is None else max(0.0, self.params.budget - self.spent)

    @property
    def copying(self) -> bool:
        """Whether drafts may come from elsewhere than the head."""
        return self.params.speculative and not self.copies is self.grammar is None

    def draft_copies(self, rule: Rule) -> Copies | None:
        """Drafts beside the head's, for a cycle in which this rule decides."""
        if not self.copying:
            return None
        forced = None if self.grammar is None else self.grammar.forced(self.answer)
        room = self.params.max_new_tokens - len(self.receipts) - 1
        copies = forced if self.copies is None else self.copies.propose(forced, room)
        if copies is None or not self.params.noise_weight(rule):
            return copies
        return couple_copies(copies, self.params.seed, len(self.tokens) - 1)

    # The answer -------------------------------------------------------------------------------------------------

    @property
    def answer(self) -> list[int]:
        """Its tokens, an end token included."""
        return [receipt.token for receipt in self.receipts]

    def accept(self, emission: Emission, features: Tensor | None = None) -> list[Receipt]:
        """Go on after all that was emitted, and add to the answer what comes before its end.

        An error of a processor, a user's rule or a criterion ends this request, and no other.

        Args:
            features: [A + 1, F] of the nodes that it was emitted at; None: the draft has no use for them.

        Returns:
            Receipts of the tokens that the answer grew by.
        """
        before = len(self.receipts)
        try:
            if emission.error is not None:
                raise emission.error
            self._count(emission)
            self.tokens += emission.tokens
            self._pass_marks(emission.tokens)
            if features is not None:
                self.add_features(features)
            if self.copies is not None:
                self.copies.accept(emission.tokens)
            self._extend_answer(emission)
        except Exception as error:
            self.finish("error", error)
            return []
        self.stats.new_tokens = len(self.receipts)
        return self.receipts[before:]

    def _count(self, emission: Emission) -> None:
        if not self.receipts:  # the prefill's token
            self.stats.prefill_seconds = time.perf_counter() - self._begun
            return
        self.stats.accepted_lengths.append(len(emission.receipts) - 1)
        self.stats.target_forwards += 1
        self.stats.undrafted += not emission.drafted
        self.stats.proposed.update(emission.proposed)
        self.stats.accepted.update(receipt.drafter for receipt in emission.receipts if receipt.drafter)

    def _extend_answer(self, emission: Emission) -> None:
        before = len(self.receipts)
        for receipt, logit in zip(emission.receipts, emission.logits, strict=True):
            if self.reason is not None:  # after an end a processor may leave no token to draw
                break
            require_drawable(logit)
            self.receipts.append(receipt)
            if (reason := self._reason_after(receipt.token)) is not None:
                self.finish(reason)
        added = self.receipts[before:]
        self.spent += math.fsum(receipt.regret for receipt in added if receipt.source == "fuzzy")
        refused = next((at for at, receipt in enumerate(added, before) if receipt.exact_because == "budget"), None)
        if refused is not None and self.closed is None:
            self._close("budget", refused)

    def _reason_after(self, token: int) -> str | None:
        """Why the answer ends with this token, its last; None: it goes on."""
        if token in self.params.eos_ids:
            return "eos"
        if token in self.params.stop_ids or self.stop_strings is not None and self.stop_strings(token):
            return "stop"
        if self.params.criteria and self._criteria_met(token):
            return "stop"
        return "length" if len(self.receipts) == self.params.max_new_tokens else None

    def _criteria_met(self, token: int) -> bool:
        """Whether any of the criteria ends the answer with this token; they must not change the text.

        Raises:
            TypeError: a criterion that answers neither with a bool nor with a tensor of one.
        """
        end = len(self.params.padding) + len(self.prompt) + len(self.receipts)
        self._text[0, end - 1] = token
        for criterion in self.params.criteria:
            met = criterion(self._text[:, :end], None)
            if not (isinstance(met, bool) or isinstance(met, Tensor) and met.numel() == 1):
                raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {met!r}")
            if met:
                return True
        return False

    def complete_with(self, tokens: Sequence[int]) -> bool:
        """Whether the answer has ended with these tokens after it: processors are not asked about what comes then."""
        return (len(self.receipts) + len(tokens) >= self.params.max_new_tokens
                or any(token in self.params.eos_ids or token in self.params.stop_ids for token in tokens))

    def _pass_marks(self, tokens: Sequence[int]) -> None:
        """Note where marks of `within` put the next token."""
        if self.params.within is not None:
            opening, closing = self.params.within
            for token in tokens:
                self.inside = (self.inside or token == opening) and token != closing

    def _close(self, why: str, at: int) -> None:
        """The rule no longer decides, from so many new tokens on."""
        self.closed = why
        self.stats.exact_from, self.stats.exact_because = at, why

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Nothing more is added to the answer."""
        self.reason, self.error = reason, error
        if self._begun is not None:
            seconds = time.perf_counter() - self._begun
            self.stats.prefill_seconds = self.stats.prefill_seconds or seconds  # it may have ended while being read
            self.stats.decode_seconds = seconds - self.stats.prefill_seconds

    def output(self) -> Output:
        """The answer, ended."""
        assert self.reason is not None
        self.stats.budget_spent = None if self.params.budget is None else self.spent
        return Output(self.answer, self.reason, self.params.seed, self.stats, self.receipts)


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


def require_drawable(logit: float) -> None:
    """Raise where the token drawn has no probability: no other had any either, or a NaN came out on top."""
    if not logit > -math.inf:
        raise ValueError(f"no token can be drawn: after the logits processors the best logit is {logit}")
