"""Requests of OpenAI's API with our decoding options, their validation, and error responses."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Union

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, create_model, model_validator
from starlette.exceptions import HTTPException

from ..drafting.config import TreeConfig
from ..inputs.prompts import chat_tokens, render_chat
from ..inputs.requests import end_tokens
from ..loading.pair import EagleModel
from ..options.generate import GenerateOptions, from_generate
from ..options.option import REPLACEMENTS, members
from ..utils.checks import OptionError, is_check, require_integer
from .limits import check_template_kwargs
from .splitter import MOST_CALLS, Splitter, message_start, response_template
from .tools import call_schema, check_tools, chosen_tools

log = logging.getLogger(__name__)
NEAR = 0.88  # similarity of misspelt names; names that other servers know are less similar: xtc_threshold has 0.82
LONGEST_MESSAGE = 600  # characters; messages quote values of the request
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}
MOST_CHOICES = 8
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # per message
UNION_MEMBER = re.compile(r"str|list\[.+\]")  # in pydantic's places, which clients do not know

# Decoding options that are fields of every request. A generation config is an object of Python.
OPTIONS = [name for name in GenerateOptions.declared if name not in ("generation_config", "chat_template_kwargs")]
OTHER_NAMES = {  # in the API, in vLLM, in llama.cpp: ours
    "max_completion_tokens": "max_new_tokens", "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens",
    "repeat_penalty": "repetition_penalty"}
TO_THE_END = 2**31  # max_new_tokens of an answer without a limit; the engine lowers it to the end of the context
OF_A_RULE = {"threshold", "divergence", "head_guard"}  # defaults that do not apply to a request with its own rule
NULLS = {"head_guard"}  # options for which null is a value; for others it means the default
# Features of the API, vLLM and llama.cpp that this server lacks and that change an answer: the value that turns each
# off, beside null. Other unknown fields are ignored.
NEUTRAL = {
    "functions": [], "function_call": "none", "modalities": ["text"], "echo": False, "suffix": "", "best_of": 1,
    "bad_words": [], "allowed_token_ids": [], "use_beam_search": False, "include_stop_str_in_output": False,
    "skip_special_tokens": True, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None, "structured_outputs": None, "grammar": "", "json_schema": None,
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
    first = max(error.errors(), key=lambda problem: len(problem["loc"]))  # in a union: the member that fits best
    place = [part for part in map(str, first["loc"]) if part != "body" and not UNION_MEMBER.fullmatch(part)]
    why = first.get("ctx", {}).get("error")
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
    base = {"max_new_tokens": TO_THE_END, **from_generate(defaults)}
    base = {name: value for name, value in base.items() if not ("acceptance" in own and name in OF_A_RULE)}
    if own.get("text_drafts") == "off":
        base.pop("reference", None)
    elif "reference" in own and base.get("text_drafts") == "off":
        del base["text_drafts"]
    least = base.get("min_new_tokens")
    if "min_new_tokens" not in own and least is not None and isinstance(most := own.get("max_new_tokens"), int):
        base["min_new_tokens"] = min(least, max(most, 0))
    if (own_template := own.get("chat_template_kwargs")) is not None:
        own = {**own, "chat_template_kwargs": {**(base.get("chat_template_kwargs") or {}), **own_template}}
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

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
            raise OptionError("type", kind, '"text", since images, audio and files are not supported here')
        return part


# fail_fast: report only the first wrong item; a body can contain half a million.
Content = str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


def plain_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(BaseModel):
    """One message of a chat; answers of the API are accepted as they are. `render_chat` checks the roles."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    name: str | None = None  # of a tool, with its result: some templates show it
    content: Content | None = None
    reasoning_content: str | None = None  # templates show or drop earlier thoughts
    tool_calls: Annotated[list[dict], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Message:
        self.tool_calls = self.tool_calls and [read_call(call) for call in self.tool_calls]
        for name in ("function_call", "audio"):  # parts of a turn that templates would lack
            if self.model_extra.get(name):
                raise OptionError(name, problem="is not supported here")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: role "system" for "developer", and text in `content`."""
        message = {"role": "system" if self.role == "developer" else self.role, "name": self.name,
                   "content": None if self.content is None else plain_text(self.content),
                   "reasoning_content": self.reasoning_content, "tool_calls": self.tool_calls,
                   "tool_call_id": self.tool_call_id}
        return {name: value for name, value in message.items() if value or name == "content"}


def read_call(call: dict) -> dict:
    """The parts of a call that templates know.

    Raises:
        ValueError: the call names no function.
    """
    function = call.get("function")
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise OptionError("tool_calls", problem='must each be {"id": I, "type": "function", "function": {"name": N, '
                          f'"arguments": A}}}}, where A is a JSON object as text, got {call!r}')
    return {"id": call.get("id"), "type": "function",
            "function": {"name": function["name"], "arguments": function.get("arguments")}}


class Prediction(BaseModel):
    """A text that the answer will resemble, such as a file to edit."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["content"]
    content: Content


class StreamOptions(BaseModel):
    """What a stream contains besides the answer."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: usage in every event
    include_obfuscation: bool = False  # padding; never sent


def extra_fields(value: Any, place: str = "") -> set[str]:
    """Names of the fields that the models of a body do not list, except null ones."""
    if isinstance(value, list):
        return set().union(*(extra_fields(item, place) for item in value if isinstance(item, BaseModel)))
    if not isinstance(value, BaseModel):
        return set()
    return {place + name for name, inside in (value.model_extra or {}).items() if inside is not None}.union(
        *(extra_fields(getattr(value, name), f"{place}{name}.") for name in type(value).model_fields))


Tokens = Annotated[list[int], Field(fail_fast=True)]
Prompts = Field(max_length=MOST_MESSAGES, fail_fast=True)


def option_field(name: str) -> tuple[Any, Any]:
    """The type and default of a decoding option as a field: its declaration, for the schema alone. `GenerateOptions`
    checks the values."""
    option = GenerateOptions.declared[name]
    bounds = Field(ge=option.least, gt=option.above, le=option.most)
    kinds = [Annotated[kind, bounds] if kind in (int, float) else kind
             for kind in (members(option.plain) if option.plain else option.kinds)]
    default = option.default if name in NULLS else None
    return Annotated[Union[(*kinds, None)], SkipValidation], Field(default, description=option.meaning)  # noqa: UP007


OptionFields = create_model("OptionFields", __config__=ConfigDict(strict=True, extra="allow"), **{
    name: option_field(OTHER_NAMES.get(name, name)) for name in (*OPTIONS, *OTHER_NAMES)})


class AnswerRequest(OptionFields):
    """The fields that chats and completions share: the decoding options, and these. Other fields are ignored."""

    our_names: ClassVar[dict[str, str]] = OTHER_NAMES

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None, SkipValidation] = Field(1, description=(
        "Number of choices. At temperature 0, the default, decoding is greedy and all choices are the same: set a "
        "temperature."))

    @model_validator(mode="after")
    def check_shared(self) -> AnswerRequest:
        if self.n is not None:
            require_integer("n", self.n, 1, MOST_CHOICES)
        if self.stream_options is not None and not self.stream:
            raise OptionError("stream_options", problem="need stream=true")
        return self

    def decoding(self) -> dict[str, Any]:
        """The decoding options of the request, under the client's names."""
        own = {name: getattr(self, name) for name in OptionFields.model_fields if name in self.model_fields_set}
        if own.get("response_format") == {"type": "text"}:
            del own["response_format"]
        return {**own, **(self.model_extra or {})}

    def options(self, defaults: Mapping[str, object]) -> GenerateOptions:
        """The decoding options: the request's, then the server's defaults.

        Raises:
            Refusal: a field is misspelt, or not supported and would change the answer, or a value is invalid.
        """
        options: dict[str, Any] = {}
        unknown = self.unknown()
        for name in sorted(unknown):  # a misspelt option would be ignored
            near = difflib.get_close_matches(name.lower().replace("-", "_")[:64], OptionFields.model_fields, 1, NEAR)
            if near:
                raise Refusal(400, f"unknown field {name!r}; did you mean {near[0]!r}?", param=name)
        for name, value in self.decoding().items():
            ours = self.our_names.get(name, name)
            # vLLM and llama.cpp turn top_k off and draw a seed with -1.
            value = {("top_k", -1): 0, ("seed", -1): None}.get((name, value) if isinstance(value, int) else None, value)
            if value is None and name not in NULLS or NEUTRAL.get(name, ...) == value or name in unknown:
                continue
            if name in NEUTRAL:
                hint = f"use {REPLACEMENTS[name]}" if name in REPLACEMENTS else "omit it"
                raise Refusal(400, f"not supported here: {name}={value!r}; {hint}", param=name)
            if ours in options and options[ours] != value:
                raise Refusal(400, f"{name}={value!r} contradicts another field for {ours}", param=name)
            options[ours] = value
        if isinstance(biases := options.get("logit_bias"), dict):  # keys of JSON objects are strings
            options["logit_bias"] = {int(token) if token.isdecimal() and len(token) < 10 else token: bias
                                     for token, bias in biases.items()}
        try:
            if "tree" in options:
                options["tree"] = tree_of(options["tree"])
            return options_over(defaults, options)
        except (TypeError, ValueError) as error:
            raise self.refusal(error) from error

    def unknown(self) -> set[str]:
        """Names of the fields that are ignored, as `messages.name` for those of a message."""
        return extra_fields(self) - NEUTRAL.keys()

    def refusal(self, error: Exception) -> Refusal:
        """The refusal for an error of the library, with the client's name for the option."""
        if not (is_check(error) or isinstance(error, ImportError)):  # the latter: an extra is not installed
            log.error("a request failed", exc_info=error)
            return Refusal(500, "the request failed; see the server's log")
        if not isinstance(error, OptionError):
            return Refusal(400, str(error))
        name = next((theirs for theirs, value in self.decoding().items()
                     if value is not None and self.our_names.get(theirs) == error.name), error.name)
        return Refusal(400, f"{name} {error.problem}", param=name if name in type(self).model_fields else None)


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`."""

    our_names: ClassVar[dict[str, str]] = {**OTHER_NAMES, "prediction": "reference", "tools": "response_format"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = Field(None, description="false: an answer has at most one call")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=(
        'Variables of the chat template, such as {"enable_thinking": false}'))
    continue_final_message: bool | None = Field(None, description="The answer continues the last message")
    add_generation_prompt: bool | None = None
    prediction: Prediction | None = Field(None, description=(
        "A text that the answer will resemble: drafts are copied from it. A lossless answer does not depend on it. "
        "usage.completion_tokens_details counts the copied tokens."))

    _tools: list[dict] = []  # tools that the model may call
    _must_call: bool = False
    _prompt: str = ""  # the rendered chat

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs", problem="needs logprobs=true")
        check_template_kwargs(self.chat_template_kwargs or {})
        self._tools, self._must_call = chosen_tools(check_tools(self.tools or []), self.tool_choice)
        if self._must_call and self.response_format not in (None, {"type": "text"}):
            raise OptionError("response_format", problem="cannot be combined with a call that tool_choice requires: "
                              "omit one of them")
        return self

    def decoding(self) -> dict[str, Any]:
        predicted = None if self.prediction is None else plain_text(self.prediction.content)
        call = call_schema(self._tools) if self._must_call else None
        own = {name: getattr(self, name) for name in ("continue_final_message", "add_generation_prompt")}
        template = (self.chat_template_kwargs or {}) | {name: is_on for name, is_on in own.items() if is_on is not None}
        return {"prediction": predicted, "tools": call, "chat_template_kwargs": template or None, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to list with each token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def splitter(self, model: EagleModel, stops: Sequence[str], form: object) -> Splitter | None:
        """What splits one answer into text, thoughts and calls; None: it is text.

        Args:
            stops: strings that end the answer.
            form: the response format that the answer follows.
        """
        template = response_template(model.tokenizer, self._tools)
        if template is None:
            return None
        continued = plain_text(self.messages[-1].content or "") if self.continue_final_message else ""
        return Splitter(model.tokenizer, template, message_start(template, self._prompt, continued, form), self._tools,
                        1 if self.parallel_tool_calls is False else MOST_CALLS, stops, end_tokens(model, chat=True))

    def prompts(self, model: EagleModel, template: Mapping[str, object] | None) -> list[Any]:
        """The chat as token ids, in a list of one prompt."""
        messages, tools = [message.plain() for message in self.messages], self._tools or None
        self._prompt = render_chat(messages, model, {**(template or {}), "tools": tools})
        return [chat_tokens(self._prompt, model)]


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`: texts without a chat template, or token ids."""

    our_names: ClassVar[dict[str, str]] = {**OTHER_NAMES, "logprobs": "top_logprobs"}

    prompt: str | Tokens | Annotated[list[str], Prompts] | Annotated[list[Tokens], Prompts]
    logprobs: int | None = None  # 0: only those of the chosen tokens

    def decoding(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, **super().decoding()}

    @property
    def alternatives(self) -> int | None:
        """As in `ChatRequest`."""
        return self.logprobs

    def splitter(self, model: EagleModel, stops: Sequence[str], form: object) -> None:
        """As in `ChatRequest`."""
        return None

    def prompts(self, model: EagleModel, template: Mapping[str, object] | None) -> list[Any]:
        """The texts or token ids, as a list of prompts."""
        many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]
