"""Faults of the server and options that it cannot serve with: what clients are told, and how its process ends."""

import asyncio
import logging
import socket
import threading
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from served import ROOT, SMALL, wait_until
from starlette.responses import PlainTextResponse
from test_engine import eagle3_pair
from tiny import tiny_chat_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.cli.serve import check_packages
from eagle_fsd.decoding import cycle
from eagle_fsd.serve.answers import usage
from eagle_fsd.serve.app import create_app
from eagle_fsd.serve.limits import ServeOptions
from eagle_fsd.serve.server import configuration, reserve, serve
from eagle_fsd.utils.installation import install_command

CHAT = "/v1/chat/completions"
PAIR = [word for name, path in zip(("--target", "--draft"), SMALL, strict=True) for word in (name, path)]
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextmanager
def client(pair=None, defaults=None, **engine):
    with eagle_fsd.Engine(pair or tiny_chat_pair(), **engine) as made:
        app = create_app(made, "tiny", ServeOptions(), defaults or {})
        with TestClient(app, "http://localhost", raise_server_exceptions=False) as found:
            found.engine = made
            yield found


# The engine fails -------------------------------------------------------------------------------------------------


def test_a_server_whose_engine_failed_ends(monkeypatch, caplog):
    """And `serve` says so, with which the command's status is 1: whoever started it may start another."""
    pair, options, ended = tiny_chat_pair(), ServeOptions(port=0), []
    place = reserve(options)
    caplog.set_level(logging.INFO)
    thread = threading.Thread(target=lambda: ended.append(serve(pair, "tiny", place, options, {}, None, None)))
    thread.start()
    wait_until(lambda: "serving tiny" in caplog.text)
    monkeypatch.setattr(pair.target, "verify", lambda *args: 1 / 0)
    assert httpx.post(f"http://127.0.0.1:{place.getsockname()[1]}{CHAT}", json=BODY, timeout=60).status_code == 500
    thread.join(60)
    assert ended == [False] and "the engine has failed" in caplog.text


def test_a_fault_before_decoding_is_the_servers_and_logged(monkeypatch, caplog):
    """Not the client's, although it is a TypeError, as those of checks are."""
    with client() as found:
        assert found.post(CHAT, json={**BODY, "temperature": "warm"}).status_code == 400
        monkeypatch.setattr("eagle_fsd.serve.protocol.chat_tokens", lambda *args: len(5))
        answer = found.post(CHAT, json=BODY)
    assert answer.status_code == 500 and "see the server's log" in answer.json()["error"]["message"]
    assert "has no len()" in caplog.text


def test_until_then_it_tells_clients_to_go_elsewhere(monkeypatch):
    pair = tiny_chat_pair()
    with client(pair) as found:
        monkeypatch.setattr(pair.target, "verify", lambda *args: 1 / 0)
        assert found.post(CHAT, json=BODY).status_code == 500
        for answer in (found.post(CHAT, json=BODY), found.get("/health")):
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "shutting_down" and "ZeroDivision" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_wrong_in_an_answer_is_no_fault_of_the_client(stream, monkeypatch):
    """As ValueErrors in the middle of decoding, or of a tokenizer that cannot decode."""
    def broken(self):
        raise ValueError("no token can be drawn")

    monkeypatch.setattr(cycle, "step", broken)
    with client() as found:
        answer = found.post(CHAT, json={**BODY, "stream": stream})
        assert answer.status_code == (200 if stream else 500)  # of a stream the status is out
        assert "server_error" in answer.text and "no token" not in answer.text


# What is told -----------------------------------------------------------------------------------------------------


def test_an_infinite_divergence_is_null():
    """Of a draft that does not name the token, by kl."""
    pair = eagle3_pair(range(4, 20), tiny_tokenizer())
    pair.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "abcde"}], "max_tokens": 20, "logprobs": True,
            "divergence": "kl", "threshold": 0.5, "acceptance": "fsd"}
    with client(pair) as found:
        answers = [found.post(CHAT, json={**chat, "seed": seed}) for seed in range(4)]
        streams = "".join(found.post(CHAT, json={**chat, "seed": seed, "stream": True}).text for seed in range(4))
    assert all(answer.status_code == 200 for answer in answers)
    assert sum(len(answer.json()["choices"][0]["logprobs"]["content"]) for answer in answers) > 20
    assert "data: {" in streams and "Infinity" not in streams and "error" not in streams


def test_a_prompt_that_was_not_there_is_not_cached():
    with eagle_fsd.Engine(tiny_chat_pair()) as engine:
        prompt = [(5 * i + 3) % 30 for i in range(60)]
        for expected in (0, 59):
            tickets = [engine.submit(prompt, max_new_tokens=6, seed=i, temperature=1.0) for i in range(2)]
            told = usage(60, [ticket.result() for ticket in tickets])["prompt_tokens_details"]["cached_tokens"]
            assert told >= expected - 1 if expected else told == 0


def test_small_things_of_the_protocol():
    """An answer of the API may be sent back; another method is told which there are; n is bounded by the queue."""
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None,
            "function_call": None}
    with client(max_waiting=2) as found:
        back = found.post(CHAT, json={**BODY, "messages": [*BODY["messages"], said, *BODY["messages"]]})
        assert back.status_code == 200, back.text
        put = found.put(CHAT, json=BODY)
        assert (put.status_code, put.headers["allow"]) == (405, "POST")
        answer = found.post(CHAT, json={**BODY, "n": 3})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
        assert found.post(CHAT, json={**BODY, "n": 2}).status_code == 200


# Options of the server --------------------------------------------------------------------------------------------


def test_defaults_are_checked_against_the_model():
    with pytest.raises(ValueError, match="outside the vocabulary"), client(defaults={"stop_token_ids": [10**6]}):
        pass


def test_defaults_hold_where_a_request_does_not_say():
    """Whoever chooses a rule chooses its threshold too."""
    defaults = {"threshold": 0.5, "divergence": "tv", "max_new_tokens": 3}
    with client(defaults=defaults) as found:
        asked = []
        submit = found.engine.submit
        found.engine.submit = lambda prompt, options, **more: asked.append(options) or submit(prompt, options, **more)
        for more in ({"max_tokens": None}, {"threshold": 0.1}, {"acceptance": "lenience"}):
            assert found.post(CHAT, json={**BODY, **more}).status_code == 200
    assert [(each.max_new_tokens, each.threshold, each.divergence) for each in asked] == [
        (3, 0.5, "tv"), (4, 0.1, "tv"), (4, None, None)]


def test_an_answer_may_go_on_unless_somebody_says(monkeypatch):
    """As in OpenAI's API, vLLM and llama.cpp."""
    given = []
    monkeypatch.setattr("eagle_fsd.serve.server.serve", lambda *args: given.append(args) or True)
    for words in ([], ["--max-new-tokens", "5"]):
        assert main(["serve", "--port", "0", *words, *PAIR]) == 0
    assert "max_new_tokens" not in given[0][4] and given[1][4]["max_new_tokens"] == 5
    assert given[0][-1] == [SMALL[0]]  # what requests may call it too
    with client(tiny_chat_pair(max_position_embeddings=64), given[0][4] | {"acceptance": "exact"}) as found:
        used = found.post(CHAT, json={"messages": BODY["messages"], "max_tokens": None}).json()["usage"]
    assert used["total_tokens"] == 64


def test_what_is_missing_is_named_alone(monkeypatch):
    """Not all that the extra holds: what is not there, or too old."""
    def version(name):
        if name in ("uvicorn", "gradio"):
            raise PackageNotFoundError(name)
        return "0.1" if name == "h11" else "99"

    monkeypatch.setattr("eagle_fsd.utils.installation.version", version)
    monkeypatch.setattr("eagle_fsd.utils.installation.requires", lambda name: [
        "torch>=2.9", *(f'{each}; extra == "{extra}"' for extra in ("serve", "page")
                        for each in ("fastapi>=0.165", "uvicorn>=0.34", "h11>=0.14")), 'gradio>=6; extra == "page"'])
    for page, named in ((False, "'uvicorn>=0.34' 'h11>=0.14'"), (True, "'uvicorn>=0.34' 'h11>=0.14' 'gradio>=6'")):
        with pytest.raises(ImportError, match=f"pip install {named}$"):
            check_packages(page)
    monkeypatch.setattr("eagle_fsd.utils.installation.version", lambda name: "99")
    check_packages(True)
    # A checkout that is not installed.
    monkeypatch.setattr("eagle_fsd.utils.installation.requires", lambda name: version("gradio"))
    check_packages(True)
    assert install_command("page").endswith(f" -m pip install '{ROOT}[page]'")


def test_plain_serving_drafts_nothing(monkeypatch):
    served = []
    monkeypatch.setattr("eagle_fsd.serve.server.serve",
                        lambda model, name, place, options, defaults, *_: served.append((model, defaults)) or True)
    assert main(["serve", "--plain", "--port", "0", "--tree", "8,2,2", *PAIR]) == 0
    with client(*served[0]) as plain:
        used = plain.post(CHAT, json={**BODY, "max_tokens": 40, "acceptance": "exact"}).json()["usage"]
    assert used["completion_tokens"] == 40 == used["target_forwards"] + 1 and used["tau"] == 1.0


def test_idle_connections_are_kept(monkeypatch):
    """Longer than clients pause."""
    async def app(scope, receive, send):
        pass

    assert configuration(app, ServeOptions()).timeout_keep_alive == 75
    assert configuration(app, ServeOptions(keep_alive_seconds=3)).timeout_keep_alive == 3
    with pytest.raises(ValueError, match="keep_alive_seconds must be a positive number"):
        ServeOptions(keep_alive_seconds=0)


# Connections ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such time")
def test_a_client_that_never_reads_loses_its_connection():
    async def app(scope, receive, send):
        await PlainTextResponse("x" * 2**24)(scope, receive, send)

    options = ServeOptions(port=0, write_seconds=0.3)
    place = reserve(options)
    config = configuration(app, options)
    config.lifespan = "off"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])))
    thread.start()
    wait_until(lambda: server.started)
    try:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", place.getsockname()[1]))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(lambda: server.server_state.connections)
            wait_until(lambda: not server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(30)
