"""One sequence being decoded: what was asked for, what is known of its text, and the answer so far.

T positions that the draft has not read, F width of the target's features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from ..acceptance import Rule, make_rule
from ..drafting.config import TreeConfig
from ..drafting.coupling import couple_copies
from ..drafting.text import Copies, TextSource
from .grammar import Grammar
from .output import Output, Receipt, Stats

EXACT = make_rule("exact")
# The text repeats itself when it ends in this many copies of a span, together of at least so many tokens.
COPIES, REPEATED_TOKENS, LONGEST_SPAN = 3, 12, 32


class Emission(NamedTuple):
    """What one forward of the target emitted for a request; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False
    error: Exception | None = None  # what a processor or a user's rule raised: nothing was emitted
    proposed: dict[str, int] = {}  # drafted nodes by who drafted them; never changed


class Request:
    """One sequence being decoded.

    Args:
        prompt: token ids. rule, temperature, seed, max_new_tokens, budget: as asked for; see `GenerateOptions`.
        processors: of logits, warpers included. alike: what they were made of, where their result does not depend on
            the tokens before: one call serves all requests of an equal one. None: they are called for each row alone.
        eos_ids, stop_ids: tokens that end it. text_ends: told each new token, says whether a stop string is complete.
        criteria: of `transformers`; they see the whole text.
        copies: drafts from its own text, beside the head's; None: there are none. grammar: drafts what it forces; it is
            one of the processors too. speculative: whether anything is drafted.
        top_logprobs: tokens that receipts tell beside the one taken.
        within: the tokens after and up to which the rule decides, in prompt and answer; None: everywhere.
        padding: before the prompt, for processors and criteria, which see it in `model.generate`.
    """

    def __init__(
        self, prompt: Sequence[int], *, max_new_tokens: int, rule: Rule = EXACT, temperature: float = 0.0,
        seed: int = 0, budget: float | None = None, processors: LogitsProcessorList | None = None, alike: object = None,
        eos_ids: frozenset[int] = frozenset(), stop_ids: frozenset[int] = frozenset(),
        text_ends: Callable[[int], bool] | None = None, criteria: Sequence[Callable] = (), padding: Sequence[int] = (),
        copies: TextSource | None = None, grammar: Grammar | None = None, speculative: bool = True,
        top_logprobs: int = 0, within: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.prompt, self.max_new_tokens, self.temperature, self.seed = list(prompt), max_new_tokens, temperature, seed
        self.rule, self.budget = rule, budget
        self.processors, self.alike = processors or LogitsProcessorList(), alike
        self.eos_ids, self.stop_ids, self.text_ends, self.criteria = eos_ids, stop_ids, text_ends, criteria
        self.padding, self.copies, self.grammar, self.device = padding, copies, grammar, device
        self.speculative, self.top_logprobs = speculative, top_logprobs
        self.within, self.inside = within, within is None  # whether the rule decides about the next token
        self._pass(self.prompt)
        self.tree: TreeConfig | None = None  # that it wishes for in an engine
        self.tokens = list(prompt)  # prompt and all emitted tokens; the last one is the root once decoding has begun
        self.new: list[int] = []  # the answer
        self.receipts: list[Receipt] = []
        self.stats = Stats()
        self.reason: str | None = None  # why it ended
        self.closed: str | None = None  # why the rule no longer decides
        self.spent = 0.0  # regret of the answer's fuzzy tokens, in nats
        self._features: list[Tensor] = []  # parts of `features`
        self._text: Tensor | None = None  # [1, padding, prompt and room for the answer], for criteria
        if budget == 0 and not self.lossless:
            self._close("budget", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the text is what the target alone would write."""
        return self.rule.is_lossless(self.greedy)

    def deciding(self) -> Rule:
        """The rule of the next cycle: `exact` from where the budget is spent or the text repeats itself."""
        if self.lossless:
            return EXACT
        if self.closed is None and self.budget is not None and repeats(self.emitted):
            self._close("repetition", len(self.new))
        return EXACT if self.closed else self.rule

    def _pass(self, tokens: Sequence[int]) -> None:
        """Note where marks of `within` put the next token."""
        if self.within is not None:
            for token in tokens:
                self.inside = (self.inside or token == self.within[0]) and token != self.within[1]

    @property
    def left(self) -> float:
        """Nats of the budget that fuzzy tokens may still cost."""
        return math.inf if self.budget is None else max(0.0, self.budget - self.spent)

    def _close(self, why: str, at: int) -> None:
        """The rule no longer decides, from so many new tokens on."""
        self.closed = why
        self.stats.exact_from, self.stats.exact_because = at, why

    @property
    def features(self) -> Tensor | None:
        """[T, F] of the positions before the last T tokens: the draft's next input."""
        if len(self._features) > 1:
            self._features = [torch.cat(self._features)]
        return self._features[0] if self._features else None

    @features.setter
    def features(self, features: Tensor | None) -> None:
        self._features = [] if features is None else [features]

    @property
    def context(self) -> list[int]:
        """What processors see of the text before the root."""
        return [*self.padding, *self.tokens[:-1]]

    @property
    def emitted(self) -> list[int]:
        """All tokens after the prompt: the answer, and what was emitted after its end."""
        return self.tokens[len(self.prompt) :]

    @property
    def copying(self) -> bool:
        """Whether drafts may come from elsewhere than the head."""
        return self.speculative and not self.copies is self.grammar is None

    def noise_weight(self, rule: Rule) -> float:
        """How much the noise that the target draws with counts in drafts, see `Coupling`; 0: a rule that looks at how
        probable the children are, and not only at which of them is drawn, wants the most probable ones."""
        if self.greedy:
            return 0.0
        return EXACT.noise_weight if rule.is_lossless(self.greedy) else rule.noise_weight

    def propose(self, rule: Rule) -> Copies | None:
        """Drafts beside the head's, for a cycle in which this rule decides."""
        if not self.copying:
            return None
        forced = None if self.grammar is None else self.grammar.forced(self.new)
        copies = forced if self.copies is None else self.copies.propose(
            forced, self.max_new_tokens - len(self.new) - 1)
        if copies is None or not self.noise_weight(rule):
            return copies
        return couple_copies(copies, self.seed, len(self.tokens) - 1)

    def advance(self, emission: Emission, features: Tensor | None) -> None:
        """Go on after what a cycle emitted.

        Args:
            features: [A + 1, F] of the nodes that it was emitted at; None: there is no head to read them.
        """
        if features is not None:
            self._features.append(features)
        self.tokens += emission.tokens
        self._pass(emission.tokens)
        if self.copies is not None:
            self.copies.keep(emission.tokens)

    def take(self, emission: Emission, streamer: BaseStreamer | None) -> None:
        """Add what a cycle emitted to the answer, as far as it belongs to it; or raise what kept it from that."""
        if emission.error is not None:
            raise emission.error
        before = len(self.new)
        count = self._cut(emission.tokens)
        for logit in emission.logits[:count]:  # after an end a processor may have nothing to say
            require_drawable(logit)
        receipts = emission.receipts[:count]
        self.spent += math.fsum(receipt.regret for receipt in receipts if receipt.source == "fuzzy")
        refused = next((at for at, receipt in enumerate(receipts) if receipt.exact_because == "budget"), None)
        if refused is not None and self.closed is None:
            self._close("budget", before + refused)
        self.receipts += receipts
        if streamer is not None:
            if hasattr(streamer, "on_receipts"):
                streamer.on_receipts(receipts)
            streamer.put(torch.tensor(emission.tokens[:count]))

    def _cut(self, emitted: Sequence[int]) -> int:
        """Add tokens to the answer up to its end, whose reason is noted; returns how many."""
        for count, token in enumerate(emitted, 1):
            self.new.append(token)
            self.reason = self._reason_after(token)
            if self.reason is not None:
                return count
        return len(emitted)

    def _reason_after(self, token: int) -> str | None:
        """Why the answer ends with this token, its last; None: it goes on."""
        if token in self.eos_ids:
            return "eos"
        if token in self.stop_ids or self.text_ends is not None and self.text_ends(token):
            return "stop"
        if self.criteria and self._criteria_met():
            return "stop"
        return "length" if len(self.new) == self.max_new_tokens else None

    def complete_with(self, said: Sequence[int]) -> bool:
        """Whether the answer has ended with these tokens after it: processors are not asked about what comes then."""
        return (len(self.new) + len(said) >= self.max_new_tokens
                or any(token in self.eos_ids or token in self.stop_ids for token in said))

    def _criteria_met(self) -> bool:
        """Whether any of the criteria ends the answer; they see the whole text, which they must not change.

        Raises:
            TypeError: a criterion that answers neither with a bool nor with a tensor of one.
        """
        before = [*self.padding, *self.prompt]
        end = len(before) + len(self.new)
        if self._text is None:
            self._text = torch.empty(1, len(before) + self.max_new_tokens, dtype=torch.long)
            self._text[0, : len(before)] = torch.tensor(before)
            self._text = self._text.to(self.device)
        self._text[0, end - 1] = self.new[-1]
        for criterion in self.criteria:
            found = criterion(self._text[:, :end], None)
            if not (isinstance(found, bool) or isinstance(found, Tensor) and found.numel() == 1):
                raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {found!r}")
            if found:
                return True
        return False

    def count(self, emission: Emission) -> None:
        """Note what a verify forward did."""
        if emission.error is None:
            self.stats.accepted_lengths.append(len(emission.tokens) - 1)
            self.stats.target_forwards += 1
            self.stats.undrafted += not emission.drafted
            self.stats.proposed.update(emission.proposed)
            self.stats.accepted.update(receipt.drafter for receipt in emission.receipts if receipt.drafter)

    def output(self) -> Output:
        """The answer, ended."""
        assert self.reason is not None
        self.stats.new_tokens = len(self.new)
        self.stats.budget_spent = None if self.budget is None else self.spent
        return Output(self.new, self.reason, self.seed, self.stats, self.receipts)


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
