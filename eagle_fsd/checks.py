"""Checks of single values: each names the option, the value, and what would be accepted. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real


def require_integer(name: str, value: object, least: int) -> None:
    """Raise unless the option is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def require_bool(name: str, value: object) -> None:
    """Raise unless the option is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def require_number(name: str, value: object, accepted: str, valid: Callable[[float], bool]) -> None:
    """Raise unless the option is a number that is valid; `accepted` says in words which ones are."""
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(value):
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_interval(label: str, value: object, upper: float, closed: bool) -> None:
    """Raise unless 0 <= value <= upper (or < upper)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{label} must be a number, got {value!r}")
    if not (0 <= value < upper or (closed and value == upper)):
        raise ValueError(f"{label} must lie in [0, {upper:g}{']' if closed else ')'}, got {value!r}")


def check_choice(label: str, value: object, accepted: Sequence[str]) -> None:
    """Raise unless the value is one of the accepted."""
    if value not in accepted:
        raise ValueError(f"{label} must be one of {', '.join(accepted)}, got {value!r}")


def check_functions(name: str, given: object) -> None:
    """Raise unless `given` is None or a list of functions."""
    if given is None:
        return
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list, got {given!r}")
    for each in given:
        if isinstance(each, type) or not callable(each):
            raise TypeError(f"{name} must hold functions or objects that can be called, got {each!r}")


def check_placement(device: object, device_map: object) -> None:
    """Raise where the target's place is given twice."""
    if device is not None and device_map is not None:
        raise ValueError(f"give device={device!r} or device_map={device_map!r}, not both")
