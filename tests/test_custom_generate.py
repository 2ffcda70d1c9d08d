"""Decoding inside the target's own `generate`."""

import pytest
import torch
from test_generate import Recorder
from tiny import PROMPT, VOCAB, readable, tiny_head, tiny_target
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.generation.stopping_criteria import StopStringCriteria

import eagle_fsd
from eagle_fsd import TreeConfig, custom_generate, save_head

IDS = torch.tensor([PROMPT])
TREE = TreeConfig(16, 5, 4)


@pytest.fixture
def target(pair):
    return pair.target.model


@pytest.fixture
def ours(pair, target):
    """`generate` of the target with our decode loop."""

    def call(input_ids=IDS, **options):
        options = {"draft": pair.draft, "threshold": 0.0, "tree": TREE, "max_new_tokens": 24} | options
        return target.generate(input_ids, custom_generate=custom_generate, **options)

    return call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 5},
        {"max_new_tokens": None, "max_length": 20},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5]]},
        {"suppress_tokens": [5, 6, 7]},
        {"logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
        {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, do_sample=False)},
    ],
    ids=readable,
)
def test_greedy_decoding_respects_the_generation_config(target, ours, options):
    stock = {"max_new_tokens": 24} | options
    expected = target.generate(IDS, do_sample=False, **stock)
    sequences = ours(do_sample=False, **options)
    assert sequences.dtype == expected.dtype and torch.equal(sequences, expected)


@pytest.mark.parametrize("options", [
    {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"penalty_alpha": 0.6, "top_k": 4},
], ids=readable)
def test_another_method_of_generation_is_refused(ours, options):
    with pytest.raises(ValueError, match=f"a method of its own .*{next(iter(options))}"):
        ours(**options)


def test_an_assistant_is_refused(ours, target):
    with pytest.raises(ValueError, match="cannot take an assistant_model as well"):
        ours(assistant_model=target)


def test_end_tokens_and_their_delay(target, ours):
    free = ours()[0, len(PROMPT) :].tolist()
    target.generation_config.eos_token_id = [free[6], VOCAB - 1]
    target.generation_config.pad_token_id = 0
    assert ours().shape[1] < len(PROMPT) + 24
    assert torch.equal(ours(), target.generate(IDS, max_new_tokens=24))
    assert torch.equal(ours(min_new_tokens=12), target.generate(IDS, max_new_tokens=24, min_new_tokens=12))


def test_the_mask_that_a_tokenizer_gives(pair, target, tokenizer, ours):
    inputs = tokenizer("hello", return_tensors="pt")
    expected = target.generate(**inputs, max_new_tokens=8)
    sequences = target.generate(
        **inputs, max_new_tokens=8, custom_generate=custom_generate, draft=pair.draft, threshold=0.0
    )
    assert torch.equal(sequences, expected)


def test_sampling_uses_the_warpers_of_the_config(pair, ours):
    """The same seed in `eagle_fsd.generate` with the same options gives the same tokens."""
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.1}
    for seed in range(3):
        sequences = ours(do_sample=True, seed=seed, **options)
        expected = eagle_fsd.generate(PROMPT, pair, max_new_tokens=24, seed=seed, threshold=0.0, tree=TREE, **options)
        assert sequences[0, len(PROMPT) :].tolist() == expected.token_ids


def test_sampling_follows_the_global_seed(ours):
    def sample(seed):
        torch.manual_seed(seed)
        return ours(do_sample=True)[0].tolist()

    assert sample(1) == sample(1) != sample(2)
    torch.manual_seed(1)
    assert ours(do_sample=True)[0].tolist() != ours(do_sample=True)[0].tolist()


def test_rules_and_thresholds(pair, ours):
    for rule, threshold in (("fsd", 0.3), ("tilt", 1.0)):
        sequences = ours(acceptance=rule, threshold=threshold)
        expected = eagle_fsd.generate(
            PROMPT, pair, max_new_tokens=24, acceptance=rule, threshold=threshold, tree=TREE
        )
        assert sequences[0, len(PROMPT) :].tolist() == expected.token_ids
        assert not torch.equal(sequences, ours())


def test_a_streamer_gets_prompt_and_tokens(ours):
    recorder = Recorder()
    sequences = ours(streamer=recorder)
    assert recorder.prompt == PROMPT and recorder.tokens == sequences[0, len(PROMPT) :].tolist()
    assert recorder.ended == 1 and len(recorder.values) > 3


def test_a_text_streamer(ours, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=5)
    sequences = ours(streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(sequences[0, len(PROMPT) :], skip_special_tokens=True)


def test_stopping_criteria(target, ours, tokenizer):
    stop = tokenizer.decode(ours()[0, len(PROMPT) + 8 : len(PROMPT) + 10], skip_special_tokens=True)
    assert stop
    criteria = [StopStringCriteria(tokenizer, [stop])]
    expected = target.generate(IDS, max_new_tokens=24, stopping_criteria=criteria)
    assert torch.equal(ours(stopping_criteria=criteria), expected) and expected.shape[1] < len(PROMPT) + 24

    def after_ten(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= len(PROMPT) + 10)

    assert ours(stopping_criteria=[after_ten]).shape[1] == len(PROMPT) + 10


def test_an_output_object_where_asked_for(ours):
    output = ours(return_dict_in_generate=True)
    assert torch.equal(output.sequences, ours())


def test_the_head_may_be_a_directory(pair, ours, tmp_path):
    save_head(pair.draft, tmp_path)
    assert torch.equal(ours(draft=str(tmp_path)), ours())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft": None}, ValueError, "draft= is missing"),
        ({"num_beams": 2}, ValueError, "num_beams"),
        ({"attention_mask": torch.tensor([[1, 0] + [1] * (len(PROMPT) - 2)])}, ValueError, "padded on the left only"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 16)}, ValueError, "inputs_embeds"),
        ({"return_dict_in_generate": True, "output_scores": True}, ValueError, "output_scores"),
        ({"acceptance": "greedy"}, ValueError, "greedy"),
        ({"threshold": -1}, ValueError, "threshold"),
        ({"tree": 5}, TypeError, "TreeConfig"),
        ({"seed": -5}, ValueError, "seed"),
        ({"draft_head": 5}, ValueError, "draft_head"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_any_forward(pair, ours, monkeypatch, options, error, message):
    def forward(*args, **kwargs):
        raise AssertionError("a forward ran")

    monkeypatch.setattr(pair.target.decoder, "forward", forward)
    with pytest.raises(error, match=message):
        ours(**options)


def test_a_head_of_another_target_is_refused(ours):
    with pytest.raises(ValueError, match="vocabulary"):
        ours(draft=tiny_head(tiny_target(vocab_size=VOCAB + 1)))
