"""`eagle-fsd serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError

from ..heads.catalogue import DEFAULT
from ..serve.limits import KEY_VARIABLE, ServeOptions, key_from_environment, served_name
from ..utils.installation import install_command, is_installed, packages_of
from ..utils.threads import in_own_thread
from .arguments import Decoding, Loading


@dataclass(frozen=True)
class Answering(Decoding):
    """How to sample tokens, when to end an answer, and which draft tokens to accept.

    Args:
        max_new_tokens: most tokens of an answer if the request sets no limit; None: up to the end of the context, or
            of the share of --max-tokens.
    """

    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        most = max(1, self.min_new_tokens or 1) if self.max_new_tokens is None else self.max_new_tokens
        Decoding(**{**vars(self), "max_new_tokens": most})


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serve the pair through an OpenAI-compatible API.

    The decoding options are defaults for requests that do not set them. If the environment variable EAGLE_FSD_API_KEY
    is set, clients must send its value as their API key.
    """

    serving: ServeOptions = ServeOptions()
    pair: Loading = Loading()
    decoding: Answering

    def run(self) -> None:
        key = key_from_environment()
        check_packages(self.serving.page)
        from ..serve.server import reserve, serve

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        name = self.serving.name or served_name(self.pair.target)
        if key is None and self.serving.host not in ("127.0.0.1", "localhost", "::1"):
            logging.warning("anyone who can reach %s can use the model: set %s to require a key", self.serving.host,
                            KEY_VARIABLE)
        listener = reserve(self.serving)
        defaults = {name: getattr(self.decoding, name) for name in Decoding.declared}
        if defaults["max_new_tokens"] is None:
            del defaults["max_new_tokens"]
        model = in_own_thread(self.pair.load)
        if self.serving.plain:
            model = replace(model, draft=None, sizing=None)
            defaults["speculative"] = False
        if not serve(model, name, listener, self.serving, defaults, defaults.pop("tree"), key,
                     [self.pair.target or DEFAULT]):
            sys.exit(1)


def check_packages(page: bool) -> None:
    """Raise ImportError, with the command to install them, if packages for serving are missing or too old. Imports
    raise instead in a checkout that is not installed."""
    extra = "page" if page else "serve"  # `page` includes `serve`
    with suppress(PackageNotFoundError):
        if not all(map(is_installed, packages_of(extra))):
            raise ImportError(f"serving needs more packages: {install_command(extra)}")
