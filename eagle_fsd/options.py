"""Every option of decoding and of loading: its name, default, meaning and check, once.

`generate`, `custom_generate`, `Chat`, the command line, the endpoint and the harness take theirs from here. The
docstrings are what `--help` says. Nothing here imports torch before an object is made, so that `--help` is quick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from types import NoneType
from typing import Any

from .checks import OptionError, require_bool, require_integer, require_number
from .drafting.config import TreeConfig
from .drafting.text import TextDrafts
from .keywords import unknown_option

MOST_LOGPROBS = 20
MOST_REFERENCES = 1024
LISTS = ("seed", "stop", "stop_token_ids", "fuzzy_within", "reference")  # options that may be lists or tuples
OF_ONE_PROMPT = "for prompts with options of their own, Engine(model).submit(prompt, ...) takes one at a time"
LEAST_TEMPERATURE = 1e-6  # below, quotients leave the range of float32


class Options:
    """What the dataclasses of options share."""

    @classmethod
    def names(cls) -> list[str]:
        """The names of the options, in their order."""
        return [field.name for field in fields(cls)]

    @classmethod
    def from_names(cls, options: Mapping[str, object], also: Sequence[str] = ()) -> Any:
        """From values by name.

        Args:
            also: further names that the caller takes, for the message.

        Raises:
            TypeError: an unknown name; the message lists what is accepted, or says what to use instead.
            TypeError, ValueError: a value that cannot be accepted.
        """
        for name in options:
            if name not in cls.names():
                raise TypeError(unknown_option(name, [*cls.names(), *also]))
        return cls(**options)


@dataclass(frozen=True)
class GenerateOptions(Options):
    """How tokens are drawn, where an answer ends, and which drafted tokens are kept.

    Args:
        max_new_tokens: tokens of an answer, never exceeded; lowered where the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling.
        top_p: sample from the most likely tokens that together have this probability; 1: off.
        top_k: sample from so many of the most likely tokens; 0: off.
        min_p: leave out tokens below this share of the most likely one's probability; 0: off.
        repetition_penalty: as in `model.generate`; 1: off.
        frequency_penalty: taken from a token's logit for each time that the answer has it (-2 to 2); 0: off.
        presence_penalty: taken once from those of tokens that the answer has (-2 to 2); 0: off.
        logit_bias: added to the logits of tokens by their ids (-100 to 100 each).
        top_logprobs: so many of the target's best tokens are listed with each token (0 to 20): `receipt.top`.
        min_new_tokens: no end token, and none of `stop_token_ids`, before so many tokens.
        ignore_eos: go on past end tokens.
        seed: of the sampling noise; None draws one, reported in `out.seed`. With one seed, decoding without a head,
            `exact` and any rule at its lossless end give the same tokens. For a batch a list of seeds, one for each
            prompt; one seed is that of the first prompt, and those after it get the numbers that follow.
        stop: strings that end the answer; not part of its text.
        stop_token_ids: further tokens that end it.
        acceptance: a rule's name (see `eagle_fsd.RULES`), a rule object, or a function from the `Nodes` of one row to
            `Weights` or to log-weights [V].
        threshold: the rule's; larger accepts more. None: 0, that is lossless, or a rule object's own; rules that are
            not lossless at 0 (typical, fsd_paper, relaxed when sampling) ask for one.
        divergence: for the rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the
            target's top k tokens such as js_top32.
        head_guard: alpha in [0, 1]: a fuzzy token needs target probability >= (1 - alpha) * the best token's. None: no
            guard, as in the papers. "default": the rule's own, 0.7 for fsd, typical and relaxed.
        budget: nats of regret (log-probability of the target's best token less that of the token taken) that the fuzzy
            tokens of an answer may cost together. A dearer token is refused and the answer is exact from there, as it
            is from where the text starts to repeat; `out.stats` says where. 0: exact; inf: only repetition counts.
        fuzzy_within: two marks, as text or token ids of one token each, such as ("<think>", "</think>"): the rule
            decides after the first, which may stand in the prompt, and up to the second; elsewhere the target's own
            tokens are taken. None: it decides everywhere.
        tree: size of the draft tree; None: as the model was loaded for (`load(tree=)`).
        text_drafts: "auto": what followed the last tokens where they stood before, in the prompt, the answer or a
            `reference`, is drafted too, as far as it is likely and pays; "off"; or a `TextDrafts`. Copies take part in
            this `tree`, within its `total_tokens`.
        speculative: False decodes plainly: nothing is drafted, and no rule decides.
        response_format: what the answer's text must be (extra `structured`): a JSON schema or a pydantic model, or an
            object with a `type`: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": S}},
            {"type": "regex", "regex": R}, {"type": "choice", "choice": [...]}, or {"type": "grammar", "grammar": G}
            in Lark's form or GBNF. JSON is written with ", " and ": " and no other blanks. An answer that ends at
            `max_new_tokens` or a stop string may be cut short.
        reference: a text, or several, that the answer will resemble though it is not in the prompt: drafts are copied
            from it as well. The text of a lossless answer does not depend on it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int = 0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    acceptance: Any = "fsd"  # a name, a Rule, or a function
    threshold: float | None = None
    divergence: str | None = None
    head_guard: float | str | None = "default"
    budget: float | None = None
    fuzzy_within: Sequence[str] | Sequence[int] | None = None
    tree: TreeConfig | None = None
    text_drafts: TextDrafts | str = "auto"
    reference: str | Sequence[str] | None = None
    speculative: bool = True
    response_format: Any = None  # a mapping, or a class of pydantic

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list if name == "tree" else (list, tuple)) and name not in LISTS:
                raise OptionError(name, problem=f"is one value for all prompts of a batch, got {value!r}; "
                                  f"{OF_ONE_PROMPT}")
        require_number("temperature", self.temperature, f"0 (greedy) or a number >= {LEAST_TEMPERATURE:g}",
                       lambda x: x == 0 or LEAST_TEMPERATURE <= x < math.inf)
        require_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        require_number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        require_number("repetition_penalty", self.repetition_penalty, "a positive number", lambda x: 0 < x < math.inf)
        for name in ("frequency_penalty", "presence_penalty"):
            require_number(name, getattr(self, name), "a number from -2 to 2", lambda x: -2 <= x <= 2)
        for name, least, most in (("max_new_tokens", 1, None), ("min_new_tokens", 0, None), ("top_k", 0, None),
                                  ("top_logprobs", 0, MOST_LOGPROBS)):
            require_integer(name, getattr(self, name), least, most)
        for name in ("ignore_eos", "speculative"):
            require_bool(name, getattr(self, name))
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens ({self.max_new_tokens})")
        if self.response_format is not None and (self.ignore_eos or self.min_new_tokens):
            raise OptionError("response_format", problem="decides where an answer ends: leave ignore_eos and "
                              "min_new_tokens out")
        self._check_tokens()
        self._check_texts()
        self._check_acceptance()

    def _check_tokens(self) -> None:
        """Options that name tokens, and the seed."""
        if not (self.logit_bias is None or isinstance(self.logit_bias, Mapping)):
            raise OptionError("logit_bias", self.logit_bias, "numbers by token ids")
        for token, bias in (self.logit_bias or {}).items():
            require_integer("logit_bias", token, 0)
            require_number("logit_bias", bias, "a number from -100 to 100 for each token", lambda x: -100 <= x <= 100)
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, (Iterable, NoneType)):
            raise OptionError("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        self._read_once("stop_token_ids")
        for token in self.stop_token_ids or ():
            require_integer("stop_token_ids", token, 0)
        if self.seed is not None:
            for seed in self.seed if isinstance(self.seed, (list, tuple)) else [self.seed]:
                require_integer("seed", seed, 0)
                if seed >= 2**63:
                    raise OptionError("seed", seed, "below 2**63")

    def _check_texts(self) -> None:
        """Where an answer ends, and what drafts are copied from."""
        if not isinstance(self.stop, (str, list, tuple, NoneType)):
            raise OptionError("stop", self.stop, "a string or a list of strings")
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise OptionError("stop", problem=f"must hold non-empty strings, got {string!r}")
        if not (self.text_drafts in ("auto", "off") or isinstance(self.text_drafts, TextDrafts)):
            raise OptionError("text_drafts", self.text_drafts, '"auto", "off" or a TextDrafts')
        texts = isinstance(self.reference, (Iterable, NoneType)) and not isinstance(self.reference, (bytes, Mapping))
        if texts and not isinstance(self.reference, str):
            self._read_once("reference")
        if not texts or not all(isinstance(text, str) for text in self.references):
            raise OptionError("reference", self.reference, "a text or a list of texts")
        if len(self.references) > MOST_REFERENCES:
            raise OptionError("reference", problem=f"may be at most {MOST_REFERENCES} texts, got "
                              f"{len(self.references)}")
        if self.references and self.text_drafts == "off":
            raise OptionError("reference", problem='is what text drafts are copied from: leave text_drafts="off" out')

    def _check_acceptance(self) -> None:
        """The rule, where it decides, what it may cost, and the tree."""
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, Real):
                raise OptionError("budget", self.budget, "a number of nats")
            if not self.budget >= 0:
                raise OptionError("budget", self.budget, "at least 0 nats")
        if not isinstance(self.tree, (TreeConfig, NoneType)):
            raise OptionError("tree", self.tree, "a TreeConfig, or None for that of load(tree=...)")
        marks = self.fuzzy_within
        if marks is not None and not (
                isinstance(marks, (list, tuple)) and len(marks) == 2 and marks[0] != marks[1]
                and all(type(mark) is int or isinstance(mark, str) and mark for mark in marks)):
            raise OptionError("fuzzy_within", marks, 'two different marks, as text or token ids, such as ("<think>", '
                              '"</think>")')
        lossless = self.lossless  # makes the rule, which checks its own options
        if isinstance(self.acceptance, str) and self.threshold is None and not lossless:
            raise OptionError("acceptance", problem=f"{self.acceptance!r} needs a threshold: without one decoding is "
                              "lossless, and this rule is not, even at 0")

    def _read_once(self, name: str) -> None:
        """Keep the items of an iterator."""
        if not isinstance(values := getattr(self, name), (list, tuple, NoneType)):
            object.__setattr__(self, name, tuple(values))

    @functools.cached_property
    def rule(self) -> Any:
        """The acceptance rule, a `Rule`."""
        from .acceptance.registry import make_rule

        guard = {} if self.head_guard == "default" else {"head_guard": self.head_guard}
        return make_rule(self.acceptance, self.threshold, self.divergence, **guard)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the text is what the target alone would write."""
        return self.rule.is_lossless(self.greedy)

    @property
    def references(self) -> list[str]:
        return [self.reference] if isinstance(self.reference, str) else list(self.reference or [])

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


# What a `GenerationConfig` may set that nothing here depends on.
WITHOUT_EFFECT = ("bos_token_id", "pad_token_id", "use_cache", "return_dict_in_generate", "transformers_version")


def from_generate(keywords: Mapping[str, object], temperature: float = 0.0) -> dict[str, object]:
    """Options under our names, of keywords that may also have names of `model.generate`: `do_sample`, `stop_strings`,
    `eos_token_id`, and a `generation_config`, whose settings hold where no keyword sets them.

    Args:
        temperature: where no keyword sets it.

    Raises:
        TypeError, ValueError: a value that cannot be accepted, one set twice, or a greedy temperature with sampling.
    """
    options = dict(keywords)
    config = options.pop("generation_config", None)
    if config is not None:
        if not hasattr(config, "to_diff_dict"):
            raise OptionError("generation_config", config, "a GenerationConfig of transformers")
        neutral = config._get_default_generation_params()
        ours = {"do_sample", *GenerateOptions.names()}
        configured = {name: value for name, value in config.to_diff_dict().items() if name not in WITHOUT_EFFECT
                      and (name in ours or value not in (neutral.get(name), False))}
        options = {**configured, **options}
    for theirs, ours in (("stop_strings", "stop"), ("eos_token_id", "stop_token_ids")):
        if options.get(theirs) is None:
            options.pop(theirs, None)
        elif ours in options:
            raise ValueError(f"{theirs} and {ours} are the same here: give one of them")
        else:
            options[ours] = options.pop(theirs)
            if theirs == "eos_token_id":  # replaces the model's own
                options["ignore_eos"] = True
                options[ours] = [options[ours]] if isinstance(options[ours], int) else options[ours]
    sampling = options.pop("do_sample", None)
    if sampling is not None:
        require_bool("do_sample", sampling)
        if sampling:
            options.setdefault("temperature", temperature or 1.0)
            if options["temperature"] == 0:
                raise OptionError("temperature", 0, "above 0 with do_sample=True")
        else:
            options["temperature"] = 0.0
    return options
