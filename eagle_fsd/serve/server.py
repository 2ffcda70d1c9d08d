"""The server process: uvicorn, with limits on time, that finishes requests in progress before it exits."""

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
from ..loading.pair import EagleModel
from .app import create_app
from .limits import ServeOptions

log = logging.getLogger(__name__)
# The page loads nothing from other hosts, whatever Gradio or a generated text refers to.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


class TimeoutProtocol(H11Protocol):
    """Uvicorn's HTTP protocol with a timeout: a request must arrive within `seconds` (else status 408)."""

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
        """Run the timer while head or body are incomplete."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.seconds, self._time_out)

    def _time_out(self) -> None:
        self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Server(uvicorn.Server):
    """Exits with status 0 after a signal, and at once after a second one. Also exits if the engine fails, so that a
    supervisor can restart it."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.engine.error is not None


def reserve(options: ServeOptions) -> socket.socket:
    """Bind a socket, before the long work of loading the pair.

    Raises:
        OSError: the address is in use, or not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # applies to every connection
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * options.write_seconds)))
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {options.host}, port {options.port}: {error.strerror or error}") from error
    return listener


def configuration(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    """The configuration of uvicorn."""
    return uvicorn.Config(
        app, http=partial(TimeoutProtocol, seconds=options.read_seconds), ws="none", server_header=False,
        headers=[("content-security-policy", POLICY), ("referrer-policy", "no-referrer")],
        timeout_graceful_shutdown=options.drain_seconds, timeout_keep_alive=options.keep_alive_seconds,
        access_log=False, log_config=None, proxy_headers=False,
    )


def serve(
    model: EagleModel, name: str, listener: socket.socket, options: ServeOptions, defaults: dict[str, object],
    tree: TreeConfig | None, key: str | None, also: Sequence[str] = (),
) -> bool:
    """Serve until a signal; return False if the engine failed first.

    Args:
        name: name of the model in requests and answers.
        listener: socket from `reserve`.
        defaults: decoding options of requests that do not set them.
        tree: draft tree of all requests; None: see `Engine`.
        key: API key that clients must send; None: no key.
        also: further names that requests may use for the model.
    """
    engine = Engine(model, **options.engine, tree=tree)
    try:
        app = create_app(engine, name, options, defaults, key, also)
        listener.listen()  # connections queue from here on
        host, port, *_ = listener.getsockname()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("serving %s at %s", name, url)
        if options.page:
            log.info("the page is at %s/page", url)
        asyncio.run(Server(configuration(app, options), engine).serve([listener]))
        return engine.error is None
    finally:
        engine.close(drain=False)
