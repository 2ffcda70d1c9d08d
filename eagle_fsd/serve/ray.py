"""Replicas of the endpoint on Ray Serve, each with its own engine: `eagle_fsd.serve.ray:app`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve

from ..batching.engine import Engine
from ..drafting.config import TreeConfig
from ..heads.catalogue import DEFAULT
from ..loading.load import load
from ..options.generate import GenerateOptions
from ..options.load import LoadOptions
from ..utils.threads import in_own_thread
from .app import create_app
from .limits import ServeOptions, key_from_environment, served_name

# Ray Serve configures these itself.
OF_RAY = ("host", "port", "read_seconds", "write_seconds", "keep_alive_seconds", "max_connections", "drain_seconds",
          "page", "plain")


@serve.deployment(name="EagleFsd", max_ongoing_requests=72, graceful_shutdown_timeout_s=75, health_check_period_s=5)
@serve.ingress()
class Replica:
    """One replica: the pair, an engine and the application of `eagle-fsd serve`.

    Args:
        settings: options by name, see `app`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        loading, options, defaults, tree = check_settings(settings)
        self.engine = Engine(in_own_thread(partial(load, **loading)), **options.engine, tree=tree)
        self.application = create_app(self.engine, options.name or served_name(loading.get("target")),
                                      replace(options, host="0.0.0.0"), defaults,  # Ray's proxy has its own host name
                                      key_from_environment(), [loading.get("target") or DEFAULT])

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.application

    def check_health(self) -> None:
        """Raise if the engine has failed; Ray Serve then replaces the replica."""
        if self.engine.closed:
            raise RuntimeError("the engine has stopped")


def app(settings: Mapping[str, Any]) -> serve.Application:
    """The application, for Ray Serve's YAML (`import_path: eagle_fsd.serve.ray:app`) or `serve.run`.

    Args:
        settings: the YAML's `args`: options of `LoadOptions`, `ServeOptions` (except those that Ray Serve configures
            itself) and `GenerateOptions` by name; `tree` is an object with the fields of a `TreeConfig`. The API key
            comes from the environment of the replicas.

    Raises:
        ValueError, TypeError: an option is unknown, or a value is invalid.
    """
    check_settings(settings)
    return Replica.bind(dict(settings))


def check_settings(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], ServeOptions, dict[str, Any], TreeConfig | None]:
    """Validate the settings; return the options of loading, serving and decoding, and the tree."""
    own = [name for name in settings if name in OF_RAY]
    if own:
        raise ValueError(f"args must not contain {own[0]}: set it in Ray Serve's own options")
    rest = dict(settings)
    tree = rest.pop("tree", None)
    loading, serving = ({option.name: rest.pop(option.name) for option in fields(kind) if option.name in rest}
                        for kind in (LoadOptions, ServeOptions))
    LoadOptions(**loading)
    GenerateOptions(**rest)
    return loading, ServeOptions(**serving), rest, None if tree is None else TreeConfig(**tree)
