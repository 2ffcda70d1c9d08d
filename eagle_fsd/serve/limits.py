"""Options of a server besides the pair: address, name, and limits."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..heads.catalogue import DEFAULT, display_name
from ..utils.checks import OptionError, require_bool, require_integer, require_number

KEY_VARIABLE = "EAGLE_FSD_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """Address of the server, name of the model, and limits.

    Args:
        host: address to listen on. 127.0.0.1: this machine only; 0.0.0.0: all interfaces, see docs/serving.md.
        port: port to listen on; 0 chooses a free one, which the log shows.
        name: name of the model in requests and answers; None: the target's id, or the last part of its path.
        max_rows: most requests decoded together.
        max_tokens: positions in the caches, for all rows together, each as long as the longest; None: as many as fit
            into a quarter of the free memory.
        max_waiting: most requests that wait for a row; further ones get status 429.
        prefill_chunk: most prompt tokens prefilled between two decode cycles of other requests.
        prefixes: number of recent texts whose caches are kept for prompts with the same beginning; 0: none.
        read_seconds: seconds in which a request must arrive, head and body (else status 408).
        write_seconds: seconds in which a client must accept sent data before its connection is closed (Linux only).
        keep_alive_seconds: seconds after which an idle connection is closed. Clients reuse connections, so let it
            exceed their pauses.
        max_body: largest body of a request in bytes (else status 413).
        max_connections: most requests in progress, waiting ones included; further ones get status 503.
        drain_seconds: seconds in which requests in progress may finish after SIGTERM.
        page: also serve the chat page at /page/ (extra `page`).
        plain: decode without the drafter, for comparison; a request can still turn on drafts from the text with
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
    read_seconds: float = 20.0
    write_seconds: float = 30.0
    keep_alive_seconds: float = 75.0
    max_body: int = 2**20
    max_connections: int = 256
    drain_seconds: float = 60.0
    page: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting", "prefill_chunk", "max_body", "max_connections"):
            require_integer(name, getattr(self, name), 1)
        require_integer("prefixes", self.prefixes, 0)
        require_integer("port", self.port, 0, 65535)
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, 2)
        for name in ("read_seconds", "write_seconds", "keep_alive_seconds", "drain_seconds"):
            require_number(name, getattr(self, name), "a positive number of seconds", lambda x: 0 < x < math.inf)
        require_bool("page", self.page)
        require_bool("plain", self.plain)

    @property
    def engine(self) -> dict[str, Any]:
        """The options that are arguments of `Engine`."""
        names = ("max_rows", "max_tokens", "max_waiting", "prefill_chunk", "prefixes")
        return {name: getattr(self, name) for name in names}


def check_template_kwargs(keywords: Mapping[str, object]) -> None:
    """Raise OptionError if a request passes more than variables on to the chat template: the template itself, which is
    a program, and how it is tokenised are the server's."""
    from transformers import PreTrainedTokenizerBase  # not for --help

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {
        "documents", "continue_final_message", "add_generation_prompt"}
    if (wrong := sorted(own & keywords.keys())):
        raise OptionError("chat_template_kwargs", problem=f"must not have {', '.join(wrong)}: they hold variables of "
                          "the chat template, such as enable_thinking")


def served_name(target: str | Path | None) -> str:
    """The default name of a target."""
    return display_name(target or DEFAULT.rpartition("/")[2])


def key_from_environment() -> str | None:
    """The API key that clients must send, from the environment variable `EAGLE_FSD_API_KEY`; None: no key. There is no
    flag for it, because every user of the machine can read command lines.

    Raises:
        ValueError: the variable is empty, or not ASCII text that is valid in a header.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is not None and (not key.strip() or key != key.strip() or not key.isascii() or not key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII text without surrounding spaces; unset it to serve "
                         "without a key")
    return key
