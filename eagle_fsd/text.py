"""The text of an answer while its tokens come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a character decodes to whose last bytes are yet to come


class GrowingText:
    """Text decoded a few tokens at a time: each piece is what a token adds after those before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # the tokens of the last piece, and those since
        self.known = 0  # how many of them the text before the next piece is made of

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The piece that this token ends, empty in the middle of a character; `pending` is what it is so far."""
        self.ids.append(token)
        piece = self.pending()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self.ids, self.known = self.ids[self.known :], len(self.ids) - self.known
        return piece

    def pending(self) -> str:
        """What the tokens since the last piece are so far, an unfinished character included."""
        return self._decode(self.ids)[len(self._decode(self.ids[: self.known])) :]


class StreamedText:
    """Text as it can be shown while its tokens come: never what a stop string, complete or begun, may take away again.

    Args:
        strings: stop strings; there may be none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.text, self.strings = GrowingText(tokenizer), strings
        self.shown = 0  # characters
        self.held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown of the text once these tokens have come."""
        self.held += "".join(map(self.text.add, tokens))
        found = [at for string in self.strings if (at := self.held.find(string)) >= 0]
        count = 0 if self.stopped else min(found) if found else len(self.held) - self._begun()
        self.stopped = self.stopped or bool(found)
        piece, self.held = self.held[:count], self.held[count:]
        self.shown += count
        return piece

    def rest(self, whole: str) -> str:
        """What the whole text has beyond what was shown."""
        return whole[self.shown :]

    def _begun(self) -> int:
        """How many of the last characters are the beginning of a stop string."""
        lengths = range(min(max(map(len, self.strings), default=1) - 1, len(self.held)), 0, -1)
        return next((n for n in lengths if any(string.startswith(self.held[-n:]) for string in self.strings)), 0)


class StopStrings:
    """Told each new token, says whether one of the strings is complete.

    Args:
        strings: not empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.text, self.strings = GrowingText(tokenizer), strings
        self.tail = ""  # text in which one may have begun

    def __call__(self, token: int) -> bool:
        piece = self.text.add(token)
        found = self.tail + (piece or self.text.pending())
        self.tail = (self.tail + piece)[-max(map(len, self.strings)) :]
        return any(string in found for string in self.strings)
