"""Markdown tables, and how their cells are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate


def markdown(rows: Iterable[Mapping[str, object]]) -> str:
    """A table of cells by heading; a heading that a row lacks leaves its cell empty."""
    return tabulate(list(rows), headers="keys", tablefmt="github", disable_numparse=True)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def span(ends: Sequence[float], digits: int = 2) -> str:
    """Both ends of an interval."""
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
