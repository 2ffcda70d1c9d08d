"""Temporary: the new core's seam, made of the old one. The commit "new core" removes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..acceptance import Rule, make_rule
from ..drafting.config import TreeConfig
from ..engine import decoder as old
from ..engine import request as old_request
from ..engine.request import BatchSettings
from ..options import AcceptanceOptions, SamplingOptions, names_of
from ..settings import resolve


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    acceptance: object = "fsd"
    threshold: float | None = None
    divergence: str | None = None
    head_guard: object = "default"
    budget: float | None = None
    tree: TreeConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        AcceptanceOptions(budget=self.budget, tree=self.tree)
        self.rule  # noqa: B018

    @property
    def rule(self) -> Rule:
        more = {} if self.head_guard == "default" else {"head_guard": self.head_guard}
        return make_rule(self.acceptance, self.threshold, self.divergence, **more)

    @classmethod
    def from_names(cls, given: Mapping) -> GenerateOptions:
        for name in given:
            if name not in names_of(cls):
                raise TypeError(f"unknown option {name!r}; accepted: {', '.join(sorted(names_of(cls)))}")
        return cls(**given)


class Request(old_request.Request):
    options: GenerateOptions
    rule = property(lambda self: self.settings.rule)
    lossless = property(lambda self: self.settings.lossless)
    max_new_tokens = property(lambda self: self.settings.max_new_tokens)
    seed = property(lambda self: self.settings.seed)
    temperature = property(lambda self: float(self.options.temperature))


def make_requests(model, prompts, options, logits_processor=None, stopping_criteria=None):
    accepting = AcceptanceOptions(acceptance=options.rule, budget=options.budget, tree=options.tree)
    _, settings = resolve(model, prompts, options, accepting, logits_processor, stopping_criteria)
    made = [Request(ids, own, model.target.device) for ids, own in zip(prompts, settings, strict=True)]
    for each in made:
        each.options = options
    return made


class Decoder(old.Decoder):
    def __init__(self, target, head, requests, choose, pause=None, *, earlier=None, forwards=None):
        super().__init__(target, head, [], BatchSettings(choose, pause), [], earlier, None, forwards)
        self.requests = list(requests)
        self._settle()
