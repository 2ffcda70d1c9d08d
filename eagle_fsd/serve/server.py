"""The server's process: uvicorn around the application, which ends after what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from functools import partial
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..drafting.config import TreeConfig
from ..pair import EagleModel
from .app import Service, create_app
from .engine import Engine
from .limits import ServeOptions

log = logging.getLogger(__name__)


class PatientProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, which waits for ever for a request's head and for its client to read, with a time for
    each.

    Args:
        reading: seconds for a head to arrive. writing: for what was sent to leave this machine.
    """

    def __init__(self, *args, reading: float, writing: float, **options) -> None:
        super().__init__(*args, **options)
        self.reading, self.writing = reading, writing
        self.head: asyncio.TimerHandle | None = None
        self.stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing pauses wherever something is left, and goes on once all went
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.head = stopped(self.head)
        self.stuck = stopped(self.stuck)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(self.writing, self.transport.abort)

    def resume_writing(self) -> None:
        self.stuck = stopped(self.stuck)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def _expect_head(self) -> None:
        """Begin to count where a head is awaited, and end where it has come."""
        if self.conn.their_state is not h11.IDLE:
            self.head = stopped(self.head)
        elif self.head is None:
            self.head = self.loop.call_later(self.reading, self.transport.close)


def stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


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


def configuration(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """Uvicorn's settings: a time for a request's head and for taking the answer, no web sockets, no word of itself."""
    patient = partial(PatientProtocol, reading=options.read_seconds, writing=options.write_seconds)
    return uvicorn.Config(
        app, http=patient, ws="none", timeout_keep_alive=5, server_header=False, access_log=False,
        timeout_graceful_shutdown=5, log_config=None, proxy_headers=False,
    )


def serve(
    model: EagleModel, name: str, place: socket.socket, options: ServeOptions, defaults: dict[str, object],
    tree: TreeConfig | None, key: str | None,
) -> bool:
    """Serve until a signal ends it; False: the engine failed before.

    Args:
        name: of the model in requests and answers.
        place: where, from `reserve`.
        defaults: options of decoding of requests that name none.
        tree: of all requests; None: see `Engine`.
        key: what clients must show; None: nothing.
    """
    engine = Engine(model, **options.engine, tree=tree)
    try:
        app = create_app(engine, name, options, defaults, key)
        if options.page:
            from .page import mount_page

            mount_page(app, app.state.service, key)
        server = DrainingServer(configuration(app, options), app.state.service, options.drain_seconds)
        asyncio.run(server.serve([place]))
        return not server.failed
    finally:
        engine.close(drain=False)
