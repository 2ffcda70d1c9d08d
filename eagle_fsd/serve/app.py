"""The endpoint: an OpenAI-compatible application around an `Engine`."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..batching.engine import Engine
from ..batching.tickets import EngineClosed, QueueFull, Ticket, interleaved
from ..decoding.grammar import GrammarError
from ..decoding.output import Output
from ..inputs.requests import end_tokens
from ..options.generate import GenerateOptions
from .answers import FINISHED, Formatter, as_event, speller
from .limits import ServeOptions
from .metrics import Counted, Metrics
from .protocol import TO_THE_END, AnswerRequest, ChatRequest, CompletionRequest, Refusal, options_over, refusal_of_body

log = logging.getLogger(__name__)
T = TypeVar("T")
LOCAL = ("localhost", "127.0.0.1", "::1")
IGNORED = "X-Eagle-Fsd-Ignored"  # the header that names ignored fields
LONGEST_NAME, MOST_NAMES, MOST_LOGGED = 64, 32, 1024  # characters of their names; names in the header, in the log
PING, PING_SECONDS = ": waiting\n\n", 10.0  # a comment in a stream, and how long there may be no event without one
CLIENT_GONE = 499  # for the metrics: a client that disconnected reads no status


class Service:
    """The engine and the settings that all requests of the endpoint share.

    Args:
        name: name of the model in requests and answers.
        defaults: decoding options of requests that do not set them.
        also: further names that requests may use for the model; the first one is where it was loaded from.
        connections: most requests in progress.
    """

    def __init__(self, engine: Engine, name: str, defaults: Mapping[str, object], also: Sequence[str] = (),
                 connections: int = 256) -> None:
        self.connections, self.slots = connections, asyncio.Semaphore(connections)
        self.logged: set[str] = set()  # ignored fields
        self.engine, self.name, self.defaults = engine, name, dict(defaults)
        self.names = list(dict.fromkeys([name, name.rpartition("/")[2].lower()]))  # the name, then an alias
        self.known = {part.casefold() for full in map(str, (name, *also)) for part in (full, full.rpartition("/")[2])}
        self.root = str(next(iter(also), name))
        self.metrics = Metrics(engine, name)

    async def submit(self, body: AnswerRequest, options: GenerateOptions) -> list[Ticket]:
        """Submit all choices of a request, or none, and return a ticket for each.

        Args:
            options: those of the request.

        Raises:
            Refusal: the request is invalid, or the server cannot take it now.
        """
        count = body.n or 1
        tickets: list[Ticket] = []
        try:
            # Tokenising long prompts and compiling grammars would block the event loop.
            prompts = await asyncio.to_thread(body.prompts, self.engine.model, options.chat_template_kwargs)
            options = replace(options, chat_template_kwargs=None)  # the prompts are token ids now
            count *= len(prompts)
            if count > (most := self.engine.max_waiting):
                raise Refusal(400, f"n times prompts must be at most {most} here (max_waiting), got {count}", param="n")
            for number in range(count):
                own = options if options.seed is None else replace(options, seed=options.seed + number)
                prompt = prompts[number // (body.n or 1)]
                tickets.append(await asyncio.to_thread(self.engine.submit, prompt, own,
                                                       fit=own.max_new_tokens == TO_THE_END))
        except (ValueError, TypeError, ImportError) as error:
            raise body.refusal(error) from error
        except QueueFull as error:
            raise Refusal(429, f"the server is busy: {error}", code="queue_full") from error
        except EngineClosed as error:
            raise shutting_down() from error
        finally:
            if len(tickets) < count:
                cancel(tickets)
        return tickets

    def check_name(self, name: str) -> None:
        """Raise Refusal if `name` is not a name of this model, ignoring case."""
        if name.casefold() not in self.known:
            raise Refusal(404, f"there is no model {name!r}, only {', '.join(self.names)}", param="model",
                          code="model_not_found")

    def ignored(self, body: AnswerRequest) -> dict[str, str]:
        """The header that names the ignored fields of a request, if it has any. The log names each field once."""
        names = sorted(quote(name[:LONGEST_NAME]) for name in body.unknown())[:MOST_NAMES]
        for name in names:
            if name not in self.logged and len(self.logged) < MOST_LOGGED:
                self.logged.add(name)
                log.warning("the field %s of a request is unknown and ignored", name)
        return {IGNORED: ", ".join(names)} if names else {}

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Take one of the places for requests in progress.

        Raises:
            Refusal: there is none.
        """
        if self.slots.locked():
            raise Refusal(503, f"the server already handles {self.connections} requests (max_connections)",
                          code="too_many_connections")
        async with self.slots:
            yield

    async def output_of(self, ticket: Ticket) -> Output:
        """Wait for the whole answer.

        Raises:
            Refusal: the engine closed before the answer was complete.
        """
        output = await ticket
        self.metrics.time(ticket, len(output.token_ids))
        if output.finish_reason not in FINISHED:
            raise shutting_down()
        return output

    async def outputs_of(self, tickets: Sequence[Ticket]) -> list[Output]:
        return [await self.output_of(ticket) for ticket in tickets]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await the work; cancel it if the client disconnects first.

    Raises:
        Refusal: the client disconnected.
    """
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(CLIENT_GONE, "the client disconnected")
        return task.result()
    finally:
        for future in (watch, task):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


def shutting_down() -> Refusal:
    return Refusal(503, "the server is shutting down: try again, on another server if you can", code="shutting_down")


def cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


async def respond(service: Service, request: Request, body: AnswerRequest) -> Response:
    """Answer a chat or a completion, whole or as a stream."""
    model, spell = service.engine.model, None
    if body.model is not None:
        service.check_name(body.model)
    options = await asyncio.to_thread(body.options, service.defaults)  # long lists in it would block the event loop
    ignored = service.ignored(body)
    if body.alternatives is not None:
        ends = tuple(sorted(end_tokens(model, chat=isinstance(body, ChatRequest))))
        spell = await asyncio.to_thread(speller, model.tokenizer, model.target.vocab_size, ends)
    tickets = await service.submit(body, options)
    try:
        formatter = Formatter(service.name, body, spell, [ticket.prompt_tokens for ticket in tickets[:: body.n or 1]],
                              [body.splitter(model, ticket.stops, options.response_format) for ticket in tickets])
        if body.stream:
            return StreamingResponse(stream(service, formatter, tickets), media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **ignored})
        return JSONResponse(formatter.whole(await while_connected(request, service.outputs_of(tickets))),
                            headers=ignored)
    except BaseException as error:
        cancel(tickets)
        raise (as_refusal(error) if isinstance(error, Exception) else error) from error


async def stream(service: Service, formatter: Formatter, tickets: list[Ticket]) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer, and comments while there are none: while it waits for a row, say."""
    outputs: dict[int, Output] = {}
    pieces, waiting = interleaved(tickets), None
    try:
        if formatter.chat:
            yield "".join(map(formatter.opening, range(len(tickets))))
        while len(outputs) < len(tickets):
            waiting = waiting or asyncio.ensure_future(anext(pieces))
            if not (await asyncio.wait([waiting], timeout=PING_SECONDS))[0]:
                yield PING
                continue
            (number, piece), waiting = waiting.result(), None
            if piece is None:
                outputs[number] = await service.output_of(tickets[number])
                yield formatter.ending(number, outputs[number])
            elif (event := formatter.piece(number, piece)):
                yield event
        yield formatter.closing([outputs[number] for number in range(len(tickets))])
    except Exception as error:  # the status is sent already: report the error in the stream
        yield as_event(as_refusal(error).body)
    finally:
        if waiting is not None:
            waiting.cancel()
        cancel(tickets)


def as_refusal(error: Exception) -> Refusal:
    """The refusal for an error while an answer was decoded. The request was valid, so most are the server's fault."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EngineClosed):
        return shutting_down()
    if isinstance(error, GrammarError):  # the grammar is too complex
        return Refusal(400, str(error), param=error.name)
    log.error("an answer failed", exc_info=error)
    return Refusal(500, "the answer failed; see the server's log")


class Guard:
    """ASGI middleware of a server without an API key: web pages of other origins cannot use it through a browser.

    Whoever makes a page can let its name resolve to this machine, so that `Host` and `Origin` agree. A server that
    listens to this machine only therefore refuses every `Host` but this machine's own names. Others are reached by many
    names, which clients that are no pages may use: a page, whose browser sends an `Origin`, needs a name of this
    machine or an address.

    Args:
        host: address that the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app, self.local = app, host in LOCAL
        self.names = set(LOCAL) if self.local else {*LOCAL, host.lower(), socket.gethostname().lower(),
                                                    socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await JSONResponse(refusal.body, refusal.status_code)(scope, receive, send)

    def refusal(self, headers: Headers, scope: Scope) -> Refusal | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name, elsewhere = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
        except ValueError:
            name = elsewhere = None
        known = name in self.names or not self.local and is_address(name)
        if self.local and host and not known:
            return Refusal(403, f"without an API key this server answers to {', '.join(LOCAL)} only, not to {host!r}",
                           code="foreign_host")
        if origin is not None and (elsewhere != host or not known):
            return Refusal(403, f"without an API key this server refuses pages of other origins, got {origin!r}",
                           code="foreign_origin")
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and scope["path"].startswith("/v1/") and media != "application/json":
            return Refusal(415, f"send Content-Type: application/json, got {media!r}")
        return None


def is_address(host: str | None) -> bool:
    """Whether a host is an IP address."""
    try:
        ip_address(host or "")
    except ValueError:
        return False
    return True


def create_app(
    engine: Engine, name: str, options: ServeOptions, defaults: Mapping[str, object], key: str | None = None,
    also: Sequence[str] = (),
) -> FastAPI:
    """Create the ASGI application.

    Args:
        name: name of the model in requests and answers.
        defaults: decoding options of requests that do not set them.
        key: API key that clients must send as `Authorization: Bearer KEY`, except to /health; None: no key.
        also: further names that requests may use for the model.

    Raises:
        ValueError, TypeError: this model cannot decode with the defaults, or its tokenizer's response template is
            invalid.
    """
    engine.check(options_over(defaults, {}))
    if getattr(engine.model.tokenizer, "response_template", None):
        engine.model.tokenizer.get_response_parser(prefix="")
    service = Service(engine, name, defaults, also, options.max_connections)

    # FastAPI's /docs would load scripts from another host; /openapi.json stays.
    app = FastAPI(title="eagle_fsd", docs_url=None, redoc_url=None, redirect_slashes=False,
                  max_body_size=options.max_body)
    if key is None:
        app.add_middleware(Guard, host=options.host)
    else:  # a page that has the key may use the server
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"],
                           expose_headers=[IGNORED])
    app.add_middleware(Counted, answered=service.metrics.answered)

    def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode("latin-1")
        if key is not None and not hmac.compare_digest(sent, f"Bearer {key}".encode()):
            raise Refusal(401, "the API key is missing or wrong: send Authorization: Bearer KEY",
                          code="invalid_api_key")

    @app.get("/health")
    async def health() -> dict:
        if engine.closed:
            raise shutting_down()
        return {"status": "ok", "rows": engine.rows, "waiting": engine.waiting}

    add_errors(app)
    app.include_router(routes(service), dependencies=[Depends(check_key)])
    if options.page:
        from .page import mount_page

        mount_page(app, engine, name, defaults, key, service.slot)
    return app


def add_errors(app: FastAPI) -> None:
    """Return every error in the form of OpenAI's API."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        messages = {404: f"there is no {method} {path!r}", 405: f"{path!r} does not accept {method}",
                    413: "the body is too large (max_body)"}
        if not isinstance(error, Refusal):
            status, headers = error.status_code, error.headers
            error = Refusal(status, messages.get(status, str(error.detail)))
            error.headers = headers  # 405: the allowed methods
        # In ASCII: UTF-8 cannot encode half of a surrogate pair, which a request may contain.
        return Response(json.dumps(error.body), error.status_code, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await http_error(request, refusal_of_body(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return await http_error(request, Refusal(500, "the server failed; see its log"))


def routes(service: Service) -> APIRouter:
    """The routes that require the API key."""
    router = APIRouter()
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "eagle_fsd", "root": service.root,
               "parent": None, "max_model_len": service.engine.max_length} for name in service.names]

    async def take_slot() -> AsyncIterator[None]:
        async with service.slot():
            yield

    slot = [Depends(take_slot)]

    @router.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": listed}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        service.check_name(name)
        return next((entry for entry in listed if entry["id"] == name), listed[0])

    @router.post("/v1/chat/completions", response_model=None, dependencies=slot)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a chat. Unknown fields are ignored, and named in the header `x-eagle-fsd-ignored`.
        `usage` counts drafted and accepted tokens, from the head and copied from the text, `metrics` as vLLM does."""
        return await respond(service, request, body)

    @router.post("/v1/completions", response_model=None, dependencies=slot)
    async def completion(request: Request, body: CompletionRequest) -> Response:
        """Continue a text. Unknown fields are ignored, and named in the header `x-eagle-fsd-ignored`.
        `usage` counts drafted and accepted tokens, from the head and copied from the text, `metrics` as vLLM does."""
        return await respond(service, request, body)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
