"""The endpoint: an OpenAI-compatible application around an `Engine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..engine.output import Output
from .engine import Engine
from .guards import Guard, Refusal
from .limits import ServeOptions
from .metrics import Metrics
from .protocol import FINISHED, Asked, ChatRequest, CompletionRequest, Form, as_event, options_over, refused
from .tickets import EngineClosed, Piece, QueueFull, Ticket, interleaved

log = logging.getLogger(__name__)
T = TypeVar("T")
GONE = 499  # a client that went away reads no status; the log does


class Service:
    """An engine as the endpoint uses it.

    Args:
        name: of the model.
        defaults: options of decoding of requests that name none.
        queue_seconds: longest wait for a row.
    """

    def __init__(self, engine: Engine, name: str, defaults: Mapping[str, object], queue_seconds: float) -> None:
        self.engine, self.name, self.defaults, self.queue_seconds = engine, name, dict(defaults), queue_seconds
        self.metrics = Metrics(engine)
        self.draining = False  # finish what runs, refuse what is new
        self.submitting = 0  # requests that are being checked and tokenised

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or waits."""
        return bool(self.submitting or self.engine.rows or self.engine.waiting)

    def check_open(self) -> None:
        """Raise `Refusal` (503) where the server is about to end."""
        if self.engine.error is not None:
            raise Refusal(503, "the engine has failed and the server ends: try again later", code="engine_failed")
        if self.draining or self.engine.closed:
            raise Refusal(503, "the server is shutting down: try again, elsewhere if you can", code="shutting_down")

    async def submit(self, asked: Asked) -> list[Ticket]:
        """A ticket for each choice: all of them are taken, or none.

        Raises:
            Refusal: the request cannot be answered, or not now.
        """
        self.check_open()
        if asked.model not in (None, self.name):
            raise self.no_model(asked.model)
        options, count = asked.options(self.defaults), asked.n or 1
        if count > (most := self.engine.max_waiting):
            raise Refusal(400, f"n must be at most {most} here (max_waiting), got {count}", param="n")
        tickets: list[Ticket] = []
        self.submitting += 1
        try:
            for number in range(count):
                own = options if options.seed is None else replace(options, seed=options.seed + number)
                # Long prompts are tokenised beside the event loop.
                tickets.append(await asyncio.to_thread(self.engine.submit, asked.prompt, own))
        except (ValueError, TypeError) as error:
            raise refused(error) from error
        except QueueFull as error:
            raise Refusal(429, f"the server is busy: {error}", code="queue_full") from error
        except EngineClosed as error:
            self.check_open()
            raise Refusal(503, str(error), code="shutting_down") from error
        finally:
            self.submitting -= 1
            if len(tickets) < count:
                cancel(tickets)
        return tickets

    def no_model(self, name: str) -> Refusal:
        return Refusal(404, f"there is no model {name!r}, only {self.name!r}", param="model", code="model_not_found")

    async def wait(self, request: Request, tickets: Sequence[Ticket], work: Awaitable[T]) -> T:
        """What comes of the work, which ends where its client goes away.

        Raises:
            Refusal: the client has gone; or 503, none of the tickets left the queue in time.
        """
        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        try:
            done, _ = await asyncio.wait([task, watch], timeout=self.queue_seconds,
                                         return_when=asyncio.FIRST_COMPLETED)
            if not done and all(ticket.queued_seconds is None for ticket in tickets):
                raise Refusal(503, f"no row became free within {self.queue_seconds:g} seconds", code="queue_timeout")
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refusal(GONE, "the client went away")
            return task.result()
        finally:
            for each in (watch, task):
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each

    async def ended(self, ticket: Ticket) -> Output:
        """The whole answer.

        Raises:
            Refusal: the engine was closed in the middle of it.
        """
        output = await ticket
        self.metrics.time(ticket, len(output.token_ids))
        if output.finish_reason not in FINISHED:
            raise Refusal(503, "the server was shut down before the answer ended: try again", code="shutting_down")
        return output

    async def all_ended(self, tickets: Sequence[Ticket]) -> list[Output]:
        return [await self.ended(ticket) for ticket in tickets]


def cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


async def respond(service: Service, request: Request, asked: Asked) -> Response:
    """The answer to a chat or a completion, whole or as a stream."""
    form = Form(service.name, isinstance(asked, ChatRequest), asked.wants_logprobs, service.engine.model.tokenizer)
    tickets = await service.submit(asked)
    try:
        if not asked.stream:
            return JSONResponse(form.whole(tickets, await service.wait(request, tickets, service.all_ended(tickets))))
        pieces = interleaved(tickets)
        first = await service.wait(request, tickets, anext(pieces))  # what fails before it has a status of its own
        return StreamingResponse(stream(service, form, asked, tickets, pieces, first), media_type="text/event-stream",
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    except BaseException as error:
        cancel(tickets)
        raise as_refusal(error) from error


async def stream(
    service: Service, form: Form, asked: Asked, tickets: list[Ticket],
    pieces: AsyncIterator[tuple[int, Piece | None]], first: tuple[int, Piece | None],
) -> AsyncIterator[str]:
    """The server-sent events of an answer whose first piece is there."""
    outputs: dict[int, Output] = {}

    async def events(number: int, piece: Piece | None) -> str:
        if piece is not None:
            return form.piece(number, piece)
        outputs[number] = await service.ended(tickets[number])
        return form.ending(number, outputs[number])

    try:
        if form.chat:
            yield "".join(map(form.opening, range(len(tickets))))
        yield await events(*first)
        async for number, piece in pieces:
            yield await events(number, piece)
        yield form.closing(tickets, [outputs[number] for number in range(len(tickets))], asked.wants_usage)
    except Exception as error:  # the status is out: the stream says it
        refusal = as_refusal(error)
        assert isinstance(refusal, Refusal)
        yield as_event(refusal.body)
    finally:
        cancel(tickets)
        await pieces.aclose()


def as_refusal(error: BaseException) -> BaseException:
    """What a client is told of an answer that failed: its request was in order, so the fault is the server's.
    Cancellation and the like stay what they are."""
    if isinstance(error, (Refusal, asyncio.CancelledError)) or not isinstance(error, Exception):
        return error
    if isinstance(error, EngineClosed):
        return Refusal(503, str(error), code="shutting_down")
    log.error("an answer failed", exc_info=error)
    return Refusal(500, "the answer failed; the server's log says why")


def create_app(
    engine: Engine, name: str, options: ServeOptions, defaults: Mapping[str, object], key: str | None = None,
    inner: Sequence[type] = (),
) -> FastAPI:
    """The application, but for the page.

    Args:
        name: of the model in requests and answers.
        defaults: options of decoding of requests that name none.
        key: what clients must show; None: nothing.
        inner: ASGI middleware that sees what the guard lets through.

    Raises:
        ValueError, TypeError: defaults that this model cannot answer with.
    """
    engine.check(options_over(defaults, {}))
    service = Service(engine, name, defaults, options.queue_seconds)

    # The pages at /docs would be fetched from elsewhere; /openapi.json is the description itself.
    app = FastAPI(title="eagle_fsd", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for each in inner:
        app.add_middleware(each)
    app.add_middleware(Guard, key=key, max_body=options.max_body, max_open=options.max_connections,
                       read_seconds=options.read_seconds, own_login=("/page",) if options.page else (),
                       count=service.metrics.count)
    add_errors(app)
    add_routes(app, service)
    return app


def add_errors(app: FastAPI) -> None:
    """Every error in the API's form."""

    @app.exception_handler(Refusal)
    async def refusal(request: Request, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = max(error.errors(), key=lambda each: len(each["loc"]))  # of what may be text or a list: what is wrong
        place = ".".join(str(part) for part in found["loc"] if part != "body")
        return Refusal(400, f"{place or 'the body'}: {found['msg']}, got {found.get('input')!r}",
                       param=place or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        said = {404: f"there is no {method} {path!r}", 405: f"{path!r} takes no {method}"}
        refusal = Refusal(error.status_code, said.get(error.status_code, str(error.detail)))
        return refusal.response(error.headers)  # 405: what is allowed

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return Refusal(500, "the server failed; its log says why").response()


def add_routes(app: FastAPI, service: Service) -> None:
    """What the endpoint answers."""
    listed = {"id": service.name, "object": "model", "created": 0, "owned_by": "eagle_fsd"}

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [listed]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        if name != service.name:
            raise service.no_model(name)
        return listed

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        return await respond(service, request, asked)

    @app.post("/v1/completions", response_model=None)
    async def completion(request: Request, asked: CompletionRequest) -> Response:
        return await respond(service, request, asked)

    @app.get("/health")
    async def health() -> dict:
        service.check_open()
        return {"status": "ok", "rows": service.engine.rows, "waiting": service.engine.waiting}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
