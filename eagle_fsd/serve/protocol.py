"""What clients ask for and get: requests with their options of decoding, and answers whole or in pieces."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from ..engine.output import Output, Receipt
from ..options import GenerateOptions, names_of
from .tickets import Piece

LONGEST_MESSAGE = 600  # characters: a request's own values are shown in it
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "2"}}
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message

OPTIONS = names_of(GenerateOptions)
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}  # the API's name: ours
RULE = {"threshold", "divergence", "head_guard"}  # belong to the rule that they were given with
NULLS = {"head_guard"}  # where null says something else than nothing

# What the API has and this server does not: accepted where it changes nothing.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "parallel_tool_calls")
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",),
    "functions": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],), "echo": (False,),
    "suffix": ("",), "best_of": (1,),
}


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


def options_over(defaults: Mapping[str, object], given: Mapping[str, object]) -> GenerateOptions:
    """A request's options over the server's defaults: who chooses a rule chooses its threshold too, and who gives a
    reference has it copied from.

    Raises:
        TypeError, ValueError: as `GenerateOptions`, and for what one request may not ask for.
    """
    kept = {name: value for name, value in defaults.items() if not ("acceptance" in given and name in RULE)}
    if given.get("text_drafts") == "off":
        kept.pop("reference", None)
    elif "reference" in given and kept.get("text_drafts") == "off":
        del kept["text_drafts"]
    options = GenerateOptions.from_names({**kept, **given})
    if isinstance(options.seed, (list, tuple)):
        raise TypeError("seed must be an int: that of the first choice; the others get the numbers that follow")
    if len(options.stop_strings) > MOST_STOPS:
        raise ValueError(f"stop must hold at most {MOST_STOPS} strings, got {len(options.stop_strings)}")
    return options


def refused(error: Exception) -> Refusal:
    """For a `ValueError` or `TypeError` of the core, in its words: they begin with the option that is wrong."""
    name = str(error).partition(" ")[0]
    return Refusal(400, str(error), param={"max_new_tokens": "max_tokens"}.get(name, name) if name in OPTIONS else None)


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
    """One message of a chat. An answer of the API may be sent back: what it has besides its content, where empty."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Content

    @model_validator(mode="after")
    def check_others(self) -> Message:
        for name, value in self.model_extra.items():
            if value not in (None, []) and name != "name":  # of a person: templates have no place for it
                raise ValueError(f"{name} of a message is not supported here, only role and content")
        return self

    def plain(self) -> dict[str, str]:
        """As chat templates take it; the API's newer name for `system` is not known to them."""
        return {"role": "system" if self.role == "developer" else self.role, "content": plain_text(self.content)}


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


class Asked(BaseModel):
    """What both kinds of requests have; further fields are options of decoding, see `options`."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1

    @property
    def predicted(self) -> str | None:
        """The text of a prediction, the API's name for a reference."""
        return None

    def options(self, defaults: Mapping[str, object]) -> GenerateOptions:
        """The options of decoding: those of the request, else the server's.

        Raises:
            Refusal: a field that is not known or not supported, or a value that cannot be accepted.
        """
        given: dict[str, Any] = {} if self.predicted is None else {"reference": self.predicted}
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT or value is None and name not in NULLS:
                continue
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise Refusal(400, f"{name} is not supported here: leave it out, got {value!r}", param=name)
                continue
            ours = RENAMED.get(name, name)
            if ours in given and given[ours] != value:
                raise Refusal(400, f"{name}={value!r} was given under another name too, with another value", param=name)
            given[ours] = value
        try:
            return options_over(defaults, given)
        except (TypeError, ValueError) as error:
            unknown = next((name for name in given if name not in OPTIONS), None)
            if unknown is not None:
                raise Refusal(400, str(error), param=unknown, code="unknown_field") from error
            raise refused(error) from error


class ChatRequest(Asked):
    """The body of `/v1/chat/completions`. Further fields are options of decoding by their names in `generate`, such as
    threshold, or text_drafts ("auto", "off")."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # of the chosen token alone they are known
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

    @property
    def predicted(self) -> str | None:
        return None if self.prediction is None else plain_text(self.prediction.content)

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class CompletionRequest(Asked):
    """The body of `/v1/completions`: text as it is, or token ids; one prompt. Further fields are options of decoding by
    their names in `generate`, such as threshold, text_drafts ("auto", "off") or reference (a text that the answer will
    resemble)."""

    prompt: str | Annotated[list[int], Field(min_length=1, fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # 0: of the chosen tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


# Answers -------------------------------------------------------------------------------------------------------------


@dataclass
class Form:
    """How the answers to one request look.

    Args:
        model: the name that the server gives its model.
        asked: the request.
        prompt_tokens: length of the prompt.
    """

    model: str
    asked: Asked
    tokenizer: PreTrainedTokenizerBase
    prompt_tokens: int
    new_tokens: int = 0  # that were streamed
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return isinstance(self.asked, ChatRequest)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for index, output in enumerate(outputs):
            said = {"message": {"role": "assistant", "content": output.text}} if self.chat else {"text": output.text}
            choices.append({"index": index, **said, "finish_reason": FINISHED[output.finish_reason],
                            "logprobs": self._tokens(output.token_ids, output.receipts), "seed": output.seed})
        return self._body("", choices, self._usage(outputs))

    def opening(self, index: int) -> str:
        """What a chat's stream begins with: who speaks."""
        return self._event([self._choice(index, {"role": "assistant", "content": ""})])

    def piece(self, index: int, piece: Piece) -> str:
        """What a cycle added to a choice; empty where it is neither text nor asked for."""
        self.new_tokens += len(piece.token_ids)
        listed = self._tokens(piece.token_ids, piece.receipts)
        if not piece.text and listed is None:
            return ""
        return self._event([self._choice(index, {"content": piece.text}, logprobs=listed)])

    def ending(self, index: int, output: Output) -> str:
        """Why a choice ended."""
        return self._event([self._choice(index, {}, FINISHED[output.finish_reason]) | {"seed": output.seed}])

    def closing(self, outputs: Sequence[Output]) -> str:
        """What a stream ends with."""
        wanted = self.asked.stream_options and self.asked.stream_options.include_usage
        last = as_event(self._body(".chunk", [], self._usage(outputs))) if wanted else ""
        return f"{last}data: [DONE]\n\n"

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return usage(self.prompt_tokens, outputs, predicted=self.asked.predicted is not None)

    def _choice(self, index: int, delta: dict, reason: str | None = None, logprobs: dict | None = None) -> dict:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}

    def _event(self, choices: list[dict]) -> str:
        wanted = self.asked.stream_options and self.asked.stream_options.continuous_usage_stats
        return as_event(self._body(".chunk", choices, counts(self.prompt_tokens, self.new_tokens) if wanted else None))

    def _body(self, kind: str, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        """The object around choices; `kind`: what it is of a chat's answer, "" or ".chunk"."""
        named, prefix = (f"chat.completion{kind}", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": named, "created": self.created, "model": self.model,
                "choices": choices, **({} if usage is None else {"usage": usage})}

    def _tokens(self, ids: Sequence[int], receipts: Sequence[Receipt]) -> dict | None:
        """Tokens with their log-probabilities under the target, and as further fields where they come from."""
        if not self.asked.wants_logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in ids]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": [finite(receipt.logprob) for receipt in receipts],
                    "top_logprobs": None, "source": [receipt.source for receipt in receipts]}
        return {"content": [
            {"token": text, "logprob": finite(receipt.logprob), "bytes": list(text.encode()), "top_logprobs": [],
             "source": receipt.source, "divergence": finite(receipt.divergence), "regret": finite(receipt.regret)}
            for text, receipt in zip(texts, receipts, strict=True)]}


def finite(value: float | None) -> float | None:
    """What JSON has a number for."""
    return value if value is not None and math.isfinite(value) else None


def as_event(body: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, allow_nan=False)}\n\n"


def counts(prompt: int, new: int) -> dict[str, Any]:
    """Tokens in the API's fields."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def usage(prompt: int, outputs: Sequence[Output], predicted: bool = False) -> dict[str, Any]:
    """Tokens, and what drafting and the rule made of them: `accepted_tokens` of the draft, tau, drafted tokens by who
    drafted them, `fuzzy_tokens` that only the rule accepted, and the target's forwards.

    Args:
        predicted: whether there was a prediction. Tokens of the answer that are copies count as accepted from it, and
            copies that were verified for nothing as rejected, wherever in the text they were found: what was predicted
            mostly stands in the prompt too.
    """
    stats = [output.stats for output in outputs]
    accepted = sum(sum(each.accepted_lengths) for each in stats)
    cycles = sum(len(each.accepted_lengths) for each in stats)
    read = max(each.prefill_tokens for each in stats)  # the first choice; the others find what it has read
    by_drafter = {name: {drafter: sum(getattr(each, name)[drafter] for each in stats) for drafter in ("head", "text")}
                  for name in ("proposed", "accepted")}
    copied = sum(receipt.drafter == "text" for output in outputs for receipt in output.receipts) if predicted else 0
    rejected = by_drafter["proposed"]["text"] - copied if predicted else 0
    return {
        **counts(prompt, sum(len(output.token_ids) for output in outputs)),
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - read) if read else 0},
        "completion_tokens_details": {"accepted_prediction_tokens": copied, "rejected_prediction_tokens": rejected},
        "accepted_tokens": accepted, "tau": round(accepted / cycles + 1, 4) if cycles else 1.0,
        "proposed_by": by_drafter["proposed"], "accepted_by": by_drafter["accepted"],
        "fuzzy_tokens": sum(receipt.source == "fuzzy" for output in outputs for receipt in output.receipts),
        "target_forwards": sum(each.target_forwards for each in stats),
    }
