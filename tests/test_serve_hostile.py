"""Hostile requests: the documented status of each (docs/serving.md), and that the server answers the next one.

A case sends something to the server and returns the status it got, or None where the connection was closed on it.
"""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fastapi.exceptions import RequestValidationError
from served import here, wait_for_health
from tiny import tiny_chat_pair

KEY = "the right key"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "what is it"}], "max_tokens": 4}
LONG = json.dumps({**BODY, "max_tokens": 150, "stream": True}).encode()
MAX_BODY, READ_SECONDS, POSITIONS = 65536, 0.3, 200


@pytest.fixture(scope="module")
def server():
    pair = tiny_chat_pair(max_position_embeddings=POSITIONS)
    with here(pair, KEY, max_rows=2, max_body=MAX_BODY, read_seconds=READ_SECONDS) as found:
        yield found


def post(server, path=CHAT, key=KEY, **options):
    headers = {"Authorization": f"Bearer {key}"} | options.pop("headers", {})
    return httpx.post(f"{server.url}{path}", headers=headers, timeout=60, **options)


def raw(server, *parts, close_writing=False, pause=0.0):
    """The status of what comes back for these bytes, None where nothing does."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            if close_writing:
                connection.shutdown(socket.SHUT_WR)
            while b"\r\n" not in received:
                more = connection.recv(4096)
                if not more:
                    return None
                received += more
        except ConnectionError:
            return None
        return int(received.split(b" ")[1])


def head(length, more=""):
    return (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n{more}\r\n").encode()


def body(**changed):
    """A case: the usual request, changed."""
    return lambda server: post(server, json={**BODY, **changed}).status_code


def text(content, **headers):
    """A case: these bytes as body."""
    headers = {"Content-Type": "application/json", **headers}
    return lambda server: post(server, content=content, headers=headers).status_code


def sent(*parts, **how):
    """A case: these bytes as they are."""
    return lambda server: raw(server, *parts, **how)


def get(path, key=KEY):
    return sent(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())


def million_tokens(server):
    """As many as the target has positions for, no more."""
    answer = post(server, json={**BODY, "max_tokens": 10**6})
    assert answer.json()["usage"]["total_tokens"] <= POSITIONS
    return answer.status_code


def chunked(server):
    """A huge body of unknown length."""
    chunk = b"%x\r\n%s\r\n" % (4096, b" " * 4096)
    return raw(server, head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"),
               *[chunk] * (MAX_BODY // 4096 + 2), b"0\r\n\r\n")


def leaves_at_once(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(len(LONG)) + LONG)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, no goodbye


def never_reads(server):
    """A stream that nobody takes: the answer ends none the less, and its row is free."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(head(len(LONG)) + LONG)
        wait_for_health(server, rows=1)
        wait_for_health(server, rows=0)
        return int(connection.recv(64).split(b" ")[1])


def function(**changed):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **changed}}


CASES = {
    "two hundred tools": (body(tools=[function(name=f"f{i}") for i in range(200)]), 400),
    "a tool whose text is a template": (body(tools=[function(description="{{ 7 * 7 }}{% for %}")]), 400),
    "every token forbidden": (body(logit_bias={str(i): -100 for i in range(20)}), 200),
    "JSON 20,000 deep": (text(b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"), 400),
    "not UTF-8": (text(b'{"messages": "\xff\xfe"}'), 400),
    "a number of 5000 digits": (text(b'{"messages": [], "n": ' + b"9" * 5000 + b"}"), 400),
    "an image": (body(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]), 400),
    "half a character": (text(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400),
    "half a character as a field": (text(b'{"\\ud800": 1, "messages": [{"role": "user", "content": "x"}]}'), 400),
    "half a character as model": (text(b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'), 404),
    "a prompt that is too long": (body(messages=[{"role": "user", "content": "word " * 5000}]), 400),
    "a million tokens": (million_tokens, 200),
    "half a token": (body(max_tokens=1.5), 400),
    "a threshold of no number": (text(json.dumps({**BODY, "threshold": float("nan")}).encode()), 400),
    "a thousand stop strings": (body(stop=["x"] * 1000), 400),
    "token ids out of range": (lambda server: post(server, "/v1/completions", json={"prompt": [-1, 10**9]}).status_code,
                               400),
    "a large body": (text(b" " * (MAX_BODY + 1)), 413),
    "a large body, announced and never sent": (sent(head(10**12)), 413),
    "a large body in chunks": (chunked, 413),
    "a slow head": (sent(b"POST /v1/chat", pause=READ_SECONDS + 0.2), 408),
    "a length that is none": (sent(head("-5")), 400),
    "a slow body": (sent(head(100), b'{"mess'), 408),
    "half a body, then half closed": (sent(head(len(LONG)) + LONG[:20], close_writing=True), None),
    "a long list of wrong items": (text(json.dumps({"messages": [0] * 20_000}).encode()), 400),
    "gone at once": (leaves_at_once, None),
    "a stream that nobody reads": (never_reads, 200),
    "no key": (lambda server: httpx.post(f"{server.url}{CHAT}", json=BODY).status_code, 401),
    "a path upwards, encoded": (get("/v1/models/%2e%2e/%2e%2e/etc/passwd"), 404),
    "metrics without the key": (get("/metrics", key="a wrong key"), 401),
    "no HTTP": (sent(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), 400),
    "a head without end": (sent(b"GET / HTTP/1.1\r\n", b"X: " + b"y" * 200_000), 400),
    "a web socket": (get("/v1/models HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX: y"), 200),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_answered_with_its_status(server, case):
    """And after it the server answers as usual, and is idle."""
    send, status = CASES[case]
    assert send(server) == status
    answer = post(server, json=BODY)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    wait_for_health(server, rows=0, waiting=0)


@pytest.mark.parametrize("content", [b"{]", b'{"messages": "\xff"}', b'{"model": "\\ud800", "messages": []}',
                                     json.dumps({**BODY, "acceptance": "x" * 50_000}).encode()])
def test_errors_have_the_form_of_the_api_and_are_short(server, content):
    answer = post(server, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 1000 and "\n" not in error["message"]


def test_the_official_client_gets_the_status_of_a_body_that_is_too_large(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.APIStatusError) as found:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 10_000_000}])
    assert found.value.status_code == 413


TOKENS = [1] * 330_000


@pytest.mark.parametrize(("path", "content"), [
    ("/v1/completions", {"prompt": [*TOKENS, "a"]}), ("/v1/completions", {"prompt": ["a", *TOKENS]}),
    ("/v1/completions", {"prompt": [[*TOKENS, "a"]]}), ("/v1/completions", {"prompt": [[1]] * 200_000}),
    (CHAT, {**BODY, "tools": TOKENS}), (CHAT, {**BODY, "stop": TOKENS}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": TOKENS}]}),
    (CHAT, {"messages": [{"role": "user", "content": TOKENS}]}), (CHAT, {"messages": TOKENS}),
    (CHAT, {**BODY, "stop_token_ids": [*TOKENS, "a"]}), (CHAT, {**BODY, "logit_bias": {str(i): "a" for i in TOKENS}}),
    (CHAT, {**BODY, "reference": ["a"] * 200_000}), (CHAT, {**BODY, "chat_template_kwargs": TOKENS})])
def test_a_large_body_is_refused_at_its_first_fault(server, path, content):
    """Not at each of its items: one error, of few bytes, in little memory."""
    errors, found = [], RequestValidationError.errors
    with here(server.pair) as large, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestValidationError, "errors", lambda error: errors.append(len(found(error))) or found(error))
        answer = httpx.post(f"{large.url}{path}", json=content, timeout=60)
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert sum(errors) <= 5


def test_many_connections(server):
    """Those above the limit are told to come back; the others are answered. The list of models and the metrics take no
    place."""
    with here(max_connections=1, max_waiting=8) as busy, httpx.stream(
            "POST", f"{busy.url}{CHAT}", json={**BODY, "max_tokens": 1900, "stream": True}):
        assert {httpx.get(f"{busy.url}{path}").status_code for path in ("/v1/models", "/metrics", "/health")} == {200}
        assert httpx.post(f"{busy.url}{CHAT}", json=BODY).status_code == 503
    with here(server.pair, max_connections=8, max_waiting=8) as crowded, ThreadPoolExecutor(50) as pool:
        asked = {**BODY, "max_tokens": 60}
        found = list(pool.map(lambda _: httpx.post(f"{crowded.url}{CHAT}", json=asked, timeout=60).status_code,
                              range(50)))
        assert {200, 503} >= set(found) and 503 in found and found.count(200) >= 8
        wait_for_health(crowded, rows=0, waiting=0)
