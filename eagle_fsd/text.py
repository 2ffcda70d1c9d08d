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


class WatchedText(GrowingText):
    """Text in which stop strings are looked for. It has no special tokens, but for those that a stop string names: each
    of them stands in it as one character, a lone surrogate, which no decoded text has.

    `strings` are the stop strings, and those that name such tokens a second time, as they are found here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self.marks: dict[int, str] = {}
        self.strings = list(strings)
        if not strings:
            return
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | {
            token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        named = [token for token, content in special.items() if any(content in string for string in strings)]
        named.sort(key=lambda token: -len(special[token]))  # where one contains another, the longer is meant
        self.marks = {token: chr(0xD800 + number) for number, token in enumerate(named)}
        marked = list(strings)
        for token, mark in self.marks.items():
            marked = [string.replace(special[token], mark) for string in marked]
        self.strings = list(dict.fromkeys([*strings, *marked]))

    def add(self, token: int) -> str:
        return self.marks.get(token) or super().add(token)

    def unmarked(self, text: str) -> str:
        """The text without special tokens."""
        return text.translate(dict.fromkeys(map(ord, self.marks.values())))


class StreamedText:
    """Text as it can be shown while its tokens come: never what a stop string, complete or begun, may take away again.

    Args:
        strings: stop strings; there may be none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.text = WatchedText(tokenizer, strings)
        self.shown = 0  # characters
        self.held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown of the text once these tokens have come."""
        self.held += "".join(map(self.text.add, tokens))
        found = [at for string in self.text.strings if (at := self.held.find(string)) >= 0]
        count = 0 if self.stopped else min(found) if found else len(self.held) - self._begun()
        self.stopped = self.stopped or bool(found)
        piece, self.held = self.text.unmarked(self.held[:count]), self.held[count:]
        self.shown += len(piece)
        return piece

    def withheld(self) -> str:
        """What would be shown if the text ended here."""
        return "" if self.stopped else self.text.unmarked(self.held) + self.text.pending()

    def rest(self, whole: str) -> str:
        """What the whole text has beyond what was shown."""
        return whole[self.shown :]

    def _begun(self) -> int:
        """How many of the last characters are the beginning of a stop string."""
        strings = self.text.strings
        lengths = range(min(max(map(len, strings), default=1) - 1, len(self.held)), 0, -1)
        return next((n for n in lengths if any(string.startswith(self.held[-n:]) for string in strings)), 0)


class StopStrings:
    """Told each new token, says whether one of the strings is complete.

    Args:
        strings: not empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.text = WatchedText(tokenizer, strings)
        self.tail = ""  # text in which one may have begun

    def __call__(self, token: int) -> bool:
        piece = self.text.add(token)
        found = self.tail + (piece or self.text.pending())
        self.tail = (self.tail + piece)[-max(map(len, self.text.strings)) :]
        return any(string in found for string in self.text.strings)


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Sequence[str]) -> str:
    """The text of an answer before the first stop string in it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if stops and (streamed := StreamedText(tokenizer, stops)).text.marks:
        streamed.add(ids)
        text = text[: streamed.shown] if streamed.stopped else text
    return text[: min((at for string in stops if (at := text.find(string)) >= 0), default=None)]
