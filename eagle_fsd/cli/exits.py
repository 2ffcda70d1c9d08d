"""How commands end: exit statuses, and one line for what a user can get wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress


def check_counts(options: object, *names: str, least: int = 1) -> None:
    """Raise ValueError for an option that is below `least`; one that was not given (None) is none."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


USER_ERRORS = (ValueError, TypeError, OSError, ImportError)  # what a user can get wrong


def exit_status(
    program: str, work: Callable[[], object], *, also: tuple[type[Exception], ...] = (), stopped: str | None = None,
) -> int:
    """The exit status of a command: 0; 2 with one line for what a user can get wrong; 130 after Ctrl-C.

    Where the reader of its output goes, such as `head`, it ends quietly.

    Args:
        also: what a user can get wrong besides; everything else is shown with its traceback.
        stopped: what to say after Ctrl-C.
    """
    from ..data.progress import lines_on_stderr

    try:
        try:
            with lines_on_stderr():
                work()
        finally:
            sys.stdout.flush()  # here, where it can still be caught that nobody reads it
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # or Python would try again, and complain, at its end
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (*USER_ERRORS, *also) as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
