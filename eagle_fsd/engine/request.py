"""One request of a batch: what it asks for, what is known of its text, and the answer so far.

T positions that the draft has not read, F width of the target's features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..acceptance import Rule
from ..acceptance.budget import EXACT_RULE, Budget
from ..drafting.config import Choice
from ..drafting.policy import Pause
from .emission import Emission
from .receipts import Output, Receipt, Stats


@dataclass(frozen=True)
class BatchSettings:
    """What requests that are decoded together have in common.

    Args:
        choose: tree and cost for so many requests, see `Drafting`.
        pause: where drafting has not paid in earlier requests; None: nothing is known of them.
    """

    choose: Callable[[int], Choice]
    pause: Pause | None = None


@dataclass(frozen=True)
class RequestSettings:
    """What one request asks for, checked and resolved.

    Args:
        text_ends: told each new token, whether a stop string is complete.
        budget: nats, see `Budget`.
        padding: before the prompt, for processors and criteria, which see it in `model.generate`.
        alike: what the processors were made of: those of requests with equal values treat a node's logits alike.
    """

    processors: LogitsProcessorList
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    text_ends: Callable[[int], bool] | None = None
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    budget: float | None = None
    padding: Sequence[int] = ()
    rule: Rule = EXACT_RULE
    greedy: bool = True
    alike: object = None

    @property
    def lossless(self) -> bool:
        """Whether the text is what the target alone would write."""
        return self.rule.is_lossless(self.greedy)

    @property
    def decides_locally(self) -> bool:
        """Whether a node with its children is all that a decision about it needs. What a request has given up by then
        depends on the path to it, and the KL of a cycle's law, which a budget counts when sampling, is a sum over the
        whole tree."""
        local = not (self.rule.looks_ahead or self.rule.remembers)
        return (self.lossless or local) and (self.greedy or self.budget is None)

    def joins(self, other: RequestSettings) -> bool:
        """Whether one decision can be made for both."""
        ours, theirs = ((own.rule, own.greedy, own.alike, own.budget is None) for own in (self, other))
        return ours == theirs


class Request:
    """One sequence being decoded."""

    def __init__(self, prompt: Sequence[int], settings: RequestSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.prompt = list(prompt)
        self.tokens = list(prompt)  # prompt and all emitted tokens; the last one is the root once decoding has begun
        self._features: list[Tensor] = []  # parts of `features`
        self.budget = Budget(settings.budget)
        self.new: list[int] = []  # the answer
        self.receipts: list[Receipt] = []
        self.stats = Stats()
        self.reason: str | None = None  # why it ended
        self._text: Tensor | None = None  # [1, padding, prompt and room for the answer], for criteria

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
        return [*self.settings.padding, *self.tokens[:-1]]

    @property
    def emitted(self) -> list[int]:
        """All tokens behind the prompt: the answer, and what was emitted behind its end."""
        return self.tokens[len(self.prompt) :]

    def unread(self, device: torch.device) -> Tensor:
        """[T] tokens that the draft has not read, each the one after its feature."""
        assert self.features is not None
        return torch.tensor(self.tokens[-len(self.features) :], device=device)

    def advance(self, emission: Emission, features: Tensor | None) -> None:
        """Go on behind what a cycle emitted.

        Args:
            features: [A + 1, F] of the nodes that it was emitted at; None: there is no head to read them.
        """
        if features is not None:
            self._features.append(features)
        self.tokens += emission.tokens

    def take(self, emission: Emission, streamer: BaseStreamer | None) -> None:
        """Add what a cycle emitted to the answer, as far as it belongs to it; or raise what kept it from that."""
        if emission.error is not None:
            raise emission.error
        count = self._cut(emission.tokens)
        self.budget.keep(count, [each.regret if each.source == "fuzzy" else 0.0 for each in emission.receipts])
        for logit in emission.logits[:count]:  # behind an end a processor may have nothing to say
            require_drawable(logit)
        self.receipts += emission.receipts[:count]
        if streamer is not None:
            if hasattr(streamer, "on_receipts"):
                streamer.on_receipts(emission.receipts[:count])
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
        settings = self.settings
        if token in settings.eos_ids:
            return "eos"
        if token in settings.stop_ids or settings.text_ends is not None and settings.text_ends(token):
            return "stop"
        if settings.criteria and self._criteria_met():
            return "stop"
        return "length" if len(self.new) == settings.max_new_tokens else None

    def _criteria_met(self) -> bool:
        """Whether any of the criteria ends the answer; they see the whole text, which they must not change.

        Raises:
            TypeError: a criterion that answers neither with a bool nor with a tensor of one.
        """
        end = len(self.settings.padding) + len(self.prompt) + len(self.new)
        if self._text is None:
            before = [*self.settings.padding, *self.prompt]
            self._text = torch.empty(1, len(before) + self.settings.max_new_tokens, dtype=torch.long)
            self._text[0, : len(before)] = torch.tensor(before)
            self._text = self._text.to(self.device)
        self._text[0, end - 1] = self.new[-1]
        for criterion in self.settings.criteria:
            found = criterion(self._text[:, :end], None)
            if not (isinstance(found, bool) or isinstance(found, Tensor) and found.numel() == 1):
                raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {found!r}")
            if found:
                return True
        return False

    def count(self, emission: Emission) -> Emission:
        """Note what a verify forward did; returns its emission, with why the rule no longer decided in the receipts."""
        if emission.error is not None:
            return emission
        if self.budget.ended:
            receipts = [receipt._replace(exact_because=self.budget.ended) for receipt in emission.receipts]
            emission = emission._replace(receipts=receipts)
            if self.stats.exact_because is None:
                self.stats.exact_from, self.stats.exact_because = len(self.new), self.budget.ended
        self.stats.accepted_lengths.append(len(emission.tokens) - 1)
        self.stats.target_forwards += 1
        self.stats.undrafted += not emission.drafted
        return emission

    def output(self) -> Output:
        """The answer, ended."""
        assert self.reason is not None
        self.stats.new_tokens = len(self.new)
        self.stats.budget_spent = None if self.settings.budget is None else self.budget.spent
        return Output(self.new, self.reason, self.settings.seed, self.stats, self.receipts)


def require_drawable(logit: float) -> None:
    """Raise where the token drawn has no probability: no other had any either, or a NaN came out on top."""
    if not logit > -math.inf:
        raise ValueError(f"no token can be drawn: after the logits processors the best logit is {logit}")
