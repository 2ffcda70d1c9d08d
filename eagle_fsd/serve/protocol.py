"""Requests of OpenAI's API with our decoding options, their validation, and error responses."""

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
from .tools import call_schema, check_tools, chosen_tools, tool_names

LONGEST_MESSAGE = 600  # characters; messages quote values of the request
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}
MOST_CHOICES = 8
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # per message

OPTIONS = [name for name in GenerateOptions.names() if name != "generation_config"]  # an object of Python
TO_THE_END = 2**31  # max_new_tokens of an answer without a limit; the engine lowers it to the end of the context
OF_A_RULE = {"threshold", "divergence", "head_guard"}  # defaults that do not apply to a request with its own rule
NULLS = {"head_guard"}  # options for which null is a value; for others it means the default
# Fields of the API that change nothing here, whatever their value.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
NEUTRAL = {  # features of the API, vLLM and llama.cpp that this server lacks: the value that turns each off
    "functions": [], "function_call": "none", "modalities": ["text"], "echo": False, "suffix": "", "best_of": 1,
    "add_generation_prompt": True, "bad_words": [], "cache_prompt": True, "chat_template_kwargs": {},
    "continue_final_message": False, "early_stopping": False, "include_stop_str_in_output": False, "length_penalty": 1,
    "priority": 0, "return_token_ids": False, "return_tokens_as_token_ids": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "use_beam_search": False,
}


class Refusal(HTTPException):
    """The error response to a request.

    Args:
        status: HTTP status.
        message: one line; long messages are truncated.
        param: the field in error.
        code: machine-readable, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        text = " ".join(message.split())
        super().__init__(status, text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}...",
                         HEADERS.get(status))
        self.param, self.code = param, code

    @property
    def body(self) -> dict:
        """`{"error": {"message", "type", "param", "code"}}`, as in OpenAI's API."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": ERROR_TYPES.get(self.status_code, default),
                          "param": self.param, "code": self.code}}


def refusal_of_body(error: RequestValidationError) -> Refusal:
    """The refusal for a body that is not JSON, or that has fields of the wrong types."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # in a union: the member that fits best
    place, why = [str(part) for part in first["loc"] if part != "body"], first.get("ctx", {}).get("error")
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {why}, at character {place[0]}")
    if isinstance(why, OptionError):
        param = ".".join([*place, why.name])
        return Refusal(400, f"{param} {why.problem}", param=param)
    param = ".".join(place)
    return Refusal(400, f"{param or 'the body'}: {first['msg']}, got {first.get('input')!r}", param=param or None)


# Decoding options ----------------------------------------------------------------------------------------------------


def options_over(defaults: Mapping[str, object], own: Mapping[str, object]) -> GenerateOptions:
    """Merge a request's own options with the server's defaults.

    A request that names a rule gets that rule's own threshold, divergence and guard. A request with a reference
    copies from it, even if the server's default turns text drafts off. Without a limit an answer runs `TO_THE_END`.

    Raises:
        TypeError, ValueError: as `GenerateOptions`; also for values that one request may not have.
    """
    base = {"max_new_tokens": TO_THE_END, **defaults}
    base = {name: value for name, value in base.items() if not ("acceptance" in own and name in OF_A_RULE)}
    if own.get("text_drafts") == "off":
        base.pop("reference", None)
    elif "reference" in own and base.get("text_drafts") == "off":
        del base["text_drafts"]
    least = base.get("min_new_tokens")
    if "min_new_tokens" not in own and least is not None and isinstance(most := own.get("max_new_tokens"), int):
        base["min_new_tokens"] = min(least, max(most, 0))
    options = GenerateOptions(**{**base, **own})
    if isinstance(options.seed, (list, tuple)):
        raise OptionError("seed", options.seed, "an int, the seed of the first choice; each further choice adds 1")
    if len(options.stop_strings) > MOST_STOPS:
        raise OptionError("stop", problem=f"must hold at most {MOST_STOPS} strings, got {len(options.stop_strings)}")
    return options


def tree_of(value: Any) -> TreeConfig:
    """A tree from its fields as a JSON object."""
    try:
        return TreeConfig(**value)
    except TypeError as error:
        why = f" ({error})" if isinstance(error, OptionError) else ""
        raise OptionError("tree", value, f'{{"total_tokens": N, "depth": D, "top_k": K}}{why}') from error


# Requests ------------------------------------------------------------------------------------------------------------


class Part(BaseModel):
    """A part of a message. Only text is supported."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


# fail_fast: report only the first wrong item; a body can contain half a million.
Content = str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


def plain_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(BaseModel):
    """One message of a chat; answers of the API are accepted as they are. `encode_chat` checks the roles."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Content | None = None
    tool_calls: list[dict] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Message:
        self.tool_calls = self.tool_calls and [read_call(call) for call in self.tool_calls]
        for name, value in self.model_extra.items():
            if value not in (None, []) and name != "name":  # `name`: templates have no place for a person's name
                raise OptionError(name, problem="is not supported here")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: role "system" for "developer", and text in `content`."""
        content = "" if self.content is None and self.tool_calls else self.content
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role,
                                   "content": None if content is None else plain_text(content)}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def read_call(call: dict) -> dict:
    """A call with its arguments parsed, since templates serialise them. Arguments that are not JSON stay text, so that
    a conversation can continue after a model wrote invalid JSON.

    Raises:
        ValueError: the call names no function.
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
    """A text that the answer will resemble, such as a file to edit."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["content"]
    content: Content


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: usage in every event
    include_obfuscation: bool = False  # padding; never sent


class AnswerRequest(BaseModel):
    """The fields that chats and completions share. Fields that the schema does not list are decoding options."""

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
            raise OptionError("stream_options", problem="need stream=true")
        return self

    def decoding(self) -> dict[str, Any]:
        """The decoding options of the request, under the client's names."""
        plain = self.response_format == {"type": "text"}
        return {"response_format": None if plain else self.response_format, **(self.model_extra or {})}

    def options(self, defaults: Mapping[str, object]) -> GenerateOptions:
        """The decoding options: the request's, then the server's defaults.

        Raises:
            Refusal: a field is unknown or not supported, or a value is invalid.
        """
        options: dict[str, Any] = {}
        for name, value in self.decoding().items():
            ours = self.our_names.get(name, name)
            if name in IGNORED or value is None and name not in NULLS or NEUTRAL.get(name, ...) == value:
                continue
            if name in NEUTRAL:
                raise Refusal(400, f"not supported here: {name}={value!r}, omit it", param=name)
            if ours not in OPTIONS:
                raise Refusal(400, unknown_option(name, self.known()), param=name, code="unknown_field")
            if ours in options and options[ours] != value:
                raise Refusal(400, f"{name}={value!r} contradicts another field for {ours}", param=name)
            options[ours] = 0 if (name, value) == ("top_k", -1) else value  # vLLM turns top_k off with -1
        if isinstance(biases := options.get("logit_bias"), dict):  # keys of JSON objects are strings
            options["logit_bias"] = {int(token) if token.isdecimal() and len(token) < 10 else token: bias
                                     for token, bias in biases.items()}
        try:
            if "tree" in options:
                options["tree"] = tree_of(options["tree"])
            return options_over(defaults, options)
        except (TypeError, ValueError) as error:
            raise self.refusal(error) from error

    def known(self) -> list[str]:
        """All field names."""
        return list(dict.fromkeys([*OPTIONS, *self.our_names, *type(self).model_fields]))

    def refusal(self, error: Exception) -> Refusal:
        """The refusal for an error of the library, with the client's name for the option."""
        if not isinstance(error, OptionError):
            return Refusal(400, str(error))
        name = next((theirs for theirs, value in self.decoding().items()
                     if value is not None and self.our_names.get(theirs) == error.name), error.name)
        return Refusal(400, f"{name} {error.problem}", param=name if name in self.known() else None)


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`. Other fields are decoding options under their names in `generate`."""

    our_names: ClassVar[dict[str, str]] = {
        **AnswerRequest.our_names, "prediction": "reference", "tools": "response_format"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    prediction: Prediction | None = Field(None, description=(
        "A text that the answer will resemble: drafts are copied from it. A lossless answer does not depend on it. "
        "usage.completion_tokens_details counts the copied tokens."))

    _tools: list[dict] = []  # tools that the model may call
    _must_call: bool = False

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs", problem="needs logprobs=true")
        self._tools, self._must_call = chosen_tools(check_tools(self.tools or []), self.tool_choice)
        if self._must_call and self.response_format not in (None, {"type": "text"}):
            raise OptionError("response_format", problem="cannot be combined with a call that tool_choice requires: "
                              "omit one of them")
        return self

    def decoding(self) -> dict[str, Any]:
        predicted = None if self.prediction is None else plain_text(self.prediction.content)
        call = call_schema(self._tools) if self._must_call else None
        return {"prediction": predicted, "tools": call, "top_logprobs": self.top_logprobs, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to list with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call(self) -> list[str]:
        """Names of the tools that the model may call."""
        return tool_names(self._tools)

    def prompts(self, model: EagleModel) -> list[Any]:
        """The chat as token ids, in a list of one prompt."""
        return [encode_chat([message.plain() for message in self.messages], model, self._tools or None)]


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`: texts without a chat template, or token ids. Other fields are decoding options
    under their names in `generate`."""

    our_names: ClassVar[dict[str, str]] = {**AnswerRequest.our_names, "logprobs": "top_logprobs"}
    may_call: ClassVar[Sequence[str]] = ()

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None  # 0: only those of the chosen tokens

    def decoding(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """As in `ChatRequest`."""
        return self.logprobs

    def prompts(self, model: EagleModel) -> list[Any]:
        """The texts or token ids, as a list of prompts."""
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]
