"""`eagle-fsd serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from ..heads.catalogue import DEFAULT
from ..serve.limits import KEY_VARIABLE, ServeOptions, key_from_environment, served_name
from .arguments import Decoding, Loading


@dataclass(frozen=True)
class Answering(Decoding):
    """How tokens are drawn, where an answer ends, and which drafted tokens are kept.

    Args:
        max_new_tokens: tokens of an answer whose request does not say; without it such an answer goes on to the end of
            the context, or of its share of --max-tokens.
    """

    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        most = max(1, self.min_new_tokens) if self.max_new_tokens is None else self.max_new_tokens
        Decoding(**{**vars(self), "max_new_tokens": most})


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serve the pair to OpenAI clients.

    The options of decoding are those of requests that do not say. With a variable EAGLE_FSD_API_KEY in the environment
    clients must show its value.
    """

    serving: ServeOptions = ServeOptions()
    pair: Loading = Loading()
    decoding: Answering

    def run(self) -> None:
        key = key_from_environment()
        need_packages(self.serving.page)
        from ..serve.server import reserve, serve

        begin_log()
        name = self.serving.name or served_name(self.pair.target)
        if key is None and self.serving.host not in ("127.0.0.1", "localhost", "::1"):
            logging.warning("everyone who reaches %s can use the model: set %s", self.serving.host, KEY_VARIABLE)
        listener = reserve(self.serving)
        defaults = {name: getattr(self.decoding, name) for name in Decoding.names()}
        if defaults["max_new_tokens"] is None:
            del defaults["max_new_tokens"]
        model = self.pair.load()
        if self.serving.plain:
            model = replace(model, draft=None, sizing=None)
            defaults["speculative"] = False
        if not serve(model, name, listener, self.serving, defaults, defaults.pop("tree"), key,
                     [self.pair.target or DEFAULT]):
            sys.exit(1)


def begin_log() -> None:
    """Log to stderr, where what is said of the options of one call would be said of every request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name != "eagle_fsd.requests")
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")


def need_packages(page: bool) -> None:
    """Raise ImportError, in words, where what serving needs is not installed, or too old."""
    try:
        wanted = [Requirement(text) for text in requires("eagle_fsd") or ()]
    except PackageNotFoundError:  # run from a checkout that was not installed: imports say it
        return
    extra = {"extra": "page" if page else "serve"}  # the one has all of the other
    missing = [f"{each.name}{each.specifier}" for each in wanted
               if each.marker is not None and each.marker.evaluate(extra) and not installed(each)]
    if missing:
        # By their own names: `eagle_fsd[page]` would look for eagle_fsd in the index.
        raise ImportError(f"serving needs further packages: {shlex.quote(sys.executable)} -m pip install "
                          f"{shlex.join(dict.fromkeys(missing))}")


def installed(package: Requirement) -> bool:
    try:
        return package.specifier.contains(version(package.name), prereleases=True)
    except PackageNotFoundError:
        return False
