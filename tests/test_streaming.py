"""The streamers of `transformers` with cycles of several tokens, and readers in other threads when a call fails."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import PROMPT, tiny_pair, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AsyncTextIteratorStreamer, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer

import eagle_fsd
from eagle_fsd import TreeConfig, custom_generate
from eagle_fsd.utils.text import GrowingText, StreamedText, answer_text

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


def test_nor_one_of_a_call_inside_generate(model):
    streamer = TextIteratorStreamer(model.tokenizer, timeout=TIMEOUT, **SKIP)
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(
            model.target.model.generate, torch.tensor([PROMPT]), max_new_tokens=40, custom_generate=custom_generate,
            draft=model.draft, logits_processor=[Fails()], text_streamer=streamer)
        assert "".join(streamer)
        assert isinstance(failed.exception(), RuntimeError)


# Text that grows token by token is what the whole answer decodes to, at a cost that does not grow with it.

TEXT = "Grüße: 猫が好き 👩‍🚀 – done. END of it"


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token per byte: characters are spread over several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_pieces_are_the_whole_text(bytes_tokenizer):
    text, ids = GrowingText(bytes_tokenizer), bytes_tokenizer(TEXT)["input_ids"]
    pieces = [text.add(token) for token in ids]
    assert len(ids) > len(TEXT) and "".join(pieces) == TEXT and not any("\ufffd" in piece for piece in pieces)
    assert text.pending() == ""
    assert [text.add(token) for token in bytes_tokenizer("猫")["input_ids"][:2]] == ["", ""]
    assert text.pending() == "\ufffd"


@pytest.mark.parametrize("stop", [". END", "好き", "👩‍🚀", "G", "of it"])
def test_a_stop_string_is_found_at_its_last_token(stop, bytes_tokenizer):
    text, ids = StreamedText(bytes_tokenizer, ["nowhere", stop]), bytes_tokenizer(TEXT)["input_ids"]
    ends = [text.stops_at(token) for token in ids].index(True) + 1
    assert bytes_tokenizer.decode(ids[:ends]).endswith(stop)
    assert not any(stop in bytes_tokenizer.decode(ids[:count]) for count in range(ends))


def test_tokens_are_decoded_a_few_at_a_time(bytes_tokenizer, monkeypatch):
    longest, decode = [], bytes_tokenizer.decode
    monkeypatch.setattr(type(bytes_tokenizer), "decode",
                        lambda self, ids, **options: longest.append(len(ids)) or decode(ids, **options))
    text = StreamedText(bytes_tokenizer, ["nowhere"])
    assert not any(text.stops_at(token) for token in bytes_tokenizer("ab" * 200)["input_ids"])
    assert max(longest) <= 3 and len(longest) <= 4 * 400


@pytest.mark.parametrize(
    ("stops", "together"), [([], 3), (["nowhere", "好き"], 1), (["G"], 3), (["done. ENDS", "of it"], 1)])
def test_what_is_shown_is_never_taken_back(stops, together, bytes_tokenizer):
    """And what is shown with the rest is the text before the first stop string."""
    text, ids = StreamedText(bytes_tokenizer, stops), bytes_tokenizer(TEXT)["input_ids"]
    whole = TEXT[: min([at for stop in stops if (at := TEXT.find(stop)) >= 0], default=len(TEXT))]
    shown = ""
    for start in range(0, len(ids), together):
        shown += text.add(ids[start : start + together])
        assert whole.startswith(shown)
        said = bytes_tokenizer.decode(ids[: start + together]).rstrip("\ufffd")
        held_back = max(map(len, stops), default=1) - 1 + 4  # bytes of a character are tokens
        assert len(shown) >= min(len(whole), len(said)) - held_back
    assert shown + text.rest(whole) == whole
    assert shown == whole or any(whole.endswith(stop[:1]) for stop in stops)


LETTERS = "ab<user>cd<bot>ef</s>gh"


@pytest.mark.parametrize(("stop", "ends", "text"), [
    ("<bot>", 6, "abcd"), ("d<bot>", 6, "abc"), ("<bot>e", 7, "abcd"), ("b<user>cd<bot>e", 7, "a"),
    ("f</s>", 9, "abcde"), ("<bot></s>", None, "abcdefgh"), ("<bot>x", None, "abcdefgh"), ("dx<bot>", None, "abcdefgh"),
    ("bc", 4, "a"), ("bot>", None, "abcdefgh"), (["</s>", "<user>"], 3, "ab"),
], ids=str)
@pytest.mark.parametrize("together", [1, 3])
def test_stop_strings_that_name_special_tokens(stop, ends, text, together, tokenizer):
    """Others are not there for a stop string, as they are not for who reads the text."""
    stop, ids = [stop] if isinstance(stop, str) else stop, tokenizer(LETTERS, add_special_tokens=False)["input_ids"]
    watched, streamed = StreamedText(tokenizer, stop), StreamedText(tokenizer, stop)
    assert next((count for count, token in enumerate(ids, 1) if watched.stops_at(token)), None) == ends
    shown = "".join(streamed.add(ids[start : start + together]) for start in range(0, len(ids), together))
    assert shown + streamed.withheld() == text == answer_text(tokenizer, ids[:ends], stop)
    assert shown + streamed.rest(text) == text and streamed.stopped == (ends is not None)


def test_decoding_ends_at_a_special_token(model):
    tokenizer = tiny_tokenizer()
    free = call(model, None).token_ids
    before, end = next((a, b) for a, b in zip(free[10:], free[11:], strict=False) if min(a, b) > 3 and a != b)
    stop = tokenizer.decode([before, end])
    tokenizer.add_tokens(stop[1], special_tokens=True)
    pair, count = eagle_fsd.EagleModel.from_parts(model.target.model, model.draft, tokenizer), free.index(end) + 1
    with eagle_fsd.Engine(pair, tree=TreeConfig(16, 5, 4)) as engine:
        for strings in (stop[1], [f"no{stop[1]}", stop[1]]):
            streamer = TextIteratorStreamer(tokenizer, timeout=TIMEOUT, **SKIP)
            output = call(pair, streamer, stop=strings)
            assert output.token_ids == free[:count] and output.finish_reason == "stop"
            assert output.text == "".join(streamer) == tokenizer.decode(free[:count], skip_special_tokens=True)
            ticket = engine.submit(PROMPT, max_new_tokens=60, temperature=1.0, seed=2, stop=strings)
            assert "".join(piece.text for piece in ticket) == ticket.result().text == output.text
        output = call(pair, None, stop=stop)
        assert output.token_ids[-2:] == [before, end]
        assert output.text == tokenizer.decode(output.token_ids[:-2], skip_special_tokens=True)


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """Letters, and one token per byte for what else there is, as Llama-2 has them."""
    vocabulary = {token: number for number, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *"abc"])}
    raw = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize("stops", [[], ["b\n"], ["\n"], ["b\n中"], ["c"]], ids=repr)
def test_bytes_decode_as_in_the_whole_text(fallback_tokenizer, stops):
    """Wherever the answer is cut: in the middle of a character, the newline before it is lost."""
    ids = fallback_tokenizer("ab\n中\n\nac", add_special_tokens=False)["input_ids"]
    assert fallback_tokenizer.decode(ids[:4]) == "ab\ufffd\ufffd"
    watched = StreamedText(fallback_tokenizer, stops)
    for end in range(1, 1 + next((count for count, token in enumerate(ids, 1) if watched.stops_at(token)),
                              len(ids))):
        streamed = StreamedText(fallback_tokenizer, stops)
        whole = answer_text(fallback_tokenizer, ids[:end], stops)
        shown = "".join(streamed.add([token]) for token in ids[:end])
        assert shown + streamed.withheld() == whole == shown + streamed.rest(whole)
        assert fallback_tokenizer.decode(ids[:end]).startswith(whole)
    assert not stops or not any(whole.endswith(stop) for stop in stops)


def test_spaces_that_decoding_drops_are_not_shown():
    words = ["I", "do", "n't", "know", ".", "'", "it", "'s", "n", "t", "?", "!", "fine", ",", "no", "we", "'ve", "a"]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1, 2, 3, 4]) == "I don't know."
    random = torch.Generator().manual_seed(0)
    for count in range(1, 200):
        ids = torch.randint(len(words), (1 + count % 12,), generator=random).tolist()
        streamed, whole = StreamedText(tokenizer, []), tokenizer.decode(ids)
        shown = "".join(streamed.add([token]) for token in ids)
        assert shown + streamed.withheld() == whole == shown + streamed.rest(whole)
    assert StreamedText(tokenizer, []).add([0, 1, 2, 3, 4, 0, 1, 3]) == "I don't know. I do"
