"""Exit statuses of commands, and one-line messages for errors by the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from ..utils.checks import is_check, require_integer


def check_counts(options: object, *names: str, least: int = 1) -> None:
    """Raise for an option that is neither None nor an integer of at least `least`."""
    for name in names:
        if getattr(options, name) is not None:
            require_integer(f"--{name.replace('_', '-')}", getattr(options, name), least)


def escape_unencodable() -> None:
    """Let standard output and error write characters that their encoding lacks as escapes, such as \\u20ac, instead of
    raising."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):  # the latter in the locale C
            stream.reconfigure(errors="backslashreplace")


def exit_status(
    program: str, work: Callable[[], object], *, also: tuple[type[Exception], ...] = (), stopped: str | None = None,
) -> int:
    """Run a command and return its exit status: 0; 2 after an error by the user, printed as one line; 130 after Ctrl-C.
    Errors by the user are those of our checks (`is_check`), OSError and ImportError; others raise with their traceback.

    The command ends silently if the reader of its output, such as `head`, closes the pipe. Characters that the encoding
    of the output lacks are written as escapes.

    Args:
        also: further types of errors by the user.
        stopped: message after Ctrl-C.
    """
    try:
        escape_unencodable()
        try:
            work()
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here, not at interpreter exit
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # Python would flush again at exit and print an error
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except Exception as error:
        if not (is_check(error) or isinstance(error, (OSError, ImportError, *also))):
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
