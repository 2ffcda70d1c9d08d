"""`Chat`: a conversation that keeps the caches of target and draft between turns."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .api import CALL_KEYWORDS, Keywords, check_streamer, generate
from .decoding.batch import Session
from .decoding.output import Output
from .inputs.requests import make_requests
from .loading.load import default_model
from .loading.pair import EagleModel
from .options.generate import GenerateKeywords, GenerateOptions, with_options
from .options.option import lists_options
from .utils.checks import check_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack


TURN_KEYWORDS = [name for name in CALL_KEYWORDS if name != "session"]  # a chat has its own session


class Chat:
    """A conversation in which each turn processes only its new tokens.

    Every turn returns the result of `generate(messages)`: the chat template renders the whole conversation, and the
    caches are reused up to the first token that differs.

    Args:
        model: the result of `load`; None: the default pair.
        system: text of the system message.
        options: keyword arguments of `generate` for every turn, except `session`: a chat has its own.

    Attributes:
        messages: the conversation in the form that `generate` takes. It may be edited between turns.
        options: may be changed between turns.

    Raises:
        ValueError: the model has no tokenizer, or one without a chat template.
        TypeError, ValueError: options that `generate` would reject.
    """

    @lists_options(GenerateKeywords)
    def __init__(
        self, model: EagleModel | None = None, *, system: str | None = None, **options: Unpack[Keywords]
    ) -> None:
        self.model = default_model() if model is None else model
        if getattr(self.model.tokenizer, "chat_template", None) is None:
            raise ValueError("a chat needs a tokenizer with a chat template, and this model has none")
        by_name = {name: value for name, value in options.items() if name not in TURN_KEYWORDS}
        check_streamer(options.get("streamer"))
        make_requests(self.model, [[0]], with_options(options.get("options"), by_name, TURN_KEYWORDS),
                      options.get("logits_processor"), options.get("stopping_criteria"))
        self.options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turn = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start a new conversation. Waits until a running `send` has returned."""
        with self._turn:
            self.messages: list[dict[str, Any]] = list(self._system)
            self.session = Session()
            self._stopped = False

    @property
    def system(self) -> str | None:
        """Text of the system message, None: there is none. It may be changed between turns."""
        return self._system[0]["content"] if self._system else None

    @system.setter
    def system(self, text: str | None) -> None:
        with self._turn:
            turns = self.messages[1 if self.messages and self.messages[0]["role"] == "system" else 0 :]
            self._system = [] if text is None else [{"role": "system", "content": text}]
            self.messages = [*self._system, *turns]

    @lists_options(GenerateKeywords)
    def send(self, text: str, **options: Unpack[Keywords]) -> Output:
        """Send a user message; return the answer, and add both to `messages`. Concurrent calls wait for one another.

        Args:
            options: keyword arguments of `generate` for this turn; they override those of the chat. `options=`, which
                has them all, takes the place of all options of the chat.

        Raises:
            ValueError, TypeError: as `generate`, also for a conversation that has become too long. The conversation
                stays as it was before the call.
        """
        with self._turn:
            messages = [*self.messages, {"role": "user", "content": text}]
            GenerateOptions.check_names({"session"} & options.keys(), TURN_KEYWORDS)  # a chat has its own
            check_functions("stopping_criteria", options.get("stopping_criteria"))
            whole = options.get("options") is not None
            options = {**{name: value for name, value in self.options.items() if name in TURN_KEYWORDS or not whole},
                       **options}
            criteria = [*(options.pop("stopping_criteria", None) or []), lambda input_ids, scores: self._stopped]
            self._stopped = False
            output = generate(messages, self.model, session=self.session, stopping_criteria=criteria, **options)
            self.messages = [*messages, {"role": "assistant", "content": output.text}]
            return output

    def stop(self) -> None:
        """End the running answer after its current cycle. Call it from another thread or a signal handler.

        The answer so far stays in the conversation.
        """
        self._stopped = True
