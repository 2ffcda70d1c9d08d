"""Shared parts of the evaluation commands: options, their record, and the exit status."""

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
    """Run a command and return its exit status: the result of `work` (None: 0), or that of `exit_status`.

    Args:
        module: name of the module, for example "eval.forwards".
        arguments: dataclass of the options; --help begins with its module's docstring.
        stopped: message after Ctrl-C.
    """
    results: list[int | None] = [0]
    about = sys.modules[arguments.__module__].__doc__
    status = exit_status(module, lambda: results.append(work(parse_options(
        arguments, argv, program=f"python -m {module}", description=about))), stopped=stopped)
    return status or results[-1] or 0


def option_record(args: object) -> dict[str, str]:
    """Every option by its name, as text for a record."""
    record: dict[str, str] = {}
    for name, value in vars(args).items():
        record |= option_record(value) if name == "pair" else {name: shown(value)}  # flags of `pair` have no prefix
    return record
