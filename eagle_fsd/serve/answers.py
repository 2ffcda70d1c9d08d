"""Answers in the form of OpenAI's API, whole or as events of a stream."""

from __future__ import annotations

import functools
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..batching.tickets import Piece
from ..decoding.grammar import vocabulary
from ..decoding.output import Output, Receipt
from ..drafting.copies import ORIGINS
from .protocol import ChatRequest, CompletionRequest
from .splitter import Splitter
from .tools import json_text

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}  # our finish reason: the API's
Speller = Callable[[int], tuple[str, list[int] | None]]  # from a token id to its text and bytes, see `speller`


@dataclass
class Formatter:
    """Writes the answers to one request.

    Args:
        model: name of the model.
        request: the request.
        spell: gives a token's text and bytes; None if the request asks for no log-probabilities.
        prompts: tokens of each prompt.
        splitters: for each choice, what splits it into text, thoughts and calls; None: it is text.
    """

    model: str
    request: ChatRequest | CompletionRequest
    spell: Speller | None
    prompts: Sequence[int]
    splitters: Sequence[Splitter | None]
    streamed: int = 0  # new tokens so far
    characters: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # begun in each choice
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The whole answer as one object."""
        choices = []
        for index, output in enumerate(outputs):
            fields: dict[str, Any] = {}
            whole = Piece(output.token_ids, output.receipts, output.text)
            for delta in (self._split(index, whole), self._rest(index)):
                fields |= {name: fields.get(name, type(value)()) + value for name, value in delta.items()}
            calls = fields.get("tool_calls", [])
            for call in calls:
                del call["index"]
            text = fields.pop("content", None if calls else "")
            content = {"message": {"role": "assistant", "content": text, **fields}} if self.chat else {"text": text}
            choices.append({"index": index, **content, "finish_reason": self._reason(index, output),
                            "logprobs": self._tokens(index, output.token_ids, output.receipts), "seed": output.seed})
        return self._body("", choices, self._counted(outputs))

    def opening(self, index: int) -> str:
        """The first event of a choice in a chat's stream, with its role."""
        return self._event(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> str:
        """The event of one cycle of a choice; empty if the cycle adds neither text nor log-probabilities."""
        self.streamed += len(piece.token_ids)
        logprobs = self._tokens(index, piece.token_ids, piece.receipts)
        delta = self._split(index, piece)
        return self._event(index, delta, logprobs=logprobs) if delta or logprobs is not None else ""

    def ending(self, index: int, output: Output) -> str:
        """The last events of a choice: text and calls that had to wait for its end, and its finish reason."""
        delta = self._rest(index)
        before = self._event(index, delta) if delta else ""
        return before + self._event(index, {}, finish_reason=self._reason(index, output), seed=output.seed)

    def closing(self, outputs: Sequence[Output]) -> str:
        """The last events of a stream."""
        wanted = self.request.stream_options and self.request.stream_options.include_usage
        last = as_event(self._body(".chunk", [], self._counted(outputs))) if wanted else ""
        return f"{last}data: [DONE]\n\n"

    def _split(self, index: int, piece: Piece) -> dict[str, Any]:
        """What a piece adds to the fields of a choice."""
        splitter = self.splitters[index]
        return splitter.add(piece) if splitter else {"content": piece.text} if piece.text else {}

    def _rest(self, index: int) -> dict[str, Any]:
        """What the end of the answer adds."""
        splitter = self.splitters[index]
        return splitter.end() if splitter else {}

    def _reason(self, index: int, output: Output) -> str:
        """The finish reason of a choice, in the API's terms."""
        splitter = self.splitters[index]
        return "tool_calls" if splitter and splitter.calls else FINISHED[output.finish_reason]

    def _counted(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """`usage`, and the `metrics` of a single answer as vLLM reports them, see `Stats.speculative_decoding`."""
        predicted = self.chat and self.request.prediction is not None
        metrics = {"speculative_decoding": outputs[0].stats.speculative_decoding} if len(outputs) == 1 else None
        return {"usage": usage(sum(self.prompts), outputs, predicted=predicted, prompts=len(self.prompts)),
                "metrics": metrics}

    def _event(self, index: int, delta: dict, **more: Any) -> str:
        """An event of one choice."""
        content = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "finish_reason": None, "logprobs": None, **more}
        wanted = self.request.stream_options and self.request.stream_options.continuous_usage_stats
        return as_event(self._body(".chunk", [choice],
                                   {"usage": counts(sum(self.prompts), self.streamed)} if wanted else {}))

    def _body(self, kind: str, choices: list[dict], counted: dict[str, Any]) -> dict[str, Any]:
        """The object around choices, with further fields of it; `kind` is "" or ".chunk"."""
        name, prefix = (f"chat.completion{kind}", "chatcmpl") if self.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{self.id}", "object": name, "created": self.created, "model": self.model,
                "choices": choices, **counted}

    def _tokens(self, index: int, ids: Sequence[int], receipts: Sequence[Receipt]) -> dict | None:
        """Tokens with the target's log-probabilities; further fields give the source of each token."""
        if self.request.alternatives is None:
            return None
        tokens = [self._token(token, receipt.logprob) for token, receipt in zip(ids, receipts, strict=True)]
        if self.chat:
            return {"content": [token | {
                "top_logprobs": [self._token(*best) for best in receipt.top], "source": receipt.source,
                "drafter": receipt.drafter, "divergence": finite(receipt.divergence), "regret": finite(receipt.regret)}
                for token, receipt in zip(tokens, receipts, strict=True)]}
        top = [by_text({token: receipt.logprob, **dict(receipt.top)}, self.spell)
               for token, receipt in zip(ids, receipts, strict=True)] if self.request.alternatives else None
        return {"tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens], "top_logprobs": top,
                "text_offset": [self._offset(index, token["bytes"] or []) for token in tokens],
                "source": [receipt.source for receipt in receipts]}

    def _offset(self, index: int, encoded: Sequence[int]) -> int:
        """Where the next token of a choice begins in its text: at its first character, of which earlier tokens may have
        some bytes."""
        begins = [byte & 0xC0 != 0x80 for byte in encoded]  # a character of UTF-8
        offset = self.characters[index] - (begins[:1] == [False])
        self.characters[index] += sum(begins)
        return offset

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, encoded = self.spell(token)
        return {"token": text, "logprob": finite(logprob), "bytes": encoded}


def by_text(top: Mapping[int, float], spell: Speller) -> dict[str, float | None]:
    """Log-probabilities by token text, the best first; by token id, as in vLLM, if a better token has the same text."""
    logprobs: dict[str, float | None] = {}
    for token, logprob in sorted(top.items(), key=lambda item: -item[1]):
        text, _ = spell(token)
        logprobs[f"token_id:{token}" if text in logprobs else text] = finite(logprob)
    return logprobs


@functools.lru_cache(maxsize=4)
def speller(tokenizer: PreTrainedTokenizerBase, size: int, eos_ids: tuple[int, ...]) -> Speller:
    """A function from a token id to the token's text and its bytes. The text of a part of a character is "bytes:...".
    The bytes are None for a token that adds no text to an answer, such as an end token.

    llguidance gives the bytes. For a tokenizer that it does not support they are those of the text.

    Args:
        size: V, the size of the logits.
    """
    tokens = None
    with suppress(ValueError, AttributeError, ImportError):  # AttributeError: a slow tokenizer
        ends = tuple(token for token in eos_ids if token < size)  # as in `Grammar`, which shares the vocabulary
        tokens = vocabulary(tokenizer, size, ends or (0,))

    def spell(token: int) -> tuple[str, list[int] | None]:
        text = tokenizer.decode([token])
        encoded = text.encode() if tokens is None else tokens.decode_bytes([token])
        if text and not tokenizer.decode([token], skip_special_tokens=True):
            return text, None
        try:
            return encoded.decode(), list(encoded)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded), list(encoded)

    return spell


def finite(value: float | None) -> float | None:
    """The value; None for infinity and NaN, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def as_event(body: dict) -> str:
    """Format a server-sent event."""
    return f"data: {json_text(body)}\n\n"


def counts(prompt: int, new: int) -> dict[str, Any]:
    """Token counts in the API's fields."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def usage(prompt: int, outputs: Sequence[Output], predicted: bool = False, prompts: int = 1) -> dict[str, Any]:
    """The API's token counts, and ours: `accepted_tokens` of the draft, tau, proposed and accepted tokens by drafter,
    `fuzzy_tokens` that only the rule accepts, their `regret` in nats, and the target's forwards.

    Args:
        prompt: tokens of all prompts together.
        predicted: the request has a prediction. Copied tokens then count as accepted or rejected prediction tokens,
            wherever they were copied from: most of a prediction is usually in the prompt too.
        prompts: number of prompts; each has the same number of outputs.
    """
    stats = [output.stats for output in outputs]
    accepted = sum(sum(answer.accepted_lengths) for answer in stats)
    cycles = sum(len(answer.accepted_lengths) for answer in stats)
    choices = len(stats) // prompts  # the first choice prefills the prompt, the others reuse its cache
    prefilled = sum(max(answer.prefill_tokens for answer in stats[first : first + choices])
                    for first in range(0, len(stats), choices))
    receipts = [receipt for output in outputs for receipt in output.receipts]
    regrets = [receipt.regret for receipt in receipts if receipt.source == "fuzzy"]
    by_origin = {name: {origin: sum(getattr(answer, name)[origin] for answer in stats) for origin in ORIGINS}
                  for name in ("proposed", "accepted")}
    copied = sum(receipt.drafter == "text" for receipt in receipts) if predicted else 0
    rejected = by_origin["proposed"]["text"] - copied if predicted else 0
    return {
        **counts(prompt, sum(len(output.token_ids) for output in outputs)),
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - prefilled) if prefilled else 0},
        "completion_tokens_details": {"accepted_prediction_tokens": copied, "rejected_prediction_tokens": rejected},
        "accepted_tokens": accepted, "tau": round(accepted / cycles + 1, 4) if cycles else 1.0,
        "proposed_by": by_origin["proposed"], "accepted_by": by_origin["accepted"],
        "fuzzy_tokens": len(regrets), "regret": round(math.fsum(regrets), 4),
        "target_forwards": sum(answer.target_forwards for answer in stats),
    }
