"""`Chat` and `Session`: kept caches change what is computed and not what is said."""

import os
import re
import threading
from pathlib import Path

import pytest
import torch
from eagle_fsd.prompts import encode_prompt
from tiny import CHAT_TEMPLATE, HIDDEN, PROMPT, tiny_chat_pair, tiny_pair
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd import Chat, Session, TreeConfig
from eagle_fsd.drafting.config import Choice
from eagle_fsd.pair import EagleModel

TREE = TreeConfig(16, 5, 4)
SAID = ("hello there.", "and now.", "what else")
OPTIONS = {"max_new_tokens": 12, "threshold": 0.0, "tree": TREE, "seed": 5}


@pytest.fixture
def model():
    return tiny_chat_pair()


@pytest.fixture
def processed(model, monkeypatch):
    """Numbers of positions in the target's forwards."""
    counts, forward = [], model.target.decoder.forward

    def counting(*args, **options):
        counts.append(options["input_ids"].shape[1])
        return forward(*args, **options)

    monkeypatch.setattr(model.target.decoder, "forward", counting)
    return counts


def scratch(chat, text, **options):
    """The answer to come, by a request of its own."""
    options = {**chat.options, **options}
    return eagle_fsd.generate([*chat.messages, {"role": "user", "content": text}], chat.model, **options)


def assert_turn(chat, text, **options):
    """The next turn is that of a request of its own, draft trees included."""
    expected = scratch(chat, text, **options)
    output = chat.send(text, **options)
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths
    assert chat.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": output.text}]
    return output


def test_threads_take_turns(model):
    """None of them is lost, whoever comes first, and each is what was to be said there."""
    chat = Chat(model, **OPTIONS)
    begun = threading.Barrier(4)

    def say(number):
        begun.wait()
        for _ in range(2):
            chat.send("abcd"[number])

    threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 8
    assert sorted(message["content"] for message in chat.messages[::2]) == sorted("abcd" * 2)
    again = Chat(model, **OPTIONS)
    for message in chat.messages[::2]:
        again.send(message["content"])
    assert again.messages == chat.messages


def test_the_system_message_may_be_changed_between_turns(model):
    chat = Chat(model, **OPTIONS, system="be nice")
    assert_turn(chat, SAID[0])
    chat.system = "be brief"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[0]["content"] == chat.system == "be brief"
    assert_turn(chat, SAID[1])
    chat.system = None
    assert chat.messages[0]["role"] == "user"
    assert_turn(chat, SAID[2])
    chat.reset()
    assert chat.messages == []


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention": "sdpa"}),
        ("mistral-window", {"attention": "sdpa"}),
        ("gemma2", {}),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_turns_are_those_of_requests_of_their_own(family, options):
    chat = Chat(tiny_chat_pair(family, **options), **OPTIONS)
    turns = {}, {}, {}, {"threshold": 0.3}, {"temperature": 0.8, "acceptance": "tilt", "threshold": 0.5}
    for seed, turn in enumerate(turns):
        output = assert_turn(chat, SAID[seed % 3], **{**turn, "seed": seed})
        assert output.stats.prefill_tokens <= len("<s><user>hello there.<bot>") - 11 + 1
    assert sum(output.stats.accepted_lengths) > 0
    assert len(chat.messages) == 10


@pytest.mark.parametrize("end", [None, "inside a path"])
def test_a_turn_processes_only_its_new_tokens(model, processed, end):
    chat = Chat(model, **OPTIONS, system="be nice")
    if end:  # then the caches hold more than the answer
        free = scratch(chat, SAID[0])
        last = free.stats.accepted_lengths[0]
        assert last > 1
        model.target.model.generation_config.eos_token_id = free.token_ids[last - 1]
    held = 0
    for text in SAID:
        processed.clear()
        prompt = encode_prompt([*chat.messages, {"role": "user", "content": text}], model)
        output = chat.send(text)
        assert len(output.token_ids) == len(output.text)  # no special tokens, which the template would leave out
        assert processed[0] == output.stats.prefill_tokens == len(prompt) - held
        assert len(processed) == 1 + output.stats.target_forwards
        # The last token of an answer is in the cache only where it was drafted, and then some behind it may be too.
        said, cached = len(prompt) + len(output.token_ids), chat.session.decoder.forwards.cache.length
        held = min(said, cached)
        assert held == said if end else held >= said - 1


def test_the_draft_reads_only_what_is_new_either(model, monkeypatch):
    read, forward = [], model.draft.forward

    def counting(features, tokens, *args, **options):
        read.append(tokens.shape[1])
        return forward(features, tokens, *args, **options)

    monkeypatch.setattr(model.draft, "forward", counting)
    chat = Chat(model, **OPTIONS)
    first = chat.send(SAID[0])
    before, held = chat.session.decoder.forwards.draft_cache.length, chat.session.decoder.forwards.cache.length
    read.clear()
    second = chat.send(SAID[1])
    # Of the last cycle, and the new ones; the last of them comes with the first token of the answer.
    assert read[:2] == [held - before + second.stats.prefill_tokens - 1, 1]
    assert held - before == first.stats.accepted_lengths[-1] + 1


def test_special_tokens_of_an_answer_are_not_in_its_text(model, processed):
    """So the next prompt departs from the caches within the answer, where the draft has read on."""
    with torch.no_grad():
        model.target.lm_head.weight[1] = model.target.lm_head.weight[20]  # </s>, which ends nothing here
        model.target.lm_head.weight[20] = 0
    chat = Chat(model, **OPTIONS, top_k=4)
    outputs = [assert_turn(chat, text, temperature=1.0, seed=seed) for seed, text in enumerate(SAID)]
    assert any(1 in output.token_ids for output in outputs[:2])
    assert all(output.stats.prefill_tokens < 30 for output in outputs)


def test_a_template_that_shortens_earlier_answers(model):
    """As those of thinking models do."""
    model.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ m.content }}", "{% if loop.last %}{{ m.content }}{% else %}{{ m.content[4:] }}{% endif %}")
    chat, before = Chat(model, **OPTIONS), []
    for text in SAID:
        output = assert_turn(chat, text)
        prompt = encode_prompt(chat.messages[:-1], model)
        shared = len(os.path.commonprefix([before, prompt]))
        # One more, whose feature the draft has read with another token behind it.
        assert output.stats.prefill_tokens == len(prompt) - max(0, shared - 1)
        before = prompt + output.token_ids
    assert shared > 10


def test_text_that_is_tokenised_differently(model):
    """The model says two letters that the tokenizer makes one token of."""
    answer = scratch(Chat(model, **OPTIONS), SAID[0]).text
    pair = next(answer[at : at + 2] for at in range(3, len(answer)) if answer[at : at + 2].isalpha())
    vocabulary = {**model.tokenizer.get_vocab(), pair: 31}
    del vocabulary["."]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair)]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>", "<user>", "<bot>"])
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
    chat = Chat(model, **OPTIONS)
    first, second, _ = (assert_turn(chat, text.replace(".", "")) for text in SAID)
    assert pair in first.text and 31 not in first.token_ids
    prompt = encode_prompt(chat.messages[:3], model)
    assert 31 in prompt and len(SAID[1]) < second.stats.prefill_tokens < len(prompt) - 12


def test_edited_conversations(model):
    chat = Chat(model, **OPTIONS)
    for text in SAID:
        assert_turn(chat, text)
    del chat.messages[-2:]
    assert assert_turn(chat, SAID[2]).stats.prefill_tokens <= 2  # the same again
    del chat.messages[-4:]
    assert_turn(chat, "something else.", temperature=1.0)
    chat.reset()
    assert chat.messages == [] and assert_turn(chat, "a").stats.prefill_tokens == len("<s><user>a<bot>") - 11


def test_turns_without_a_draft_tree(model):
    """The draft reads later what it did not at the time."""
    class Trees:
        chosen = Choice(None)

        def of(self, rule, temperature, rows):
            return self.chosen

    model.trees = Trees()
    chat = Chat(model, **{**OPTIONS, "tree": None})
    first = assert_turn(chat, SAID[0])
    assert first.stats.undrafted == first.stats.target_forwards == 11 and first.stats.plain_because
    Trees.chosen = Choice(TREE)
    second = assert_turn(chat, SAID[1])
    assert sum(second.stats.accepted_lengths) > 0 and second.stats.prefill_tokens < 12
    Trees.chosen = Choice(None)
    assert_turn(chat, SAID[2])


def test_a_model_without_a_head():
    drafting = tiny_chat_pair()
    chat = Chat(EagleModel.from_parts(drafting.target.model, None, drafting.tokenizer), **OPTIONS)
    outputs = [assert_turn(chat, text) for text in SAID]
    assert outputs[1].stats.prefill_tokens == 1 + len("<user>and now.<bot>") - 9


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
    before = list(chat.messages)
    streamer = None
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        if where == "streamer":
            streamer = Meddler(5, fail)
        else:  # in the draft, so that the cycle is half done; or with some layers of the target ahead of the others
            part = model.draft if where == "draft" else model.target.decoder.layers[1]
            context.setattr(part, "forward", fail)
        chat.send(SAID[1], streamer=streamer)
    assert chat.messages == before
    assert streamer is None or streamer.ended == 1
    assert_turn(chat, SAID[1])
    assert assert_turn(chat, SAID[2]).stats.prefill_tokens < 13


def test_a_conversation_that_is_full():
    chat = Chat(tiny_chat_pair(max_position_embeddings=64), **OPTIONS)
    for text in SAID:
        assert_turn(chat, text)
    before = list(chat.messages)
    with pytest.raises(ValueError, match="the prompt has 7. tokens, the target takes at most 63"):
        chat.send("once more")
    assert chat.messages == before
    del chat.messages[-2:]
    assert len(assert_turn(chat, "abcdefg.").token_ids) < 12  # up to the last position
    chat.reset()
    assert_turn(chat, SAID[0])


def test_sessions_of_other_models_and_no_sessions():
    model, other = tiny_chat_pair(), tiny_pair(seed=1)
    session, prompt = Session(), [3, 4, 5, 6]
    eagle_fsd.generate(prompt, model, session=session, **OPTIONS)
    with pytest.raises(ValueError, match="another model"):
        eagle_fsd.generate(prompt, other, session=session, **OPTIONS)
    with pytest.raises(TypeError, match="Session or None"):
        eagle_fsd.generate(prompt, model, session=True, **OPTIONS)
    expected = eagle_fsd.generate(prompt, other, **OPTIONS)
    assert eagle_fsd.generate(prompt, other, session=session, **OPTIONS).token_ids == expected.token_ids


def test_caches_grow_with_the_conversation(model):
    chat = Chat(model, **{**OPTIONS, "max_new_tokens": 4})
    capacities = []
    for number in range(6):
        assert_turn(chat, f"{'abcdef'[number]}.")
        capacities.append(chat.session.decoder.forwards.cache.capacity)
    assert set(capacities) == {25, 50, 100} and chat.session.decoder.forwards.draft_cache.length > 30
    assert chat.session.decoder.requests[0].features.shape[-1] == HIDDEN


def test_models_that_cannot_chat(model):
    with pytest.raises(ValueError, match="chat template"):
        Chat(tiny_pair())
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        Chat(model)
    model.tokenizer.chat_template = CHAT_TEMPLATE
    chat = Chat(model, speed=1)
    with pytest.raises(TypeError, match="speed"):
        chat.send("hello")
    assert chat.messages == []


PAGE = (Path(__file__).parents[1] / "docs" / "chat.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_of_the_docs_run(monkeypatch, capsys, example):
    model = tiny_chat_pair(max_position_embeddings=1024)
    monkeypatch.setattr(eagle_fsd, "load", lambda: model)
    exec(compile(example, "docs/chat.md", "exec"), {})
    assert re.search("[a-z ]{8}", capsys.readouterr().out)


def test_a_text_that_becomes_long_is_read_anew():
    """Phi-3's rotary embedding gives a long text other keys than a short one."""
    short = len(PROMPT) + 10
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [4.0, 5.0],
            "original_max_position_embeddings": short}
    pair = tiny_pair("phi3", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=short)
    session, options = Session(), {"acceptance": "exact", "tree": TreeConfig(8, 3, 2), "max_new_tokens": 8}
    begun = eagle_fsd.generate(PROMPT, pair, session=session, **options)
    longer = PROMPT + begun.token_ids + PROMPT
    assert len(longer) > short
    output = eagle_fsd.generate(longer, pair, session=session, **options)
    assert output.stats.prefill_tokens == len(longer)
    assert output.token_ids == eagle_fsd.generate(longer, pair, **options).token_ids
