"""A request of an engine, from the queue to its end: what it asks for, and how its answer is handed on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..api import cut_text
from ..engine.receipts import Output, Receipt, Stats
from ..engine.request import Request, RequestSettings
from ..pair import EagleModel
from ..prompts import decode
from ..text import StreamedText
from .tickets import Answer, Piece


class Job(BaseStreamer):
    """What `Request.take` streams to, for one ticket's answer.

    Args:
        stops: strings that end it. temperature: for the choice of a tree.
    """

    def __init__(
        self, model: EagleModel, prompt: list[int], settings: RequestSettings, stops: Sequence[str], temperature: float
    ) -> None:
        self.model, self.prompt, self.settings = model, prompt, settings
        self.stops, self.temperature = stops, temperature
        self.answer = Answer()
        self.text = None if model.tokenizer is None else StreamedText(model.tokenizer, stops)
        self._receipts: Sequence[Receipt] = ()

    @property
    def positions(self) -> int:
        """Of its whole text."""
        return len(self.prompt) + self.settings.max_new_tokens

    def on_receipts(self, receipts: Sequence[Receipt]) -> None:
        self._receipts = receipts

    def put(self, value: Tensor) -> None:
        ids = value.tolist()
        self.answer.add(Piece(ids, list(self._receipts), "" if self.text is None else self.text.add(ids)))

    def end(self) -> None:
        """A streamer's, which ends with `finish` or `fail`."""

    def finish(self, request: Request | None) -> None:
        """Hand on the whole answer; None: it was cancelled before its turn."""
        try:
            self.answer.end(self._output(request))
        except Exception as error:  # of the tokenizer
            self.fail(error)

    def _output(self, request: Request | None) -> Output:
        settings, answer, now = self.settings, self.answer, time.perf_counter()
        output = Output([], "cancelled", settings.seed, Stats(), []) if request is None else request.output()
        if answer.started is not None:
            first = answer.first or now
            output.stats.prefill_seconds, output.stats.decode_seconds = first - answer.started, now - first
        if self.text is not None:
            output.text = cut_text(decode(self.model, output.token_ids), self.stops)
            rest = self.text.rest(output.text)
            if rest:
                answer.add(Piece([], [], rest))
        return output

    def fail(self, error: BaseException) -> None:
        """Hand on what ended it."""
        self.answer.end(error=error)
