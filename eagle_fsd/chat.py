"""`Chat`: a conversation that keeps the caches of target and draft between its turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .api import OWN, generate, with_options
from .decoding.decoder import Session
from .decoding.output import Output
from .keywords import GenerateKeywords, lists_options
from .loading import default_model
from .models.placement import Lock
from .options import GenerateOptions
from .pair import EagleModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import Keywords


class Chat:
    """A conversation whose turns process only what is new in them.

    Every turn is what `generate(messages)` gives: the whole conversation is put through the chat template and
    tokenised, and the caches are used as far as its tokens are those that they hold.

    Args:
        model: from `load`; None: the default pair.
        system: text of a system message.
        options: those of `generate`, for every turn.

    Attributes:
        messages: the conversation as `generate` takes it. It may be edited between turns.
        options: may be changed between turns.

    Raises:
        ValueError: the model has no tokenizer, or one without a chat template.
        TypeError, ValueError: options that `generate` would refuse.
    """

    @lists_options(GenerateOptions, GenerateKeywords)
    def __init__(
        self, model: EagleModel | None = None, *, system: str | None = None, **options: Unpack[Keywords]
    ) -> None:
        self.model = default_model() if model is None else model
        if getattr(self.model.tokenizer, "chat_template", None) is None:
            raise ValueError("a chat needs a tokenizer with a chat template, and this model has none")
        with_options(options.get("options"), {name: value for name, value in options.items() if name not in OWN})
        self.options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turn = Lock()
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation, once an answer that another thread waits for has ended."""
        with self._turn:
            self.messages: list[dict[str, Any]] = list(self._system)
            self.session = Session()
            self._stopped = False

    @property
    def system(self) -> str | None:
        """Text of the system message; may be changed between turns, None: without one."""
        return self._system[0]["content"] if self._system else None

    @system.setter
    def system(self, text: str | None) -> None:
        with self._turn:
            said = self.messages[1 if self.messages and self.messages[0]["role"] == "system" else 0 :]
            self._system = [] if text is None else [{"role": "system", "content": text}]
            self.messages = [*self._system, *said]

    @lists_options(GenerateOptions, GenerateKeywords)
    def send(self, text: str, **options: Unpack[Keywords]) -> Output:
        """Say something; returns the answer and adds both to `messages`. Threads wait for one another.

        Args:
            options: those of `generate` for this turn, on top of the chat's own.

        Raises:
            ValueError, TypeError: as `generate`, for a conversation that has become too long as well; the
                conversation is then as it was before.
        """
        with self._turn:
            messages = [*self.messages, {"role": "user", "content": text}]
            options = {**self.options, **options}
            criteria = [*(options.pop("stopping_criteria", None) or []), self._is_stopped]
            self._stopped = False
            output = generate(messages, self.model, session=self.session, stopping_criteria=criteria, **options)
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
            return output

    def stop(self) -> None:
        """End the answer that is being written after its current cycle: from another thread or a signal handler.

        What is there by then stays in the conversation.
        """
        self._stopped = True

    def _is_stopped(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return torch.full((len(input_ids),), self._stopped)
