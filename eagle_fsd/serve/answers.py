"""Answers in the API's form, whole and in pieces, with what they cost."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.receipts import Output
from .tickets import Piece, Ticket

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}


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
            return {"tokens": texts, "token_logprobs": [receipt.logprob for receipt in receipts],
                    "top_logprobs": None, "source": [receipt.source for receipt in receipts]}
        return {"content": [
            {"token": text, "logprob": receipt.logprob, "bytes": list(text.encode()), "top_logprobs": [],
             "source": receipt.source, "divergence": receipt.divergence, "regret": receipt.regret}
            for text, receipt in zip(texts, receipts, strict=True)]}


def as_event(body: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def usage(tickets: Sequence[Ticket], outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens in the API's fields, and what drafting and the rule made of them: `accepted_tokens` of the draft, tau,
    `fuzzy_tokens` that only the rule accepted, and the target's forwards."""
    prompt = tickets[0].prompt_tokens
    new = sum(len(output.token_ids) for output in outputs)
    stats = [output.stats for output in outputs]
    accepted = sum(sum(each.accepted_lengths) for each in stats)
    cycles = sum(len(each.accepted_lengths) for each in stats)
    read = min(each.prefill_tokens for each in stats)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": max(0, prompt - read) if read else 0},
        "accepted_tokens": accepted, "tau": round(accepted / cycles + 1, 4) if cycles else 1.0,
        "fuzzy_tokens": sum(receipt.source == "fuzzy" for output in outputs for receipt in output.receipts),
        "target_forwards": sum(each.target_forwards for each in stats),
    }
