"""How an option is declared: once, as an annotated key of a `TypedDict`.

The declaration has the option's name, type, default, description and bounds. The `TypedDict` is the type of keyword
arguments for editors (PEP 692). `declare` makes the dataclass of it, with its checks and its docstring, which is the
help of the command line. `lists_options` puts the options into signatures. The endpoint's schema (`serve/protocol.py`)
and docs/options.md are made of the declarations as well.
"""

from __future__ import annotations

import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..utils.checks import OptionError, require_bool, require_integer, require_number

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable)
REPLACEMENTS = {  # names from other libraries and servers: what to use here
    "add_generation_prompt": 'chat_template_kwargs={"add_generation_prompt": ...}',
    "assistant_model": "load(target, draft): a draft head or a small causal LM drafts",
    "attention_mask": "the output of the tokenizer, mask included, as the prompt",
    "bad_words_ids": "logits_processor=[NoBadWordsLogitsProcessor(...)]",
    "continue_final_message": 'chat_template_kwargs={"continue_final_message": True}',
    "do_sample": "temperature= (0 is greedy)",
    "enable_thinking": 'chat_template_kwargs={"enable_thinking": ...}',
    "grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_choice": 'response_format={"type": "choice", "choice": [...]}',
    "guided_grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_json": 'response_format={"type": "json_schema", "json_schema": {"schema": S}}',
    "guided_regex": 'response_format={"type": "regex", "regex": R}',
    "input_ids": "prompt, the first argument",
    "inputs": "prompt, the first argument",
    "logprobs": "receipts of the output, one for each token",
    "max_completion_tokens": "max_new_tokens=",
    "json_schema": 'response_format={"type": "json_schema", "json_schema": {"schema": S}}',
    "max_length": "max_new_tokens=",
    "max_time": "stopping_criteria=[MaxTimeCriteria(seconds)]",
    "max_tokens": "max_new_tokens=",
    "messages": "prompt, the first argument",
    "m": "target=",
    "min_length": "min_new_tokens=",
    "min_tokens": "min_new_tokens=",
    "model": "target=",
    "n": "a list of prompts with a list of seeds",
    "n_predict": "max_new_tokens=",
    "no_repeat_ngram_size": "logits_processor=[NoRepeatNGramLogitsProcessor(n)]",
    "num_beams": "greedy decoding or sampling: there are no beams",
    "num_return_sequences": "a list of prompts with a list of seeds",
    "output_scores": "receipts of the output, one for each token",
    "pad_token_id": "nothing: prompts of a batch are not padded",
    "prefix_allowed_tokens_fn": "logits_processor=[PrefixConstrainedLogitsProcessor(...)]",
    "pool": "reference=, a text from which drafts are copied",
    "prediction": "reference=",
    "remember": "reference=, a text from which drafts are copied",
    "repeat_penalty": "repetition_penalty=",
    "session": "Chat(model), which keeps one",
    "stop_strings": "stop=",
    "prompt_lookup_num_tokens": "text_drafts=, which is on by default",
    "stream": "streamer=, or Engine(model).submit(...), whose ticket is an iterator",
    "streamer": "Engine(model).submit(...), whose ticket is an iterator",
    "structured_outputs": "response_format=",
    "temp": "temperature=",
    "tokenizer": "nothing: the model has its tokenizer",
    "tools": 'chat_template_kwargs={"tools": [...]}',
    "use_cache": "nothing: there is always a cache",
    # of load
    "compile": "nothing: prepacked weights, the default, are faster",
    "load_in_4bit": "quantization_config=",
    "load_in_8bit": "quantization_config=",
    "torch_dtype": "dtype=",
    "tp_plan": "device_map=, or vLLM with an exported head (eagle-fsd export)",
}


@dataclass(frozen=True)
class Option:
    """What a declaration says of an option besides its name.

    Args:
        default: its value if the caller sets none.
        meaning: its description.
        least, most: bounds of a number, or of each of several, included.
        above: a lower bound that is not included.
        accepted: the valid values in words that follow "must be". Bools and ints need none; the type of another option
            is checked only if it has them.
        plain: its type as JSON, if that is not its type in Python.
        kinds, optional: its types in Python without None, and whether it may be None; `declarations` sets both.
    """

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    accepted: str = ""
    plain: Any = None
    kinds: tuple = ()
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise OptionError if the value is of another type or out of bounds."""
        if value is None and self.optional:
            return
        if self.kinds == (bool,):
            require_bool(name, value)
        elif self.kinds == (int,):
            require_integer(name, value, self.least, self.most)
        elif self.kinds == (float,) and self.accepted:
            require_number(name, value, self.accepted, self.allows)
        elif {int, Sequence[int]}.issuperset(self.kinds) and (isinstance(value, (list, tuple)) or not self.accepted):
            for number in value if isinstance(value, (list, tuple)) else [value]:
                require_integer(name, number, self.least, self.most)
        elif self.accepted and not any(is_of(value, kind) for kind in self.kinds):
            raise OptionError(name, value, self.accepted)

    def allows(self, number: float) -> bool:
        """Whether a number lies in the bounds; infinity and NaN do not."""
        return math.isfinite(number) and (self.least is None or number >= self.least) and (
            self.above is None or number > self.above) and (self.most is None or number <= self.most)


def members(kind: Any) -> tuple:
    """The members of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def is_of(value: object, kind: Any) -> bool:
    """Whether a value is of a type: for `Literal` one of its values, for `Sequence` a list or tuple of such items."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(is_of(item, *get_args(kind)) for item in value)
    return isinstance(value, origin)


def declarations(owner: type) -> dict[str, Option]:
    """The options that a class or `TypedDict` declares, by name."""
    found = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, Option):
                kinds = members(hint.__origin__)
                found[name] = replace(option, kinds=tuple(kind for kind in kinds if kind is not NoneType),
                                      optional=NoneType in kinds)
    return found


class Options:
    """Base class of the dataclasses that `declare` makes.

    Attributes:
        declared: the declarations by name, in order.
    """

    declared: ClassVar[Mapping[str, Option]] = {}

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def check_names(cls, options: Iterable[str], also: Sequence[str] = ()) -> None:
        """Raise TypeError for a name that is no option. The message names a replacement or lists the accepted names.

        Args:
            also: further names that the caller accepts, for the message.
        """
        accepted = [*cls.declared, *also]
        for name in options:
            if name not in cls.declared:
                near = difflib.get_close_matches(str(name), [*accepted, *REPLACEMENTS], 1, cutoff=0.75)  # misspelt
                meant = name if name in REPLACEMENTS else next(iter(near), None)
                hint = (f"accepted: {', '.join(accepted)}" if meant is None else f"did you mean {meant!r}?"
                        if meant in accepted else f"use {REPLACEMENTS[meant]}")
                raise TypeError(f"unknown option {name!r}; {hint}")

    def __post_init__(self) -> None:
        for name, option in self.declared.items():
            option.check(name, getattr(self, name))


def declare(keywords: type) -> Callable[[T], T]:
    """A decorator that makes a frozen dataclass of the options that a class and this `TypedDict` declare. Its docstring
    is that of the class and the descriptions; a constructor of its own stays.
    """
    def decorate(owner: T) -> T:
        hints = {name: hint for each in (owner, keywords)
                 for name, hint in get_type_hints(each, include_extras=True).items()}  # with what tyro reads
        owner.declared = declarations(owner) | declarations(keywords)
        owner.__annotations__ = {name: hints[name] for name in owner.declared}
        for name, option in owner.declared.items():
            setattr(owner, name, option.default)
        owner.__doc__ = f"{inspect.cleandoc(owner.__doc__ or '')}\n\nArgs:\n{meanings(owner.declared)}"
        return dataclass(frozen=True, init="__init__" not in vars(owner))(owner)

    return decorate


def meanings(options: Mapping[str, Option]) -> str:
    """The descriptions of options, as in a docstring."""
    wrap = textwrap.TextWrapper(116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False,
                                break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{name}: {option.meaning}") for name, option in options.items())


def lists_options(
    keywords: type, *, names: Sequence[str] | None = None, described: bool = False
) -> Callable[[F], F]:
    """A decorator that lists the options a function takes as `**keywords`, with defaults, in its signature.

    Args:
        keywords: the `TypedDict` that declares them.
        names: the options; None: all.
        described: add the descriptions of the options to the docstring.
    """
    options = declarations(keywords)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        listed = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint,
                                    default=options[name].default if name in options else None)
                  for name, hint in get_type_hints(keywords).items() if names is None or name in names]
        function.__signature__ = signature.replace(parameters=[*own, *listed])
        if described:
            function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions by name:\n{meanings(options)}"
        return function

    return decorate
