"""`OptionError`, and checks of single values. Errors name option, value and accepted values. Imports no torch."""

from __future__ import annotations

import opcode
from collections.abc import Callable, Sequence
from numbers import Integral, Real

RAISE = opcode.opmap["RAISE_VARARGS"]
OURS = ("eagle_fsd", "train", "eval")  # packages


def is_check(error: BaseException) -> bool:
    """Whether an error says what the user got wrong: a ValueError or TypeError by a `raise` statement of this project.

    One that an operation or another library raises, such as "'NoneType' object is not subscriptable", is a fault of the
    program, so code that calls others with the user's input must raise an error of its own.
    """
    trace = error.__traceback__
    if not isinstance(error, (ValueError, TypeError)) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    module = getattr(frame.f_globals.get("__spec__"), "name", "")  # __name__ is "__main__" with python -m
    return module.partition(".")[0] in OURS and frame.f_code.co_code[trace.tb_lasti] == RAISE


class OptionError(ValueError, TypeError):
    """An invalid option. The message begins with its name.

    It is both a `ValueError` and a `TypeError`, so that callers may catch either.

    Args:
        name: name of the option.
        value: its value.
        accepted: the accepted values, in words that follow "must be".
        problem: replaces value and accepted: a message of another form, which follows the name.
    """

    def __init__(self, name: str, value: object = None, accepted: str = "", *, problem: str = "") -> None:
        self.name, self.problem = name, problem or f"must be {accepted}, got {value!r}"
        super().__init__(str(self))

    def __str__(self) -> str:  # not from `args`, which an unpickled copy has wrong
        return f"{self.name} {self.problem}"


def require_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless the option is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(name, value, "an int")
    if value < least:
        raise OptionError(name, value, f"at least {least}")
    if most is not None and value > most:
        raise OptionError(name, value, f"at most {most}")


def require_bool(name: str, value: object) -> None:
    """Raise unless the option is True or False."""
    if not isinstance(value, bool):
        raise OptionError(name, value, "a bool")


def require_number(name: str, value: object, accepted: str, valid: Callable[[float], bool]) -> None:
    """Raise unless the option is a valid number; `accepted` describes the valid ones."""
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
        raise OptionError(name, value, accepted)


def check_interval(name: str, value: object, upper: float, closed: bool, of: str = "") -> None:
    """Raise unless 0 <= value <= upper (or < upper); `of` names the owner of the option, such as "of rule 'fsd' "."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(name, problem=f"{of}must be a number, got {value!r}")
    if upper == 0 != value:
        raise OptionError(name, problem=f"{of}must be 0, got {value!r}: decoding is lossless there")
    if not (0 <= value < upper or (closed and value == upper)):
        raise OptionError(name, problem=f"{of}must lie in [0, {upper:g}{']' if closed else ')'}, got {value!r}")


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise unless the value is one of the accepted ones."""
    if value not in accepted:
        raise OptionError(name, value, f"one of {', '.join(accepted)}")


def check_functions(name: str, functions: object) -> None:
    """Raise unless `functions` is None or a list of functions."""
    if functions is None:
        return
    if not isinstance(functions, (list, tuple)):
        raise OptionError(name, functions, "a list")
    for function in functions:
        if isinstance(function, type) or not callable(function):
            raise OptionError(name, problem=f"must contain functions or callable objects, got {function!r}")


def check_placement(device: object, device_map: object) -> None:
    """Raise ValueError if both are set."""
    if device is not None and device_map is not None:
        raise ValueError(f"pass device={device!r} or device_map={device_map!r}, not both")
