"""`OptionError`, and checks of single values: each names the option, the value, and what is accepted. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real


class OptionError(ValueError, TypeError):
    """An option that cannot be accepted: its name, then what is wrong with it.

    It is a `ValueError` and a `TypeError`, whichever of the two a caller expects.

    Args:
        name: of the option.
        value: of the option, and `accepted`: the values that it takes, in words that follow "must be".
        problem: in place of these two, for a message of another form; it follows the name.
    """

    def __init__(self, name: str, value: object = None, accepted: str = "", *, problem: str = "") -> None:
        self.name, self.problem = name, problem or f"must be {accepted}, got {value!r}"
        super().__init__(str(self))

    def __str__(self) -> str:  # also of a copy from another process, which `args` alone would not make
        return f"{self.name} {self.problem}"


def require_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise unless the option is an integer of at least `least` and at most `most`."""
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
    """Raise unless the option is a number that is valid; `accepted` says in words which ones are."""
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
        raise OptionError(name, value, accepted)


def check_interval(name: str, value: object, upper: float, closed: bool, of: str = "") -> None:
    """Raise unless 0 <= value <= upper (or < upper); `of` says whose option it is, such as "of rule 'fsd' "."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(name, problem=f"{of}must be a number, got {value!r}")
    if not (0 <= value < upper or (closed and value == upper)):
        raise OptionError(name, problem=f"{of}must lie in [0, {upper:g}{']' if closed else ')'}, got {value!r}")


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    """Raise unless the value is one of the accepted."""
    if value not in accepted:
        raise OptionError(name, value, f"one of {', '.join(accepted)}")


def check_functions(name: str, functions: object) -> None:
    """Raise unless `functions` is None or a list of functions."""
    if functions is None:
        return
    if not isinstance(functions, (list, tuple)):
        raise OptionError(name, functions, "a list")
    for each in functions:
        if isinstance(each, type) or not callable(each):
            raise OptionError(name, problem=f"must hold functions or objects that can be called, got {each!r}")


def check_placement(device: object, device_map: object) -> None:
    """Raise where both name a place for the target."""
    if device is not None and device_map is not None:
        raise ValueError(f"give device={device!r} or device_map={device_map!r}, not both")
