"""Options as text: dataclasses as command lines, read by tyro."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

T = TypeVar("T")

STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName, tyro.conf.HelptextFromCommentsOff)


def parse_options(options: type[T], argv: Sequence[str] | None = None, *, program: str | None = None) -> T:
    """A dataclass from a command line: its fields are the flags, its docstring is the help."""
    return tyro.cli(options, args=argv, prog=program, config=STYLE)
