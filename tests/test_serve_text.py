"""Copies from the text at the endpoint: predictions, and what is told of them."""

import functools
from collections import defaultdict

import openai
import pytest
from served import here
from tiny import PROMPT, tiny_chat_pair

import eagle_fsd
from eagle_fsd.drafting.config import MOST_NODES
from eagle_fsd.drafting.copies import ORIGINS
from eagle_fsd.drafting.sizing import Pause, Plan, Prices
from eagle_fsd.serve.protocol import options_over

CHAT = [{"role": "user", "content": "what is it"}]
DRAWN = {"temperature": 0.8, "top_p": 0.9, "seed": 5}  # greedy answers of a tiny model repeat themselves
OPTIONS = {"model": "tiny", "messages": CHAT, "max_tokens": 40, **DRAWN}
OFF = {"text_drafts": "off"}
FUZZY = {"acceptance": "fsd", "threshold": 0.5}
DETAILS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@functools.cache
def pair_of(head: bool):
    pair = tiny_chat_pair(max_position_embeddings=2048)
    return pair if head else eagle_fsd.EagleModel.from_parts(pair.target.model, None, pair.tokenizer)


@pytest.fixture(scope="module", params=[True, False], ids=["head", "no head"])
def server(request):
    with here(pair_of(request.param), max_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(client, **changed):
    """The text of an answer and its usage."""
    answer = client.chat.completions.create(**{**OPTIONS, **changed})
    return answer.choices[0].message.content, answer.usage


def edited(text):
    """What was said before an edit: one letter in the middle is another."""
    at = len(text) // 2
    return text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]


def predicted(content):
    return {"type": "content", "content": content}


# Predictions ------------------------------------------------------------------------------------------------------


def test_a_prediction_is_copied_from(client, server):
    """The text stays the same, and takes fewer forwards of the target; usage is that of the receipts."""
    text, plain = asked(client, extra_body=OFF)
    before = edited(text)
    again, usage = asked(client, prediction=predicted(before))
    assert again == text and usage.completion_tokens == plain.completion_tokens
    assert usage.model_extra["target_forwards"] < plain.model_extra["target_forwards"]
    expected = eagle_fsd.generate(CHAT, server.pair, max_new_tokens=40, reference=before, tree=server.engine.tree,
                                  **DRAWN)
    copied = sum(receipt.drafter == "text" for receipt in expected.receipts)
    details = usage.completion_tokens_details
    assert [getattr(details, name) for name in DETAILS] == [copied, expected.stats.proposed["text"] - copied]
    assert copied > 0
    for name in ("proposed", "accepted"):
        assert usage.model_extra[f"{name}_by"] == {origin: getattr(expected.stats, name)[origin]
                                                   for origin in ORIGINS}
    assert sum(usage.model_extra["accepted_by"].values()) == usage.model_extra["accepted_tokens"]
    parts = [{"type": "text", "text": before[:7]}, {"type": "text", "text": before[7:]}]
    assert asked(client, prediction=predicted(parts))[1].completion_tokens_details == details


def test_a_stream_tells_of_it_at_its_end(client):
    text, _ = asked(client, extra_body=OFF)
    _, usage = asked(client, prediction=predicted(text))
    *_, last = client.chat.completions.create(**OPTIONS, prediction=predicted(text), stream=True,
                                              stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details == usage.completion_tokens_details
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("changed", [{}, {"extra_body": OFF}, {"prediction": None}, {"prediction": predicted("")},
                                     {"prediction": predicted([])}, {"extra_body": {"text_drafts": "auto"}}])
def test_without_one_nothing_was_predicted(client, changed):
    """An empty one may be given where copies come from prompt and answer alone."""
    text, usage = asked(client, **changed)
    assert text == asked(client)[0]
    if not changed.get("prediction"):
        assert [getattr(usage.completion_tokens_details, name) for name in DETAILS] == [0, 0]
    if changed.get("extra_body") == OFF:
        assert usage.model_extra["proposed_by"]["text"] == 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_is_accepted_of_it_than_is_answered(client, most):
    """Though a path of copies may go on beyond the last token."""
    text, _ = asked(client)
    _, usage = asked(client, prediction=predicted(text), max_tokens=most)
    assert usage.completion_tokens_details.accepted_prediction_tokens < most == usage.completion_tokens


@pytest.mark.parametrize("wrong", [
    "a text", 5, [], {}, {"type": "content"}, {"type": "contents", "content": "x"}, {"content": "x"},
    predicted(5), predicted(None), predicted([5]), predicted([{"type": "image_url", "text": "x"}]),
    predicted([{"type": "text", "text": "x"}] * 1025),
])
def test_a_bad_prediction_is_refused(client, wrong):
    with pytest.raises(openai.BadRequestError, match=r"prediction(\S+)?(: (Input|Field|List|Extra)| must be)") as error:
        asked(client, prediction=wrong)
    assert error.value.param.startswith("prediction") and len(error.value.body["message"]) < 1000


@pytest.mark.parametrize(("changed", "said", "param"), [
    ({"extra_body": {"text_drafts": "on"}}, 'text_drafts must be "auto", "off" or a Text.*, got \'on\'', "text_drafts"),
    ({"extra_body": {"reference": [5]}}, r"reference must be a text or a list of texts, got \[5\]", "reference"),
    ({"prediction": predicted("x"), "extra_body": OFF}, 'leave out text_drafts="off"', "prediction"),
    ({"prediction": predicted("x"), "extra_body": {"reference": "y"}}, "contradicts another field", "reference"),
    ({"prediction": predicted("x" * 100_000)}, "prediction has 100000 characters, too many", "prediction"),
])
def test_what_does_not_go_together_is_refused(client, changed, said, param):
    with pytest.raises(openai.BadRequestError, match=said) as found:
        asked(client, **changed)
    assert found.value.param == param


def test_completions_take_a_reference(client):
    options = {"model": "tiny", "prompt": "what is it, and why", "max_tokens": 30, **DRAWN}
    plain = client.completions.create(**options, extra_body=OFF)
    copied = client.completions.create(**options, extra_body={"reference": plain.choices[0].text})
    assert copied.choices[0].text == plain.choices[0].text
    assert copied.usage.model_extra["target_forwards"] < plain.usage.model_extra["target_forwards"]
    assert copied.usage.model_extra["accepted_by"]["text"] > 0
    answer = client.completions.with_raw_response.create(**options, extra_body={
        "prediction": predicted("x"), "chat_template_kwargs": {"x": 1}})  # of chats
    assert answer.headers["x-eagle-fsd-ignored"] == "chat_template_kwargs, prediction"
    assert answer.parse().choices[0].text == plain.choices[0].text


@pytest.mark.parametrize(("defaults", "given", "expected"), [
    (OFF, {}, ("off", [])),
    (OFF, {"reference": "x"}, ("auto", ["x"])),
    (OFF, {"reference": ""}, ("auto", [""])),
    ({"reference": ["x"]}, OFF, ("off", [])),
    ({"reference": ["x"]}, {"reference": "y"}, ("auto", ["y"])),
    ({"reference": ["x"]}, {"text_drafts": "auto"}, ("auto", ["x"])),
])
def test_what_a_request_says_goes_before_the_servers_own(defaults, given, expected):
    found = options_over(defaults, given)
    assert (found.text_drafts, found.references) == expected


# Room -------------------------------------------------------------------------------------------------------------


class Costs:
    """Such as `tree="auto"` has without a head: copies cost nothing."""

    largest_tree, pauses = eagle_fsd.TreeConfig(64, 16, 4), defaultdict(Pause)

    def of(self, rows=1, temperature=0.0, lossless=True):
        return Plan(self.largest_tree, drafts=False, prices=Prices(lambda nodes, levels: 1.0))


@pytest.mark.parametrize(("head", "tree", "nodes"), [
    (False, None, MOST_NODES), (True, None, MOST_NODES), (False, eagle_fsd.TreeConfig(8, 2, 2), 8),
    (True, eagle_fsd.TreeConfig(40, 2, 2), 40),
])
def test_there_is_room_for_copies_to_the_last_position(head, tree, nodes):
    """As many as can be verified, in caches that are as tight as the engine allows, beside another row."""
    pair = pair_of(head)
    pair = eagle_fsd.EagleModel(pair.target, pair.draft, pair.tokenizer, sizing=Costs())
    expected = eagle_fsd.generate(PROMPT * 5, pair_of(False), max_new_tokens=60, text_drafts="off")
    room = 2 * (5 * len(PROMPT) + 60 + nodes)
    verified, verify = [], pair.target.verify
    with eagle_fsd.Engine(pair, tree=tree, max_rows=2, max_tokens=room, prefixes=0) as engine, \
            pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.target, "verify", lambda tokens, *rest: verified.append(tokens.shape[1])
                      or verify(tokens, *rest))
        reference = pair.tokenizer.decode(expected.token_ids)
        tickets = [engine.submit(PROMPT * 5, max_new_tokens=60, reference=[reference, reference[20:] + reference])
                   for _ in range(2)]
        outputs = [ticket.result() for ticket in tickets]
        with pytest.raises(ValueError, match=f"the engine has room for {room - nodes}"):
            engine.submit(PROMPT * 5, max_new_tokens=room - nodes - 5 * len(PROMPT) + 1)
    assert [output.token_ids for output in outputs] == [expected.token_ids] * 2
    assert sum(output.stats.accepted["text"] for output in outputs) > 0 and engine.stats.cycles < 60
    assert max(verified) <= nodes and (tree is not None or max(verified) > 16)
    assert engine.stats.proposed == sum((output.stats.proposed for output in outputs), type(engine.stats.proposed)())
