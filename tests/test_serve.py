"""The endpoint as its clients use it: the `openai` package, unchanged."""

import asyncio
import importlib
import signal
from importlib.util import find_spec

import httpx
import openai
import pytest
import torch
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator
from served import here, served, wait_for_health, wait_until
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.models.cache import TreeCache
from eagle_fsd.serve.app import create_app
from eagle_fsd.serve.limits import ServeOptions

CHAT = [{"role": "user", "content": "what is it"}]
OPTIONS = {"model": "tiny", "messages": CHAT, "max_tokens": 24}
LONG = {**OPTIONS, "max_tokens": 1900}
TREE = eagle_fsd.TreeConfig(16, 5, 4)
FUZZY = {"acceptance": "fsd", "threshold": 0.5}


@pytest.fixture(scope="module")
def server():
    with here(max_rows=2, max_waiting=2, tree=TREE) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_is_what_generate_says(client, server):
    answer = client.chat.completions.create(**OPTIONS)
    expected = eagle_fsd.generate(CHAT, server.pair, max_new_tokens=24, tree=TREE)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length" == expected.finish_reason
    assert answer.model == "tiny" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage, more = answer.usage, answer.usage.model_extra
    assert usage.completion_tokens == 24 and usage.total_tokens == usage.prompt_tokens + 24
    assert more["tau"] == pytest.approx(more["accepted_tokens"] / more["target_forwards"] + 1, abs=1e-3)
    assert more["tau"] >= 1 and more["fuzzy_tokens"] == 0  # the default is lossless


def test_options_of_acceptance_go_through(client, server):
    answer = client.chat.completions.create(**OPTIONS, extra_body={**FUZZY, "budget": 2.5, "head_guard": None})
    expected = eagle_fsd.generate(CHAT, server.pair, max_new_tokens=24, budget=2.5, head_guard=None, tree=TREE, **FUZZY)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.model_extra["fuzzy_tokens"] == sum(r.source == "fuzzy" for r in expected.receipts)


@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_is_the_answer_in_pieces(client, stops):
    text = client.chat.completions.create(**OPTIONS).choices[0].message.content
    stop = ["nothing of this", text[12:15]] if stops else None
    whole = client.chat.completions.create(**OPTIONS, stop=stop)
    if stops:  # it ends the answer and is not in it
        assert whole.choices[0].message.content == text[: text.index(stop[1])]
        assert whole.choices[0].finish_reason == "stop"
    pieces = list(client.chat.completions.create(**OPTIONS, stop=stop, stream=True,
                                                 stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    reasons = [piece.choices[0].finish_reason for piece in pieces if piece.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert len({piece.id for piece in pieces}) == 1
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-1].model_extra["metrics"] == whole.model_extra["metrics"]
    assert all(piece.usage is None for piece in pieces[:-1])


def test_usage_comes_with_every_piece_where_it_is_wanted(client):
    """As load testers want it."""
    pieces = list(client.chat.completions.create(**OPTIONS, stream=True, stream_options={
        "include_usage": True, "continuous_usage_stats": True}))
    told = [piece.usage.completion_tokens for piece in pieces]
    assert told[0] == 0 and told == sorted(told) and told[-2:] == [24, 24]
    assert {piece.usage.prompt_tokens for piece in pieces} == {pieces[-1].usage.prompt_tokens}


def test_choices_have_seeds_that_follow_and_are_drawn_again_with_them(client):
    options = {**OPTIONS, "temperature": 1.0, "top_p": 0.95}
    both = client.chat.completions.create(**options, n=2, seed=7)
    second = client.chat.completions.create(**options, seed=8)
    assert [choice.index for choice in both.choices] == [0, 1] and both.model_extra["metrics"] is None  # as in vLLM
    assert [choice.model_extra["seed"] for choice in both.choices] == [7, 8]
    assert both.choices[1].message.content == second.choices[0].message.content
    streamed = {0: "", 1: ""}
    for piece in client.chat.completions.create(**options, n=2, seed=7, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert list(streamed.values()) == [choice.message.content for choice in both.choices]


def test_logprobs_are_those_of_the_receipts(client, server):
    expected = eagle_fsd.generate(CHAT, server.pair, max_new_tokens=24, tree=TREE)
    listed = client.chat.completions.create(**OPTIONS, logprobs=True).choices[0].logprobs.content
    assert [each.logprob for each in listed] == pytest.approx([receipt.logprob for receipt in expected.receipts],
                                                              abs=1e-4)
    assert [each.model_extra["source"] for each in listed] == [receipt.source for receipt in expected.receipts]
    streamed = [each for piece in client.chat.completions.create(**OPTIONS, logprobs=True, stream=True)
                if piece.choices[0].logprobs for each in piece.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in listed]


def test_completions_take_text_and_token_ids(client, server):
    prompt = "what is it, and why"
    expected = eagle_fsd.generate(prompt, server.pair, max_new_tokens=12, tree=TREE)
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, logprobs=0)
    assert answer.choices[0].text == expected.text and answer.object == "text_completion"
    assert len(answer.choices[0].logprobs.tokens) == len(expected.token_ids)
    ids = server.pair.tokenizer(prompt)["input_ids"]
    pieces = client.completions.create(model="tiny", prompt=ids, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    rendered = client.completions.create(model="tiny", prompt=f"<s>{prompt}", max_tokens=12)  # no second <s>
    assert rendered.choices[0].text == expected.text and rendered.usage.prompt_tokens == len(ids)


def test_parts_of_text_and_the_newer_names(client):
    asked = client.chat.completions.create(**OPTIONS)
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": " it"}]
    again = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], user="me",
                                           max_completion_tokens=24, presence_penalty=0)
    assert again.choices[0].message == asked.choices[0].message
    assert again.usage.completion_tokens == asked.usage.completion_tokens


def test_models_are_listed(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "eagle_fsd"
    assert client.models.retrieve("tiny").model_extra == {"root": "tiny", "parent": None, "max_model_len": 2048}
    with here(max_tokens=100, tree=TREE) as small:
        (model,) = httpx.get(f"{small.url}/v1/models").json()["data"]
        longest, asked = model["max_model_len"], {"prompt": [5] * 10, "ignore_eos": True}
        for tokens, status in ((longest - 10, 200), (longest - 9, 400)):
            answer = httpx.post(f"{small.url}/v1/completions", json={**asked, "max_tokens": tokens})
            assert answer.status_code == status
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


@pytest.mark.parametrize("own", [{"messages": CHAT}, {"prompt": "ab"}], ids=("chat", "text"))
def test_the_schema_lists_every_option_with_its_bounds(server, own):
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= described["paths"].keys()
    if find_spec("openapi_spec_validator"):
        importlib.import_module("openapi_spec_validator").validate(described)
    path = "/v1/chat/completions" if "messages" in own else "/v1/completions"
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = Draft202012Validator({**body, "components": described["components"]})
    for fields in ({"threshold": 0.5, "temperature": 0.8, "max_tokens": 4}, {"acceptance": "exact", "seed": 3},
                   {"head_guard": None, "top_p": 0.9, "tree": {"total_tokens": 8, "depth": 3, "top_k": 2}}):
        assert schema.is_valid({**own, **fields})
        assert httpx.post(f"{server.url}{path}", json={"max_tokens": 4, **own, **fields}).status_code == 200
    for fields in ({"threshold": -1}, {"temperature": "warm"}, {"max_tokens": 0}, {"top_p": 0}, {"seed": [1, 2]},
                   {"acceptance": "judge"}, {"head_guard": 2}, {"text_drafts": "on"}, {"frequency_penalty": 2.5}):
        assert not schema.is_valid({**own, **fields})
        assert httpx.post(f"{server.url}{path}", json={**own, **fields}).status_code == 400


@pytest.mark.parametrize("rows", [4, 3])
def test_answers_without_a_limit_share_the_room(rows):
    """Each ends at the context's end or where its share of the room does, whoever else is there; the caches grow with
    the texts."""
    chats = [[{"role": "user", "content": "what is it"[: 3 + number % 7]}] for number in range(10)]
    with here(max_rows=rows, max_tokens=2000, max_waiting=32, tree=TREE) as found:
        sizes, make_room = [], Batch.make_room

        def noted(batch, *joining):
            make_room(batch, *joining)
            sizes.append((batch.cache.batch, batch.cache.capacity))

        async def crowd():
            async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client:
                return await asyncio.gather(*(client.chat.completions.create(model="tiny", messages=chat)
                                              for chat in chats))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Batch, "make_room", noted)
            answers = asyncio.run(crowd())
        room = 2000 // rows - TREE.total_tokens
        assert [answer.usage.total_tokens for answer in answers] == [room] * 10
        assert {answer.choices[0].finish_reason for answer in answers} == {"length"}
        for number in (0, 5):
            expected = eagle_fsd.generate(chats[number], found.pair, tree=TREE,
                                          max_new_tokens=answers[number].usage.completion_tokens)
            assert answers[number].choices[0].message.content == expected.text
        assert max(requests for requests, _ in sizes) == rows and all(count * each <= 2000 for count, each in sizes)
        long = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none").completions
        used = long.create(model="tiny", prompt=[5, 6, 7] * 250).usage  # longer than a share
        assert (used.prompt_tokens, used.completion_tokens) == (750, 256)
        with pytest.raises(openai.BadRequestError, match="a prompt of 1995 tokens"):
            long.create(model="tiny", prompt=[5, 6, 7] * 665)


def test_caches_begin_small_and_grow():
    """Where there is no memory to grow, the longest text ends with that error, and the others go on."""
    pair, sizes, resized = tiny_chat_pair(max_position_embeddings=2048), [], TreeCache.resized

    def noted(cache, capacity, rows, *chosen):
        if capacity > 700:
            raise torch.OutOfMemoryError("no memory")
        sizes.append(capacity)
        return resized(cache, capacity, rows, *chosen)

    with pytest.MonkeyPatch.context() as patch, eagle_fsd.Engine(pair, tree=TREE, max_rows=2) as engine:
        patch.setattr(TreeCache, "resized", noted)
        long = engine.submit(CHAT, max_new_tokens=1900)
        short = engine.submit(CHAT, max_new_tokens=300, temperature=1.0, seed=3)
        with pytest.raises(torch.OutOfMemoryError):
            long.result(60)
        assert short.result(60).token_ids == eagle_fsd.generate(CHAT, pair, max_new_tokens=300, temperature=1.0, seed=3,
                                                                tree=TREE).token_ids
        assert engine.submit(CHAT, max_new_tokens=3).result(60).finish_reason == "length"
    assert sizes[0] < 350 < max(sizes) and engine.error is None


def test_names_of_the_model():
    app = {"model": "Org/Some-Model", "messages": CHAT, "max_tokens": 1}
    with eagle_fsd.Engine(tiny_chat_pair()) as engine, TestClient(
            create_app(engine, "mine", ServeOptions(), {}, also=["Org/Some-Model"]), "http://localhost") as found:
        for name in ("mine", "Mine", "Org/Some-Model", "some-model", "org/some-model"):
            assert found.post("/v1/chat/completions", json={**app, "model": name}).json()["model"] == "mine"
            model = found.get(f"/v1/models/{name}").json()
            assert (model["id"], model["root"]) == ("mine", "Org/Some-Model")
        for name in ("other", "Else/some-model", ""):
            assert found.post("/v1/chat/completions", json={**app, "model": name}).status_code == 404


@pytest.mark.parametrize(("changed", "error", "param"), [
    ({"model": "large"}, openai.NotFoundError, "model"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"n": 1000}, openai.BadRequestError, "n"),
    ({"frequency_penalty": 2.5}, openai.BadRequestError, "frequency_penalty"),
    ({"max_completion_tokens": 5}, openai.BadRequestError, "max_tokens"),  # which is 24
    ({"extra_body": {"best_of": 3}}, openai.BadRequestError, "best_of"),
])
def test_errors_reach_the_client_as_its_own(client, changed, error, param):
    with pytest.raises(error) as found:
        client.chat.completions.create(**{**OPTIONS, **changed})
    assert found.value.param == param and found.value.body["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_other_than_text_are_refused_by_name(client, kind):
    content = [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{**OPTIONS, "messages": [{"role": "user", "content": content}]})
    assert found.value.param == "messages.0.content.1.type"
    assert found.value.body["message"] == (
        'messages.0.content.1.type must be "text", since images, audio and files are not supported here, '
        f"got {kind!r}")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(server, stream):
    async def leave():
        async with httpx.AsyncClient(timeout=60) as client:
            request = asyncio.ensure_future(client.post(f"{server.url}/v1/chat/completions",
                                                        json={**LONG, "stream": stream}))
            await asyncio.to_thread(wait_for_health, server, rows=1)
            request.cancel()

    asyncio.run(leave())
    wait_for_health(server, rows=0, waiting=0)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_that_waits_for_a_row_begins_at_once(server, client, monkeypatch, path):
    """And sends comments, which clients skip, until there is something to send."""
    monkeypatch.setattr("eagle_fsd.serve.app.PING_SECONDS", 0.01)
    short = {"messages" if "chat" in path else "prompt": CHAT if "chat" in path else "what", "max_tokens": 2,
             "stream": True}
    long = [client.chat.completions.create(**LONG, stream=True) for _ in range(2)]
    wait_for_health(server, rows=2)
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=short, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        while (line := next(lines)) != ": waiting":
            assert not line or '"role"' in line
        for each in long:
            each.close()
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" and len(events) > 2
    wait_for_health(server, rows=0, waiting=0)


def test_a_stream_that_nobody_waits_for_leaves_the_queue(server, client):
    long = [client.chat.completions.create(**LONG, stream=True) for _ in range(2)]
    wait_for_health(server, rows=2)
    third = client.chat.completions.create(**LONG, stream=True)
    wait_for_health(server, waiting=1)
    for each in (third, *long):
        each.close()
    wait_for_health(server, rows=0, waiting=0)


def test_a_full_queue_says_when_to_come_back(server):
    async def crowd():
        async with httpx.AsyncClient(timeout=60) as client:
            ask = []
            for place in ("rows", "waiting"):
                ask += [asyncio.ensure_future(client.post(f"{server.url}/v1/chat/completions", json=LONG))
                        for _ in range(2)]
                await asyncio.to_thread(wait_for_health, server, **{place: 2})
            last = await client.post(f"{server.url}/v1/chat/completions", json=LONG)
            for each in ask:
                each.cancel()
            return last

    answer = asyncio.run(crowd())
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    wait_for_health(server, rows=0, waiting=0)


def test_metrics_count_what_was_answered(server, client):
    def read():
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = read()
    answer = client.chat.completions.create(**OPTIONS, extra_body=FUZZY)
    usage, after = answer.usage, read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["eagle_fsd_tokens_total"] == usage.completion_tokens
    for name in ("proposed", "accepted"):
        for drafter, count in usage.model_extra[f"{name}_by"].items():
            assert grown[f'eagle_fsd_{name}_total{{drafter="{drafter}"}}'] == count
    assert sum(usage.model_extra["accepted_by"].values()) == usage.model_extra["accepted_tokens"] > 0
    drafts, labels = answer.model_extra["metrics"]["speculative_decoding"], 'engine="0",model_name="tiny"'
    for name, ours in (("drafts", "num_spec_steps"), ("draft_tokens", "num_draft_tokens"),
                       ("accepted_tokens", "num_accepted_draft_tokens")):
        assert grown[f"vllm:spec_decode_num_{name}_total{{{labels}}}"] == drafts[ours] > 0
    for position, count in enumerate(drafts["num_accepted_tokens_per_pos"]):
        name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}}'
        assert grown[name] == count > 0
    assert grown["eagle_fsd_fuzzy_total"] == usage.model_extra["fuzzy_tokens"]
    assert grown['eagle_fsd_http_answers_total{path="/v1/chat/completions",status="200"}'] == 1
    assert grown["eagle_fsd_first_token_seconds_count"] == grown["eagle_fsd_answer_seconds_count"] == 1
    assert after["eagle_fsd_rows"] == after["eagle_fsd_queue"] == 0 and after["eagle_fsd_tau"] >= 1


def test_a_signal_finishes_what_runs_and_refuses_what_is_new():
    with here(max_rows=1, tree=TREE) as found:
        client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(**{**OPTIONS, "max_tokens": 400}, stream=True)
        next(iter(stream))
        found.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not found.server.servers or not found.server.servers[0].is_serving())
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(**OPTIONS)
        assert [piece.choices[0].finish_reason for piece in stream][-1] == "length"
        found.thread.join(30)
        assert not found.thread.is_alive()


@pytest.mark.slow
def test_the_command_ends_with_status_0_after_sigterm():
    with served("--tree", "8,2,2", key="a secret") as found:
        client = openai.OpenAI(base_url=f"{found.url}/v1", api_key="a secret", max_retries=0)
        stream = client.chat.completions.create(model="small", messages=CHAT, max_tokens=100, stream=True,
                                                extra_body={"ignore_eos": True})
        next(iter(stream))
        found.process.terminate()
        assert [piece.choices[0].finish_reason for piece in stream][-1] == "length"
        assert found.process.wait(60) == 0 and "a secret" not in "".join(found.log)
        assert "Loading weights" not in "".join(found.log)  # bars of what is quick
