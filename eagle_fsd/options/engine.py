"""Every option of an engine, which a server has as well."""

from __future__ import annotations

from typing import Annotated, TypedDict

from .option import Option, Options, declare


class EngineKeywords(TypedDict, total=False):
    """The options of `Engine` besides its model and tree, declared."""

    max_rows: Annotated[int, Option(8, "maximum number of requests that are decoded together.", least=1)]
    max_tokens: Annotated[int | None, Option(
        None, "capacity of the caches in positions: rows times the length of the longest one. A request waits until it "
        "fits. None: as many as fit into a quarter of the free memory, within the limits of control groups.", least=2)]
    max_waiting: Annotated[int, Option(
        64, "maximum number of requests that wait for a row; a server answers further ones with 429.", least=1)]
    prefill_chunk: Annotated[int, Option(
        512, "maximum number of prompt tokens that are processed between two cycles of other requests.", least=1)]
    prefixes: Annotated[int, Option(
        8, "number of recent texts whose caches are kept for prompts with the same beginning (0: none). They take at "
        "most half of `max_tokens` in addition.", least=0)]


@declare(EngineKeywords)
class EngineOptions(Options):
    """Limits of an engine."""
