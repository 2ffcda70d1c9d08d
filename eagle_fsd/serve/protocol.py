"""What clients ask for and get: requests with their options of decoding, and answers whole or in pieces."""

from __future__ import annotations

import functools
import json
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import docstring_parser
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from ..acceptance import RULES
from ..batching.tickets import Piece
from ..decoding.grammar import vocabulary
from ..decoding.output import Output, Receipt
from ..drafting.config import TreeConfig
from ..drafting.tree import DRAFTERS
from ..options import MOST_LOGPROBS, GenerateOptions, names_of
from ..pair import EagleModel
from ..prompts import ROLES, encode_chat
from .tools import HeldText, check_tools, chosen_tools, find_calls, json_text, schema_of_a_call
from .tools import names_of as names_of_tools

LONGEST_MESSAGE = 600  # characters: a request's own values are shown in it
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
MOST_CHOICES = 8
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message

OPTIONS = names_of(GenerateOptions)
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}  # the API's name: ours
TO_THE_END = 2**31  # max_new_tokens of an answer without a limit, which the engine lowers
RULE = {"threshold", "divergence", "head_guard"}  # belong to the rule that they were given with
NULLS = {"head_guard"}  # where null says something else than nothing

# What the API and other servers have and this one does not: accepted where it changes nothing.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "parallel_tool_calls")
NEUTRAL: dict[str, tuple] = {
    "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "echo": (False,), "suffix": ("",),
    "best_of": (1,), "add_generation_prompt": (True,), "bad_words": ([],), "cache_prompt": (True,),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "early_stopping": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "priority": (0,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
SCHEMA = 'response_format={"type": "json_schema", "json_schema": {"schema": S}}'
ELSEWHERE = {  # names of other servers, and what to use here
    "grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_choice": 'response_format={"type": "choice", "choice": [...]}',
    "guided_grammar": 'response_format={"type": "grammar", "grammar": G}',
    "guided_json": SCHEMA,
    "guided_regex": 'response_format={"type": "regex", "regex": R}',
    "json_schema": SCHEMA,
    "min_tokens": "min_new_tokens",
    "repeat_penalty": "repetition_penalty",
    "structured_outputs": "response_format, of the type json_schema, regex, choice or grammar",
}


def whole_number(name: str, least: int, most: int) -> Any:
    """The type of a field that is an integer within bounds, or null."""
    def check(value: Any) -> int | None:
        if value is None or type(value) is int and least <= value <= most:
            return value
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")

    return Annotated[int | None, BeforeValidator(check)]


# Refusals ------------------------------------------------------------------------------------------------------------


class Refusal(HTTPException):
    """A request that is not answered, and what its client is told.

    Args:
        status: of HTTP.
        message: one line; cut where it is long.
        param: the field that is wrong.
        code: a word for programs, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        text = " ".join(message.split())
        super().__init__(status, text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}...",
                         HEADERS.get(status))
        self.param, self.code = param, code

    @property
    def body(self) -> dict:
        """What the client reads: `{"error": {"message", "type", "param", "code"}}`."""
        usual = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": TYPES.get(self.status_code, usual), "param": self.param,
                          "code": self.code}}


# Options of decoding -------------------------------------------------------------------------------------------------


def options_over(
    defaults: Mapping[str, object], given: Mapping[str, object], also: Sequence[str] = ()
) -> GenerateOptions:
    """A request's options over the server's defaults: who chooses a rule chooses its threshold too, and who gives a
    reference has it copied from. Where nobody says how long an answer may be, it goes on `TO_THE_END`.

    Args:
        also: fields that a request has besides, for the message about one that is not known.

    Raises:
        TypeError, ValueError: as `GenerateOptions`, and for what one request may not ask for.
    """
    kept = {"max_new_tokens": TO_THE_END, **defaults}
    kept = {name: value for name, value in kept.items() if not ("acceptance" in given and name in RULE)}
    if given.get("text_drafts") == "off":
        kept.pop("reference", None)
    elif "reference" in given and kept.get("text_drafts") == "off":
        del kept["text_drafts"]
    if "min_new_tokens" not in given and isinstance(most := given.get("max_new_tokens"), int):
        kept["min_new_tokens"] = min(kept.get("min_new_tokens", 0), max(most, 0))  # a shorter answer than the default's
    options = GenerateOptions.from_names({**kept, **given}, also)
    if isinstance(options.seed, (list, tuple)):
        raise TypeError("seed must be an int: that of the first choice; the others get the numbers that follow")
    if len(options.stop_strings) > MOST_STOPS:
        raise ValueError(f"stop must hold at most {MOST_STOPS} strings, got {len(options.stop_strings)}")
    return options


def tree_of(given: Any) -> TreeConfig:
    """A request's own tree.

    Raises:
        ValueError: something else than its numbers by name.
    """
    try:
        return TreeConfig(**given)
    except TypeError as error:
        raise ValueError(f'tree must be {{"total_tokens": N, "depth": D, "top_k": K}}, got {given!r}') from error


def refused(error: Exception, fields: Mapping[str, str] = MappingProxyType({})) -> Refusal:
    """For a `ValueError` or `TypeError` of the core, in its words: they begin with the option that is wrong.

    Args:
        fields: of the request, by the options that were made of them.
    """
    name, space, rest = str(error).partition(" ")
    theirs = {"max_new_tokens": "max_tokens", **fields}.get(name, name)
    return Refusal(400, theirs + space + rest, param=theirs if name in (*OPTIONS, "tools") else None)


# Requests ------------------------------------------------------------------------------------------------------------


class Part(BaseModel):
    """A piece of a message: text, no image and no sound."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


# One wrong item of a list is told, not each: a body has room for half a million.
Content = str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


def plain_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(BaseModel):
    """One message of a chat. An answer of the API may be sent back."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Content | None = None
    tool_calls: list[dict] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_all(self) -> Message:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"content of a message of the {self.role} must be text, got None")
        for name, value in self.model_extra.items():
            if value not in (None, []) and name != "name":  # of a person: templates have no place for it
                raise ValueError(f"not supported here: {name} of a message")
        self.plain()
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it; the API's newer name for `system` is not known to them.

        Raises:
            ValueError: calls that are none.
        """
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role,
                                   "content": "" if self.content is None else plain_text(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [plain_call(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def plain_call(call: dict) -> dict:
    """A call with its arguments as an object, which templates write themselves. Whatever else some model gave as
    arguments stays as it is: a conversation goes on after it.

    Raises:
        ValueError: it names no function.
    """
    function = call.get("function")
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise ValueError('each of tool_calls must be {"id": I, "type": "function", "function": {"name": N, '
                         f'"arguments": A}}}}, where A is a JSON object as text, got {call!r}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "type": "function",
            "function": {"name": function["name"], "arguments": arguments or {}}}


class Prediction(BaseModel):
    """What the answer will resemble, such as a file that is to be edited."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["content"]
    content: Content


class StreamOptions(BaseModel):
    """What a stream says besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as vLLM: with every piece
    include_obfuscation: bool = False  # padding, which is never sent


def add_options(schema: dict[str, Any]) -> None:
    """Describe the options of decoding in the API's page, in the words of their docstring."""
    told = {each.arg_name: each.description for each in docstring_parser.parse(GenerateOptions.__doc__ or "").params}
    shapes = {
        "acceptance": {"enum": list(RULES)}, "text_drafts": {"enum": ["auto", "off"]},
        "tree": {"type": "object", "properties": {
            name: {"type": "integer"} for name in ("total_tokens", "depth", "top_k")}},
    }
    kinds, named = get_type_hints(GenerateOptions), schema["properties"]
    for name, ours in {**{name: name for name in kinds}, **RENAMED}.items():
        if name not in named:
            named[name] = {**(shapes.get(ours) or TypeAdapter(kinds[ours]).json_schema()), "description": told[ours]}


class Asked(BaseModel):
    """What both kinds of requests have; further fields are options of decoding, see `options`."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=add_options)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: whole_number("n", 1, MOST_CHOICES) = 1
    response_format: Any = None
    logit_bias: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are of a stream: give stream=true with them")
        return self

    @property
    def predicted(self) -> str | None:
        """The text of a prediction, the API's name for a reference."""
        return None

    @property
    def listed(self) -> int | None:
        """Tokens that are told beside each; None: no log-probabilities are asked for."""
        return None

    @property
    def format(self) -> Any:
        """What the answer's text must be."""
        return None if self.response_format == {"type": "text"} else self.response_format

    @property
    def fields(self) -> dict[str, str]:
        """What options are called here that were made of other fields."""
        return {}

    def options(self, defaults: Mapping[str, object]) -> GenerateOptions:
        """The options of decoding: those of the request, else the server's.

        Raises:
            Refusal: a field that is not known or not supported, or a value that cannot be accepted.
        """
        own = {"reference": self.predicted, "top_logprobs": self.listed, "response_format": self.format}
        given = {name: value for name, value in own.items() if value is not None}
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT or value is None and name not in NULLS:
                continue
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise Refusal(400, f"not supported here: {name}={value!r}, leave it out", param=name)
                continue
            if name in ELSEWHERE:
                raise Refusal(400, f"unknown option {name!r}; use {ELSEWHERE[name]}", param=name, code="unknown_field")
            ours = RENAMED.get(name, name)
            if ours in given and given[ours] != value:
                raise Refusal(400, f"{name}={value!r} was given under another name too, with another value", param=name)
            given[ours] = value
        if given.get("top_k") == -1:  # vLLM's way to say that it is off
            given["top_k"] = 0
        try:
            if self.logit_bias:
                given["logit_bias"] = {int(token) if token.isdecimal() and len(token) < 10 else token: bias
                                       for token, bias in self.logit_bias.items()}
            for name, accepted in (("acceptance", tuple(RULES)), ("text_drafts", ("auto", "off"))):
                if name in given and given[name] not in accepted:
                    raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {given[name]!r}")
            if "tree" in given:
                given["tree"] = tree_of(given["tree"])
            return options_over(defaults, given, (*RENAMED, *type(self).model_fields))
        except (TypeError, ValueError) as error:
            unknown = next((name for name in given if name not in OPTIONS), None)
            if unknown is not None:
                raise Refusal(400, str(error), param=unknown, code="unknown_field") from error
            raise refused(error, self.fields) from error


class ChatRequest(Asked):
    """The body of `/v1/chat/completions`. Further fields are options of decoding by their names in `generate`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: whole_number("top_logprobs", 0, MOST_LOGPROBS) = None
    tools: Any = None
    tool_choice: Any = None
    prediction: Prediction | None = Field(None, description=(
        "A text that the answer will resemble: drafts are copied from it. A lossless answer does not depend on it; "
        "usage.completion_tokens_details says what it was good for."))

    @field_validator("prediction", mode="wrap")
    @classmethod
    def check_prediction(cls, value: Any, usual: ValidatorFunctionWrapHandler) -> Prediction | None:
        """One message for all that can be wrong with it."""
        try:
            return usual(value)
        except ValidationError as error:
            raise ValueError('it must be {"type": "content", "content": C}, where C is a text or a list of at most '
                             f'{MOST_PARTS} parts {{"type": "text", "text": ...}}') from error

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs are told beside logprobs: give logprobs=true with them")
        self._tools, self._must_call = chosen_tools(check_tools(self.tools or []), self.tool_choice)
        if self._must_call and self.response_format not in (None, {"type": "text"}):
            raise ValueError("response_format cannot hold for a call that tool_choice asks for: leave one of them out")
        return self

    _tools: list[dict] = []  # that may be called
    _must_call: bool = False

    @property
    def predicted(self) -> str | None:
        return None if self.prediction is None else plain_text(self.prediction.content)

    @property
    def listed(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def format(self) -> Any:
        return schema_of_a_call(self._tools) if self._must_call else super().format

    @property
    def fields(self) -> dict[str, str]:
        return ({} if self.prediction is None else {"reference": "prediction"}) | (
            {"response_format": "tools"} if self._must_call else {})

    @property
    def may_call(self) -> list[str]:
        """The names of tools that may be called."""
        return names_of_tools(self._tools)

    def prompts(self, model: EagleModel) -> list[Any]:
        """The chat as token ids."""
        return [encode_chat([message.plain() for message in self.messages], model, self._tools or None)]


class CompletionRequest(Asked):
    """The body of `/v1/completions`: texts as they are, or token ids. Further fields are options of decoding by their
    names in `generate`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: whole_number("logprobs", 0, MOST_LOGPROBS) = None  # 0: of the chosen tokens alone

    may_call: ClassVar[Sequence[str]] = ()

    @property
    def listed(self) -> int | None:
        return self.logprobs

    def prompts(self, model: EagleModel) -> list[Any]:
        """The texts, or their token ids."""
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]


# Answers -------------------------------------------------------------------------------------------------------------


@dataclass
class Form:
    """How the answers to one request look.

    Args:
        model: the name that the server gives its model.
        asked: the request.
        spell: what a token is, where log-probabilities are asked for: see `speller`.
        prompts: lengths of the prompts.
    """

    model: str
    asked: ChatRequest | CompletionRequest
    spell: Callable[[int], tuple[str, list[int] | None]] | None
    prompts: Sequence[int]
    new_tokens: int = 0  # that were streamed
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    held: dict[int, HeldText] = field(default_factory=lambda: defaultdict(HeldText))  # of a stream that may call tools

    @property
    def chat(self) -> bool:
        return isinstance(self.asked, ChatRequest)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for index, output in enumerate(outputs):
            text, calls = self._calls(output)
            message = {"role": "assistant", "content": text if text or not calls else None}
            said = {"message": message | ({"tool_calls": calls} if calls else {})} if self.chat else {"text": text}
            choices.append({"index": index, **said, "finish_reason": self._reason(output, calls),
                            "logprobs": self._tokens(output.token_ids, output.receipts), "seed": output.seed})
        return self._body("", choices, self._usage(outputs))

    def _calls(self, output: Output) -> tuple[str, list[dict]]:
        """What is said, and the tools that are called."""
        return find_calls(output.text, self.asked.may_call) if self.asked.may_call else (output.text, [])

    @staticmethod
    def _reason(output: Output, calls: list[dict]) -> str:
        return "tool_calls" if calls else FINISHED[output.finish_reason]

    def opening(self, index: int) -> str:
        """What a chat's stream begins with: who speaks."""
        return self._event([self._choice(index, {"role": "assistant", "content": ""})])

    def piece(self, index: int, piece: Piece) -> str:
        """What a cycle added to a choice; empty where it is neither text nor asked for."""
        self.new_tokens += len(piece.token_ids)
        listed = self._tokens(piece.token_ids, piece.receipts)
        text = self.held[index].add(piece.text) if self.asked.may_call else piece.text
        if not text and listed is None:
            return ""
        return self._event([self._choice(index, {"content": text}, logprobs=listed)])

    def ending(self, index: int, output: Output) -> str:
        """What was held back of a choice, and why it ended."""
        text, calls = self._calls(output)
        said = {"content": rest} if self.asked.may_call and (rest := text[self.held[index].shown :]) else {}
        if calls:
            said["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        before = self._event([self._choice(index, said)]) if said else ""
        return before + self._event([self._choice(index, {}, self._reason(output, calls)) | {"seed": output.seed}])

    def closing(self, outputs: Sequence[Output]) -> str:
        """What a stream ends with."""
        wanted = self.asked.stream_options and self.asked.stream_options.include_usage
        last = as_event(self._body(".chunk", [], self._usage(outputs))) if wanted else ""
        return f"{last}data: [DONE]\n\n"

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return usage(sum(self.prompts), outputs, predicted=self.asked.predicted is not None, prompts=len(self.prompts))

    def _choice(self, index: int, delta: dict, reason: str | None = None, logprobs: dict | None = None) -> dict:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}

    def _event(self, choices: list[dict]) -> str:
        wanted = self.asked.stream_options and self.asked.stream_options.continuous_usage_stats
        return as_event(self._body(".chunk", choices, counts(sum(self.prompts), self.new_tokens) if wanted else None))

    def _body(self, kind: str, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        """The object around choices; `kind`: what it is of a chat's answer, "" or ".chunk"."""
        named, prefix = (f"chat.completion{kind}", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": named, "created": self.created, "model": self.model,
                "choices": choices, **({} if usage is None else {"usage": usage})}

    def _tokens(self, ids: Sequence[int], receipts: Sequence[Receipt]) -> dict | None:
        """Tokens with their log-probabilities under the target, and as further fields where they come from."""
        if self.asked.listed is None:
            return None
        rows = [(self._token(token, receipt.logprob), receipt) for token, receipt in zip(ids, receipts, strict=True)]
        if self.chat:
            best = [[self._token(*each) for each in receipt.top] for receipt in receipts]
            return {"content": [token | {
                "top_logprobs": top, "source": receipt.source, "drafter": receipt.drafter,
                "divergence": finite(receipt.divergence), "regret": finite(receipt.regret)}
                for (token, receipt), top in zip(rows, best, strict=True)]}
        return {"tokens": [token["token"] for token, _ in rows],
                "token_logprobs": [token["logprob"] for token, _ in rows],
                "top_logprobs": [self._by_text(receipt.top) for receipt in receipts] if self.asked.listed else None,
                "source": [receipt.source for receipt in receipts]}

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float | None]:
        """Alternatives by their text, those of a text that another one has already by their ids, as in vLLM."""
        found: dict[str, float | None] = {}
        for token, logprob in top:
            text, _ = self.spell(token)
            found[f"token_id:{token}" if text in found else text] = finite(logprob)
        return found

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, parts = self.spell(token)
        return {"token": text, "logprob": finite(logprob), "bytes": parts}


@functools.lru_cache(maxsize=4)
def speller(
    tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...]
) -> Callable[[int], tuple[str, list[int] | None]]:
    """What a token is: its text, or "bytes:..." for a part of a character, and the bytes that it adds to a text; None:
    it is no part of one, as an end token. What llguidance does not know, such as a tokenizer of words, has text alone.
    """
    tokens = None
    with suppress(ValueError, AttributeError, ImportError):  # AttributeError: of a slow tokenizer
        ends = tuple(token for token in eos_ids if token < size)  # as of `Grammar`, whose vocabulary it is
        tokens = vocabulary(tokenizer, size, ends or (0,))

    def spell(token: int) -> tuple[str, list[int] | None]:
        text = tokenizer.decode([token])
        parts = text.encode() if tokens is None else tokens.decode_bytes([token])
        if text and not tokenizer.decode([token], skip_special_tokens=True):
            return text, None
        try:
            return parts.decode(), list(parts)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in parts), list(parts)

    return spell


def finite(value: float | None) -> float | None:
    """What JSON has a number for."""
    return value if value is not None and math.isfinite(value) else None


def as_event(body: dict) -> str:
    """A server-sent event."""
    return f"data: {json_text(body)}\n\n"


def counts(prompt: int, new: int) -> dict[str, Any]:
    """Tokens in the API's fields."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def usage(prompt: int, outputs: Sequence[Output], predicted: bool = False, prompts: int = 1) -> dict[str, Any]:
    """Tokens, and what drafting and the rule made of them: `accepted_tokens` of the draft, tau, drafted tokens by who
    drafted them, `fuzzy_tokens` that only the rule accepted with their `regret` in nats, and the target's forwards.

    Args:
        prompt: tokens of all prompts. prompts: how many, with as many outputs each.
        predicted: whether there was a prediction. Tokens of the answer that are copies count as accepted from it, and
            copies that were verified for nothing as rejected, wherever in the text they were found: what was predicted
            mostly stands in the prompt too.
    """
    stats = [output.stats for output in outputs]
    accepted = sum(sum(each.accepted_lengths) for each in stats)
    cycles = sum(len(each.accepted_lengths) for each in stats)
    choices = len(stats) // prompts  # the first of a prompt reads it, the others find what it has read
    read = sum(max(each.prefill_tokens for each in stats[at : at + choices]) for at in range(0, len(stats), choices))
    fuzzy = [receipt.regret for output in outputs for receipt in output.receipts if receipt.source == "fuzzy"]
    by_drafter = {name: {drafter: sum(getattr(each, name)[drafter] for each in stats) for drafter in DRAFTERS}
                  for name in ("proposed", "accepted")}
    copied = sum(receipt.drafter == "text" for output in outputs for receipt in output.receipts) if predicted else 0
    rejected = by_drafter["proposed"]["text"] - copied if predicted else 0
    return {
        **counts(prompt, sum(len(output.token_ids) for output in outputs)),
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - read) if read else 0},
        "completion_tokens_details": {"accepted_prediction_tokens": copied, "rejected_prediction_tokens": rejected},
        "accepted_tokens": accepted, "tau": round(accepted / cycles + 1, 4) if cycles else 1.0,
        "proposed_by": by_drafter["proposed"], "accepted_by": by_drafter["accepted"],
        "fuzzy_tokens": len(fuzzy), "regret": round(math.fsum(fuzzy), 4),
        "target_forwards": sum(each.target_forwards for each in stats),
    }
