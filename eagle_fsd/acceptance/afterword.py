"""Fuzzy acceptance behind an answer's first code block."""

from dataclasses import dataclass
from typing import ClassVar

from .prose import BEHIND, Prose


@dataclass(frozen=True)
class Afterword(Prose):
    """`prose` behind the end of the answer's first fenced block only, outside of further ones.

    In front of the first block, where a program is announced, and in answers without a block the target's own tokens
    stay: another announcement may be another program. What announces a second block is not spared. Measured in
    docs/fuzzy.md.

    Args:
        threshold: as of `prose`, in nats.
        marks: as of `prose`.
    """

    name: ClassVar[str] = "afterword"
    open_places: ClassVar[tuple[int, ...]] = (BEHIND,)
