"""Text that grows token by token is what the whole answer decodes to, at a cost that does not grow with it."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_fsd.text import GrowingText, StopStrings, StreamedText

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


def test_an_unfinished_character_is_pending(bytes_tokenizer):
    text = GrowingText(bytes_tokenizer)
    assert [text.add(token) for token in bytes_tokenizer("猫")["input_ids"][:2]] == ["", ""]
    assert text.pending() == "\ufffd"


@pytest.mark.parametrize("stop", [". END", "好き", "👩‍🚀", "G", "of it"])
def test_a_stop_string_is_found_at_its_last_token(stop, bytes_tokenizer):
    stops, ids = StopStrings(bytes_tokenizer, ["nowhere", stop]), bytes_tokenizer(TEXT)["input_ids"]
    ends = [stops(token) for token in ids].index(True) + 1
    assert bytes_tokenizer.decode(ids[:ends]).endswith(stop)
    assert not any(stop in bytes_tokenizer.decode(ids[:count]) for count in range(ends))


def test_tokens_are_decoded_a_few_at_a_time(bytes_tokenizer, monkeypatch):
    longest, decode = [], bytes_tokenizer.decode
    monkeypatch.setattr(type(bytes_tokenizer), "decode",
                        lambda self, ids, **options: longest.append(len(ids)) or decode(ids, **options))
    stops = StopStrings(bytes_tokenizer, ["nowhere"])
    assert not any(stops(token) for token in bytes_tokenizer("ab" * 200)["input_ids"])
    assert max(longest) <= 3 and len(longest) <= 4 * 400


@pytest.mark.parametrize("stops", [[], [". END"], ["nowhere", "好き"], ["👩‍🚀"], ["G"], ["done. ENDS", "of it"]])
@pytest.mark.parametrize("together", [1, 3])
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
