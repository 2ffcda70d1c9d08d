"""Options of a server besides the pair: address, name, and limits."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..heads.catalogue import DEFAULT, display_name
from ..options.engine import EngineKeywords, EngineOptions
from ..options.option import Option, Options, declare
from ..utils.checks import OptionError

KEY_VARIABLE = "EAGLE_FSD_API_KEY"
SECONDS = "a positive number of seconds"


@declare(EngineKeywords)
class ServeOptions(Options):
    """Address of the server, name of the model, and limits."""

    host: Annotated[str, Option(
        "127.0.0.1", "address to listen on. 127.0.0.1: this machine only; 0.0.0.0: all interfaces, see "
        "docs/serving.md.")]
    port: Annotated[int, Option(
        8000, "port to listen on; 0 chooses a free one, which the log shows.", least=0, most=65535)]
    name: Annotated[str | None, tyro.conf.arg(aliases=("--served-model-name",)), Option(
        None, "name of the model in requests and answers; None: the target's id, or the last part of its path.")]
    read_seconds: Annotated[float, Option(
        20.0, "seconds in which a request must arrive, head and body (else status 408).", above=0, accepted=SECONDS)]
    write_seconds: Annotated[float, Option(
        30.0, "seconds in which a client must accept sent data before its connection is closed (Linux only).",
        above=0, accepted=SECONDS)]
    keep_alive_seconds: Annotated[float, Option(
        75.0, "seconds after which an idle connection is closed. Clients reuse connections, so let it exceed their "
        "pauses.", above=0, accepted=SECONDS)]
    max_body: Annotated[int, Option(2**20, "largest body of a request in bytes (else status 413).", least=1)]
    max_connections: Annotated[int, Option(
        256, "most requests in progress, waiting ones included; further ones get status 503.", least=1)]
    drain_seconds: Annotated[float, Option(
        60.0, "seconds in which requests in progress may finish after SIGTERM.", above=0, accepted=SECONDS)]
    page: Annotated[bool, Option(False, "also serve the chat page at /page/ (extra `page`).")]
    plain: Annotated[bool, Option(
        False, "decode without the drafter, for comparison; a request can still turn on drafts from the text with "
        "speculative.")]

    @property
    def engine(self) -> dict[str, Any]:
        """The options that are arguments of `Engine`."""
        return {name: getattr(self, name) for name in EngineOptions.declared}


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
