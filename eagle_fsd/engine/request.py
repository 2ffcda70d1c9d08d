"""One request of a batch: its settings, what is known of its text, and the answer so far.

T positions that the draft has not read, F width of the target's features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..acceptance import Rule
from ..acceptance.budget import Budget
from ..trees.config import Choice, TreeConfig
from .pause import Pause
from .receipts import Output, Receipt, Stats


@dataclass(frozen=True)
class Settings:
    """One request, checked and resolved. The requests of a batch differ in processors, seed and `max_new_tokens`."""

    rule: Rule
    tree: TreeConfig | None  # None: no drafting
    processors: LogitsProcessorList
    greedy: bool
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    budget: float | None = None  # nats, see `Budget`
    cost: Callable[[int, int], float] | None = None  # see `Choice`; None: drafting never pauses
    pause: Pause | None = None  # of earlier requests; None: one of its own
    choose: Callable[[int], Choice] | None = None  # tree and cost of fewer sequences, as others end; None: the same
    padding: Sequence[int] = ()  # before the prompt, for processors and criteria, which see it in `model.generate`


class Emission(NamedTuple):
    """What one forward of the target emitted for a sequence; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False


class Request:
    """One sequence of a batch: what is known of its text, and the answer so far."""

    def __init__(self, prompt: Sequence[int], settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.prompt = list(prompt)
        self.padding = list(settings.padding)
        self.tokens = list(prompt)  # prompt and all emitted tokens; the last one is the root once decoding has begun
        self.features: Tensor | None = None  # [T, F] of the positions before the last T tokens: the draft's next input
        self.budget = None if settings.budget is None else Budget(settings.budget)
        self.new: list[int] = []  # the answer
        self.receipts: list[Receipt] = []
        self.stats = Stats()
        self.reason: str | None = None  # why it ended

    @property
    def context(self) -> list[int]:
        """What processors see of the text before the root."""
        return [*self.padding, *self.tokens[:-1]]

    def unread(self, device: torch.device) -> Tensor:
        """[T] tokens that the draft has not read, each the one after its feature."""
        assert self.features is not None
        return torch.tensor(self.tokens[-len(self.features) :], device=device)

    def take(self, cycle: Emission, stop_check: Callable | None, streamer: BaseStreamer | None) -> None:
        """Add what a cycle emitted to the answer, as far as it belongs to it."""
        kept, self.reason = cut(
            cycle.tokens, self.padding + self.prompt, self.new, self.settings, stop_check, self.device)
        for logit in cycle.logits[:kept]:  # behind an end a processor may have nothing to say
            require_drawable(logit)
        self.new += cycle.tokens[:kept]
        self.receipts += cycle.receipts[:kept]
        if streamer is not None:
            if hasattr(streamer, "on_receipts"):
                streamer.on_receipts(cycle.receipts[:kept])
            streamer.put(torch.tensor(cycle.tokens[:kept]))

    def count(self, cycle: Emission) -> Emission:
        """Note what a verify forward did; returns the cycle, its receipts with why the rule no longer decided."""
        if self.budget is not None and self.budget.ended:
            receipts = [receipt._replace(exact_because=self.budget.ended) for receipt in cycle.receipts]
            cycle = cycle._replace(receipts=receipts)
            if self.stats.exact_because is None:
                self.stats.exact_from, self.stats.exact_because = len(self.new), self.budget.ended
        self.stats.accepted_lengths.append(len(cycle.tokens) - 1)
        self.stats.target_forwards += 1
        self.stats.undrafted += not cycle.drafted
        return cycle

    def output(self) -> Output:
        """The answer, ended."""
        assert self.reason is not None
        self.stats.new_tokens = len(self.new)
        self.stats.budget_spent = None if self.budget is None else self.budget.spent
        return Output(self.new, self.reason, self.settings.seed, self.stats, self.receipts)


def require_drawable(logit: float) -> None:
    """Raise where the token drawn has no probability: no other had any either, or a NaN came out on top."""
    if not logit > -math.inf:
        raise ValueError(f"no token can be drawn: after the logits processors the best logit is {logit}")


def cut(
    emitted: list[int], prompt: list[int], new: list[int], settings: Settings, stop_check, device: torch.device
) -> tuple[int, str | None]:
    """How many of the emitted tokens belong to the answer, and why it ends with them (None: it goes on)."""
    for count, token in enumerate(emitted, 1):
        if token in settings.eos_ids:
            return count, "eos"
        if token in settings.stop_ids:
            return count, "stop"
        so_far = new + emitted[:count]
        if stop_check is not None and stop_check(so_far):
            return count, "stop"
        if settings.criteria and criteria_met(settings.criteria, prompt + so_far, device):
            return count, "stop"
        if len(so_far) == settings.max_new_tokens:
            return count, "length"
    return len(emitted), None


def criteria_met(criteria: StoppingCriteriaList, tokens: list[int], device: torch.device) -> bool:
    """Whether any of the criteria ends an answer of these tokens, the prompt included; they see them on this device.

    Raises:
        TypeError: a criterion that answers neither with a bool nor with a tensor of one.
    """
    ids = torch.tensor([tokens], device=device)
    for criterion in criteria:
        found = criterion(ids, None)
        if not (isinstance(found, bool) or isinstance(found, Tensor) and found.numel() == 1):
            raise TypeError(f"a stopping criterion must return a bool or a tensor of one, got {found!r}")
        if found:
            return True
    return False
