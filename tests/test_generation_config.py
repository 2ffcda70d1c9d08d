"""What a model's generation config and chat template ask for."""

from dataclasses import replace

import pytest
import torch
from tiny import PROMPT, readable, tiny_chat_pair, tiny_pair, tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import eagle_fsd
from eagle_fsd.inputs.prompts import ChatTokens, encode_prompt, end_of_turn
from eagle_fsd.options.generate import with_options
from eagle_fsd.serve.protocol import ChatRequest, options_over

NEW = 24
IDS = torch.tensor([PROMPT])


def free(pair, **options):
    return eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, **options).token_ids


def stock(pair, ids=IDS, **options):
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    return pair.target.model.generate(ids, **options)[0, ids.shape[1] :].tolist()


def fields():
    """Fields that change this pair's greedy text."""
    text = free(tiny_pair())
    return [
        {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": sorted(set(text[:9]))[:3]},
        {"begin_suppress_tokens": [text[0]]}, {"bad_words_ids": [[text[1]], text[3:5]]},
        {"min_length": len(PROMPT) + 9, "eos_token_id": text[4]}, {"min_new_tokens": 9, "eos_token_id": text[4]},
        {"forced_eos_token_id": 7}, {"sequence_bias": [[[text[2]], -9.0]]}, {"encoder_repetition_penalty": 0.4},
        {"exponential_decay_length_penalty": (4, 1.9), "eos_token_id": 7}, {"encoder_no_repeat_ngram_size": 1},
    ]


@pytest.mark.parametrize("asked", fields(), ids=readable)
def test_the_models_generation_config_holds_as_in_model_generate(asked):
    pair = tiny_pair()
    plain, config = free(pair), pair.target.model.generation_config
    for name, value in (asked | {"do_sample": True, "temperature": 0.6, "top_p": 0.5, "pad_token_id": 0}).items():
        setattr(config, name, value)
    expected = stock(pair)
    followed = {name: value for name, value in asked.items() if name != "eos_token_id"}
    for options in ({}, {"speculative": False}, {"tree": eagle_fsd.TreeConfig(16, 5, 4)}):
        out = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, **options)
        assert out.token_ids == expected != plain and out.generation_config == followed
        assert f"generation_config={followed}" in repr(out)
    with eagle_fsd.Engine(pair, max_rows=2) as engine:
        tickets = [engine.submit(PROMPT, max_new_tokens=NEW) for _ in range(2)]
        assert [ticket.result().token_ids for ticket in tickets] == [expected, expected]


@pytest.mark.parametrize("asked", fields(), ids=readable)
def test_a_generation_config_that_is_passed_holds_as_in_model_generate(asked):
    pair = tiny_pair()
    given = GenerationConfig(**asked, max_new_tokens=NEW, pad_token_id=0)
    out = eagle_fsd.generate(PROMPT, pair, generation_config=given)
    assert out.token_ids == stock(pair, generation_config=given) and out.generation_config == {}


def test_options_override_the_generation_configs():
    pair = tiny_pair()
    plain, config = free(pair), pair.target.model.generation_config
    config.repetition_penalty, config.no_repeat_ngram_size = 1.3, 2
    for options in ({"repetition_penalty": 1.1}, {"generation_config": GenerationConfig(repetition_penalty=1.1)},
                    {"generation_config": GenerationConfig(repetition_penalty=1.2), "repetition_penalty": 1.1}):
        out = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, **options)
        assert out.token_ids == stock(pair, repetition_penalty=1.1)
        assert out.generation_config == {"no_repeat_ngram_size": 2}
    neutral = {"repetition_penalty": 1.0, "generation_config": GenerationConfig(no_repeat_ngram_size=0)}
    assert free(pair, **neutral) == plain
    config.repetition_penalty, config.no_repeat_ngram_size = None, 0
    config.min_length, config.eos_token_id, config.pad_token_id = len(PROMPT) + 9, plain[4], 0
    assert free(pair, min_new_tokens=0) == plain[: plain.index(plain[4]) + 1] == stock(pair, min_new_tokens=0)
    given = GenerationConfig(min_length=len(PROMPT) + 9)
    assert free(pair, min_new_tokens=0, generation_config=given) == free(pair, min_new_tokens=0)
    config.min_length, config.repetition_penalty = 0, 1.3  # as in model.generate, the user's processor takes the place
    penalty = RepetitionPenaltyLogitsProcessor(1.1)
    assert free(pair, logits_processor=[penalty]) == stock(pair, logits_processor=[penalty])


def test_a_config_does_not_make_us_sample():
    pair = tiny_pair()
    plain = free(pair)
    assert free(pair, generation_config=GenerationConfig(temperature=0.7)) == plain
    pair.target.model.generation_config.update(do_sample=True, temperature=5.0, top_k=3)
    assert free(pair) == plain
    out = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, temperature=1.0, seed=1)
    pair.target.model.generation_config.update(do_sample=None, temperature=None, top_k=None)
    assert out.token_ids == free(pair, temperature=1.0, seed=1) and out.generation_config == {}


def test_a_processor_with_a_state_that_the_model_asks_for_is_refused():
    pair = tiny_pair()
    pair.target.model.generation_config.guidance_scale = 1.5
    with pytest.raises(ValueError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor is not supported"):
        free(pair)
    assert len(free(pair, generation_config=GenerationConfig(guidance_scale=1.0))) == NEW


def test_stop_strings_of_the_models_config():
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    text = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW).text
    pair.target.model.generation_config.stop_strings = [text[3:5]]
    ended = text[: text.index(text[3:5])]
    out = eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW)
    assert (out.text, out.finish_reason, out.generation_config) == (ended, "stop", {"stop_strings": [text[3:5]]})
    with eagle_fsd.Engine(pair) as engine:
        ticket = engine.submit(PROMPT, max_new_tokens=NEW)
        assert "".join(piece.text for piece in ticket) == ticket.result().text == ended
    assert eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, stop=[]).text == text


TURNS = ("<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"
         "{% if add_generation_prompt %}<bot>{% endif %}")


@pytest.mark.parametrize(("end", "token"), [
    ("</s>", 1), ("<user>\n", 2), (" \n<user></s>", 2), ("", None), (".", None), ("{{ raise_exception('no') }}", None),
    ("{% if loop.last %}<user>{% else %}<bot>{% endif %}", 2),  # as in gpt-oss, where <|end|> ends a thought, too
], ids=ascii)
def test_the_token_that_ends_a_turn(end, token):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS.replace("END", end)
    assert end_of_turn(tokenizer) == token


def test_the_longest_token_ends_the_turn():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<user>>", "<us"])
    tokenizer.chat_template = TURNS.replace("END", "<user>>")
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<user>>")
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None


def test_a_chat_ends_with_the_turn():
    """The config's end token is that of the text, 1; the template's, of a turn, is 2."""
    pair = tiny_chat_pair()
    pair.tokenizer.chat_template = TURNS.replace("END", "<user>").replace("{{ m.role }}", "bot")
    config = pair.target.model.generation_config
    config.eos_token_id, chat = 1, [{"role": "user", "content": "abc"}]
    prompt = encode_prompt(chat, pair)
    text = eagle_fsd.generate(list(prompt), pair, max_new_tokens=NEW, ignore_eos=True).token_ids
    with torch.no_grad():  # the seventh token, or an earlier one that is the same, becomes the end of the turn
        weight = pair.target.model.lm_head.weight
        weight[[2, text[6]]] = weight[[text[6], 2]]
    whole = eagle_fsd.generate(list(prompt), pair, max_new_tokens=NEW)  # a text is not a chat
    assert len(whole.token_ids) == NEW and 2 in whole.token_ids
    turn = whole.token_ids[: whole.token_ids.index(2) + 1]
    out = eagle_fsd.generate(chat, pair, max_new_tokens=NEW)
    assert (out.token_ids, out.finish_reason) == (turn, "eos")
    both = eagle_fsd.generate([chat, pair.tokenizer.decode(prompt)], pair, max_new_tokens=NEW)
    assert [each.token_ids for each in both] == [turn, whole.token_ids]
    with eagle_fsd.Engine(pair) as engine:
        assert engine.submit(chat, max_new_tokens=NEW).result().token_ids == turn
        assert engine.submit(prompt, max_new_tokens=NEW).result().token_ids == turn  # rendered by `encode_prompt`
    assert eagle_fsd.Chat(pair, max_new_tokens=NEW).send("abc").token_ids == turn
    (served,) = ChatRequest(messages=chat).prompts(pair, None)  # the endpoint's
    assert served == prompt and isinstance(served, ChatTokens)
    for options in ({"ignore_eos": True}, {"eos_token_id": 1}):
        assert eagle_fsd.generate(chat, pair, max_new_tokens=NEW, **options).token_ids[: len(turn)] == turn
        assert len(eagle_fsd.generate(chat, pair, max_new_tokens=NEW, **options).token_ids) > len(turn)
    later = eagle_fsd.generate(chat, pair, max_new_tokens=NEW, min_new_tokens=len(turn) + 2)
    assert 2 not in later.token_ids[: len(turn) + 2]


def test_a_config_in_options_holds_as_the_keyword():
    """At every door that takes `GenerateOptions`; what is given beside it overrides it."""
    pair = tiny_chat_pair()
    config = GenerationConfig(repetition_penalty=1.3, max_new_tokens=NEW, pad_token_id=0, no_repeat_ngram_size=2)
    expected, options = stock(pair, generation_config=config), eagle_fsd.GenerateOptions(generation_config=config)
    assert (options.max_new_tokens, options.repetition_penalty) == (NEW, 1.3) and config.max_new_tokens == NEW
    with eagle_fsd.Engine(pair) as engine:
        doors = (lambda options, **own: eagle_fsd.generate(PROMPT, pair, options=options, **own),
                 lambda options, **own: engine.submit(PROMPT, options, **own).result())
        for door in doors:
            assert door(options).token_ids == expected
            assert door(options, max_new_tokens=9).token_ids == door(replace(options, max_new_tokens=9)).token_ids
            assert door(options, max_new_tokens=9).token_ids == expected[:9]
            assert door(options, repetition_penalty=1.0).token_ids == stock(
                pair, generation_config=config, repetition_penalty=1.0)
    asked = eagle_fsd.GenerateOptions(generation_config=GenerationConfig(do_sample=True, top_k=3), max_new_tokens=256)
    assert (asked.temperature, asked.top_k, asked.max_new_tokens) == (1.0, 3, 256)
    assert with_options(asked, {"do_sample": False}).greedy and replace(asked, temperature=0.0).greedy
    assert eagle_fsd.GenerateOptions(do_sample=True, stop_strings="a") == eagle_fsd.GenerateOptions(
        temperature=1.0, stop="a")
    assert options_over({"generation_config": config}, {}).max_new_tokens == NEW  # the endpoint's defaults
    with pytest.raises(TypeError, match="unknown option 'num_beams'; use greedy"):
        eagle_fsd.GenerateOptions(generation_config=GenerationConfig(num_beams=4))


def test_options_of_a_turn_take_the_place_of_those_of_the_chat():
    chat = eagle_fsd.Chat(tiny_chat_pair(), max_new_tokens=9, ignore_eos=True)
    assert len(chat.send("ab", options=eagle_fsd.GenerateOptions(max_new_tokens=5, ignore_eos=True)).token_ids) == 5
    assert len(chat.send("ab").token_ids) == 9


def test_stop_tokens_wait_for_the_least_length_in_custom_generate():
    pair = tiny_pair()
    plain = free(pair)
    for least in ({"min_new_tokens": 9}, {"min_length": len(PROMPT) + 9}):
        found = stock(pair, custom_generate=eagle_fsd.custom_generate, stop_token_ids=[plain[4]], **least)
        assert plain[4] not in found[:9] and found == free(pair, min_new_tokens=9, stop_token_ids=[plain[4]])
