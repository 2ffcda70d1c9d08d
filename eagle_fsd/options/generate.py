"""Every option of decoding: its name, default, meaning and check, once.

`generate`, `custom_generate`, `Chat`, the command line, the endpoint and the harness use these options. `--help` shows
the docstrings. Nothing imports torch before an object is made, so that `--help` is fast.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any

from ..drafting.config import TreeConfig
from ..drafting.copies import TextDrafts
from ..utils.checks import OptionError, require_bool, require_integer, require_number
from .keywords import GenerateKeywords, unknown_option

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

MOST_LOGPROBS = 20
MOST_REFERENCES = 1024
# Options whose value may be a list or tuple.
LISTS = ("seed", "stop", "eos_token_id", "stop_token_ids", "fuzzy_within", "reference")
OF_ONE_PROMPT = "to give each prompt its own, submit them one by one: Engine(model).submit(prompt, ...)"
LEAST_TEMPERATURE = 1e-6  # smaller ones make logits overflow float32


class Options:
    """Base class of the option dataclasses."""

    @classmethod
    def names(cls) -> list[str]:
        """The names of the options, in order."""
        return [field.name for field in fields(cls)]

    @classmethod
    def from_names(cls, options: Mapping[str, object], also: Sequence[str] = ()) -> Any:
        """Make an object from a mapping of names to values.

        Args:
            also: further names that the caller accepts, for the error message.

        Raises:
            TypeError: an unknown name. The message names a replacement or lists the accepted names.
            TypeError, ValueError: an invalid value.
        """
        cls.check_names(options, also)
        return cls(**options)

    @classmethod
    def check_names(cls, options: Iterable[str], also: Sequence[str] = ()) -> None:
        """Raise TypeError for a name that is no option; see `from_names`."""
        for name in options:
            if name not in cls.names():
                raise TypeError(unknown_option(name, [*cls.names(), *also]))


class RuleAtTemperature:
    """Anything with a `rule` and a `temperature`, which together decide whether decoding is lossless."""

    temperature: float
    rule: Any

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the target alone would generate the same text."""
        return self.rule.is_lossless(self.greedy)


@dataclass(frozen=True, init=False)
class GenerateOptions(RuleAtTemperature, Options):
    """How tokens are drawn, where an answer ends, and which draft tokens are accepted.

    `do_sample` and `stop_strings` work as in `model.generate`.

    Args:
        max_new_tokens: maximum number of tokens of an answer; lowered if the target has fewer positions left.
        temperature: 0 is greedy; otherwise sampling.
        top_p: sample from the most likely tokens that together have this probability; 1: off.
        top_k: sample from this many of the most likely tokens; 0: off.
        min_p: leave out tokens with less than this fraction of the best token's probability; 0: off.
        repetition_penalty: as in `model.generate`; 1: off; None: that of the model's generation config.
        frequency_penalty: subtracted from a token's logit for each occurrence in the answer (-2 to 2); 0: off.
        presence_penalty: subtracted once from the logit of each token in the answer (-2 to 2); 0: off.
        logit_bias: numbers to add to logits, by token id (-100 to 100 each).
        top_logprobs: number of the target's best tokens in each receipt (0 to 20), see `receipt.top`.
        min_new_tokens: no end token, and none of `stop_token_ids`, before this many tokens; None: as many as the
            model's generation config asks for.
        generation_config: a `GenerationConfig` of transformers. Its fields override those of the model's generation
            config, and other options override it. Those that are options become these; the attribute has the others.
        eos_token_id: one or more end tokens, in place of the model's: those of its generation config and, for a chat,
            the token with which the chat template ends a turn.
        ignore_eos: continue after end tokens.
        seed: seed of the sampling noise; None draws one, see `out.seed`. With the same seed, decoding without a head,
            with `exact`, or with any lossless rule gives the same tokens. For a batch, a list with one seed per prompt,
            or the seed of the first prompt; the next prompts get the numbers that follow it.
        stop: strings that end the answer; its text does not include them. None: `stop_strings` of the model's
            generation config.
        stop_token_ids: further tokens that end the answer.
        acceptance: name of a rule (see `eagle_fsd.RULES`), a rule object, or a function from the `Nodes` of one row to
            `Weights`, `TokenWeights` or log-weights [V].
        threshold: threshold of the rule; larger accepts more. None: 0, which is lossless, or that of the rule object.
            Rules that are not lossless at 0 (typical, fsd_paper, relaxed when sampling) need a threshold.
        divergence: for rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the
            target's top k tokens such as js_top32.
        head_guard: alpha in [0, 1]: a fuzzy token needs target probability >= (1 - alpha) * the best token's. None: no
            guard, as in the papers. "default": that of the rule, 0.7 for fsd, typical and relaxed.
        budget: total regret of an answer's fuzzy tokens in nats (log-probability of the target's best token less that
            of the accepted token). A token that would exceed it is rejected, and decoding is exact from there on, and
            likewise from where the text starts to repeat; `out.stats` reports where. 0: exact; inf: only repetition
            counts.
        fuzzy_within: two marks of one token each, as text or token ids, such as ("<think>", "</think>"). The rule
            applies after the first mark, which may be in the prompt, up to the second; elsewhere decoding is exact.
            None: it applies everywhere.
        tree: size of the draft tree; None: that of the model, see `load(tree=)`.
        text_drafts: "auto": draft copies too. They continue an earlier occurrence of the last tokens in the prompt, the
            answer or a `reference`, as far as this is likely to pay. "off"; or a `TextDrafts`. Copies are part of the
            `tree` and its `total_tokens`.
        speculative: False: plain decoding without drafts or an acceptance rule.
        response_format: form of the answer's text (extra `structured`): a JSON schema or a pydantic model, or an
            object with a `type`: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": S}},
            {"type": "regex", "regex": R}, {"type": "choice", "choice": [...]}, or {"type": "grammar", "grammar": G}
            in Lark or GBNF syntax. JSON has ", " and ": " and no other whitespace. `max_new_tokens` or a stop string
            may cut the answer short.
        reference: one or more texts that the answer will resemble. Drafts are copied from them as well. The text of a
            lossless answer does not depend on them.
        chat_template_kwargs: keywords of the tokenizer's `apply_chat_template`, for prompts that are chats, such as
            {"enable_thinking": False}, {"tools": [...]}, or {"continue_final_message": True}, which continues the last
            message. `add_generation_prompt` is True unless given.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int = 0
    min_new_tokens: int | None = None
    generation_config: Any = None  # a GenerationConfig; transformers is imported later
    eos_token_id: int | Sequence[int] | None = None
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
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __init__(self, **options: Unpack[GenerateKeywords]) -> None:
        options = from_generate(options)
        GenerateOptions.check_names(options)
        for field in fields(GenerateOptions):
            object.__setattr__(self, field.name, options.get(field.name, field.default))
        self.__post_init__()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list if name == "tree" else (list, tuple)) and name not in LISTS:
                raise OptionError(name, problem=f"must be one value for all prompts of a batch, got {value!r}; "
                                  f"{OF_ONE_PROMPT}")
        require_number("temperature", self.temperature, f"0 (greedy) or a number >= {LEAST_TEMPERATURE:g}",
                       lambda x: x == 0 or LEAST_TEMPERATURE <= x < math.inf)
        require_number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        require_number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        if self.repetition_penalty is not None:
            require_number("repetition_penalty", self.repetition_penalty, "a positive number",
                           lambda x: 0 < x < math.inf)
        for name in ("frequency_penalty", "presence_penalty"):
            require_number(name, getattr(self, name), "a number from -2 to 2", lambda x: -2 <= x <= 2)
        for name, least, most in (("max_new_tokens", 1, None), ("top_k", 0, None), ("top_logprobs", 0, MOST_LOGPROBS)):
            require_integer(name, getattr(self, name), least, most)
        if self.min_new_tokens is not None:
            require_integer("min_new_tokens", self.min_new_tokens, 0)
        for name in ("ignore_eos", "speculative"):
            require_bool(name, getattr(self, name))
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise OptionError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens ({self.max_new_tokens})")
        ends = [name for name in ("ignore_eos", "min_new_tokens") if getattr(self, name)]
        if self.response_format is not None and ends:
            raise OptionError("response_format", problem="decides where an answer ends: leave out "
                              f"{' and '.join(ends)}")
        if self.ignore_eos and self.eos_token_id is not None:
            raise OptionError("eos_token_id", problem="names end tokens that ignore_eos=True ignores: leave out one")
        if not isinstance(self.chat_template_kwargs, (Mapping, NoneType)):
            raise OptionError("chat_template_kwargs", self.chat_template_kwargs, "keywords of apply_chat_template in a "
                              'dict, such as {"enable_thinking": False}')
        self._check_tokens()
        self._check_texts()
        self._check_acceptance()

    def _check_tokens(self) -> None:
        """Check options with token ids, the generation config, and the seed."""
        if not (self.generation_config is None or hasattr(self.generation_config, "to_diff_dict")):
            raise OptionError("generation_config", self.generation_config, "a GenerationConfig of transformers")
        if not (self.logit_bias is None or isinstance(self.logit_bias, Mapping)):
            raise OptionError("logit_bias", self.logit_bias, "numbers by token ids")
        for token, bias in (self.logit_bias or {}).items():
            require_integer("logit_bias", token, 0)
            require_number("logit_bias", bias, "a number from -100 to 100 for each token", lambda x: -100 <= x <= 100)
        for name, single in (("stop_token_ids", ()), ("eos_token_id", Integral)):
            if isinstance(value := getattr(self, name), single):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, (str, bytes)) or not isinstance(value, (Iterable, NoneType)):
                raise OptionError(name, value, f"{'a token id or ' if single else ''}a sequence of token ids")
            self._read_once(name)
            for token in getattr(self, name) or ():
                require_integer(name, token, 0)
        if self.seed is not None:
            for seed in self.seed if isinstance(self.seed, (list, tuple)) else [self.seed]:
                require_integer("seed", seed, 0)
                if seed >= 2**63:
                    raise OptionError("seed", seed, "below 2**63")

    def _check_texts(self) -> None:
        """Check stop strings, text drafts and references."""
        if not isinstance(self.stop, (str, list, tuple, NoneType)):
            raise OptionError("stop", self.stop, "a string or a list of strings")
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise OptionError("stop", problem=f"must be non-empty strings, got {string!r}")
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
            raise OptionError("reference", problem='needs text drafts: leave out text_drafts="off"')

    def _check_acceptance(self) -> None:
        """Check rule, budget, marks and tree."""
        if self.budget is not None:
            if isinstance(self.budget, bool) or not isinstance(self.budget, Real):
                raise OptionError("budget", self.budget, "a number of nats")
            if not self.budget >= 0:
                raise OptionError("budget", self.budget, "at least 0 nats")
        if not isinstance(self.tree, (TreeConfig, NoneType)):
            raise OptionError("tree", self.tree, "a TreeConfig, or None for the tree of load(tree=...)")
        marks = self.fuzzy_within
        if marks is not None and not (
                isinstance(marks, (list, tuple)) and len(marks) == 2 and marks[0] != marks[1]
                and all(type(mark) is int or isinstance(mark, str) and mark for mark in marks)):
            raise OptionError("fuzzy_within", marks, 'two different marks, as text or token ids, such as ("<think>", '
                              '"</think>")')
        lossless = self.lossless  # makes the rule, which checks threshold, divergence and head_guard
        if isinstance(self.acceptance, str) and self.threshold is None and not lossless:
            raise OptionError("acceptance", problem=f"{self.acceptance!r} needs a threshold: without one decoding is "
                              "lossless, but this rule is not lossless even at 0")

    def _read_once(self, name: str) -> None:
        """Replace an iterator by its items."""
        if not isinstance(values := getattr(self, name), (list, tuple, NoneType)):
            object.__setattr__(self, name, tuple(values))

    @functools.cached_property
    def rule(self) -> Any:
        """The acceptance rule, a `Rule`."""
        from ..acceptance.registry import make_rule

        guard = {} if self.head_guard == "default" else {"head_guard": self.head_guard}
        return make_rule(self.acceptance, self.threshold, self.divergence, **guard)

    @property
    def references(self) -> list[str]:
        return as_list(self.reference)

    @property
    def stop_strings(self) -> list[str]:
        return as_list(self.stop)


def as_list(strings: str | Sequence[str] | None) -> list[str]:
    """The strings, from a single one, several or none."""
    return [strings] if isinstance(strings, str) else list(strings or ())


# Fields of a `GenerationConfig`: those that decide about greedy tokens as well, and have no option of their own; those
# that matter for sampling only; and those without an effect here.
FOLLOWED = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "min_length",
    "no_repeat_ngram_size", "remove_invalid_values", "sequence_bias", "suppress_tokens", "watermarking_config",
)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
WITHOUT_EFFECT = ("bos_token_id", "pad_token_id", "use_cache", "cache_implementation", "cache_config",
                  "renormalize_logits", "return_dict_in_generate", "transformers_version")


def from_generate(keywords: Mapping[str, object], temperature: float = 0.0) -> dict[str, object]:
    """Translate keywords of `model.generate` to our options: `do_sample`, `stop_strings`, and the fields of a
    `generation_config` that are options of ours. Keywords override these.

    Args:
        temperature: that of `do_sample=True` without a temperature, if it is above 0.

    Raises:
        TypeError, ValueError: an invalid value, an option under two names, or temperature 0 with `do_sample=True`.
    """
    options = {name: value for name, value in keywords.items()
               if value is not None or name not in ("do_sample", "stop_strings")}
    if "stop" in options and "stop_strings" in options:
        raise ValueError("stop_strings and stop are the same option: use one of them")
    if "stop_strings" in options:
        options["stop"] = options.pop("stop_strings")
    if hasattr(config := options.get("generation_config"), "to_diff_dict"):
        options = {**options_of_config(config, options, temperature), **options}
        options["generation_config"] = rest = type(config)()  # a second call finds nothing to translate
        for name in FOLLOWED:
            setattr(rest, name, getattr(config, name, None))
    sampling = options.pop("do_sample", None)
    if sampling is not None:
        require_bool("do_sample", sampling)
        if sampling:
            options.setdefault("temperature", temperature or 1.0)
            if options["temperature"] == 0:
                raise OptionError("temperature", 0, "above 0 with do_sample=True")
        else:
            if options.get("temperature"):
                log.warning("temperature= changes nothing with do_sample=False: decoding is greedy")
            options["temperature"] = 0.0
    return options


def options_of_config(
    config: Any, keywords: Mapping[str, object], temperature: float
) -> dict[str, object]:
    """The fields of a `GenerationConfig` as options, `do_sample` included. As in `model.generate`, its sampling fields
    hold only where something asks for sampling: `do_sample`, or a temperature that is not the config's own.

    Args:
        keywords: options that override the config's. temperature: used if they have none.
    """
    neutral = config._get_default_generation_params()
    ours = {"do_sample", *GenerateOptions.names()}
    found = {name: value for name, value in config.to_diff_dict().items()
             if not (value is None or name.startswith("_") or name in (*FOLLOWED, *WITHOUT_EFFECT))
             and (name in ours or value not in (neutral.get(name), False))}
    if "stop_strings" in found:
        found["stop"] = found.pop("stop_strings")
    if "max_new_tokens" in {**found, **keywords}:  # takes precedence
        found.pop("max_length", None)
    if "ignore_eos" in keywords:
        found.pop("eos_token_id", None)
    default = keywords.get("temperature", temperature) != 0
    if not keywords.get("do_sample", found.get("do_sample", default)):
        found = {name: value for name, value in found.items() if name not in SAMPLING}
    return found
