"""Lazy imports for packages (PEP 562), so that `--help` does not wait for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package. Its modules are attributes as well.

    Args:
        places: for each name, the module that defines it, relative to the package.
    """

    def get(name: str) -> object:
        if name in places:
            return getattr(import_module(f"{package}.{places[name]}"), name)
        if find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return get, lambda: sorted({*vars(sys.modules[package]), *places})
