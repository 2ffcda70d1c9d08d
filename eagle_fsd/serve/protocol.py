"""What clients ask for: the bodies of requests, and the options of decoding that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..options import AcceptanceOptions, SamplingOptions, names_of
from ..trees.config import TreeConfig
from .refusals import Refusal, wrong_value

MOST_CHOICES = 16
MOST_STOPS = 16
LARGEST_TREE = TreeConfig(total_tokens=128, depth=16, top_k=32)  # what a request may ask for, in each number

# Ours by their names in the API; all others of `eagle_fsd.options` keep theirs.
RENAMED = {"max_new_tokens": "max_tokens"}
OPTIONS = {RENAMED.get(name, name): name for kind in (SamplingOptions, AcceptanceOptions) for name in names_of(kind)}

# What the API has and this server does not: accepted where it changes nothing.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "parallel_tool_calls")
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",),
    "functions": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],), "echo": (False,),
    "suffix": ("",), "best_of": (1,),
}


class Part(BaseModel):
    """A piece of a message: text, no image and no sound."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(strict=True)
    role: str
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """As chat templates take it; the API's newer name for `system` is not known to them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream says besides the answer."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests have; further fields are options of decoding, see `options`."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1

    def options(self, defaults: Mapping[str, object]) -> dict[str, Any]:
        """The options of decoding: those of the request, else the server's.

        Raises:
            Refusal: a field that is not known or not supported, or a value that cannot be accepted.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in extra.items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise Refusal(400, f"{name} is not supported here: leave it out, got {value!r}", param=name)
            if name not in OPTIONS and name not in NEUTRAL and name not in WITHOUT_EFFECT:
                raise Refusal(400, f"unknown field {name!r}; options of decoding are {', '.join(OPTIONS)}",
                              param=name, code="unknown_field")
        given = {OPTIONS[name]: value for name, value in extra.items() if name in OPTIONS}
        chosen = merged(defaults, given)
        try:
            if isinstance(given.get("tree"), dict):
                chosen["tree"] = tree_of(given["tree"])
            check_request(chosen)
            SamplingOptions.of(chosen)
            AcceptanceOptions.of(chosen)
        except (ValueError, TypeError) as error:
            raise wrong_value(error, [*names_of(SamplingOptions), *names_of(AcceptanceOptions)], RENAMED) from error
        return chosen

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Asked):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # of the chosen token alone they are known

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [message.plain() for message in self.messages]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def options(self, defaults: Mapping[str, object]) -> dict[str, Any]:
        if self.max_completion_tokens is not None:
            assert self.model_extra is not None
            if self.model_extra.get("max_tokens") not in (None, self.max_completion_tokens):
                raise Refusal(400, "give max_completion_tokens or max_tokens, not both", param="max_tokens")
            self.model_extra["max_tokens"] = self.max_completion_tokens
        return super().options(defaults)


class CompletionRequest(Asked):
    """The body of `/v1/completions`: text as it is, or token ids; one prompt."""

    prompt: str | Annotated[list[int], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # 0: of the chosen tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


def merged(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, Any]:
    """The server's defaults under the request's options: who chooses a rule or a promise chooses its dial too."""
    dial = {"acceptance", "threshold", "divergence", "quality"}
    dropped = dial if given.keys() & {"acceptance", "quality"} else {"quality"} if given.keys() & dial else set()
    return {**{name: value for name, value in defaults.items() if name not in dropped}, **given}


def check_request(options: Mapping[str, object]) -> None:
    """What may be asked for in a request, where it is less than what `generate` takes.

    Raises:
        ValueError, TypeError: in the words of `eagle_fsd.options`.
    """
    if not isinstance(options.get("acceptance", ""), str):
        raise TypeError(f"acceptance must be the name of a rule, got {options['acceptance']!r}")
    if isinstance(options.get("seed"), list):
        raise TypeError("seed must be an int: that of the first choice; the others get the numbers that follow")
    stops = options.get("stop")
    if isinstance(stops, (list, tuple)) and len(stops) > MOST_STOPS:
        raise ValueError(f"stop must hold at most {MOST_STOPS} strings, got {len(stops)}")
    ids = options.get("stop_token_ids")
    if ids is not None and not isinstance(ids, list):
        raise TypeError(f"stop_token_ids must be a list of token ids, got {ids!r}")


def tree_of(given: dict[str, Any]) -> TreeConfig:
    """A tree from its numbers by name.

    Raises:
        ValueError, TypeError: a number that is not known, missing or too large.
    """
    names = ("total_tokens", "depth", "top_k", "draft_temperature")
    if not given.keys() <= set(names):
        raise ValueError(f"tree must have {', '.join(names)}, got {', '.join(map(repr, given))}")
    for name in names[:3]:
        most = getattr(LARGEST_TREE, name)
        if isinstance(given.get(name), int) and given[name] > most:
            raise ValueError(f"tree must have a {name} of at most {most}, got {given[name]}")
    return TreeConfig(**given)
