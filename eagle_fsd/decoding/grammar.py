"""Structured output: the tokens that a grammar allows after a text, and the tokens that it forces.

llguidance (https://github.com/guidance-ai/llguidance) computes both. V is the size of the vocabulary.
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

from ..drafting.copies import Copies, forced_copies
from ..utils.checks import OptionError
from ..utils.installation import install_command

FORMS = ("json_object", "json_schema", "regex", "choice", "grammar")
SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# As `json.dumps` and most models write JSON. Free whitespace would leave few forced tokens, and small models may never
# stop writing it. "x-guidance" in a schema overrides this.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST = 48  # forced tokens of a draft
# Classes of regular expressions as in ECMA 262 and in the patterns of schemas; those of llguidance are Unicode classes.
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}


class GrammarError(OptionError):
    """A `response_format` that cannot be used, or that becomes too complex."""

    def __init__(self, problem: str) -> None:
        super().__init__("response_format", problem=problem)


class Grammar(LogitsProcessor):
    """Masks the tokens that the grammar does not allow next in the answer to one prompt.

    Like all processors, it is a function of the text.

    Args:
        response_format: see `GenerateOptions`.
        vocab_size: V of the logits. eos_ids: allowed where the text is complete.
        start: length of the prompt.

    Raises:
        ImportError: the extra `structured` is not installed.
        TypeError, ValueError: an invalid response format.
    """

    def __init__(
        self, response_format: object, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int,
        eos_ids: Sequence[int], start: int,
    ) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ImportError("response_format= needs llguidance: " + install_command("structured")) from error
        if not getattr(tokenizer, "is_fast", False):
            raise GrammarError("needs a fast tokenizer, and this model has "
                               f"{'none' if tokenizer is None else type(tokenizer).__name__}")
        eos_ids = [token for token in eos_ids if token < vocab_size]
        if not eos_ids:
            raise GrammarError("needs an end token, and this model's generation config has none")
        self.tokens, self.vocab_size = vocabulary(tokenizer, vocab_size, tuple(eos_ids)), vocab_size
        self.end, self.start = eos_ids[0], start
        self._matcher = LLMatcher(self.tokens, grammar_of(response_format), log_level=0)
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._matcher.compute_bitmask()
        self._check("cannot be used")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [1, L], [1, V]
        self._go_to(input_ids[0, self.start :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check("cannot go on")
        allowed = np.unpackbits(bits, count=self.vocab_size, bitorder="little")
        return scores.masked_fill(torch.from_numpy(allowed == 0).to(scores.device), -math.inf)

    def forced(self, answer: Sequence[int]) -> Copies | None:
        """The forced text after an answer's tokens, as a draft; None: nothing is forced.

        The grammar forces a text and not its tokens. The tokenisation is a guess, above all the last token, which may
        be part of a longer one.
        """
        self._go_to(answer)
        if self._matcher.is_error():  # `__call__` raises it, as an error of this row only
            return None
        text = self._matcher.compute_ff_bytes()
        tokens = self.tokens.tokenize_bytes(text)[:LONGEST] if text else []
        self._consumed += tokens[: self._matcher.try_consume_tokens(tokens)]
        if self._matcher.is_stopped():
            tokens = [*tokens, self.end]
        return forced_copies(tokens) if tokens else None

    def _go_to(self, answer: Sequence[int]) -> None:
        """Put the matcher in the state after these tokens of the answer."""
        answer = list(answer)
        same = next((at for at, (one, other) in enumerate(zip(self._consumed, answer, strict=False)) if one != other),
                    min(len(self._consumed), len(answer)))
        if len(self._consumed) > same:
            self._matcher.rollback(len(self._consumed) - same)
        self._matcher.consume_tokens(answer[same:])
        self._consumed = answer

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"{what}: {self._matcher.get_error().partition('<state>')[0].strip()}")


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...]) -> Any:
    """The tokenizer in the form of llguidance, which takes seconds to make. Added tokens beyond the logits are left
    out: they are never drawn.

    Raises:
        ValueError: llguidance does not support the tokenizer.
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
    """The grammar of llguidance for a response format.

    Raises:
        TypeError, ValueError: it has none of the forms that `GenerateOptions` lists.
    """
    from llguidance import LLMatcher, grammar_from

    if hasattr(response_format, "model_json_schema"):  # a pydantic model
        response_format = response_format.model_json_schema()
    if not isinstance(response_format, Mapping):
        raise GrammarError("must be a JSON schema, a pydantic model, or an object with a type of "
                           f"{', '.join(FORMS)}, got {response_format!r}")
    form = response_format.get("type")
    if not isinstance(form, str):  # a schema without a type, or with several
        form = None
    elif form not in (*FORMS, *SCHEMA_TYPES):
        raise GrammarError(f"of type {form!r} is not known; accepted: {', '.join(FORMS)}, or the types of a "
                           f"JSON schema, {', '.join(SCHEMA_TYPES)}")
    content = {"json_schema": Mapping, "regex": str, "choice": (list, tuple), "grammar": str}
    if form in content and not (isinstance(value := response_format.get(form), content[form]) and value):
        raise GrammarError(f'of type "{form}" needs a non-empty field "{form}", got {response_format!r}')
    if form in ("regex", "grammar") and (half := re.search("[\ud800-\udfff]", value)):
        raise GrammarError(f"is not valid text: lone surrogate {half[0]!r} at character {half.start()}")
    if form == "regex":
        return LLMatcher.grammar_from_regex(re.sub(r"\\(.)", lambda pair: ASCII.get(pair[1], pair[0]), value))
    if form == "choice":
        if not all(isinstance(text, str) and text for text in value):
            raise GrammarError(f"of type \"choice\" must contain non-empty strings, got {value!r}")
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, value))}")
    if form == "grammar":
        return grammar_from("grammar", value)
    if form == "json_object":
        schema: object = response_format.get("schema") or {"type": "object"}  # llama.cpp's form
    elif form == "json_schema":
        schema = {"type": "object"} if value.get("schema") is None else value["schema"]
    else:
        schema = response_format
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=WHITESPACE)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"is not a JSON schema: {error}") from error
