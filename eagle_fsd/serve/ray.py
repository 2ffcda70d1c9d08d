"""Replicas of the endpoint on Ray Serve: `eagle_fsd.serve.ray:app`, one engine in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fastapi import FastAPI
from ray import serve

from ..batching.engine import Engine
from ..drafting.config import TreeConfig
from ..heads.catalogue import DEFAULT
from ..load_options import LoadOptions
from ..loading import load
from ..options import GenerateOptions
from .app import create_app
from .limits import ServeOptions, key_from_environment, served_name

# Options that Ray Serve's YAML has under names of its own.
IN_YAML = ("host", "port", "read_seconds", "write_seconds", "max_connections", "drain_seconds", "page", "plain")


@serve.deployment(name="EagleFsd", max_ongoing_requests=72, graceful_shutdown_timeout_s=75, health_check_period_s=5)
@serve.ingress()
class Replica:
    """The pair, an engine and the application of `eagle-fsd serve`.

    Args:
        settings: options by name, see `app`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        loading, options, defaults, tree = checked(settings)
        self.engine = Engine(load(**loading), **options.engine, tree=tree)
        self.application = create_app(self.engine, options.name or served_name(loading.get("target")),
                                      replace(options, host="0.0.0.0"), defaults,  # the proxy has names of its own
                                      key_from_environment(), [loading.get("target") or DEFAULT])

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.application

    def check_health(self) -> None:
        """Raise where the engine has failed: Serve starts another replica."""
        if self.engine.closed:
            raise RuntimeError("the engine takes no requests any more")


def app(settings: Mapping[str, Any]) -> serve.Application:
    """The application, for Serve's YAML (`import_path: eagle_fsd.serve.ray:app`) or `serve.run`.

    Args:
        settings: what YAML has under `args`: options of `LoadOptions`, `ServeOptions` (but for what Serve has options
            of its own for) and `GenerateOptions` by name; `tree` as an object of the numbers of a `TreeConfig`. The
            key of the API comes from the replicas' environment.

    Raises:
        ValueError, TypeError: an option that is not known, or a value that cannot be accepted.
    """
    checked(settings)
    return Replica.bind(dict(settings))


def checked(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], ServeOptions, dict[str, Any], TreeConfig | None]:
    """Options of loading, of serving and of decoding, and the tree."""
    own = [name for name in settings if name in IN_YAML]
    if own:
        raise ValueError(f"{own[0]} is not for args: Ray Serve has options of its own for it, see its YAML")
    rest = dict(settings)
    tree = rest.pop("tree", None)
    loading, serving = ({each.name: rest.pop(each.name) for each in fields(kind) if each.name in rest}
                        for kind in (LoadOptions, ServeOptions))
    LoadOptions(**loading)
    GenerateOptions.from_names(rest)
    return loading, ServeOptions(**serving), rest, None if tree is None else TreeConfig(**tree)
