"""Load on an endpoint: an application made for the test, whose answers and refusals are known."""

import asyncio
import json
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from eval import load
from eval.load import Asked, LoadArguments, by_clients, by_rate, measure, moments, summary, table


def endpoint(refusals=0, usage=True, status=200):
    """An endpoint that answers three pieces and counts what it is asked."""
    app, state = FastAPI(), {"open": 0, "most": 0, "bodies": [], "refusals": refusals}

    @app.get("/v1/models")
    async def models():
        return {"data": [{"id": "one"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        state["bodies"].append(await request.json())
        if state["refusals"]:
            state["refusals"] -= 1
            return JSONResponse({"error": {}}, 429, {"Retry-After": "0"})
        if status != 200:
            return JSONResponse({"error": {"message": "no"}}, status)
        state["open"] += 1
        state["most"] = max(state["most"], state["open"])
        await asyncio.sleep(0.01)
        state["open"] -= 1

        def events():
            for text in ("", "a", "b", "c"):
                yield f'data: {json.dumps({"choices": [{"delta": {"content": text}}]})}\n\n'
            if usage:
                yield f'data: {json.dumps({"choices": [], "usage": {"completion_tokens": 7, "tau": 2.5}})}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app, state


def measured(app, **options):
    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            args = LoadArguments(url=("http://test/v1",), **options)
            return await measure(args, args.endpoints, [client] * len(args.endpoints))

    return asyncio.run(go())


def test_so_many_clients_ask_so_many_questions():
    app, state = endpoint()
    rows = measured(app, clients=(1, 3), requests=7, warm_up=1, extra=('{"acceptance": "exact"}',), max_tokens=9)
    assert [(row["clients"], row["answers"], row["tokens"], row["tau"]) for row in rows] == [
        (1, 7, 49, 2.5), (3, 7, 49, 2.5)]
    assert len(state["bodies"]) == 15 and state["most"] == 3
    body = state["bodies"][0]
    assert (body["model"], body["max_tokens"], body["acceptance"], body["stream"]) == ("one", 9, "exact", True)
    assert len({body["messages"][0]["content"] for body in state["bodies"][1:8]}) == 7


def test_endpoints_are_asked_in_turn_for_each_number_of_clients():
    app, state = endpoint()
    extra = ('{"acceptance": "exact"}', "{}")
    rows = measured(app, clients=(1, 2), requests=2, warm_up=0, extra=extra, label=("a", "b"))
    assert [(row["what"], row["clients"], row["answers"]) for row in rows] == [
        ("a", 1, 2), ("b", 1, 2), ("a", 2, 2), ("b", 2, 2)]
    assert [body.get("acceptance") for body in state["bodies"]] == ["exact", "exact", None, None] * 2


def test_without_usage_events_with_text_are_counted():
    app, _ = endpoint(usage=False)
    (row,) = measured(app, clients=(1,), requests=2, warm_up=0)
    assert row["tokens"] == 6 and not row["requests"][0]["counted"] and "tau" not in row


def test_who_is_told_to_come_back_does():
    app, state = endpoint(refusals=3)
    (row,) = measured(app, clients=(1,), requests=2, warm_up=0)
    assert (row["answers"], row["failed"], row["refused"], len(state["bodies"])) == (2, 0, 3, 5)


def test_errors_count_as_failed_and_end_the_warm_up():
    app, _ = endpoint(status=400)
    (row,) = measured(app, clients=(1,), requests=2, warm_up=0)
    assert (row["answers"], row["failed"]) == (0, 2) and row["requests"][0]["error"].startswith("400: ")
    with pytest.raises(ValueError, match="does not answer: 400"):
        measured(app, clients=(1,), requests=2, warm_up=1)


def test_moments_are_a_poisson_process():
    when = moments(4000, 5.0, seed=3)
    gaps = np.diff(when)
    assert when[0] == 0 and gaps.mean() == pytest.approx(0.2, rel=0.05) and gaps.std() == pytest.approx(0.2, rel=0.08)
    assert moments(5, 5.0, 3) == when[:5]


def test_questions_at_a_rate_do_not_wait_for_answers_but_for_the_bound():
    async def go(most_open):
        state = {"open": 0, "most": 0}

        async def send(number, began):
            state["open"] += 1
            state["most"] = max(state["most"], state["open"])
            await asyncio.sleep(0.02)
            state["open"] -= 1
            return Asked(began, first=0.01, total=0.02, tokens=2)

        return state, await by_rate(send, [0.0] * 6, most_open)

    state, found = asyncio.run(go(6))
    assert state["most"] == 6
    state, found = asyncio.run(go(2))
    assert state["most"] == 2 and len(found) == 6
    assert max(each.total for each in found) >= 0.06 and max(each.first for each in found) >= 0.05  # put off twice


def test_clients_share_the_questions():
    async def go():
        asked = []

        async def send(number, began):
            asked.append(number)
            await asyncio.sleep(0)
            return Asked(began, first=0.1)

        await by_clients(send, 10, 3)
        return asked

    assert sorted(asyncio.run(go())) == list(range(10))


def test_the_summary_by_hand():
    found = [Asked(0.0, first=1.0, total=3.0, tokens=5), Asked(1.0, first=2.0, total=4.0, tokens=9, tau=3.0),
             Asked(2.0, total=1.0, error="500", refused=2)]
    row = summary(found)
    assert (row["answers"], row["failed"], row["refused"], row["tokens"], row["seconds"]) == (2, 1, 2, 14, 5.0)
    assert row["tokens_per_second"] == 14 / 5 and row["first_token_p50"] == 1.5 and row["tau"] == 3.0
    assert row["per_token_p50"] == pytest.approx((2 / 4 + 2 / 8) / 2)
    shown = table([{"what": "exact", "clients": 2, **row}])
    assert "exact" in shown and "1500" in shown and "2.8" in shown
    assert summary([Asked(0.0, error="x")]) == {"answers": 0, "failed": 1, "refused": 0}


@pytest.mark.parametrize(("words", "said"), [
    (["--requests", "0"], "--requests must be at least 1, got 0"),
    (["--rate", "-1"], "--rate must be a positive number of questions per second, got -1.0"),
    (["--extra", "[1]"], "--extra must be a JSON object, got '[1]'"),
    (["--label", "a", "b", "--extra", "{}", "{}", "{}"], "--label must be given once or 3 times, got 2"),
    (["--extra", "{}", "{}"], "--label must tell the endpoints apart, got ['{}', '{}']"),
    (["--timeout", "0"], "--timeout must be a positive number of seconds, got 0.0"),
    (["--clients", "0"], "--clients must be at least 1, got (0,)"),
    (["--questions", "no-file"], "no-file"),
    ([], "the endpoint http://127.0.0.1:9/v1 does not answer: ConnectError"),
])
def test_what_cannot_be_measured_ends_in_one_line(words, said, capsys):
    assert load.main(["--url", "http://127.0.0.1:9/v1", "--model", "m", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(("said", "expected"), [
    ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", 1.0), ("inf", 1.0),
    ("nan", 1.0), ("", 1.0),
])
def test_when_to_come_back(said, expected):
    assert load.seconds_until(said) == expected


def test_when_to_come_back_as_a_date():
    said = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=90))
    assert load.seconds_until(said) == pytest.approx(90, abs=5)


@pytest.mark.parametrize("line", ["data: {", "data: [1]", "data: 5", 'data: {"choices": [1]}',
                                  'data: {"usage": {"x": 1}}', 'data: {"choices": [{"delta": "x"}]}'])
def test_a_bad_event_fails_its_answer_alone(line):
    app, count = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def chat():
        count.append(None)
        good = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        return StreamingResponse(iter([line + "\n\n" if len(count) == 2 else good]), media_type="text/event-stream")

    (row,) = measured(app, clients=(1,), requests=3, warm_up=0, model="m")
    assert (row["answers"], row["failed"]) == (2, 1) and row["requests"][1]["error"].startswith("no event of the API")


@pytest.mark.parametrize("slow", ["trickle", "refusals"])
def test_the_time_for_an_answer_is_that_of_all_of_it(slow):
    """Not of each of its pieces, nor of each try."""
    app = FastAPI()

    async def trickle():
        while True:
            yield 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
            await asyncio.sleep(0.05)

    @app.post("/v1/chat/completions")
    async def chat():
        if slow == "refusals":
            return JSONResponse({}, 429, {"Retry-After": "60"})
        return StreamingResponse(trickle(), media_type="text/event-stream")

    asked = asyncio.run(alone(app, timeout=0.4))
    assert asked.error == "not within 0.4 s" and asked.total < 30


async def alone(app, timeout):
    """What becomes of one request, with a server: the transport for applications waits for the end of a stream."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        asked = await load.ask(client, {}, Asked(0.0), timeout)
    server.should_exit = True
    await serving
    return asked
