"""The streamers of `transformers` with cycles of several tokens, and readers in other threads when a call fails."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import PROMPT, tiny_pair, tiny_tokenizer
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import eagle_fsd
from eagle_fsd import TreeConfig, custom_generate

TIMEOUT = 30  # seconds, so that a reader that is left waiting fails
SKIP = {"skip_prompt": True, "skip_special_tokens": True}


@pytest.fixture(scope="module")
def model():
    """Its text has what the streamers look for: spaces, ends of lines and Chinese characters."""
    return tiny_pair(tokenizer=tiny_tokenizer("abcdefghijklmnopqrstu国 w\nyz中"))


def call(model, streamer, prompt=PROMPT, **options):
    options = {"max_new_tokens": 60, "tree": TreeConfig(16, 5, 4), "temperature": 1.0, "seed": 2} | options
    return eagle_fsd.generate(prompt, model, streamer=streamer, **options)


def to_stdout(model, capsys, **options):
    capsys.readouterr()
    output = call(model, TextStreamer(model.tokenizer, **SKIP), **options)
    written = capsys.readouterr().out
    assert written.endswith("\n")
    return output, [written[:-1]]


def to_another_thread(model, capsys, **options):
    streamer = TextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
    with ThreadPoolExecutor() as pool:
        output = pool.submit(call, model, streamer, **options)
        pieces = list(streamer)
        return output.result(), pieces


def to_an_event_loop(model, capsys, **options):
    async def main():
        streamer = AsyncTextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
        output = asyncio.create_task(asyncio.to_thread(call, model, streamer, **options))
        pieces = [piece async for piece in streamer]
        return await output, pieces

    return asyncio.run(main())


WAYS = [to_stdout, to_another_thread, to_an_event_loop]


@pytest.mark.parametrize("way", WAYS)
def test_the_streamed_text_is_the_answer(model, capsys, way):
    for options in ({}, {"threshold": 0.4}, {"max_new_tokens": 1}):
        output, pieces = way(model, capsys, **options)
        assert "".join(pieces) == output.text and output.text
        if output.stats.target_forwards:
            assert max(output.stats.accepted_lengths) > 1  # several tokens at a time
            assert any(mark in output.text for mark in "\n中国") and " " in output.text
            assert way is to_stdout or len(pieces) > output.stats.target_forwards
    # A stop string is streamed like all other text, and is no part of the answer's.
    free = call(model, None).text
    output, pieces = way(model, capsys, stop=free[17:19])
    assert output.finish_reason == "stop" and output.text == free[: free.find(free[17:19])]
    assert "".join(pieces) == output.text + free[17:19]


class Fails:
    """A logits processor that fails after some cycles."""

    def __init__(self):
        self.left = 5

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise RuntimeError("out of memory")
        return scores


@pytest.mark.parametrize(("options", "error"), [
    ({"threshold": -1.0}, ValueError), ({"prompt": []}, ValueError), ({"speed": 1}, TypeError),
    ({"logits_processor": [Fails()]}, RuntimeError),
], ids=lambda value: str(value)[:20])
def test_a_reader_is_not_left_waiting_by_a_call_that_fails(model, options, error):
    streamer = TextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(call, model, streamer, **options)
        text = "".join(streamer)
        assert isinstance(failed.exception(), error)
    assert bool(text) == (error is RuntimeError)  # what there was until then
    assert streamer.text_queue.empty()  # ended once


def test_neither_is_an_asynchronous_one(model):
    async def main():
        streamer = AsyncTextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
        failed = asyncio.create_task(asyncio.to_thread(call, model, streamer, seed=-1))
        assert [piece async for piece in streamer] == [""]
        with pytest.raises(ValueError, match="seed"):
            await failed

    asyncio.run(main())


def test_nor_one_of_a_call_inside_generate(model):
    streamer = TextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(
            model.target.model.generate, torch.tensor([PROMPT]), max_new_tokens=40, custom_generate=custom_generate,
            draft=model.draft, logits_processor=[Fails()], text_streamer=streamer)
        assert "".join(streamer)
        assert isinstance(failed.exception(), RuntimeError)
