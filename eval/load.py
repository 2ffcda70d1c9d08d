"""What an OpenAI endpoint does under load: time to first token, time per token and throughput, by clients and by rate.

    eagle-fsd serve --target T --draft D --port 8000 &
    python -m eval.load --url http://127.0.0.1:8000/v1 --questions mt_bench.jsonl --clients 1 2 4 8 --out load
    python -m eval.load --url http://127.0.0.1:8000/v1 --questions mt_bench.jsonl --requests 200 --rate 0.5 --out load
    python -m eval.load --url URL1 URL2 --label exact others --extra '{"acceptance": "exact"}' '{}' --out load

With `--clients` every client asks its next question when it has its answer; with `--rate` questions come at random
moments (a Poisson process), whether or not earlier ones are answered. Any OpenAI endpoint can be asked, such as
`transformers serve`; what only ours knows goes into `--extra`. Several endpoints, or one with several `--extra`, are
asked in turn, for each number of clients. Tokens are those of the answer's usage, or where an
endpoint says none, its events with text.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

import httpx

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.measure.records import write_record
from eval.command import noted, run_command
from eval.questions import load_questions
from eval.report.load import Asked, summary, table

RETRIES = 5  # of a request that was told to come back


@dataclass(frozen=True)
class LoadArguments:
    """What is asked, and how fast.

    Args:
        url: of the endpoints, /v1 included; one counts for all of what else is given several times.
        questions: JSON lines as of eval.mt_bench, first turns; without it generated tasks.
        clients: numbers of clients, one after the other.
        rate: questions per second instead, at random moments.
        requests: answers of each number of clients, or of the rate.
        most_open: with --rate, questions that may be under way; further ones are put off.
        max_tokens: of an answer.
        model: its name, one for all or one for each; without it the first that the endpoint lists.
        extra: further fields of a request, as JSON, one for all or one for each: {"acceptance": "exact"}.
        label: what is measured, in the table, for each; without it what --extra says.
        warm_up: answers before the first that counts.
        timeout: seconds after which an answer, waits for its turn included, counts as failed.
        seed: of the moments, and of generated tasks.
        out: where the record goes: OUT.json and OUT.md.
    """

    url: tuple[str, ...]
    questions: Path | None = None
    clients: tuple[int, ...] = (1, 2, 4, 8)
    rate: float | None = None
    requests: int = 200
    most_open: int = 64
    max_tokens: int = 128
    model: tuple[str, ...] = ()
    extra: tuple[str, ...] = ("{}",)
    label: tuple[str, ...] = ()
    warm_up: int = 2
    timeout: float = 600.0
    seed: int = 1
    out: Path | None = None

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is asked in turn.

        Raises:
            ValueError: lists of different lengths.
        """
        given = {"url": self.url, "model": self.model or (None,), "extra": self.extra, "label": self.label or (None,)}
        count = max(map(len, given.values()))
        for name, values in given.items():
            if len(values) not in (1, count):
                raise ValueError(f"--{name} must be given once or {count} times, got {len(values)}")
        each = zip(*(values * (count // len(values)) for values in given.values()), strict=True)
        return [Endpoint(url, model, parsed(extra), label or extra) for url, model, extra, label in each]


@dataclass(frozen=True)
class Endpoint:
    """Where questions go, and what is asked besides."""

    url: str
    model: str | None
    fields: dict
    label: str


def parsed(extra: str) -> dict:
    """Fields of a request.

    Raises:
        ValueError: no JSON object.
    """
    try:
        given = json.loads(extra)
    except ValueError as error:
        raise ValueError(f"--extra must be a JSON object, got {extra!r} ({error})") from error
    if not isinstance(given, dict):
        raise ValueError(f"--extra must be a JSON object, got {extra!r}")
    return given


def check(args: LoadArguments) -> None:
    """Raise ValueError for options that would fail later."""
    check_counts(args, "requests", "most_open", "max_tokens")
    if args.warm_up < 0:
        raise ValueError(f"--warm-up must be at least 0, got {args.warm_up}")
    if not args.clients or min(args.clients) < 1:
        raise ValueError(f"--clients must be at least 1, got {args.clients}")
    if not 0 < args.timeout < math.inf:
        raise ValueError(f"--timeout must be a positive number of seconds, got {args.timeout}")
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ValueError(f"--rate must be a positive number of questions per second, got {args.rate}")
    if len({each.label for each in args.endpoints}) < len(args.endpoints):
        raise ValueError(f"--label must tell the endpoints apart, got {[each.label for each in args.endpoints]}")


async def ask(client: httpx.AsyncClient, body: dict, asked: Asked, timeout: float) -> Asked:
    """Ask until there is an answer, the endpoint says that there will be none, or the time for it is over."""
    start = time.perf_counter()

    async def until_answered() -> None:
        while (seconds := await read_answer(client, body, asked, start)) is not None:
            asked.refused += 1
            if asked.refused > RETRIES:
                asked.error = "refused"
                break
            await asyncio.sleep(seconds)

    try:
        await asyncio.wait_for(until_answered(), timeout)
    except asyncio.TimeoutError:
        asked.error = f"not within {timeout:g} s"
    except httpx.HTTPError as error:
        asked.error = type(error).__name__
    asked.total = time.perf_counter() - start
    return asked


async def read_answer(client: httpx.AsyncClient, body: dict, asked: Asked, start: float) -> float | None:
    """Note what a streamed answer says; seconds until the next try where there is none now."""
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code in (429, 503):
            return seconds_until(response.headers.get("retry-after", "1"))
        if response.status_code != 200:
            asked.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
            return None
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
                continue
            try:
                note_event(json.loads(line.removeprefix("data:")), asked, time.perf_counter() - start)
            except (ValueError, TypeError, AttributeError, KeyError):
                asked.error = f"no event of the API: {line[:200]}"
                return None
    return None


def note_event(event: dict, asked: Asked, seconds: float) -> None:
    """What an event of a stream says, so many seconds after the question."""
    if "error" in event:
        asked.error = str(event["error"])[:200]
    if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()):
        asked.first = asked.first or seconds
        asked.tokens += not asked.counted
    if usage := event.get("usage"):
        asked.tokens, asked.counted, asked.tau = usage["completion_tokens"], True, usage.get("tau")


def seconds_until(retry_after: str) -> float:
    """What a Retry-After header says, in seconds or as a date; 1 where it says neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            when = parsedate_to_datetime(retry_after)
        except ValueError:
            return 1.0
        seconds = (when.replace(tzinfo=when.tzinfo or timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 1.0


async def by_clients(send: Callable[[int, float], Awaitable[Asked]], count: int, clients: int) -> list[Asked]:
    """`count` answers to so many clients."""
    numbers, start, found = iter(range(count)), time.perf_counter(), []

    async def one() -> None:
        for number in numbers:
            found.append(await send(number, time.perf_counter() - start))

    await asyncio.gather(*(one() for _ in range(clients)))
    return found


def moments(count: int, rate: float, seed: int) -> list[float]:
    """Seconds of a Poisson process, from the first event on."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(at)
        at += draw.expovariate(rate)
    return found


async def by_rate(
    send: Callable[[int, float], Awaitable[Asked]], when: Sequence[float], most_open: int
) -> list[Asked]:
    """An answer for each moment, with at most so many under way; one that is put off has waited since its moment."""
    free, start = asyncio.Semaphore(most_open), time.perf_counter()

    async def one(number: int, moment: float) -> Asked:
        await asyncio.sleep(max(0.0, moment - (time.perf_counter() - start)))
        async with free:
            late = time.perf_counter() - start - moment
            found = await send(number, moment)
        found.total += late
        found.first = None if found.first is None else found.first + late
        return found

    return list(await asyncio.gather(*(one(*each) for each in enumerate(when))))


Send = Callable[[int, float], Awaitable[Asked]]


async def sender(args: LoadArguments, endpoint: Endpoint, client: httpx.AsyncClient) -> Send:
    """What asks an endpoint, which has answered a few times."""
    model = endpoint.model
    if model is None:
        listed = await client.get("models")
        if listed.status_code != 200:
            raise ValueError(f"{endpoint.url}/models answers {listed.status_code}: give --model, or the key as "
                             "OPENAI_API_KEY")
        model = listed.json()["data"][0]["id"]
    prompts = [question.turns[0] for question in load_questions(args.questions, 80, args.seed)]

    async def send(number: int, began: float) -> Asked:
        body = {"model": model, "messages": [{"role": "user", "content": prompts[number % len(prompts)]}],
                "max_tokens": args.max_tokens, "stream": True, "stream_options": {"include_usage": True},
                **endpoint.fields}
        return await ask(client, body, Asked(began), args.timeout)

    for failed in [each.error for each in await by_clients(send, args.warm_up, 1) if each.error]:
        raise ValueError(f"the endpoint {endpoint.url} does not answer: {failed}")
    return send


async def measure(
    args: LoadArguments, endpoints: Sequence[Endpoint], clients: Sequence[httpx.AsyncClient]
) -> list[dict]:
    """A summary for each number of clients, or for the rate, and endpoint, with what became of each request."""
    senders = [await sender(args, *each) for each in zip(endpoints, clients, strict=True)]
    rows = []
    for count in args.clients if args.rate is None else (None,):
        for endpoint, send in zip(endpoints, senders, strict=True):
            if count is None:
                found = await by_rate(send, moments(args.requests, args.rate, args.seed), args.most_open)
            else:
                found = await by_clients(send, args.requests, count)
            named = count if count is not None else f"{args.rate:g}/s"
            rows.append({"what": endpoint.label, "clients": named, **summary(found),
                         "requests": list(map(asdict, found))})
    return rows


async def connect(args: LoadArguments) -> list[dict]:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(
            httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=args.timeout, limits=limits)
        ) for endpoint in args.endpoints]
        try:
            return await measure(args, args.endpoints, clients)
        except httpx.HTTPError as error:
            raise OSError(f"{', '.join(args.url)} cannot be reached: {error}") from error


def run(args: LoadArguments) -> None:
    """Measure, print the table and write the record.

    Raises:
        ValueError: a bad option, or an endpoint that answers with errors.
        OSError: the endpoint cannot be reached.
    """
    check(args)
    rows = asyncio.run(connect(args))
    shown = table(rows)
    failures = Counter(each["error"] for row in rows for each in row["requests"] if each["error"])
    shown += "".join(f"\n{count} failed: {error}" for error, count in failures.items())
    print(shown)
    if args.out is not None:
        write_record(args.out, {"settings": noted(args), "rows": rows}, shown)


main = partial(run_command, "eval.load", LoadArguments, run, stopped="stopped")

if __name__ == "__main__":
    sys.exit(main())
