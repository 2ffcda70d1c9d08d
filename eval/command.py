"""What all commands of evaluation do alike: read and note their options, end with a status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.measure.records import shown

A = TypeVar("A")


def run_command(
    module: str, arguments: type[A], work: Callable[[A], int | None], argv: Sequence[str] | None = None, *,
    stopped: str | None = None,
) -> int:
    """The exit status of a command: that of `work` (None: 0), or see `exit_status`.

    Args:
        module: such as "eval.benchmark".
        arguments: the dataclass of its options; --help begins with its module's docstring.
        stopped: what to say after Ctrl-C.
    """
    ended: list[int | None] = [0]
    about = sys.modules[arguments.__module__].__doc__
    status = exit_status(module, lambda: ended.append(work(parse_options(
        arguments, argv, program=f"python -m {module}", description=about))), stopped=stopped)
    return status or ended[-1] or 0


def option_record(args: object) -> dict[str, str]:
    """Every option by its flag's name, as records keep them."""
    notes: dict[str, str] = {}
    for name, value in vars(args).items():
        if name == "pair":  # a group of options, whose flags have no prefix
            notes |= option_record(value)
        else:
            notes[name] = shown(value)
    return notes
