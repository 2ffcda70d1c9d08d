"""Every option of decoding: its declaration, and the checks of options that depend on one another.

`generate`, `custom_generate`, `Chat`, the command line, the endpoint and the harness use these options. Nothing imports
torch before an object is made, so that `--help` is fast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_origin

from ..acceptance import RULE_CLASSES
from ..drafting.config import TreeConfig
from ..drafting.copies import TextDrafts
from ..utils.checks import OptionError, require_bool, require_integer, require_number
from .option import Option, Options, declare

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

MOST_REFERENCES = 1024
OF_ONE_PROMPT = "to give each prompt its own, submit them one by one: Engine(model).submit(prompt, ...)"
LEAST_TEMPERATURE = 1e-6  # smaller ones make logits overflow float32
RuleName = Literal[tuple(RULE_CLASSES)]
Copying = Literal["auto", "off"]


class GenerateKeywords(TypedDict, total=False):
    """The options of `generate`, declared, and some names of `model.generate`."""

    max_new_tokens: Annotated[int, Option(
        256, "maximum number of tokens of an answer; lowered if the target has fewer positions left.", least=1)]
    temperature: Annotated[float, Option(
        0.0, "0 is greedy; otherwise sampling.", least=0,
        accepted=f"0 (greedy) or a number >= {LEAST_TEMPERATURE:g}")]
    top_p: Annotated[float, Option(
        1.0, "sample from the most likely tokens that together have this probability; 1: off.",
        above=0, most=1, accepted="a number in (0, 1]")]
    top_k: Annotated[int, Option(0, "sample from this many of the most likely tokens; 0: off.", least=0)]
    min_p: Annotated[float, Option(
        0.0, "leave out tokens with less than this fraction of the best token's probability; 0: off.",
        least=0, most=1, accepted="a number in [0, 1]")]
    repetition_penalty: Annotated[float | None, Option(
        None, "as in `model.generate`; 1: off; None: that of the model's generation config.",
        above=0, accepted="a positive number")]
    frequency_penalty: Annotated[float, Option(
        0.0, "subtracted from a token's logit for each occurrence in the answer (-2 to 2); 0: off.",
        least=-2, most=2, accepted="a number from -2 to 2")]
    presence_penalty: Annotated[float, Option(
        0.0, "subtracted once from the logit of each token in the answer (-2 to 2); 0: off.",
        least=-2, most=2, accepted="a number from -2 to 2")]
    logit_bias: Annotated[Mapping[int, float] | None, Option(
        None, "numbers to add to logits, by token id (-100 to 100 each).", accepted="numbers by token ids",
        plain=dict[str, float])]
    top_logprobs: Annotated[int, Option(
        0, "number of the target's best tokens in each receipt (0 to 20), see `receipt.top`.", least=0, most=20)]
    min_new_tokens: Annotated[int | None, Option(
        None, "no end token, and none of `stop_token_ids`, before this many tokens; None: as many as the model's "
        "generation config asks for.", least=0)]
    generation_config: Annotated[Any, Option(  # transformers is imported later
        None, "a `GenerationConfig` of transformers. Its fields override those of the model's generation config, and "
        "other options override it. Those that are options become these; the attribute has the others.")]
    eos_token_id: Annotated[int | Sequence[int] | None, Option(
        None, "one or more end tokens, in place of the model's: those of its generation config and, for a chat, the "
        "token with which the chat template ends a turn.", least=0,
        accepted="a token id or a sequence of token ids")]
    ignore_eos: Annotated[bool, Option(False, "continue after end tokens.")]
    seed: Annotated[int | Sequence[int] | None, Option(
        None, "seed of the sampling noise; None draws one, see `out.seed`. With the same seed, decoding without a "
        "head, with `exact`, or with any lossless rule gives the same tokens. For a batch, a list with one seed per "
        "prompt, or the seed of the first prompt; the next prompts get the numbers that follow it.",
        least=0, most=2**63 - 1, plain=int)]
    stop: Annotated[str | Sequence[str] | None, Option(
        None, "strings that end the answer; its text does not include them. None: `stop_strings` of the model's "
        "generation config.", accepted="a string or a list of strings")]
    stop_token_ids: Annotated[Sequence[int] | None, Option(
        None, "further tokens that end the answer.", least=0,
        accepted="a sequence of token ids")]
    acceptance: Annotated[Any, Option(
        "fsd", "name of a rule, see `eagle_fsd.RULES`; in Python also a rule object, or a function from the `Nodes` of "
        "one row to `Weights`, `TokenWeights` or log-weights [V].", plain=RuleName)]
    threshold: Annotated[float | None, Option(
        None, "threshold of the rule; larger accepts more. None: 0, which is lossless, or that of the rule object. "
        "Rules that are not lossless at 0 (typical, fsd_paper, relaxed when sampling) need a threshold.", least=0)]
    divergence: Annotated[str | None, Option(
        None, "for rules that gate on one, default js: kl, reverse_kl, js, tv, js_fsd_code, or a form on the target's "
        "top k tokens such as js_top32.")]
    head_guard: Annotated[float | Literal["default"] | None, Option(
        "default", "alpha in [0, 1]: a fuzzy token needs target probability >= (1 - alpha) * the best token's. None: "
        'no guard, as in the papers. "default": that of the rule, 0.7 for fsd, typical and relaxed.',
        least=0, most=1)]
    budget: Annotated[float | None, Option(
        None, "total regret of an answer's fuzzy tokens in nats (log-probability of the target's best token less that "
        "of the accepted token). A token that would exceed it is rejected, and decoding is exact from there on, and "
        "likewise from where the text starts to repeat; `out.stats` reports where. 0: exact; inf: only repetition "
        "counts.", least=0)]
    fuzzy_within: Annotated[Sequence[str] | Sequence[int] | None, Option(
        None, 'two marks of one token each, as text or token ids, such as ("<think>", "</think>"). The rule applies '
        "after the first mark, which may be in the prompt, up to the second; elsewhere decoding is exact. None: it "
        "applies everywhere.")]
    tree: Annotated[TreeConfig | None, Option(
        None, "size of the draft tree; None: that of the model, see `load(tree=)`.",
        accepted="a TreeConfig, or None for the tree of load(tree=...)")]
    text_drafts: Annotated[TextDrafts | Copying, Option(
        "auto", '"auto": draft copies too. They continue an earlier occurrence of the last tokens in the prompt, the '
        'answer or a `reference`, as far as this is likely to pay. "off"; or a `TextDrafts`. Copies are part of the '
        "`tree` and its `total_tokens`.", accepted='"auto", "off" or a TextDrafts', plain=Copying)]
    reference: Annotated[str | Sequence[str] | None, Option(
        None, "one or more texts that the answer will resemble. Drafts are copied from them as well. The text of a "
        "lossless answer does not depend on them.", accepted="a text or a list of texts")]
    speculative: Annotated[bool, Option(
        True, "False: plain decoding without drafts or an acceptance rule.")]
    response_format: Annotated[Any, Option(  # a mapping, or a class of pydantic
        None, "form of the answer's text (extra `structured`): a JSON schema or a pydantic model, or an object with a "
        '`type`: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": S}}, {"type": "regex", '
        '"regex": R}, {"type": "choice", "choice": [...]}, or {"type": "grammar", "grammar": G} in Lark or GBNF syntax.'
        ' JSON has ", " and ": " and no other whitespace. `max_new_tokens` or a stop string may cut the answer short.')]
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, Option(
        None, "keywords of the tokenizer's `apply_chat_template`, for prompts that are chats, such as "
        '{"enable_thinking": False}, {"tools": [...]}, or {"continue_final_message": True}, which continues the last '
        "message. `add_generation_prompt` is True unless given.",
        accepted='keywords of apply_chat_template in a dict, such as {"enable_thinking": False}')]
    # see `from_generate`
    do_sample: bool | None
    stop_strings: str | Sequence[str] | None


@declare(GenerateKeywords)
class GenerateOptions(Options):
    """How tokens are drawn, where an answer ends, and which draft tokens are accepted.

    `do_sample` and `stop_strings` work as in `model.generate`.
    """

    def __init__(self, **options: Unpack[GenerateKeywords]) -> None:
        options = from_generate(options)
        GenerateOptions.check_names(options)
        for name, option in GenerateOptions.declared.items():
            object.__setattr__(self, name, options.get(name, option.default))
        self.__post_init__()

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "eos_token_id", "reference"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, (list, tuple, str, bytes, Mapping)):
                object.__setattr__(self, name, tuple(value))  # an iterator can be read once
        if isinstance(self.eos_token_id, Integral):
            object.__setattr__(self, "eos_token_id", (self.eos_token_id,))
        for name, option in self.declared.items():
            if (isinstance(value := getattr(self, name), list if name == "tree" else (list, tuple))
                    and Sequence not in map(get_origin, option.kinds)):
                raise OptionError(name, problem=f"must be one value for all prompts of a batch, got {value!r}; "
                                  f"{OF_ONE_PROMPT}")
        super().__post_init__()
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise OptionError("temperature", self.temperature, self.declared["temperature"].accepted)
        for token, bias in (self.logit_bias or {}).items():
            require_integer("logit_bias", token, 0)
            require_number("logit_bias", bias, "a number from -100 to 100 for each token", lambda x: -100 <= x <= 100)
        if not (self.generation_config is None or hasattr(self.generation_config, "to_diff_dict")):
            raise OptionError("generation_config", self.generation_config, "a GenerationConfig of transformers")
        self._check_ends()
        self._check_references()
        self._check_acceptance()

    def _check_ends(self) -> None:
        """Check what decides where an answer ends."""
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise OptionError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens ({self.max_new_tokens})")
        ends = [name for name in ("ignore_eos", "min_new_tokens") if getattr(self, name)]
        if self.response_format is not None and ends:
            raise OptionError("response_format", problem="decides where an answer ends: leave out "
                              f"{' and '.join(ends)}")
        if self.ignore_eos and self.eos_token_id is not None:
            raise OptionError("eos_token_id", problem="names end tokens that ignore_eos=True ignores: leave out one")
        if "" in self.stop_strings:
            raise OptionError("stop", problem="must be non-empty strings, got ''")

    def _check_references(self) -> None:
        if len(self.references) > MOST_REFERENCES:
            raise OptionError("reference", problem=f"may be at most {MOST_REFERENCES} texts, got "
                              f"{len(self.references)}")
        if self.references and self.text_drafts == "off":
            raise OptionError("reference", problem='needs text drafts: leave out text_drafts="off"')

    def _check_acceptance(self) -> None:
        """Check rule, budget and marks."""
        if self.budget is not None:
            require_number("budget", self.budget, "a number of nats, at least 0", lambda nats: nats >= 0)
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lossless(self) -> bool:
        """Whether the target alone would generate the same text."""
        return self.rule.is_lossless(self.greedy)

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


def with_options(
    options: GenerateOptions | None, keywords: Mapping[str, object], also: Sequence[str] = ()
) -> GenerateOptions:
    """The options, overridden by the keywords.

    Args:
        also: further names that the caller takes, for the error message.

    Raises:
        TypeError, ValueError: an unknown name, or a bad value.
    """
    if not (options is None or isinstance(options, GenerateOptions)):
        hint = f"; {OF_ONE_PROMPT}" if isinstance(options, (list, tuple)) else ""
        raise TypeError(f"options must be GenerateOptions or None, got {options!r}{hint}")
    options = GenerateOptions() if options is None else options
    overrides = from_generate(keywords, options.temperature)
    GenerateOptions.check_names(overrides, also)
    return replace(options, **overrides) if overrides else options


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
    ours = {"do_sample", *GenerateOptions.declared}
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
