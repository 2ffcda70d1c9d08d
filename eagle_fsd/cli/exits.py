"""How commands end: exit statuses, and one line for what a user can get wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from ..options import AcceptanceOptions, LoadOptions, SamplingOptions, names_of

NAMES = "|".join(sorted({*names_of(LoadOptions), *names_of(SamplingOptions), *names_of(AcceptanceOptions)},
                        key=len, reverse=True))
# How messages name an option: `name=`, `name=value`, as the subject of what is said, and where it is of several words.
SUBJECT = r"(?= must\b| needs\b| of rule\b| '[^']*' cannot)"
NAMED = re.compile(rf"(?<![\w.'\"/-])(?:({NAMES})=(?=[\s,;:)]|$)|({NAMES})=|({NAMES}){SUBJECT}"
                   r"|([a-z]+(?:_[a-z]+)+)(?![\w.'\"=(/]))")


def as_flags(message: str) -> str:
    """What a message says, with the flags of a command line for the names of options."""
    def flag(found: re.Match) -> str:
        alone, valued, subject, words = found.groups()
        if words is not None and not re.fullmatch(NAMES, words):
            return words
        name = (alone or valued or subject or words).replace("_", "-")
        return f"--{name}{' ' if valued else ''}"

    return NAMED.sub(flag, message)


def check_counts(options: object, *names: str, least: int = 1) -> None:
    """Raise ValueError for an option that is below `least`; one that was not given (None) is none."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


USER_ERRORS = (ValueError, TypeError, OSError, ImportError)  # what a user can get wrong


def exit_status(
    program: str, work: Callable[[], object], *, also: tuple[type[Exception], ...] = (), stopped: str | None = None,
    flags: bool = False,
) -> int:
    """The exit status of a command: 0; 2 with one line for what a user can get wrong; 130 after Ctrl-C.

    Args:
        also: what a user can get wrong besides; everything else is shown with its traceback.
        stopped: what to say after Ctrl-C.
        flags: whether the options of `eagle_fsd.options` are flags of the command, and called so in messages.
    """
    from ..data.progress import lines_on_stderr  # tqdm, which --help does without

    try:
        with lines_on_stderr():
            work()
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except (*USER_ERRORS, *also) as error:
        said = " ".join(str(error).split())
        print(f"{program}: {as_flags(said) if flags else said}", file=sys.stderr)
        return 2
    return 0
