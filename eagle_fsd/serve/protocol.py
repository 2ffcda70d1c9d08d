"""What clients ask for and get: requests with their options of decoding, and answers whole or in pieces."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..options import AcceptanceOptions, SamplingOptions, names_of
from .guards import Refusal, wrong_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine.receipts import Output
    from ..serve.tickets import Piece, Ticket

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_PARTS = 1024  # of a message

# Ours by their names in the API; all others of `eagle_fsd.options` keep theirs. The tree is the engine's.
RENAMED = {"max_new_tokens": "max_tokens"}
OPTIONS = {RENAMED.get(name, name): name for kind in (SamplingOptions, AcceptanceOptions) for name in names_of(kind)
           if name != "tree"}

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

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat; what an answer of the API has besides its content may be sent back where it is empty."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: str
    name: str | None = None  # of a person: templates have no place for it
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list, Field(max_length=0)] | None = None
    annotations: Annotated[list, Field(max_length=0)] | None = None
    # One wrong item of a list is told, not each: a body has room for half a million.
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """As chat templates take it; the API's newer name for `system` is not known to them."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """What a stream says besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False  # padding, which is never sent


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

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
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

    prompt: str | Annotated[list[int], Field(min_length=1, fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # 0: of the chosen tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


def merged(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, Any]:
    """The server's defaults under the request's options: who chooses a rule or a promise chooses its dial too."""
    dial = {*names_of(AcceptanceOptions)} - {"budget", "tree"}
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


@dataclass
class Form:
    """How the answers to one request look: of a chat, or of a completion.

    Args:
        model: the name that the server gives its model.
        chat: of `/v1/chat/completions`.
        logprobs: whether tokens are listed with their log-probabilities.
    """

    model: str
    chat: bool
    logprobs: bool
    tokenizer: PreTrainedTokenizerBase
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def body(self, kind: str, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        """The object around choices; `kind`: what it is of the answer, "" or ".chunk"."""
        named = f"chat.completion{kind}" if self.chat else "text_completion"
        return {"id": self.id, "object": named, "created": self.created, "model": self.model, "choices": choices,
                **({} if usage is None else {"usage": usage})}

    def whole(self, tickets: Sequence[Ticket], outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for index, output in enumerate(outputs):
            said = {"message": {"role": "assistant", "content": output.text}} if self.chat else {"text": output.text}
            choices.append({"index": index, **said, "finish_reason": FINISHED[output.finish_reason],
                            "logprobs": self.tokens(output.token_ids, output.receipts), "seed": output.seed})
        return self.body("", choices, usage(tickets, outputs))

    def opening(self, index: int) -> str:
        """What a chat's stream begins with: who speaks."""
        return self.event([self.choice(index, {"role": "assistant", "content": ""}, None)])

    def piece(self, index: int, piece: Piece) -> str:
        """What a cycle added to a choice; empty where it is neither text nor asked for."""
        listed = self.tokens(piece.token_ids, piece.receipts)
        if not piece.text and listed is None:
            return ""
        return self.event([self.choice(index, {"content": piece.text}, None, listed)])

    def ending(self, index: int, output: Output) -> str:
        """Why a choice ended."""
        return self.event([self.choice(index, {}, FINISHED[output.finish_reason]) | {"seed": output.seed}])

    def closing(self, tickets: Sequence[Ticket], outputs: Sequence[Output], with_usage: bool) -> str:
        """What a stream ends with."""
        return (self.event([], usage(tickets, outputs)) if with_usage else "") + "data: [DONE]\n\n"

    def choice(self, index: int, delta: dict, reason: str | None, logprobs: dict | None = None) -> dict[str, Any]:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}

    def event(self, choices: list[dict], usage: dict | None = None) -> str:
        return as_event(self.body(".chunk", choices, usage))

    def tokens(self, ids: Sequence[int], receipts: Sequence) -> dict | None:
        """Tokens with their log-probabilities under the target, and as further fields where they come from."""
        if not self.logprobs:
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


def usage(tickets: Sequence[Ticket], outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens in the API's fields, and what drafting and the rule made of them: `accepted_tokens` of the draft, tau,
    `fuzzy_tokens` that only the rule accepted, and the target's forwards."""
    prompt = tickets[0].prompt_tokens
    new = sum(len(output.token_ids) for output in outputs)
    stats = [output.stats for output in outputs]
    accepted = sum(sum(each.accepted_lengths) for each in stats)
    cycles = sum(len(each.accepted_lengths) for each in stats)
    read = max(each.prefill_tokens for each in stats)  # the first choice; the others find what it has read
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - read) if read else 0},
        "accepted_tokens": accepted, "tau": round(accepted / cycles + 1, 4) if cycles else 1.0,
        "fuzzy_tokens": sum(receipt.source == "fuzzy" for output in outputs for receipt in output.receipts),
        "target_forwards": sum(each.target_forwards for each in stats),
    }


def cancel(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


async def interleaved(tickets: list[Ticket]) -> AsyncIterator[tuple[int, Piece | None]]:
    """The pieces of all answers as they come, with the number of theirs; None where one has ended.

    Whoever stops reading ends the answers too.
    """
    found: asyncio.Queue[tuple[int, Piece | None | Exception]] = asyncio.Queue()

    async def read(number: int, ticket: Ticket) -> None:
        try:
            async for piece in ticket:
                found.put_nowait((number, piece))
            found.put_nowait((number, None))
        except Exception as error:
            found.put_nowait((number, error))

    readers = [asyncio.ensure_future(read(number, ticket)) for number, ticket in enumerate(tickets)]
    try:
        left = len(tickets)
        while left:
            number, piece = await found.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield number, piece
    finally:
        cancel(tickets)
        for reader in readers:
            reader.cancel()
