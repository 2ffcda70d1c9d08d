"""What stands before the application: requests that are too large, too slow or without the key are refused there.

And how a request is refused: an error as the API's clients know it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LONGEST_MESSAGE = 600  # characters: a request's own values are shown in it
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
SECONDS_UNTIL_RETRY = {429: 1, 503: 2}
OPEN = ("/health",)  # for load balancers, which hold no key
DRAINED = 2**26  # bytes of a refused body that are read away, so that its client gets to read the answer


class Refusal(Exception):
    """A request that is not answered, and what its client is told.

    Args:
        status: of HTTP.
        message: one line; cut where it is long.
        param: the field that is wrong.
        code: a word for programs, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        text = " ".join(message.split())
        super().__init__(text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}...")
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict:
        """What the client reads: `{"error": {"message", "type", "param", "code"}}`."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": TYPES.get(self.status, usual), "param": self.param,
                          "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        seconds = SECONDS_UNTIL_RETRY.get(self.status)
        more = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return more if seconds is None else {**more, "Retry-After": str(seconds)}

    def response(self, more: Mapping[str, str] | None = None) -> Response:
        """The answer, with further headers."""
        # In ASCII: half a surrogate pair from a request could not be encoded.
        return Response(json.dumps(self.body), self.status, {**self.headers, **(more or {})}, "application/json")


class Guard:
    """An ASGI application before another one: key, size and time of a request, before anything of it is parsed.

    Args:
        key: what clients must show as `Authorization: Bearer KEY`; None: nothing.
        max_body: bytes of a body.
        max_open: requests that are read or answered at once; those in `OPEN` besides.
        read_seconds: for a body to arrive.
        own_login: paths that begin so ask for the key themselves.
        count: told path and status of every answer.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, max_body: int, max_open: int, read_seconds: float,
        own_login: tuple[str, ...] = (), count: Callable[[str, int], None],
    ) -> None:
        self.app, self.key, self.max_body, self.read_seconds = app, key, max_body, read_seconds
        self.own_login, self.count, self.max_open, self.open = own_login, count, max_open, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.open += 1
        try:
            await self.answer(scope, receive, send)
        finally:
            self.open -= 1

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or have the application answer it."""
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(scope["path"], message["status"])
            await send(message)

        try:
            self.check_key(scope)
            if self.open > self.max_open and scope["path"] not in OPEN:
                raise Refusal(503, f"{self.max_open} requests are under way, and no more may be (max_connections)",
                              code="too_many_connections")
            body = await self.read(scope, receive)
        except Refusal as refusal:
            await refuse(refusal, receive, counted, self.read_seconds)
            return
        except ConnectionResetError:
            return  # nobody is there to be answered
        await self.app(scope, replaying(body, receive), counted)

    def check_key(self, scope: Scope) -> None:
        """Raise `Refusal` (401) unless the request shows the key, or needs none."""
        path = scope["path"]
        if self.key is None or path in OPEN or any(path == own or path.startswith(f"{own}/") for own in self.own_login):
            return
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, f"Bearer {self.key}".encode()):  # as long for any key that is shown
            raise Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY",
                          code="invalid_api_key")

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The request's body.

        Raises:
            Refusal: 413 where it is too large, by its header or in fact, 408 where it is too slow.
            ConnectionResetError: the client went away.
        """
        said = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = Refusal(413, f"the body must have at most {self.max_body} bytes", code="body_too_large")
        if said.isdigit() and int(said) > self.max_body:
            raise too_large
        body, end = bytearray(), time.monotonic() + self.read_seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise Refusal(408, f"the body must arrive within {self.read_seconds:g} seconds") from None
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)


def replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body, and then what comes: that the client has gone."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def refuse(refusal: Refusal, receive: Receive, send: Send, seconds: float) -> None:
    """Answer before the body has been read, then read the rest of it away: a connection that is closed before takes
    the answer with it."""
    response = refusal.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    read, more, end = 0, refusal.status == 413, time.monotonic() + seconds
    while more and read < DRAINED:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            break
        read += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.body", "body": b""})
