"""What clients send: requests of OpenAI's API with options of decoding, and what refuses them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from ..checks import OptionError, require_integer
from ..drafting.config import TreeConfig
from ..keywords import unknown_option
from ..options import GenerateOptions
from ..pair import EagleModel
from ..prompts import encode_chat
from .tools import check_tools, chosen_tools, schema_of_a_call, tool_names

LONGEST_MESSAGE = 600  # characters; messages show values of the request
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}
MOST_CHOICES = 8
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message

OPTIONS = GenerateOptions.names()
TO_THE_END = 2**31  # max_new_tokens of an answer without a limit, which the engine lowers
OF_A_RULE = {"threshold", "divergence", "head_guard"}  # a request with another rule does not take the server's
NULLS = {"head_guard"}  # where null is a value of its own
# Fields of the API that change nothing here, whatever their value; and the values of others that change nothing.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
NEUTRAL = {"functions": [], "function_call": "none", "modalities": ["text"], "echo": False, "suffix": "", "best_of": 1}


class Refusal(HTTPException):
    """The answer to a request that is refused.

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
        """`{"error": {"message", "type", "param", "code"}}`, as clients of the API read it."""
        usual = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": ERROR_TYPES.get(self.status_code, usual),
                          "param": self.param, "code": self.code}}


def refusal_of_body(error: RequestValidationError) -> Refusal:
    """For a body that is no JSON, or whose fields have other types than the requests below."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # of a union: of the member that fits best
    place, why = [str(part) for part in first["loc"] if part != "body"], first.get("ctx", {}).get("error")
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is no JSON: {why}, at character {place[0]}")
    if isinstance(why, OptionError):
        param = ".".join([*place, why.name])
        return Refusal(400, f"{param} {why.problem}", param=param)
    param = ".".join(place)
    return Refusal(400, f"{param or 'the body'}: {first['msg']}, got {first.get('input')!r}", param=param or None)


# Options of decoding -------------------------------------------------------------------------------------------------


def options_over(defaults: Mapping[str, object], own: Mapping[str, object]) -> GenerateOptions:
    """A request's own options over the server's defaults. A request with a rule of its own starts from that rule's
    threshold, and one with a reference copies from it. Without a limit an answer goes on `TO_THE_END`.

    Raises:
        TypeError, ValueError: as `GenerateOptions`, and for what one request may not ask for.
    """
    kept = {"max_new_tokens": TO_THE_END, **defaults}
    kept = {name: value for name, value in kept.items() if not ("acceptance" in own and name in OF_A_RULE)}
    if own.get("text_drafts") == "off":
        kept.pop("reference", None)
    elif "reference" in own and kept.get("text_drafts") == "off":
        del kept["text_drafts"]
    if "min_new_tokens" not in own and isinstance(most := own.get("max_new_tokens"), int):
        kept["min_new_tokens"] = min(kept.get("min_new_tokens", 0), max(most, 0))
    options = GenerateOptions(**{**kept, **own})
    if isinstance(options.seed, (list, tuple)):
        raise OptionError("seed", options.seed, "an int, that of the first choice; each further choice adds 1")
    if len(options.stop_strings) > MOST_STOPS:
        raise OptionError("stop", problem=f"must hold at most {MOST_STOPS} strings, got {len(options.stop_strings)}")
    return options


def tree_of(value: Any) -> TreeConfig:
    """A tree from its numbers by name."""
    try:
        return TreeConfig(**value)
    except TypeError as error:
        why = f" ({error})" if isinstance(error, OptionError) else ""
        raise OptionError("tree", value, f'{{"total_tokens": N, "depth": D, "top_k": K}}{why}') from error


# Requests ------------------------------------------------------------------------------------------------------------


class Part(BaseModel):
    """A piece of a message: text, no image and no sound."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


# Only the first wrong item is reported: a body has room for half a million.
Content = str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


def plain_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(BaseModel):
    """One message of a chat. An answer of the API may be sent back; `encode_chat` checks the roles."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Content | None = None
    tool_calls: list[dict] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Message:
        self.tool_calls = self.tool_calls and [read_call(call) for call in self.tool_calls]
        for name, value in self.model_extra.items():
            if value not in (None, []) and name != "name":  # a person's name: templates have no place for it
                raise OptionError(name, problem="is not supported here")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: they call the role "developer" "system", and some add to `content`."""
        content = "" if self.content is None and self.tool_calls else self.content
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role,
                                   "content": None if content is None else plain_text(content)}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def read_call(call: dict) -> dict:
    """A call with its arguments as an object, which templates write themselves. Arguments that are no JSON, as some
    models write them, stay as they are: the conversation goes on.

    Raises:
        ValueError: it names no function.
    """
    function = call.get("function")
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise OptionError("tool_calls", problem='must each be {"id": I, "type": "function", "function": {"name": N, '
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
    """What a stream holds besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: with every piece
    include_obfuscation: bool = False  # padding, which is never sent


class AnswerRequest(BaseModel):
    """What chats and completions share. Fields that the schema does not name are options of decoding."""

    model_config = ConfigDict(strict=True, extra="allow")
    our_names: ClassVar[dict[str, str]] = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    response_format: Any = None

    @model_validator(mode="after")
    def check_shared(self) -> AnswerRequest:
        if self.n is not None:
            require_integer("n", self.n, 1, MOST_CHOICES)
        if self.stream_options is not None and not self.stream:
            raise OptionError("stream_options", problem="belong to a stream: give stream=true with them")
        return self

    def decoding(self) -> dict[str, Any]:
        """The fields that are options of decoding, under the client's names."""
        plain = self.response_format == {"type": "text"}
        return {"response_format": None if plain else self.response_format, **(self.model_extra or {})}

    def options(self, defaults: Mapping[str, object]) -> GenerateOptions:
        """The options of decoding: the request's, else the server's.

        Raises:
            Refusal: a field that is unknown or not supported, or a value that cannot be accepted.
        """
        options: dict[str, Any] = {}
        for name, value in self.decoding().items():
            ours = self.our_names.get(name, name)
            if name in IGNORED or value is None and name not in NULLS or NEUTRAL.get(name, ...) == value:
                continue
            if name in NEUTRAL:
                raise Refusal(400, f"not supported here: {name}={value!r}, leave it out", param=name)
            if ours not in OPTIONS:
                raise Refusal(400, unknown_option(name, self.known()), param=name, code="unknown_field")
            if ours in options and options[ours] != value:
                raise Refusal(400, f"{name}={value!r} was given under another name too, with another value", param=name)
            options[ours] = value
        if isinstance(biases := options.get("logit_bias"), dict):  # keys of JSON are text
            options["logit_bias"] = {int(token) if token.isdecimal() and len(token) < 10 else token: bias
                                     for token, bias in biases.items()}
        try:
            if "tree" in options:
                options["tree"] = tree_of(options["tree"])
            return options_over(defaults, options)
        except (TypeError, ValueError) as error:
            raise self.refusal(error) from error

    def known(self) -> list[str]:
        """The names of all fields."""
        return list(dict.fromkeys([*OPTIONS, *self.our_names, *type(self).model_fields]))

    def refusal(self, error: Exception) -> Refusal:
        """For an error of the library, with the client's name of the option."""
        if not isinstance(error, OptionError):
            return Refusal(400, str(error))
        name = next((theirs for theirs, value in self.decoding().items()
                     if value is not None and self.our_names.get(theirs) == error.name), error.name)
        return Refusal(400, f"{name} {error.problem}", param=name if name in self.known() else None)


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`. Further fields are options of decoding by their names in `generate`."""

    our_names: ClassVar[dict[str, str]] = {
        **AnswerRequest.our_names, "prediction": "reference", "tools": "response_format"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    prediction: Prediction | None = Field(None, description=(
        "A text that the answer will resemble: drafts are copied from it. A lossless answer does not depend on it; "
        "usage.completion_tokens_details counts what was copied."))

    _tools: list[dict] = []  # that may be called
    _must_call: bool = False

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs", problem="come with logprobs: give logprobs=true with them")
        self._tools, self._must_call = chosen_tools(check_tools(self.tools or []), self.tool_choice)
        if self._must_call and self.response_format not in (None, {"type": "text"}):
            raise OptionError("response_format", problem="cannot hold for a call that tool_choice asks for: leave one "
                              "of them out")
        return self

    def decoding(self) -> dict[str, Any]:
        predicted = None if self.prediction is None else plain_text(self.prediction.content)
        call = schema_of_a_call(self._tools) if self._must_call else None
        return {"prediction": predicted, "tools": call, "top_logprobs": self.top_logprobs, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """How many of the best tokens to list with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call(self) -> list[str]:
        """The names of the tools that may be called."""
        return tool_names(self._tools)

    def prompts(self, model: EagleModel) -> list[Any]:
        """The chat as token ids."""
        return [encode_chat([message.plain() for message in self.messages], model, self._tools or None)]


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`: texts as they are, or token ids. Further fields are options of decoding by their
    names in `generate`."""

    our_names: ClassVar[dict[str, str]] = {**AnswerRequest.our_names, "logprobs": "top_logprobs"}
    may_call: ClassVar[Sequence[str]] = ()

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None  # 0: of the chosen tokens alone

    def decoding(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """As for chats."""
        return self.logprobs

    def prompts(self, model: EagleModel) -> list[Any]:
        """The texts, or their token ids."""
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]
