"""`eagle-fsd serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, replace

from ..options import names_of
from ..serve.limits import KEY_VARIABLE, ServeOptions, key_from_environment, name_of
from .arguments import Decoding, Loading


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serve the pair to OpenAI clients.

    The options of decoding are those of requests that do not say. With a variable EAGLE_FSD_API_KEY in the environment
    clients must show its value.
    """

    serving: ServeOptions = ServeOptions()
    pair: Loading = Loading()
    decoding: Decoding

    def run(self) -> None:
        key = key_from_environment()
        need_packages(self.serving.page)
        from ..serve.server import reserve, serve

        begin_log()
        name = self.serving.name or name_of(self.pair.target)
        if key is None and self.serving.host not in ("127.0.0.1", "localhost", "::1"):
            logging.warning("everyone who reaches %s can use the model: set %s", self.serving.host, KEY_VARIABLE)
        place = reserve(self.serving)
        defaults = {name: getattr(self.decoding, name) for name in names_of(Decoding)}
        model = self.pair.load()
        if self.serving.plain:
            model = replace(model, draft=None, trees=None)
            defaults["speculative"] = False
        if not serve(model, name, place, self.serving, defaults, defaults.pop("tree"), key):
            sys.exit(1)


def begin_log() -> None:
    """Log to stderr, where what is said of the options of one call would be said of every request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= logging.ERROR or record.name != "eagle_fsd.requests")
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")


def need_packages(page: bool) -> None:
    """Raise ImportError, in words, where what serving needs is not installed."""
    from importlib.metadata import requires
    from importlib.util import find_spec

    extras = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "page": ("gradio",) if page else ()}
    missing = [extra for extra, packages in extras.items() if not all(map(find_spec, packages))]
    if missing:
        # By their own names: `eagle_fsd[page]` would look for eagle_fsd in the index.
        packages = [text.split(";")[0].strip() for text in requires("eagle_fsd") or ()
                    if any(f'extra == "{extra}"' in text for extra in missing)]
        raise ImportError(f"serving needs further packages: {shlex.quote(sys.executable)} -m pip install "
                          f"{shlex.join(dict.fromkeys(packages))}")
