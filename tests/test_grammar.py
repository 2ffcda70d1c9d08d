"""Structured output: every answer is one that the grammar allows, and the one that plain decoding finds with it."""

import copy
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd import RULES, make_rule
from eagle_fsd.decoding.grammar import Grammar

PAIRS = Path(__file__).parent / "pairs"
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "home"],
    "properties": {"name": {"type": "string", "maxLength": 12},
                   "age": {"type": "integer", "minimum": 0, "maximum": 150},
                   "home": {"type": "object", "additionalProperties": False, "required": ["city"],
                            "properties": {"city": {"enum": ["Paris", "London"]}}}}}


class Answer(BaseModel):
    yes: bool
    why: str | None


@pytest.fixture(scope="module")
def pair():
    return eagle_fsd.load(PAIRS / "small-target", PAIRS / "small-draft", dtype="float32", device="cpu", tree=None)


def generate(pair, wanted, **options):
    options = {"max_new_tokens": 150, "seed": 3, **options}
    return eagle_fsd.generate("Once upon a time", pair, response_format=wanted, **options)


def check_person(text):
    found = json.loads(text)
    assert list(found) == ["name", "age", "home"] and found["home"]["city"] in ("Paris", "London")
    assert len(found["name"]) <= 12 and 0 <= found["age"] <= 150
    assert text == json.dumps(found, ensure_ascii=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", ["all", "no head", "no text", "engine"])
def test_the_tokens_are_those_of_plain_decoding_and_forced_ones_are_drafted(pair, drafts, temperature):
    plain = generate(pair, PERSON, temperature=temperature, speculative=False)
    assert plain.finish_reason == "eos" and plain.stats.proposed.total() == 0
    check_person(plain.text)
    if drafts == "engine":
        with eagle_fsd.Engine(pair) as engine:
            tickets = [engine.submit("Once upon a time", response_format=PERSON, max_new_tokens=150, seed=3,
                                     temperature=temperature, speculative=speculative) for speculative in (True, False)]
            found, undrafted = [ticket.result() for ticket in tickets]
        assert undrafted.token_ids == plain.token_ids and undrafted.stats.proposed.total() == 0
        assert undrafted.stats.undrafted == undrafted.stats.target_forwards > found.stats.undrafted
    else:
        alone = eagle_fsd.loading.pair.EagleModel.from_parts(pair.target.model, None, pair.tokenizer)
        found = generate(alone if drafts == "no head" else pair, PERSON, temperature=temperature,
                         text_drafts="off" if drafts == "no text" else "auto")
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted["grammar"] >= 10 and found.stats.target_forwards < plain.stats.target_forwards / 2
    assert found.stats.accepted["grammar"] == sum(receipt.drafter == "grammar" for receipt in found.receipts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_leaves_the_grammar(pair, rule, temperature):
    rule = make_rule(rule, None if rule == "exact" else 0.9)
    check_person(generate(pair, PERSON, acceptance=rule, temperature=temperature).text)


@pytest.mark.parametrize(("wanted", "pattern"), [
    (Answer, r'\{"yes": (true|false), "why": (null|".*")\}'),
    ({"type": "json_object"}, r"\{.*"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"a": [1, "é"]}}}},
     r'\{"a": \[1, "é"\]\}'),
    ({"enum": ["to be", "or not"]}, '"(to be|or not)"'),
    ({"type": "json_object", "schema": {"const": 5}}, "5"),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": None}}, r"\{.*"),
    ({"type": ["object", "null"], "properties": {"a": {"const": 1}}, "additionalProperties": False},
     r'(\{("a": 1)?\}|null)'),
    ({"type": "regex", "regex": "(ab|cd)+e"}, "(ab|cd)+e"),
    ({"type": "choice", "choice": ["yes", 'say "no"']}, 'yes|say "no"'),
    ({"type": "grammar", "grammar": 'start: "x" /[0-9]{3}/'}, "x[0-9]{3}"),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9] [0-9]'}, "x[0-9][0-9]"),
])
def test_forms(pair, wanted, pattern):
    output = generate(pair, wanted)
    assert re.fullmatch(pattern, output.text, re.DOTALL) and output.finish_reason in ("eos", "length")


@pytest.mark.parametrize(("regex", "text", "allowed"), [
    (r"\d{3}", "123", True), (r"\d{3}", "🯸🯸🯸", False), (r"[\d-]+x", "1-2x", True), (r"[^\d]", "🯸", True),
    (r"\D", "🯸", True), (r"\w+", "é", False), (r"\W", "é", True), (r"[^\W\d]+", "a_b", True), (r"[^\W\d]", "1", False),
    (r"\\d", r"\d", True), (r"\\\d", r"\5", True), (r"\.", ".", True),
])
def test_classes_of_characters_are_those_of_ecma(pair, regex, text, allowed):
    """As json-schema.org asks of `pattern`: \\d is 0 to 9."""
    for wanted, shown in (({"type": "regex", "regex": regex}, text),
                          ({"type": "string", "pattern": f"^{regex}$"}, json.dumps(text, ensure_ascii=False))):
        grammar = Grammar(wanted, pair.tokenizer, vocab_size=2048, eos_ids=[2], start=0)
        tokens = grammar.tokens.tokenize_bytes(shown.encode())
        assert (grammar._matcher.try_consume_tokens(tokens) == len(tokens)) == allowed


def test_tokens_that_the_model_has_no_row_for_are_left_out(pair):
    """They are common after fine-tuning, and never drawn."""
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    assert len(tokenizer) == pair.target.vocab_size + 1
    more = eagle_fsd.EagleModel(pair.target, pair.draft, tokenizer)
    assert generate(more, PERSON).token_ids == generate(pair, PERSON).token_ids
    grammar = Grammar(PERSON, tokenizer, vocab_size=2048, eos_ids=[2, 2048], start=0)
    assert grammar.tokens.vocab_size == 2048 and grammar.tokens.eos_tokens == [2]
    with pytest.raises(ValueError, match="an end token"):
        Grammar(PERSON, tokenizer, vocab_size=2048, eos_ids=[2048], start=0)


@pytest.mark.parametrize(("wanted", "error", "said"), [
    ("json", TypeError, "got 'json'"),
    ({"type": "json_schema", "schema": {}}, ValueError, 'needs a non-empty field "json_schema"'),
    ({"type": "xml"}, ValueError, "of type 'xml' is not known; accepted: json_object, json_schema, regex, "),
    ({"type": "choice", "choice": []}, ValueError, 'needs a non-empty field "choice"'),
    ({"type": "object", "properties": 3}, ValueError, "properties"),
    ({"type": "regex", "regex": "(a"}, ValueError, "regex"),
    ({"type": "choice", "choice": ["a", ""]}, ValueError, "non-empty strings"),
    ({"type": "grammar", "grammar": "start: nothing"}, ValueError, "nothing"),
    ({"$ref": "#/nowhere"}, ValueError, "response_format cannot be used"),
    ({"type": "regex", "regex": r"[^\s\S]"}, ValueError, "response_format cannot be used"),
    ({"type": "regex", "regex": "a\ud800"}, ValueError, r"is not valid text: lone surrogate '\ud800'"),
    ({"type": []}, ValueError, "response_format cannot be used"),
])
def test_bad_formats(pair, wanted, error, said):
    with pytest.raises(error, match=re.escape(said)):
        generate(pair, wanted)


def test_what_it_cannot_go_with(pair):
    with pytest.raises(ValueError, match="leave out ignore_eos$"):
        generate(pair, PERSON, ignore_eos=True)
    with pytest.raises(ValueError, match="an end token"):
        generate(tiny_chat_pair(), PERSON)


def test_in_the_targets_own_generate_and_with_other_end_tokens(pair):
    prompt = pair.tokenizer("Once upon a time", return_tensors="pt")
    plain, eos = generate(pair, PERSON), pair.target.model.generation_config.eos_token_id
    sequences = pair.target.model.generate(
        **prompt, max_new_tokens=150, do_sample=False, custom_generate=eagle_fsd.custom_generate, draft=pair.draft,
        response_format=PERSON, text_tokenizer=pair.tokenizer)
    assert sequences[0, prompt["input_ids"].shape[1] :].tolist() == plain.token_ids
    other = next(token for token in range(2000) if token != eos and token not in plain.token_ids)
    found = generate(pair, PERSON, eos_token_id=other)
    assert found.finish_reason == "eos" and found.token_ids[-1] == other
    check_person(pair.tokenizer.decode(found.token_ids[:-1]))


def test_one_that_grows_too_complex_ends_its_own_request(pair, monkeypatch):
    """After the first token: no other request ends with it."""
    mask = Grammar.__call__

    def broken_mask(grammar, ids, scores):
        if ids.shape[1] > grammar.start:
            grammar._matcher.consume_token(0)  # an error that stays, as one of a limit does
        return mask(grammar, ids, scores)

    monkeypatch.setattr(Grammar, "__call__", broken_mask)
    with eagle_fsd.Engine(pair) as engine:
        broken, other = (engine.submit("Once", response_format=wanted, max_new_tokens=20) for wanted in (PERSON, None))
        with pytest.raises(ValueError, match="response_format cannot go on"):
            broken.result()
        assert other.result().finish_reason == "length" and engine.error is None


def test_a_broken_grammar_drafts_nothing(pair):
    grammar = Grammar(PERSON, pair.tokenizer, vocab_size=2048, eos_ids=[2], start=0)
    assert grammar.forced([]).tokens
    grammar._matcher.consume_token(0)
    assert grammar.forced([5]) is None
