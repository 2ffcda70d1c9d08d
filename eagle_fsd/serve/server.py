"""The server's process: uvicorn around the application, which ends after what it has begun."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..batching.engine import Engine
from ..drafting.config import TreeConfig
from ..pair import EagleModel
from .app import create_app
from .limits import ServeOptions

log = logging.getLogger(__name__)
# Nothing is fetched from elsewhere, whatever the page's framework or a text would like to.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


class PatientProtocol(H11Protocol):
    """Uvicorn's HTTP protocol, which itself waits for ever for a request: here it has `seconds` to arrive (408)."""

    def __init__(self, *args, seconds: float, **options) -> None:
        super().__init__(*args, **options)
        self.seconds = seconds
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        """Begin to count where head or body are awaited, and end where they have come."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.seconds, self._end)

    def _end(self) -> None:
        self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Server(uvicorn.Server):
    """Ends with status 0 after a signal, at once after a second one, and where its engine has failed: who started it
    may start another."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.engine.error is not None


def reserve(options: ServeOptions) -> socket.socket:
    """A socket at the address, which nobody is answered at yet: taken before the pair is loaded.

    Raises:
        OSError: the address is taken, or none of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # of every connection, for its client to take what was sent
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * options.write_seconds)))
        place.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {options.host}, port {options.port}: {error.strerror or error}") from error
    return place


def configuration(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """Uvicorn's settings."""
    return uvicorn.Config(
        app, http=partial(PatientProtocol, seconds=options.read_seconds), ws="none", server_header=False,
        headers=[("content-security-policy", POLICY), ("referrer-policy", "no-referrer")],
        timeout_graceful_shutdown=options.drain_seconds, access_log=False, log_config=None, proxy_headers=False,
    )


def serve(
    model: EagleModel, name: str, place: socket.socket, options: ServeOptions, defaults: dict[str, object],
    tree: TreeConfig | None, key: str | None, also: Sequence[str] = (),
) -> bool:
    """Serve until a signal ends it; False: the engine failed before.

    Args:
        name: of the model in requests and answers.
        place: where, from `reserve`.
        defaults: options of decoding of requests that name none.
        tree: of all requests; None: see `Engine`.
        key: what clients must show; None: nothing.
        also: further names that requests may have for the model.
    """
    engine = Engine(model, **options.engine, tree=tree)
    try:
        app = create_app(engine, name, options, defaults, key, also)
        place.listen()  # who comes from here on waits for the server
        host, port, *_ = place.getsockname()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("serving %s at %s", name, url)
        if options.page:
            log.info("the page is at %s/page", url)
        asyncio.run(Server(configuration(app, options), engine).serve([place]))
        return engine.error is None
    finally:
        engine.close(drain=False)
