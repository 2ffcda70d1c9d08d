"""One request: what its options come to, the text so far, and the answer in it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

from ..acceptance import Rule, make_rule
from ..acceptance.walk import Step
from ..drafting.copies import Copies, TextSource
from ..drafting.noise import couple_copies
from ..models.target import TargetModel
from ..options.generate import GenerateOptions
from ..utils.text import StreamedText, answer_text
from .grammar import Grammar
from .output import Output, Receipt, Stats
from .processing import key_of

EXACT = make_rule("exact")
# A text repeats itself if it ends in REPETITIONS repetitions of a span, with at least REPEATED_TOKENS tokens in total.
REPETITIONS, REPEATED_TOKENS, LONGEST_SPAN = 3, 12, 32
LONGEST_REPEATED = REPETITIONS * LONGEST_SPAN


@dataclass(eq=False, repr=False)
class Request:
    """A prompt with its options, what these come to for the prompt and the model, and the state of the answer.

    Args:
        prompt: token ids.
        options: as they were given, the same for all prompts of a call.
        max_new_tokens: that of the options, lowered to the positions after the prompt.
        processors: logits processors, warpers included.
        eos_ids, stop_ids: tokens that end the answer.
        watched: the text of the answer, which ends when a stop string is complete; None: there are none.
        criteria: stopping criteria of `transformers`; they see the whole text.
        padding: token ids before the prompt that processors and criteria see, as in `model.generate`.
        marks: the rule applies after the first token, up to the second, in prompt and answer; None: everywhere.
        text_source: drafts copied from the text; None: no copies.
        grammar: drafts the tokens that it forces; it is one of the processors as well.
        followed: fields of the model's generation config that the request follows, see `Output`.

    Attributes:
        processors_key: see `processing.key_of`.
        rule: that of the options, unless nothing is drafted.
        tokens: the text: prompt and all emitted tokens, like the caches also those after the end of the answer. While
            decoding, the last one is the root.
        weights_key: of both models when it began, see `drafter.weights_key`.
        receipts: of the answer's tokens.
        reason: why the answer ended, possibly "error" or "cancelled"; None: it has not.
        inside_marks: whether the rule decides the next token.
    """

    prompt: list[int]
    options: GenerateOptions
    _: KW_ONLY
    max_new_tokens: int
    seed: int = 0
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    watched: StreamedText | None = None
    criteria: Sequence[Callable] = ()
    padding: Sequence[int] = ()
    marks: tuple[int, int] | None = None
    text_source: TextSource | None = None
    grammar: Grammar | None = None
    followed: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.processors_key = key_of(self.processors)
        self.rule: Rule = self.options.rule if self.options.speculative else EXACT
        self.tokens = list(self.prompt)
        self.weights_key: tuple | None = None
        self.receipts: list[Receipt] = []
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.stats = Stats(budget_spent=None if self.options.budget is None else 0.0)
        self.inside_marks = self.marks is None
        self._started: float | None = None  # seconds of a clock
        self._stopped: list[bool] = []  # whether a stop string or criterion is met after each token, see `_stops_at`
        self._ids: Tensor | None = None  # [1, padding, prompt and the longest answer], for criteria
        self._pass_marks(self.prompt)
        if self.options.budget == 0 and not self.lossless:
            self._use_exact("budget", 0)

    @property
    def positions(self) -> int:
        """Of the longest text that it can become."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def lossless(self) -> bool:
        """Whether the target alone would generate the same text."""
        return self.rule.is_lossless(self.options.greedy)

    def begin(self, target: TargetModel, weights_key: tuple) -> None:
        """Start the clock and allocate, right before the prefill. Only the first call does."""
        self.weights_key = weights_key
        if self._started is not None:  # the text has become long, and is processed again
            return
        self._started = time.perf_counter()
        self.stats.computed_by = target.computed_by
        if self.criteria:
            ids = [*self.padding, *self.prompt, *[0] * self.max_new_tokens]
            self._ids = torch.tensor([ids], device=target.input_device)

    # For a cycle ------------------------------------------------------------------------------------------------

    @property
    def context(self) -> list[int]:
        """The tokens before the root, as processors see them."""
        return [*self.padding, *self.tokens[:-1]]

    @property
    def current_rule(self) -> Rule:
        """The rule of the next cycle: `exact` once the budget is spent or the text repeats itself."""
        return EXACT if self.lossless or self.stats.exact_because else self.rule

    def noise_weight(self, rule: Rule) -> float:
        """The weight of the target's sampling noise in drafts for this rule, see `Coupling`. 0: the drafts are the most
        probable tokens, for a rule that depends on the probabilities of the children and not only on the draw."""
        if self.options.greedy:
            return 0.0
        return (EXACT if rule.is_lossless(greedy=False) else rule).noise_weight

    @property
    def remaining_budget(self) -> float:
        """In nats."""
        return math.inf if self.options.budget is None else max(0.0, self.options.budget - self.stats.budget_spent)

    @property
    def copying(self) -> bool:
        """Whether drafts may come from the text or a grammar."""
        return self.options.speculative and (self.text_source is not None or self.grammar is not None)

    def draft_copies(self, rule: Rule) -> Copies | None:
        """Drafts from the text or the grammar, for a cycle with this rule."""
        if not self.copying:
            return None
        forced = None if self.grammar is None else self.grammar.forced(self.answer)
        left = self.max_new_tokens - len(self.receipts) - 1
        copies = forced if self.text_source is None else self.text_source.propose(forced, left)
        if copies is None or not self.noise_weight(rule):
            return copies
        return couple_copies(copies, self.seed, len(self.tokens) - 1)

    # The answer -------------------------------------------------------------------------------------------------

    @property
    def stops(self) -> list[str]:
        """The strings that end the answer."""
        return [] if self.watched is None else self.watched.stops

    @property
    def answer(self) -> list[int]:
        """The tokens of the answer, an end token included."""
        return [receipt.token for receipt in self.receipts]

    def append(
        self, steps: Sequence[Step], origins: Sequence[str | None], error: Exception | None = None
    ) -> list[Receipt]:
        """Append the tokens of a walk to the text, and extend the answer, up to its end if it ends here. The last token
        is the target's own, not a draft token.

        An error of a processor, a user's rule or a criterion ends this request only.

        Args:
            origins: of each node, see `DraftTree.origin_names`.
            error: of a processor or a user's rule in the last step, which emits no token. The tokens before may end the
                answer.

        Returns:
            Receipts of the new tokens of the answer.
        """
        before = len(self.receipts)
        drafters = [*(origins[step.node] for step in steps[1:]), None]
        receipts = [
            Receipt(step.token, ("target" if step is steps[-1] else "exact") if step.is_exact else "fuzzy",
                    None if math.isnan(step.divergence) else step.divergence, step.logprob, step.regret,
                    self.stats.exact_because or ("budget" if step.closed else None), drafter,
                    step.top[: self.options.top_logprobs])
            for step, drafter in zip(steps, drafters, strict=False)  # no steps: a user's rule failed
        ][: None if error is None else -1]
        try:
            if error is not None and not receipts:
                raise error
            self._count(receipts, origins)
            tokens = [receipt.token for receipt in receipts]
            self.tokens += tokens
            self._pass_marks(tokens)
            if self.text_source is not None:
                self.text_source.extend(tokens)
            for receipt, step in zip(receipts, steps, strict=False):
                if not step.logit > -math.inf:  # all tokens have probability 0, or the logit is NaN
                    raise ValueError("no token can be drawn: the best logit after the logits processors is "
                                     f"{step.logit}")
                self.receipts.append(receipt)
                if (reason := self._reason_after(receipt.token, len(self.receipts))) is not None:
                    self.finish(reason)
                    break  # after the end, a processor may leave no token to draw
            if self.options.budget is not None:
                self._pay(steps, before)
            if error is not None and self.reason is None:
                raise error
        except Exception as error:
            self.finish("error", error)
            return []
        self.stats.new_tokens = len(self.receipts)
        return self.receipts[before:]

    def _count(self, receipts: Sequence[Receipt], origins: Sequence[str | None]) -> None:
        if not self.receipts:  # the token of the prefill
            self.stats.prefill_seconds = time.perf_counter() - self._started
            return
        proposed = Counter(filter(None, origins))
        self.stats.accepted_lengths.append(len(receipts) - 1)
        self.stats.drafts += bool(proposed)
        self.stats.undrafted += not proposed
        self.stats.proposed.update(proposed)
        self.stats.accepted.update(receipt.drafter for receipt in receipts if receipt.drafter)

    def _pay(self, steps: Sequence[Step], before: int) -> None:
        """Pay for the fuzzy tokens after the first `before` of the answer. Once the budget is spent or the text repeats
        itself, decoding is exact."""
        added, stats = self.receipts[before:], self.stats
        stats.budget_spent += math.fsum(receipt.regret for receipt in added if receipt.source == "fuzzy")
        if stats.exact_because is None and not self.lossless:
            rejected = next((at for at, step in enumerate(steps[: len(added)], before) if step.closed), None)
            if rejected is not None:
                self._use_exact("budget", rejected)
            elif self.reason is None and repeats([receipt.token for receipt in self.receipts[-LONGEST_REPEATED:]]):
                self._use_exact("repetition", len(self.receipts))

    def _reason_after(self, token: int, count: int) -> str | None:
        """Why the answer ends after this token, its last of `count`; None: it does not."""
        if token in self.eos_ids:
            return "eos"
        if token in self.stop_ids or self._stops_at(token, count):
            return "stop"
        return "length" if count == self.max_new_tokens else None

    def complete_with(self, tokens: Sequence[int]) -> bool:
        """Whether the answer ends within these next tokens: then no processor is called for a token after them."""
        return any(self._reason_after(token, count) for count, token in enumerate(tokens, len(self.receipts) + 1))

    def _stops_at(self, token: int, count: int) -> bool:
        """Whether a stop string or criterion ends the answer after this token, its last of `count`. Both see each token
        once, in order, at the first call for it."""
        if count > len(self._stopped):
            self._stopped.append(self.watched is not None and self.watched.stops_at(token)
                                 or self._criteria_met(token, count))
        return self._stopped[count - 1]

    def _criteria_met(self, token: int, count: int) -> bool:
        """Whether a criterion ends the answer after this token. Criteria must not change the text.

        Raises:
            TypeError: a criterion returned neither a bool nor a tensor of one.
        """
        if not self.criteria:
            return False
        end = len(self.padding) + len(self.prompt) + count
        self._ids[0, end - 1] = token
        for criterion in self.criteria:
            met = criterion(self._ids[:, :end], None)
            if not (isinstance(met, bool) or isinstance(met, Tensor) and met.numel() == 1):
                raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {met!r}")
            if met:
                return True
        return False

    def _pass_marks(self, tokens: Sequence[int]) -> None:
        """Update `inside_marks` after these tokens, as `Within.after` does in a walk."""
        if self.marks is not None:
            opening, closing = self.marks
            for token in tokens:
                self.inside_marks = (self.inside_marks or token == opening) and token != closing

    def _use_exact(self, why: str, at: int) -> None:
        """Use the exact rule from now on, that is after `at` new tokens."""
        self.stats.exact_from, self.stats.exact_because = at, why

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End the answer."""
        self.reason, self.error = reason, error
        if self._started is not None:
            seconds = time.perf_counter() - self._started
            self.stats.prefill_seconds = self.stats.prefill_seconds or seconds  # it may end during the prefill
            self.stats.decode_seconds = seconds - self.stats.prefill_seconds

    def output(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Output:
        """The result, once the answer has ended; with its text if there is a tokenizer."""
        assert self.reason is not None
        ids = self.answer
        text = None if tokenizer is None else answer_text(tokenizer, ids, self.stops)
        return Output(ids, self.reason, self.seed, self.stats, self.receipts, text, self.followed)


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
