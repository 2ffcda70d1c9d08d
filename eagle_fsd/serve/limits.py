"""Options of a server besides the pair: where it listens, its name, and how much it takes on."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..checks import require_bool, require_integer, require_number
from ..heads.catalogue import DEFAULT, display_name

KEY_VARIABLE = "EAGLE_FSD_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, what the model is called, and how much it takes on.

    Args:
        host: address to listen at. 127.0.0.1: this machine only; 0.0.0.0: all that reach it, see docs/serving.md.
        port: 0 takes a free one, which the log names.
        name: of the model in requests and answers; without it the target's, or the last part of its path.
        max_rows: requests that are decoded together.
        max_tokens: positions that the caches have room for: those of all rows together, each as long as the longest;
            without it as many as a quarter of the free memory holds.
        max_waiting: requests that wait for a row; the next one is refused (429).
        prefill_chunk: tokens of prompts that are read between two cycles of the others.
        prefixes: recent texts whose caches are kept for prompts that begin alike; 0: none.
        remember: tokens of recent answers that are kept in memory, for further lossless answers to copy drafts from
            where the same API key is shown; 0: none, see docs/serving.md.
        read_seconds: longest time for a request to arrive, head and body (408).
        write_seconds: longest time for a client to take what was sent to it; after that its connection is closed
            (where the system can say so: Linux).
        max_body: bytes of a request's body (413).
        max_connections: requests that are answered at once, waiting ones included; those above get 503.
        drain_seconds: after SIGTERM, longest time for what runs to end.
        page: serve the page at /page/ too (extra `page`).
        plain: decode without drafting, to compare with; a request may still ask for drafts from the text with
            speculative.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: Annotated[str | None, tyro.conf.arg(aliases=("--served-model-name",))] = None
    max_rows: int = 8
    max_tokens: int | None = None
    max_waiting: int = 64
    prefill_chunk: int = 512
    prefixes: int = 8
    remember: int = 0
    read_seconds: float = 20.0
    write_seconds: float = 30.0
    max_body: int = 2**20
    max_connections: int = 256
    drain_seconds: float = 60.0
    page: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting", "prefill_chunk", "max_body", "max_connections"):
            require_integer(name, getattr(self, name), 1)
        require_integer("prefixes", self.prefixes, 0)
        require_integer("remember", self.remember, 0)
        require_integer("port", self.port, 0, 65535)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, 2)
        for name in ("read_seconds", "write_seconds", "drain_seconds"):
            require_number(name, getattr(self, name), "a positive number of seconds", lambda x: 0 < x < math.inf)
        require_bool("page", self.page)
        require_bool("plain", self.plain)

    @property
    def engine(self) -> dict[str, Any]:
        """The arguments of `Engine`."""
        names = ("max_rows", "max_tokens", "max_waiting", "prefill_chunk", "prefixes", "remember")
        return {name: getattr(self, name) for name in names}


def served_name(target: str | Path | None) -> str:
    """The name of a target without a `name` of the server."""
    return display_name(target or DEFAULT.rpartition("/")[2])


def key_from_environment() -> str | None:
    """The API key that clients must show, from the variable `EAGLE_FSD_API_KEY`: not from the command line, which
    every user of the machine can read. None: no key is asked for.

    Raises:
        ValueError: it is set and empty, or no ASCII text that a header can hold.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and (not key.strip() or key != key.strip() or not key.isascii() or not key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII text without spaces around it; unset it to ask for "
                         "no key")
    return key
