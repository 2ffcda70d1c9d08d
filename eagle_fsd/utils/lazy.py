"""Lazy imports for packages (PEP 562), so that `--help` does not wait for torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package whose source has its public names as imports under
    `if TYPE_CHECKING`, which type checkers follow. Its modules are attributes as well."""
    own = sys.modules[package]
    (branch,) = [node for node in ast.parse(own.__loader__.get_source(package)).body if isinstance(node, ast.If)]
    places = {each.name: f"{package}.{node.module}" for node in branch.body for each in node.names}

    def get(name: str) -> object:
        if name in places:
            return getattr(import_module(places[name]), name)
        if find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return get, lambda: sorted({*vars(own), *places}), sorted(places)
