"""Replicas of the endpoint on Ray Serve: `eagle_fsd.serve.ray:app`, one engine in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from ..acceptance import make_rule
from ..data.bundled import default_pair
from ..drafting.config import TreeConfig
from ..options import AcceptanceOptions, LoadOptions, SamplingOptions, names_of
from ..pair import load
from ..serve.limits import ServeOptions, key_from_environment
from ..serve.server import name_of
from .app import create_app, new_engine

KINDS = (LoadOptions, ServeOptions, SamplingOptions, AcceptanceOptions)
# Serve's own, see its YAML.
ELSEWHERE = ("host", "port", "read_seconds", "write_seconds", "max_connections", "drain_seconds", "page")
CONVERSATIONS = 256  # whose replica is remembered, in each


class Affine:
    """An ASGI application that tells Serve which conversations it has answered, so that their next requests come here.

    A conversation is what the header `serve_multiplexed_model_id` names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (conversation := serve.get_multiplexed_model_id()):
            await self.remember(conversation)
        await self.app(scope, receive, send)

    @serve.multiplexed(max_num_models_per_replica=CONVERSATIONS)
    async def remember(self, conversation: str) -> str:
        return conversation


@serve.deployment(name="EagleFsd", max_ongoing_requests=72, graceful_shutdown_timeout_s=75, health_check_period_s=5)
@serve.ingress()
class Replica:
    """The pair, an engine and the application of `eagle-fsd serve`.

    Args:
        settings: options by name, see `app`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        options = ServeOptions.of(settings)
        model = load(**{name: settings[name] for name in names_of(LoadOptions) if name in settings and name != "tree"})
        tree = None if settings.get("tree") is None else TreeConfig(**settings["tree"])
        defaults = {name: value for name, value in settings.items()
                    if name in {*names_of(SamplingOptions), *names_of(AcceptanceOptions)} and name != "tree"}
        name = options.name or name_of(settings.get("target") or default_pair()[0])
        self.engine = new_engine(model, options, tree)
        self.application = create_app(self.engine, name, options, defaults, key_from_environment(), inner=(Affine,))

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
            of its own for), `SamplingOptions` and `AcceptanceOptions` by name; `tree` as an object of the numbers of a
            `TreeConfig`. The key of the API comes from the replicas' environment.

    Raises:
        ValueError, TypeError: an option that is not known, or a value that cannot be accepted.
    """
    known = [name for kind in KINDS for name in names_of(kind) if name not in ELSEWHERE]
    for name in settings:
        if name not in known:
            raise ValueError(f"unknown option {name!r} under args; accepted: {', '.join(sorted(set(known)))}")
    plain = {name: value for name, value in settings.items() if name != "tree"}
    for kind in KINDS:
        kind.of(plain)
    if settings.get("quality") is None:
        make_rule(**AcceptanceOptions.of(plain).rule)
    if settings.get("tree") is not None:
        TreeConfig(**settings["tree"])
    return Replica.bind(dict(settings))
