"""`Chat` and `Session`: kept caches change what is computed and not what is said."""

import os
import threading
from collections import defaultdict

import pytest
import torch
from tiny import CHAT_TEMPLATE, PROMPT, growing_long, tiny_chat_pair, tiny_pair
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd import Chat, Session, TreeConfig
from eagle_fsd.drafting.sizing import Pause, Plan
from eagle_fsd.inputs.prompts import encode_prompt, render_chat
from eagle_fsd.loading.pair import EagleModel

TREE = TreeConfig(16, 5, 4)
SAID = ("hello there.", "and now.", "what else")
OPTIONS = {"max_new_tokens": 12, "threshold": 0.0, "tree": TREE, "seed": 5}


@pytest.fixture
def model():
    return tiny_chat_pair()


def scratch(chat, text, **options):
    """The answer to come, by a request of its own."""
    return eagle_fsd.generate([*chat.messages, {"role": "user", "content": text}], chat.model,
                              **{**chat.options, **options})


def assert_turn(chat, text, **options):
    """The next turn is that of a request of its own, draft trees included."""
    expected = scratch(chat, text, **options)
    output = chat.send(text, **options)
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths
    assert chat.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": output.text}]
    return output


@pytest.mark.parametrize("end", [None, "inside a path"])
def test_a_turn_processes_only_its_new_tokens(model, monkeypatch, end):
    chat, positions, read = Chat(model, **OPTIONS, system="be nice"), [], []
    if end:  # then the caches hold more than the answer
        free = scratch(chat, SAID[0])
        assert free.stats.accepted_lengths[0] > 1
        model.target.model.generation_config.eos_token_id = free.token_ids[free.stats.accepted_lengths[0] - 1]
    target, draft = model.target.forward, model.draft.forward

    def of_target(tokens, *args):
        positions.append(tokens.shape[1])
        return target(tokens, *args)

    def of_draft(features, tokens, *args, **options):
        read.append(tokens.shape[1])
        return draft(features, tokens, *args, **options)

    monkeypatch.setattr(model.target, "forward", of_target)
    monkeypatch.setattr(model.draft, "forward", of_draft)
    held = drafted = 0
    for text in SAID:
        positions.clear()
        read.clear()
        prompt = encode_prompt([*chat.messages, {"role": "user", "content": text}], model)
        output = chat.send(text)
        assert positions[0] == output.stats.prefill_tokens == len(prompt) - held
        assert len(positions) == 1 + output.stats.target_forwards
        assert end or read[0] == len(prompt) - 1 - drafted  # the last token comes with the first one of the answer
        # The last token of an answer is in the cache only where it was drafted, and then some after it may be too.
        caches, said = chat.session.row.caches, len(prompt) + len(output.token_ids)
        held, drafted = min(said, caches[0].length), caches[1].length
        assert held == said if end else held >= said - 1


def test_prompts_that_depart_from_what_was_said(model):
    """Special tokens that are not in an answer's text, and messages that were edited or taken away."""
    with torch.no_grad():
        model.target.lm_head.weight[1] = model.target.lm_head.weight[20]  # </s>, which ends nothing here
        model.target.lm_head.weight[20] = 0
    chat = Chat(model, **OPTIONS, top_k=4)
    outputs = [assert_turn(chat, text, temperature=1.0, seed=seed) for seed, text in enumerate(SAID)]
    assert any(1 in output.token_ids for output in outputs[:2])
    assert all(output.stats.prefill_tokens < 30 for output in outputs)
    del chat.messages[-2:]
    assert assert_turn(chat, SAID[2], temperature=1.0, seed=2).stats.prefill_tokens <= 2  # the same again
    del chat.messages[-4:]
    assert_turn(chat, "something else.")
    chat.reset()
    assert chat.messages == [] and assert_turn(chat, "a").stats.prefill_tokens == len("<s><user>a<bot>") - 11


def test_a_template_that_shortens_earlier_answers(model):
    """As those of thinking models do."""
    model.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ m.content }}", "{% if loop.last %}{{ m.content }}{% else %}{{ m.content[4:] }}{% endif %}")
    chat, before = Chat(model, **OPTIONS), []
    for text in SAID:
        output = assert_turn(chat, text)
        prompt = encode_prompt(chat.messages[:-1], model)
        shared = len(os.path.commonprefix([before, prompt]))
        # One more, whose feature the draft has read with another token after it.
        assert output.stats.prefill_tokens == len(prompt) - max(0, shared - 1)
        before = prompt + output.token_ids
    assert shared > 10


def test_turns_without_a_draft_tree_and_without_a_head(model):
    """The draft reads later what it did not at the time."""
    class Trees:
        chosen, pauses = Plan(TREE, drafts=False), defaultdict(Pause)

        def of(self, rows=1, temperature=0.0, lossless=True):
            return self.chosen

    model.sizing = Trees()
    chat = Chat(model, **{**OPTIONS, "tree": None})
    first = assert_turn(chat, SAID[0])
    assert first.stats.undrafted == first.stats.target_forwards == 11
    Trees.chosen = Plan(TREE)
    second = assert_turn(chat, SAID[1])
    assert sum(second.stats.accepted_lengths) > 0 and second.stats.prefill_tokens < 12
    Trees.chosen = Plan(TREE, drafts=False)
    assert_turn(chat, SAID[2])
    chat = Chat(EagleModel.from_parts(model.target.model, None, model.tokenizer), **OPTIONS)
    outputs = [assert_turn(chat, text) for text in SAID]
    assert outputs[1].stats.prefill_tokens == 1 + len("<user>and now.<bot>") - 9


def test_the_system_message_may_be_changed_between_turns(model):
    chat = Chat(model, **OPTIONS, system="be nice")
    assert_turn(chat, SAID[0])
    chat.system = "be brief"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[0]["content"] == chat.system == "be brief"
    assert_turn(chat, SAID[1])
    chat.system = None
    assert_turn(chat, SAID[2])
    assert chat.messages[0]["role"] == "user"


def test_threads_take_turns(model):
    """None of them is lost, whoever comes first."""
    chat, begun = Chat(model, **OPTIONS), threading.Barrier(3)

    def say(number):
        begun.wait()
        for _ in range(2):
            chat.send("abc"[number])

    threads = [threading.Thread(target=say, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(message["content"] for message in chat.messages[::2]) == sorted("abc" * 2)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 6
    assert_turn(chat, "d")


class Meddler(BaseStreamer):
    """Does something once it has been given a number of tokens."""

    def __init__(self, after, action):
        self.left, self.action, self.ended = after, action, 0

    def put(self, value):
        self.left -= value.numel() if value.dim() == 1 else 0
        if self.left <= 0:
            self.action()

    def end(self):
        self.ended += 1


def test_an_answer_that_is_stopped_stays_in_the_conversation(model):
    chat = Chat(model, **{**OPTIONS, "max_new_tokens": 40})
    assert_turn(chat, SAID[0])
    whole = scratch(chat, SAID[1])
    output = chat.send(SAID[1], streamer=Meddler(6, chat.stop))
    assert output.finish_reason == "stop" and 6 < len(output.token_ids) < 20
    assert whole.token_ids[: len(output.token_ids)] == output.token_ids
    assert chat.messages[-1] == {"role": "assistant", "content": output.text}
    assert len(assert_turn(chat, SAID[2]).token_ids) == 40


@pytest.mark.parametrize("where", ["streamer", "draft", "layer"])
def test_an_error_anywhere_leaves_a_conversation_that_goes_on(model, monkeypatch, where):
    def fail(*args, **options):
        raise KeyboardInterrupt

    chat = Chat(model, **OPTIONS)
    assert_turn(chat, SAID[0])
    before, streamer = list(chat.messages), None
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        if where == "streamer":
            streamer = Meddler(5, fail)
        else:  # in the draft, so that the cycle is half done; or with some layers of the target ahead of the others
            failing = model.draft if where == "draft" else model.target.computation.decoder.layers[1].mlp.down_proj
            context.setattr(failing, "forward", fail)
        chat.send(SAID[1], streamer=streamer)
    assert chat.messages == before
    assert streamer is None or streamer.ended == 1
    assert_turn(chat, SAID[1])
    assert assert_turn(chat, SAID[2]).stats.prefill_tokens < 13


def test_sessions_of_other_models():
    model, other, session, prompt = tiny_chat_pair(), tiny_pair(seed=1), Session(), [3, 4, 5, 6]
    eagle_fsd.generate(prompt, model, session=session, **OPTIONS)
    with pytest.raises(ValueError, match="another model"):
        eagle_fsd.generate(prompt, other, session=session, **OPTIONS)
    expected = eagle_fsd.generate(prompt, other, **OPTIONS)
    assert eagle_fsd.generate(prompt, other, session=session, **OPTIONS).token_ids == expected.token_ids


def test_bad_chats(model):
    with pytest.raises(ValueError, match="a tokenizer with a chat template"):
        Chat(tiny_pair())
    for given in ({"speed": 1}, {"temperature": -1}):
        with pytest.raises((TypeError, ValueError), match=next(iter(given))):
            Chat(model, **given)
    chat = Chat(model)
    with pytest.raises(ValueError, match='"content", both text'):
        chat.send(5)
    with pytest.raises(ValueError, match='"content", both text'):
        Chat(model, system=5).send("a")
    assert chat.messages == []


def test_a_text_that_becomes_long_is_read_anew():
    """Phi-3's rotary embedding gives a long text other keys than a short one."""
    short = len(PROMPT) + 10
    pair = growing_long("phi3", short)
    session, options = Session(), {"acceptance": "exact", "tree": TreeConfig(8, 3, 2), "max_new_tokens": 8}
    begun = eagle_fsd.generate(PROMPT, pair, session=session, **options)
    longer = PROMPT + begun.token_ids + PROMPT
    output = eagle_fsd.generate(longer, pair, session=session, **options)
    assert output.stats.prefill_tokens == len(longer) > short
    assert output.token_ids == eagle_fsd.generate(longer, pair, **options).token_ids


# The chat template ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "rendered"), [
    ({}, "accbcfg"), ({"thinking": True}, "accbcdefg"), ({"tools": [{"name": "h"}]}, "accbchfg"),
    ({"add_generation_prompt": False}, "accbc"), ({"continue_final_message": True}, "accb"),
    ({"chat_template": "{{ messages[0].content }}k"}, "ak")])
def test_what_the_chat_template_is_given(model, given, rendered):
    """By every call that takes a chat. An assistant message needs no content."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user", "content": "b"}]
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}c{% endfor %}{% if thinking %}de{% endif %}"
        "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{% if add_generation_prompt %}fg{% endif %}")
    assert render_chat(chat, model, given) == rendered
    options = {"max_new_tokens": 6, "chat_template_kwargs": given}
    ids = encode_prompt(chat, model, given)
    expected = eagle_fsd.generate(ids, model, max_new_tokens=6).token_ids
    assert eagle_fsd.generate([chat, chat], model, **options)[1].token_ids == expected
    with eagle_fsd.Engine(model) as engine:
        assert engine.submit(chat, **options).result().token_ids == expected
    said = Chat(model, **options)
    said.messages = chat[:-1]
    assert said.send("b").token_ids == expected


def test_what_send_would_refuse_is_refused_at_once(model):
    """The constructor takes no option that no turn can serve; `send` has the same message."""
    for given, error, said in (
        ({"session": eagle_fsd.Session()}, TypeError, "unknown option 'session'; use Chat"),
        ({"stopping_criteria": 5}, TypeError, "stopping_criteria must be a list"),
        ({"logits_processor": [5]}, TypeError, "logits_processor must contain functions"),
        ({"streamer": 5}, TypeError, "streamer must have the methods put and end"),
        ({"seed": [1, 2]}, ValueError, "seed needs one for each prompt"),
        ({"stop_token_ids": [10**6]}, ValueError, "stop_token_ids has token id 1000000"),
    ):
        for refused in (lambda given: Chat(model, **given), lambda given: Chat(model).send("a", **given)):
            with pytest.raises(error, match=said):
                refused(given)
    with eagle_fsd.Engine(model) as engine:
        for name in ("session", "streamer"):
            with pytest.raises(TypeError, match=f"unknown option '{name}'; use "):
                engine.submit([1], **{name: None})
