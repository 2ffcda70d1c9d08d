"""The rules `prose` and `afterword` in whole answers: fuzzy outside of fenced code, the target's own inside."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PROMPT, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.acceptance.prose import BEFORE, BEHIND, FENCE, INSIDE, Marks, after_all
from eagle_fsd.measure.experiment import meaning
from eagle_fsd.settings import equipped, marks_of

TREE = eagle_fsd.TreeConfig(10, 4, 3)
NAMES = {"z": "```", "n": "``", "l": "`\n\n", "a": "`x`", "t": "``````", "k": " ``"}


@pytest.fixture(scope="module")
def pair():
    """Some of its letters are written as fences and ticks, so that its answers have blocks."""
    tokenizer = tiny_tokenizer()
    written = {NAMES.get(text, text): token for text, token in tokenizer.get_vocab().items()}
    tokenizer.get_vocab = lambda: written
    pair = tiny_pair(tokenizer=tokenizer)
    pair.tokenizer = tokenizer
    pair.texts = {token: text for text, token in written.items()}
    return pair


def test_marks_are_of_what_the_vocabulary_says(pair):
    number = pair.tokenizer.convert_tokens_to_ids
    marks = marks_of(pair.tokenizer, 64)
    assert [letter for letter in "abcdefghijklmnopqrstuvwxyz" if marks.ticked[number(letter)]] == sorted(NAMES)
    assert marks_of(pair.tokenizer, 10).moves.equal(marks.moves[:10])
    assert marks.moves.shape == (64, 9) and len(marks.ticked) == 64 and not marks.ticked[32:].any()
    for letter, states in {"z": (3, 4, 5, 6), "n": (2, 3, 4, 5), "l": (0, 0, 3, 3), "b": (0, 0, 0, 3)}.items():
        assert marks.moves[number(letter)][:4].tolist() == list(states)  # from no, one, two backticks; within a block


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.text("`a\n", min_size=1, max_size=7), min_size=1, max_size=9), st.integers(0, 8))
def test_a_text_of_any_tokens_ends_where_its_fences_say(texts, shorter):
    marks = Marks.of(enumerate(texts), len(texts))
    moves, kept = torch.stack([marks.moves, marks.moves]).long(), max(0, len(texts) - shorter)
    moves[1, kept:] = torch.arange(9)  # a row that ends earlier
    for row, said in zip(after_all(moves).tolist(), (texts, texts[:kept]), strict=True):
        *behind, rest = "".join(said).replace("```", "|").split("|")
        place = BEFORE if not behind else INSIDE if len(behind) % 2 else BEHIND
        assert row == FENCE * place + len(rest) - len(rest.rstrip("`"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("rule", "options"), [
    ("prose", {"threshold": math.inf}), ("fsd+prose", {"threshold": 0.6}), ("afterword", {"threshold": math.inf}),
    ("fsd+afterword", {"threshold": 0.6})])
def test_fuzzy_tokens_stand_outside_of_code_only(pair, rule, options, temperature):
    count, inside, split = 0, 0, 0
    prompts = [[*PROMPT, *more] for more in itertools.product(range(4, 24), range(4, 8))]
    asked = {"max_new_tokens": 24, "tree": TREE, "temperature": temperature, "seed": 3, "acceptance": rule, **options}
    for output in (outputs := eagle_fsd.generate(prompts, pair, **asked)):
        text = ""
        for token, receipt in zip(output.token_ids, output.receipts, strict=True):
            fences = text.count("```")
            inside += fences % 2
            if receipt.source == "fuzzy":
                assert fences % 2 == 0 and "`" not in pair.texts[token]
                assert fences or "afterword" not in rule
                count += 1
            text += (own := pair.texts.get(token, ""))
            split += text.count("```") > fences and "```" not in own
    assert count > 5 and inside > 5 and split > 5  # some fences are of several tokens
    for prompt, output in zip(prompts[:4], outputs, strict=False):
        alone = eagle_fsd.generate(prompt, pair, **asked | {"seed": output.seed})
        assert alone.token_ids == output.token_ids
    if temperature == 0 and rule == "prose":  # where no token has a mark, all is prose
        free = eagle_fsd.make_rule("prose", math.inf, marks=Marks.of([], pair.target.vocab_size))
        found = eagle_fsd.generate(prompts, pair, **asked | {"acceptance": free, "threshold": None})
        assert sum(receipt.source == "fuzzy" for output in found for receipt in output.receipts) > count


def test_a_byte_of_sentencepiece_is_a_backtick():
    tokenizer = tiny_tokenizer()
    tokenizer.get_vocab = lambda: {"<0x60>": 5, "```": 6}
    marks = marks_of(tokenizer, 8)
    assert marks.ticked.nonzero().flatten().tolist() == [5, 6] and marks.moves[5, :3].tolist() == [1, 2, 3]


def test_answers_under_other_marks_are_of_another_rule():
    rule = eagle_fsd.make_rule("fsd+prose", 0.3)
    first, same, other = (replace(rule, gates=(replace(rule.gates[0], marks=Marks.of([(3, text)], 8)),))
                          for text in ("```", "```", "``"))
    assert meaning(first) == meaning(same) != meaning(other)


def test_marks_of_fewer_tokens_are_refused(pair):
    few = eagle_fsd.make_rule("prose", 1.0, marks=marks_of(pair.tokenizer, 20))
    with pytest.raises(ValueError, match="the marks of rule 'prose' are of 20 tokens, the target has"):
        eagle_fsd.generate(PROMPT, pair, acceptance=few)


def test_a_vocabulary_without_fences_is_told(caplog):
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    pair.tokenizer = tiny_tokenizer()
    equipped(eagle_fsd.make_rule("fsd+prose", 0.3), pair)
    assert "rule 'fsd+prose' finds no code: the tokenizer has no token with a backtick" in caplog.text


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
