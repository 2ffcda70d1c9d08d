"""`Engine`: requests that join while others are being decoded."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import generate
from ..options import AcceptanceOptions, SamplingOptions
from ..pair import EagleModel
from ..prompts import encode_prompt
from ..trees.config import TreeConfig
from .tickets import Answer, EngineClosed, Piece, QueueFull, Ticket


@dataclass
class EngineStats:
    """Counters since the engine began; they only grow.

    Args:
        requests: submitted and taken. finished: by finish_reason, "error" included. prompt_tokens: of prompts that
            were read; reused_tokens: those of them that were copied from an earlier request. tokens: new ones.
        cycles: of the loop. forwards: verify forwards, each row of a cycle counted; undrafted: those of them without a
            draft tree. accepted: draft tokens; tau is accepted / forwards + 1. fuzzy: tokens that only a rule accepted.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    cycles: int = 0
    forwards: int = 0
    undrafted: int = 0
    accepted: int = 0
    fuzzy: int = 0


class Engine:
    def __init__(
        self, model: EagleModel, *, max_rows: int = 8, max_tokens: int | None = None, max_waiting: int = 64,
        prefill_chunk: int = 512, tree: TreeConfig | None = None,
    ) -> None:
        self.model, self.max_rows, self.max_waiting = model, max_rows, max_waiting
        self.tree = tree or model.default_tree
        self.stats = EngineStats()
        self._queue: deque[tuple[Answer, list[int], dict]] = deque()
        self._changed = threading.Condition()
        self._closing, self._running = False, 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def rows(self) -> int:
        """Requests being decoded or read."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self._closing

    def submit(self, prompt: Any, **options: Any) -> Ticket:
        SamplingOptions.of(options), AcceptanceOptions.of(options)
        ids = encode_prompt(prompt, self.model)
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine takes no more requests")
            if len(self._queue) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait already")
            answer = Answer(lambda: None)
            self._queue.append((answer, ids, options))
            self._changed.notify_all()
        return Ticket(answer, len(ids), 0)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                answer, ids, options = self._queue.popleft()
                self._running = 1
            try:
                output = generate(ids, self.model, streamer=_Pieces(answer, self.model), **options)
                answer.end(output)
            except Exception as error:
                answer.end(error=error)
            self._running = 0


class _Pieces:
    def __init__(self, answer: Answer, model: EagleModel) -> None:
        self.answer, self.model, self.prompt = answer, model, True

    def on_receipts(self, receipts: list) -> None:
        self.receipts = receipts

    def put(self, tokens: torch.Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        ids = tokens.tolist()
        self.answer.add(Piece(ids, self.receipts, self.model.tokenizer.decode(ids) if self.model.tokenizer else ""))

    def end(self) -> None:
        pass
