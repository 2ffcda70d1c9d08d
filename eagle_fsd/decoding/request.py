"""One request: its parameters, the text so far, and the answer in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..acceptance import Rule, make_rule
from ..drafting.config import TreeConfig
from ..drafting.copies import Copies, TextSource
from ..drafting.noise import couple_copies
from ..models.target import TargetModel
from ..options.generate import GenerateOptions
from ..utils.text import StopStrings
from .grammar import Grammar
from .output import Output, Receipt, Stats

EXACT = make_rule("exact")
# A text repeats itself if it ends in REPETITIONS repetitions of a span, with at least REPEATED_TOKENS tokens in total.
REPETITIONS, REPEATED_TOKENS, LONGEST_SPAN = 3, 12, 32


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestParams:
    """What the options of a request come to for its prompt and model: constant. See `GenerateOptions`.

    Args:
        budget: total regret of fuzzy tokens in nats; None: no limit.
        processors: logits processors, warpers included.
        processors_key: for processors whose result does not depend on earlier tokens: one call serves all requests with
            an equal key. None: each row has calls of its own.
        eos_ids, stop_ids: tokens that end the answer.
        criteria: stopping criteria of `transformers`; they see the whole text.
        padding: token ids before the prompt that processors and criteria see, as in `model.generate`.
        speculative: whether drafts are used.
        tree: its own draft tree; None: that of the model or the engine. The rows of an engine share one, see
            `Engine.submit`.
        top_logprobs: number of the target's best tokens in each receipt.
        within: the rule applies after the first token, up to the second, in prompt and answer; None: everywhere.
        followed: fields of the model's generation config that the request follows, see `Output`.
    """

    max_new_tokens: int
    rule: Rule = EXACT
    temperature: float = GenerateOptions.temperature
    seed: int = 0
    budget: float | None = GenerateOptions.budget
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    processors_key: object = None
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    criteria: Sequence[Callable] = ()
    padding: Sequence[int] = ()
    speculative: bool = GenerateOptions.speculative
    tree: TreeConfig | None = GenerateOptions.tree
    top_logprobs: int = GenerateOptions.top_logprobs
    within: tuple[int, int] | None = None
    followed: Mapping[str, object] = field(default_factory=dict)

    greedy, lossless = GenerateOptions.greedy, GenerateOptions.lossless  # of `rule` and `temperature`

    def noise_weight(self, rule: Rule) -> float:
        """The weight of the target's sampling noise in drafts for this rule, see `Coupling`. 0: the drafts are the most
        probable tokens, for a rule that depends on the probabilities of the children and not only on the draw."""
        if self.greedy:
            return 0.0
        return EXACT.noise_weight if rule.is_lossless(self.greedy) else rule.noise_weight


class Emission(NamedTuple):
    """The tokens that one forward of the target emits for a request. The prefill emits a single token."""

    receipts: list[Receipt]
    logits: list[float]  # of the tokens, processed
    error: Exception | None = None  # of a processor or a user's rule, after these tokens
    proposed: dict[str, int] = {}  # number of drafted nodes by origin; never mutated

    @property
    def tokens(self) -> list[int]:
        return [receipt.token for receipt in self.receipts]


class Request:
    """The state of one request.

    Args:
        prompt: token ids.
        stop_strings: the answer ends when one of them is complete.
        text_source: drafts copied from the text; None: no copies.
        grammar: drafts the tokens that it forces; it is one of the processors as well.
    """

    def __init__(
        self, prompt: Sequence[int], params: RequestParams, *, stop_strings: StopStrings | None = None,
        text_source: TextSource | None = None, grammar: Grammar | None = None,
    ) -> None:
        self.prompt, self.params = list(prompt), params
        self.stop_strings, self.text_source, self.grammar = stop_strings, text_source, grammar
        # The text: prompt and all emitted tokens, like the caches also those after the end of the answer.
        self.tokens = list(prompt)  # while decoding, the last one is the root
        self.weights: tuple | None = None  # of both models, see `begin`
        # The answer.
        self.receipts: list[Receipt] = []
        self.reason: str | None = None  # why it ended, possibly "error" or "cancelled"; None: it has not
        self.error: BaseException | None = None
        self.stats = Stats()
        self._started: float | None = None  # seconds of a clock
        self._stopped: list[bool] = []  # whether a stop string or criterion is met after each token, see `_stops_at`
        self._text: Tensor | None = None  # [1, padding, prompt and room for the answer], for criteria
        # Whether the rule applies.
        self.exact_because: str | None = None  # why it no longer does: "budget" or "repetition"
        self.spent = 0.0  # regret of the answer's fuzzy tokens, in nats
        self.inside_marks = params.within is None  # whether the rule decides the next token
        self._pass_marks(prompt)
        if params.budget == 0 and not params.lossless:
            self._close("budget", 0)

    @property
    def positions(self) -> int:
        """Of the longest text that it can become."""
        return len(self.prompt) + self.params.max_new_tokens

    def begin(self, target: TargetModel, weights: tuple) -> None:
        """Start the clock and allocate, right before the prefill.

        Args:
            weights: `weights_key` of both models.
        """
        self._started, self.weights = time.perf_counter(), weights
        self.stats.computed_by = target.computed_by
        if self.params.criteria:
            room = [0] * self.params.max_new_tokens
            self._text = torch.tensor([[*self.params.padding, *self.prompt, *room]], device=target.device)

    # For a cycle ------------------------------------------------------------------------------------------------

    @property
    def context(self) -> list[int]:
        """The tokens before the root, as processors see them."""
        return [*self.params.padding, *self.tokens[:-1]]

    def current_rule(self) -> Rule:
        """The rule of the next cycle: `exact` once the budget is spent or the text repeats itself."""
        if self.params.lossless:
            return EXACT
        if self.exact_because is None and self.params.budget is not None and repeats(self.tokens[len(self.prompt) :]):
            self._close("repetition", len(self.receipts))
        return EXACT if self.exact_because else self.params.rule

    @property
    def remaining_budget(self) -> float:
        """The remaining budget in nats."""
        return math.inf if self.params.budget is None else max(0.0, self.params.budget - self.spent)

    @property
    def copying(self) -> bool:
        """Whether drafts may come from the text or a grammar."""
        return self.params.speculative and (self.text_source is not None or self.grammar is not None)

    def draft_copies(self, rule: Rule) -> Copies | None:
        """Drafts from the text or the grammar, for a cycle with this rule."""
        if not self.copying:
            return None
        forced = None if self.grammar is None else self.grammar.forced(self.answer)
        room = self.params.max_new_tokens - len(self.receipts) - 1
        copies = forced if self.text_source is None else self.text_source.propose(forced, room)
        if copies is None or not self.params.noise_weight(rule):
            return copies
        return couple_copies(copies, self.params.seed, len(self.tokens) - 1)

    # The answer -------------------------------------------------------------------------------------------------

    @property
    def stops(self) -> list[str]:
        """The strings that end the answer."""
        return [] if self.stop_strings is None else self.stop_strings.strings

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer, an end token included."""
        return [receipt.token for receipt in self.receipts]

    def append(self, emission: Emission) -> list[Receipt]:
        """Append all emitted tokens to the text, and extend the answer, up to its end if it ends here.

        An error of a processor, a user's rule or a criterion ends this request only.

        Returns:
            Receipts of the new tokens of the answer.
        """
        before = len(self.receipts)
        try:
            if emission.error is not None and not emission.receipts:
                raise emission.error
            self._count(emission)
            self.tokens += emission.tokens
            self._pass_marks(emission.tokens)
            if self.text_source is not None:
                self.text_source.extend(emission.tokens)
            self._extend_answer(emission)
            if emission.error is not None and self.reason is None:
                raise emission.error
        except Exception as error:
            self.finish("error", error)
            return []
        self.stats.new_tokens = len(self.receipts)
        return self.receipts[before:]

    def _count(self, emission: Emission) -> None:
        if not self.receipts:  # the token of the prefill
            self.stats.prefill_seconds = time.perf_counter() - self._started
            return
        self.stats.accepted_lengths.append(len(emission.receipts) - 1)
        self.stats.target_forwards += 1
        self.stats.drafts += bool(emission.proposed)
        self.stats.undrafted += not emission.proposed
        self.stats.proposed.update(emission.proposed)
        self.stats.accepted.update(receipt.drafter for receipt in emission.receipts if receipt.drafter)

    def _extend_answer(self, emission: Emission) -> None:
        before = len(self.receipts)
        for receipt, logit in zip(emission.receipts, emission.logits, strict=True):
            if self.reason is not None:  # after the end, a processor may leave no token to draw
                break
            require_drawable(logit)
            self.receipts.append(receipt)
            if (reason := self._reason_after(receipt.token)) is not None:
                self.finish(reason)
        added = self.receipts[before:]
        self.spent += math.fsum(receipt.regret for receipt in added if receipt.source == "fuzzy")
        rejected = next((at for at, receipt in enumerate(added, before) if receipt.exact_because == "budget"), None)
        if rejected is not None and self.exact_because is None:
            self._close("budget", rejected)

    def _reason_after(self, token: int) -> str | None:
        """Why the answer ends after this token, its last one; None: it does not."""
        if token in self.params.eos_ids:
            return "eos"
        if token in self.params.stop_ids or self._stops_at(token, len(self.receipts)):
            return "stop"
        return "length" if len(self.receipts) == self.params.max_new_tokens else None

    def complete_with(self, tokens: Sequence[int]) -> bool:
        """Whether the answer ends within these next tokens: then no processor is called for a token after them."""
        count = len(self.receipts)
        if count + len(tokens) >= self.params.max_new_tokens or any(
                token in self.params.eos_ids or token in self.params.stop_ids for token in tokens):
            return True
        return any(self._stops_at(token, at) for at, token in enumerate(tokens, count + 1))

    def _stops_at(self, token: int, count: int) -> bool:
        """Whether a stop string or criterion ends the answer after this token, its last of `count`. Both see each token
        once, in order, at the first call for it."""
        if count > len(self._stopped):
            self._stopped.append(self.stop_strings is not None and self.stop_strings(token)
                                 or self._criteria_met(token, count))
        return self._stopped[count - 1]

    def _criteria_met(self, token: int, count: int) -> bool:
        """Whether a criterion ends the answer after this token. Criteria must not change the text.

        Raises:
            TypeError: a criterion returned neither a bool nor a tensor of one.
        """
        if not self.params.criteria:
            return False
        end = len(self.params.padding) + len(self.prompt) + count
        self._text[0, end - 1] = token
        for criterion in self.params.criteria:
            met = criterion(self._text[:, :end], None)
            if not (isinstance(met, bool) or isinstance(met, Tensor) and met.numel() == 1):
                raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {met!r}")
            if met:
                return True
        return False

    def _pass_marks(self, tokens: Sequence[int]) -> None:
        """Update `inside_marks` after these tokens, as `Within.after` does in a walk."""
        if self.params.within is not None:
            opening, closing = self.params.within
            for token in tokens:
                self.inside_marks = (self.inside_marks or token == opening) and token != closing

    def _close(self, why: str, at: int) -> None:
        """Use the exact rule from now on, that is after `at` new tokens."""
        self.exact_because = why
        self.stats.exact_from, self.stats.exact_because = at, why

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End the answer."""
        self.reason, self.error = reason, error
        if self._started is not None:
            seconds = time.perf_counter() - self._started
            self.stats.prefill_seconds = self.stats.prefill_seconds or seconds  # it may end during the prefill
            self.stats.decode_seconds = seconds - self.stats.prefill_seconds

    def output(self) -> Output:
        """The result, once the answer has ended."""
        assert self.reason is not None
        self.stats.budget_spent = None if self.params.budget is None else self.spent
        return Output(self.answer, self.reason, self.params.seed, self.stats, self.receipts,
                      generation_config=self.params.followed)


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the tokens end in several repetitions of one span."""
    for span in range(1, LONGEST_SPAN + 1):
        length = max(REPETITIONS * span, REPEATED_TOKENS)
        if length > len(tokens):
            break
        end = tokens[-length:]
        if end[span:] == end[:-span]:
            return True
    return False


def require_drawable(logit: float) -> None:
    """Raise ValueError if the drawn token has probability 0, as all others then have, or its logit is NaN."""
    if not logit > -math.inf:
        raise ValueError(f"no token can be drawn: the best logit after the logits processors is {logit}")
