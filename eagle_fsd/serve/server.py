"""The server's process: uvicorn around the application, which ends after what it has begun."""

from __future__ import annotations

import logging
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from .guards import protocol_with_patience
from .limits import ServeOptions

if TYPE_CHECKING:
    from ..serve.app import Service

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Refuses what is new after SIGTERM or Ctrl-C, and ends once what runs has ended or its time is over.

    A second signal ends it at once, and so does an engine that has failed: who started the server may start another.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float) -> None:
        super().__init__(config)
        self.service, self.drain_seconds, self.deadline = service, drain_seconds, float("inf")
        self.failed = False  # ended because the engine had

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            self.force_exit = self.should_exit = True
        else:
            self.service.draining = True
            self.deadline = time.monotonic() + self.drain_seconds
            log.info("%s: refusing new requests, finishing what runs", signal.Signals(sig).name)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            host, port, *_ = each.getsockname()
            log.info("serving %s at http://%s:%d", self.service.name, f"[{host}]" if ":" in host else host, port)

    async def on_tick(self, counter: int) -> bool:
        if self.service.draining and (not self.service.busy or time.monotonic() > self.deadline):
            self.should_exit = True
        elif self.service.engine.closed and not self.service.draining:
            log.critical("the engine has failed: the server ends")
            self.failed = self.should_exit = True
        return await super().on_tick(counter)


def name_of(target: str | Path | None) -> str:
    """What a target is called where nobody says: its hub id, or the last part of a path."""
    text = str(target or "SmolLM2-135M-Instruct")
    return Path(text).name if Path(text).exists() else text


def reserve(options: ServeOptions) -> socket.socket:
    """A socket at the address, which nobody is answered at yet: taken before the pair is loaded.

    Raises:
        OSError: the address is taken, or none of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {options.host}, port {options.port}: {error.strerror or error}") from error
    return place


def configuration(app: FastAPI, options: ServeOptions) -> uvicorn.Config:
    """Uvicorn's settings: a time for a request's head and for taking the answer, no web sockets, no word of itself."""
    return uvicorn.Config(
        app, http=protocol_with_patience(options.read_seconds, options.write_seconds), ws="none",
        timeout_keep_alive=5, server_header=False, access_log=False,
        timeout_graceful_shutdown=5, log_config=None, proxy_headers=False,
    )
