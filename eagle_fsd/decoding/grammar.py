"""Structured output: the tokens that a grammar allows after a text, and those that it leaves no choice about.

llguidance computes both (https://github.com/guidance-ai/llguidance). V vocabulary.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from ..checks import OptionError
from ..drafting.text import Copies, forced_copies

FORMS = ("text", "json_object", "json_schema", "regex", "choice", "grammar")
SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# As `json.dumps` and most models write it: a choice of blanks between tokens would leave few tokens without a choice,
# and small models never stop writing them. A schema's own "x-guidance" says otherwise.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST = 48  # tokens drafted in a row
# Of a regular expression as in ECMA 262, and as llguidance has them in a schema's patterns; its own are Unicode's.
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}


class GrammarError(OptionError):
    """A `response_format` that cannot be used, or that is too complex to go on with."""

    def __init__(self, problem: str) -> None:
        super().__init__("response_format", problem=problem)


class Grammar(LogitsProcessor):
    """Forbids the tokens that the answer to one prompt cannot go on with: a function of the text, like all processors.

    Args:
        response_format: see `GenerateOptions`.
        vocab_size: V, that of the logits. eos_ids: allowed where the grammar is complete.
        start: length of the prompt.

    Raises:
        ImportError: the extra `structured` is not installed.
        TypeError, ValueError: no grammar can be made of it.
    """

    def __init__(
        self, response_format: object, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int,
        eos_ids: Sequence[int], start: int,
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ImportError("response_format= needs llguidance: pip install llguidance") from error
        if not getattr(tokenizer, "is_fast", False):
            raise GrammarError("needs a fast tokenizer, and this model has "
                               f"{'none' if tokenizer is None else type(tokenizer).__name__}")
        eos_ids = [token for token in eos_ids if token < vocab_size]
        if not eos_ids:
            raise GrammarError("needs an end token, and this model's generation config has none")
        self.tokens, self.vocab_size = vocabulary(tokenizer, vocab_size, tuple(eos_ids)), vocab_size
        self.end, self.start = eos_ids[0], start
        self._matcher = LLMatcher(self.tokens, grammar_of(response_format), log_level=0)
        self._said: list[int] = []  # what it has been told
        self._matcher.compute_bitmask()
        self._check("cannot be used")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [1, L], [1, V]
        self._go_to(input_ids[0, self.start :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check("cannot go on")
        allowed = np.unpackbits(bits, count=self.vocab_size, bitorder="little")
        return scores.masked_fill(torch.from_numpy(allowed == 0).to(scores.device), -math.inf)

    def forced(self, said: Sequence[int]) -> Copies | None:
        """What can only come after an answer's tokens, as a draft; None: there is a choice.

        Its last token is a guess: it may be part of a longer one. So is the tokenisation of all, which the grammar
        leaves free.
        """
        self._go_to(said)
        if self._matcher.is_error():  # said where the mask is asked for, which is an error of this row alone
            return None
        text = self._matcher.compute_ff_bytes()
        tokens = self.tokens.tokenize_bytes(text)[:LONGEST] if text else []
        self._said += tokens[: self._matcher.try_consume_tokens(tokens)]
        if self._matcher.is_stopped():
            tokens = [*tokens, self.end]
        return forced_copies(tokens) if tokens else None

    def _go_to(self, said: Sequence[int]) -> None:
        """Be where these tokens of the answer have been said."""
        said = list(said)
        same = next((at for at, (one, other) in enumerate(zip(self._said, said, strict=False)) if one != other),
                    min(len(self._said), len(said)))
        if len(self._said) > same:
            self._matcher.rollback(len(self._said) - same)
        self._matcher.consume_tokens(said[same:])
        self._said = said

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"{what}: {self._matcher.get_error().partition('<state>')[0].strip()}")


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...]) -> Any:
    """The tokens in llguidance's form, which takes it seconds to make. Added ones that the logits have no place for are
    left out: they are never drawn.

    Raises:
        ValueError: llguidance does not know such a tokenizer.
    """
    from llguidance import LLTokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["padding"] = described["truncation"] = None
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < size]
    try:
        return LLTokenizer(json.dumps(described), n_vocab=size, eos_token=list(eos_ids))
    except ValueError as error:
        raise GrammarError(f"cannot be used with this tokenizer: {error}") from error


def grammar_of(response_format: object) -> str:
    """llguidance's grammar.

    Raises:
        TypeError, ValueError: it is none of the forms that `GenerateOptions` names.
    """
    from llguidance import LLMatcher, grammar_from

    if hasattr(response_format, "model_json_schema"):  # of pydantic
        response_format = response_format.model_json_schema()
    if not isinstance(response_format, Mapping):
        raise GrammarError("must be a JSON schema, a pydantic model, or an object of a type of "
                           f"{', '.join(FORMS[1:])}, got {response_format!r}")
    form = response_format.get("type")
    if not isinstance(form, str):  # a schema without a type, or of several
        form = None
    elif form not in (*FORMS, *SCHEMA_TYPES):
        raise GrammarError(f"of type {form!r} is not known; accepted: {', '.join(FORMS[1:])}, or those of a JSON "
                           f"schema, {', '.join(SCHEMA_TYPES)}")
    wanted = {"json_schema": Mapping, "regex": str, "choice": (list, tuple), "grammar": str}
    if form in wanted and not (isinstance(found := response_format.get(form), wanted[form]) and found):
        raise GrammarError(f'of type "{form}" needs a field "{form}" that is not empty, got {response_format!r}')
    if form in ("regex", "grammar") and (half := re.search("[\ud800-\udfff]", found)):
        raise GrammarError(f"holds no valid text: a lone surrogate {half[0]!r} at {half.start()}")
    if form == "regex":
        return LLMatcher.grammar_from_regex(re.sub(r"\\(.)", lambda pair: ASCII.get(pair[1], pair[0]), found))
    if form == "choice":
        if not all(isinstance(text, str) and text for text in found):
            raise GrammarError(f"of type \"choice\" must hold non-empty strings, got {found!r}")
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, found))}")
    if form == "grammar":
        return grammar_from("grammar", found)
    if form == "json_object":
        schema: object = response_format.get("schema") or {"type": "object"}  # llama.cpp's form
    elif form == "json_schema":
        schema = {"type": "object"} if found.get("schema") is None else found["schema"]
    else:
        schema = response_format
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=WHITESPACE)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"holds no JSON schema: {error}") from error
