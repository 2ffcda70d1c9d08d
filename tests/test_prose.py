"""The rule `prose` in whole answers: fuzzy outside of fenced code, the target's own inside."""

import math
from dataclasses import replace

import pytest
import torch
from tiny import PROMPT, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.acceptance.prose import PLAIN, TICKED, TURNING, Marks, mark_of
from eagle_fsd.settings import equipped, marks_of

TREE = eagle_fsd.TreeConfig(10, 4, 3)
NAMES = dict(zip("abcdefgh", ["```", "`x`", "``````", "a", "````", "d", "e", "f"], strict=True))


@pytest.fixture(scope="module")
def pair():
    """Some of its letters are written as fences and ticks, so that its answers have blocks."""
    tokenizer = tiny_tokenizer()
    written = {NAMES.get(text, text): token for text, token in tokenizer.get_vocab().items()}
    tokenizer.get_vocab = lambda: written
    pair = tiny_pair(tokenizer=tokenizer)
    pair.tokenizer = tokenizer
    return pair


def test_marks_are_of_what_the_vocabulary_says(pair):
    number = pair.tokenizer.convert_tokens_to_ids
    marks = marks_of(pair.tokenizer, 64).of.tolist()
    assert [marks[number(letter)] for letter in "abcdefgh"] == [
        TURNING, TICKED, TICKED, PLAIN, TURNING, PLAIN, PLAIN, PLAIN]
    assert len(marks) == 64 and not any(marks[32:])
    assert [mark_of(text) for text in ("```python", "``", "a", "```\n```")] == [TURNING, TICKED, PLAIN, TICKED]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [{"acceptance": "prose", "threshold": math.inf},
                                     {"acceptance": "fsd+prose", "threshold": 0.6}], ids=["prose", "fsd+prose"])
def test_fuzzy_tokens_stand_outside_of_code_only(pair, options, temperature):
    marks, count, inside = marks_of(pair.tokenizer, pair.target.vocab_size).of, 0, 0
    prompts = [[*PROMPT, token] for token in range(4, 24)]
    given = {"max_new_tokens": 24, "tree": TREE, "temperature": temperature, "seed": 3}
    for output in (outputs := eagle_fsd.generate(prompts, pair, **options, **given)):
        turns = 0
        for token, receipt in zip(output.token_ids, output.receipts, strict=True):
            inside += turns % 2
            if receipt.source == "fuzzy":
                assert turns % 2 == 0 and marks[token] == PLAIN
                count += 1
            turns += int(marks[token] == TURNING)
    assert count > 5 and inside > 5
    for prompt, output in zip(prompts[:4], outputs, strict=False):
        alone = eagle_fsd.generate(prompt, pair, **options, **given | {"seed": output.seed})
        assert alone.token_ids == output.token_ids
    if temperature == 0 and options["acceptance"] == "prose":  # where no token has a mark, all is prose
        free = eagle_fsd.make_rule("prose", math.inf, marks=Marks(torch.zeros_like(marks)))
        found = eagle_fsd.generate(prompts, pair, acceptance=free, **given)
        assert sum(receipt.source == "fuzzy" for output in found for receipt in output.receipts) > count


def test_a_vocabulary_without_fences_is_told(caplog):
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    pair.tokenizer = tiny_tokenizer()
    equipped(eagle_fsd.make_rule("fsd+prose", 0.3), pair)
    assert "rule 'fsd+prose' finds no code: the tokenizer has no token with ```" in caplog.text


def test_without_a_tokenizer_it_is_refused(pair):
    bare = replace(pair, tokenizer=None)
    with pytest.raises(ValueError, match="rule 'fsd\\+prose' looks for code .*, and there is no tokenizer"):
        eagle_fsd.generate(PROMPT, bare, acceptance="fsd+prose", threshold=0.3)
    assert eagle_fsd.generate(PROMPT, bare, acceptance="fsd+prose", max_new_tokens=4).token_ids  # lossless at 0
    marks = marks_of(pair.tokenizer, pair.target.vocab_size)
    given = eagle_fsd.make_rule("fsd", 0.3, gates=[eagle_fsd.make_rule("prose", math.inf, marks=marks)])
    assert (eagle_fsd.generate(PROMPT, bare, acceptance=given, tree=TREE, max_new_tokens=20).token_ids
            == eagle_fsd.generate(PROMPT, pair, acceptance="fsd+prose", threshold=0.3, tree=TREE,
                                  max_new_tokens=20).token_ids)
