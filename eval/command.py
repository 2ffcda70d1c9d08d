"""What all commands of evaluation do alike: read their options, end with a status, and note what they were given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.measure.records import shown_settings
from eagle_fsd.options import Options

A = TypeVar("A")


def run_command(
    module: str, arguments: type[A], work: Callable[[A], int | None], argv: Sequence[str] | None = None, *,
    stopped: str | None = None,
) -> int:
    """The exit status of a command: that of `work` (None: 0), or see `exit_status`.

    Args:
        module: such as "eval.sweep".
        arguments: the dataclass of its options; what its module says is what --help begins with.
        stopped: what to say after Ctrl-C.
    """
    args = parse_options(arguments, argv, program=f"python -m {module}",
                         description=sys.modules[arguments.__module__].__doc__)
    found: list[int | None] = [0]
    status = exit_status(module, lambda: found.append(work(args)), stopped=stopped, flags=True)
    return status or found[-1] or 0


def noted(args: object) -> dict[str, str]:
    """Every option by its flag's name, as records keep them."""
    groups = [vars(group) for group in vars(args).values() if isinstance(group, Options)]
    own = {name: value for name, value in vars(args).items() if not isinstance(value, Options)}
    return shown_settings({name: value for options in (*groups, own) for name, value in options.items()})
