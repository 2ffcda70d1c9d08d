"""Packages whose names are imported when they are asked for (PEP 562), so that `--help` does not wait for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; its modules are found by their names, too.

    Args:
        places: the module of the package, without its own name, that each name comes from.
    """

    def get(name: str) -> object:
        if name in places:
            return getattr(import_module(f"{package}.{places[name]}"), name)
        if find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return get, lambda: sorted({*vars(sys.modules[package]), *places})
