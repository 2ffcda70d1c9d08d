"""The text of an answer while it is generated, where a stop string ends it, and whether two models have one tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # how an incomplete character decodes
# A token that begins so, after a character other than a space or ', is not changed by `clean_up_tokenization_spaces`
# together with the text before it.
APART = re.compile(r" [^\s'.?!,n]")
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte token of a tokenizer with byte fallback


def token_difference(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> str | None:
    """The first token that differs, in words; None: there is none. Either tokenizer may have further tokens."""
    vocabularies = target.get_vocab(), drafter.get_vocab()
    if vocabularies[0] == vocabularies[1]:
        return None
    theirs, ours = ({number: token for token, number in tokens.items()} for tokens in vocabularies)
    number = min((number for number in theirs.keys() & ours.keys() if theirs[number] != ours[number]), default=None)
    return None if number is None else f"its token {number} is {ours[number]!r}, the target's is {theirs[number]!r}"


class GrowingText:
    """Text decoded token by token. A piece is the text that a token adds to the text before it.

    Args:
        special: with the text of special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: bool = False) -> None:
        self.tokenizer, self.special = tokenizer, special
        own = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
        backend = getattr(tokenizer, "backend_tokenizer", None)  # transformers ignores the setting for BPE
        self.cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False) and (
            own or backend is None or type(backend.model).__name__ != "BPE")
        self.ids: list[int] = []  # tokens of the last piece, and those after it
        self.known = 0  # the number of them that belong to the last piece

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=not self.special)

    def add(self, token: int) -> str:
        """The piece that this token completes, see `pending`. It is empty in the middle of a character, and within byte
        tokens (byte fallback): an incomplete character at their end changes how all of them decode."""
        if self.cleans:
            return self._add_before(token)
        self.ids.append(token)
        if BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or ""):
            return ""
        piece = self.pending()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self.ids, self.known = self.ids[self.known :], len(self.ids) - self.known
        return piece

    def _add_before(self, token: int) -> str:
        """`add` if spaces before punctuation are dropped: the text before this token, where the token leaves it so."""
        raw = partial(self.tokenizer.decode, skip_special_tokens=not self.special, clean_up_tokenization_spaces=False)
        before, piece = raw(self.ids), self.pending()
        self.ids.append(token)
        if not (piece and before[-1:].strip(" '") and APART.match(raw(self.ids)[len(before) :])):
            return ""
        self.ids, self.known = self.ids[self.known :], len(self.ids) - 1 - self.known
        return piece

    def pending(self) -> str:
        """The text of the tokens since the last piece, an incomplete character included."""
        return self._decode(self.ids)[len(self._decode(self.ids[: self.known])) :]


class StreamedText:
    """Text that can be shown while it is generated, up to the first stop string. What may be part of one is withheld.

    Special tokens are left out, except those that a stop string contains: in the text that is searched, each of these
    is one character, a lone surrogate, which does not occur in decoded text.

    Args:
        stops: stop strings, possibly none.
        special: with the text of special tokens.

    Attributes:
        stopped: whether the text that `add` has searched contains a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], special: bool = False) -> None:
        self.stops, self.growing = list(stops), GrowingText(tokenizer, special)
        self.marks, marked = ({}, []) if special or not stops else mark_special(tokenizer, stops)
        self._strings = list(dict.fromkeys([*stops, *marked]))
        self._shown = 0  # characters
        self._unshown = ""  # the end of the text, which may begin a stop string
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be shown after these tokens."""
        self._unshown += "".join(self.marks.get(token) or self.growing.add(token) for token in tokens)
        end = first_of(self._strings, self._unshown)
        count = 0 if self.stopped else len(self._unshown) - self._partial() if end is None else end
        self.stopped = self.stopped or end is not None
        piece, self._unshown = self._unmarked(self._unshown[:count]), self._unshown[count:]
        self._shown += len(piece)
        return piece

    def stops_at(self, token: int) -> bool:
        """Add a token. Returns whether a stop string is complete, perhaps in text that would still be withheld."""
        self.add([token])
        return self.stopped or first_of(self._strings, self._unshown + self.growing.pending()) is not None

    def withheld(self) -> str:
        """The text that would be shown if the answer ended here."""
        text = self._unshown + self.growing.pending()
        return "" if self.stopped else self._unmarked(text[: first_of(self._strings, text)])

    def rest(self, whole: str) -> str:
        """The part of the whole text that has not been shown."""
        return whole[self._shown :]

    def _partial(self) -> int:
        """The number of characters at the end that are the beginning of a stop string."""
        lengths = range(min(max(map(len, self._strings), default=1) - 1, len(self._unshown)), 0, -1)
        return next((n for n in lengths if any(string.startswith(self._unshown[-n:]) for string in self._strings)), 0)

    def _unmarked(self, text: str) -> str:
        """The text without special tokens."""
        return text.translate(dict.fromkeys(map(ord, self.marks.values())))


def mark_special(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> tuple[dict[int, str], list[str]]:
    """A character for each special token that a stop string contains, and the strings with these characters."""
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)) | {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    named = [token for token, content in special.items() if any(content in stop for stop in stops)]
    named.sort(key=lambda token: -len(special[token]))  # replace the longer one first if one contains another
    marks, marked = {token: chr(0xD800 + number) for number, token in enumerate(named)}, list(stops)
    for token, mark in marks.items():
        marked = [stop.replace(special[token], mark) for stop in marked]
    return marks, marked


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stops: Sequence[str]) -> str:
    """The text of an answer before the first stop string in it."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if stops and (streamed := StreamedText(tokenizer, stops)).marks:
        text = text[: len(streamed.add(ids) + streamed.withheld())]
    return text[: first_of(stops, text)]


def first_of(strings: Sequence[str], text: str) -> int | None:
    """Where the first of the strings in a text begins; None: it contains none."""
    return min((at for string in strings if (at := text.find(string)) >= 0), default=None)
