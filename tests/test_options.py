"""The options' dataclasses: what they take, what they refuse, and what they say of names from elsewhere."""

import inspect
import math
import re
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch
from tiny import PROMPT, VOCAB, tiny_pair, tiny_tokenizer
from transformers import GenerationConfig

import eagle_fsd
from eagle_fsd import GenerateOptions, LoadOptions, TreeConfig
from eagle_fsd.api import CALL_KEYWORDS, Keywords
from eagle_fsd.options.engine import EngineOptions
from eagle_fsd.options.generate import GenerateKeywords, with_options
from eagle_fsd.options.option import REPLACEMENTS
from eagle_fsd.utils.checks import OptionError

NAN, INF = math.nan, math.inf

BAD = [
    ("max_new_tokens", 0, ValueError, "at least 1, got 0"),
    ("max_new_tokens", 2.5, TypeError, "an int, got 2.5"),
    ("max_new_tokens", True, TypeError, "an int, got True"),
    ("temperature", -0.1, ValueError, "0 .greedy. or a number"),
    ("temperature", NAN, ValueError, "got nan"),
    ("temperature", INF, ValueError, "got inf"),
    ("temperature", 1e-320, ValueError, "1e-06"),
    ("temperature", "hot", ValueError, "got 'hot'"),
    ("top_p", 0, ValueError, r"in \(0, 1\]"),
    ("top_k", -1, ValueError, "at least 0"),
    ("top_k", 2.0, TypeError, "an int"),
    ("min_p", 1.5, ValueError, r"in \[0, 1\]"),
    ("repetition_penalty", 0, ValueError, "positive"),
    ("min_new_tokens", -1, ValueError, "at least 0"),
    ("min_new_tokens", 300, ValueError, "max_new_tokens .256., got 300"),
    ("ignore_eos", "no", TypeError, "a bool"),
    ("seed", -1, ValueError, "at least 0"),
    ("seed", 2**63, ValueError, "at most 9223372036854775807"),
    ("seed", 1.0, TypeError, "an int"),
    ("seed", [None], TypeError, "an int"),
    ("stop", "", ValueError, "non-empty strings"),
    ("stop", ["a", 7], ValueError, r"a string or a list of strings, got \['a', 7\]"),
    ("stop", b"a", TypeError, "a string or a list"),
    ("stop", "\ud800", ValueError, "lone surrogate"),
    ("stop_token_ids", 7, TypeError, "a sequence of token ids"),
    ("stop_token_ids", "ab", TypeError, "a sequence of token ids"),
    ("stop_token_ids", ["a"], TypeError, "an int"),
    ("stop_token_ids", [True], TypeError, "an int, got True"),
    ("stop_token_ids", [VOCAB], ValueError, f"stop_token_ids has token id {VOCAB}"),
    ("eos_token_id", [VOCAB], ValueError, f"eos_token_id has token id {VOCAB}"),
    ("logit_bias", {VOCAB: 1}, ValueError, f"logit_bias has token id {VOCAB}"),
    ("generation_config", {"top_p": 0.9}, TypeError, "a GenerationConfig"),
    ("acceptance", "greedy", ValueError, "'greedy'; accepted: exact, fsd"),
    ("acceptance", 7, TypeError, "a name, a rule or a function"),
    ("threshold", -0.1, ValueError, "threshold of rule 'fsd'"),
    ("threshold", torch.tensor(0.1), TypeError, "a number"),
    ("divergence", "euclid", ValueError, "'euclid'; accepted: kl"),
    ("head_guard", 1.5, ValueError, r"in \[0, 1\]"),
    ("head_guard", "none", TypeError, "a number"),
    ("budget", -1, ValueError, "a number of nats, at least 0, got -1"),
    ("budget", NAN, ValueError, "got nan"),
    ("budget", "all", TypeError, "a number of nats, at least 0"),
    ("budget", True, TypeError, "got True"),
    ("tree", (16, 5, 4), TypeError, "a TreeConfig"),
    ("tree", TreeConfig(16, 5, VOCAB + 1), ValueError, "top_k 33.*32"),
    ("streamer", "stdout", TypeError, "methods put and end"),
    ("session", "mine", TypeError, "a Session or None"),
    ("options", {"temperature": 1.0}, TypeError, "GenerateOptions or None"),
    ("logits_processor", [5], TypeError, "must contain functions or callable objects, got 5"),
    ("logits_processor", print, TypeError, "must be a list"),
    ("stopping_criteria", [5], TypeError, "stopping_criteria must contain functions"),
    ("model", "smollm2", TypeError, "eagle_fsd.load, got str"),
    *(("text_drafts", value, TypeError, 'text_drafts must be "auto", "off" or a TextDrafts, got ')
      for value in ("on", "", None, True, 5, {"longest": 3})),
    *(("reference", value, TypeError, "reference must be a text or a list of texts, got ")
      for value in (b"a", b"", ["a", 5], {"a": "b"}, {}, [None], 5, 0)),
    ("reference", "a\ud800", ValueError, "reference is not valid text: lone surrogate"),
    ("reference", "a" * 70_000, ValueError, "reference has 70000 characters"),
    ("reference", ["a"] * 1025, ValueError, "reference may be at most 1024 texts, got 1025"),
    *(("fuzzy_within", marks, ValueError, "two different marks")
      for marks in (("a",), "ab", (3, 3), (True, 2), ("", "b"))),
    ("fuzzy_within", (3, 99), ValueError, "outside the vocabulary"),
    ("fuzzy_within", ("abc", "b"), ValueError, "'abc' is 3 tokens of this model"),
]
TOGETHER = [
    ({"acceptance": "exact", "threshold": 0.1}, "threshold"),
    ({"acceptance": lambda nodes: nodes.warped, "threshold": 0.1}, "takes no options, got threshold"),
    *(({"reference": texts, "text_drafts": "off"}, 'leave out text_drafts="off"') for texts in ("a", ["a", "b"])),
]


@pytest.fixture(scope="module")
def small():
    return tiny_pair(tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(("given", "error", "message"), [
    *(({name: value}, error, message) for name, value, error, message in BAD),
    *((given, ValueError, message) for given, message in TOGETHER),
], ids=lambda value: ascii(value)[:30])  # no address: xdist compares the names
def test_bad_values_are_refused_before_any_forward(small, monkeypatch, given, error, message):
    def forward(*args, **kwargs):
        raise AssertionError("a forward ran")

    monkeypatch.setattr(torch.nn.functional, "embedding", forward)
    with pytest.raises(error, match=message) as caught:
        eagle_fsd.generate(PROMPT, **{"model": small} | given)
    assert not isinstance(caught.value, OptionError) or caught.value.name in given


@pytest.mark.parametrize("name", [
    "stream", "num_beams", "max_length",
    "no_repeat_ngram_size", "max_tokens", "max_completion_tokens", "n",
    "tokenizer", "bad_words_ids", "prediction", "prompt_lookup_num_tokens",
])
def test_names_from_elsewhere_lead_to_ours(small, name):
    with pytest.raises(TypeError, match=f"unknown option '{name}'; use ") as caught:
        eagle_fsd.generate(PROMPT, small, **{name: 1})
    assert str(caught.value).endswith(REPLACEMENTS[name])


def test_names_of_model_generate_that_mean_the_same_are_taken():
    def read(options=None, **given):
        made = with_options(options, given)
        return {name: getattr(made, name) for name in ("temperature", "stop", "stop_token_ids", "eos_token_id", "top_p",
                                                     "repetition_penalty", "max_new_tokens")
                if getattr(made, name) != getattr(GenerateOptions(), name)}

    assert read(do_sample=False) == read(do_sample=None) == {}
    assert read(do_sample=True) == {"temperature": 1.0}
    assert read(do_sample=True, temperature=0.7) == {"temperature": 0.7}
    assert read(GenerateOptions(temperature=0.7), do_sample=True) == {"temperature": 0.7}
    assert read(GenerateOptions(temperature=0.7), do_sample=False) == {}
    assert read(stop_strings="a") == {"stop": "a"} and read(stop_strings=None, eos_token_id=None) == {}
    assert read(eos_token_id=5) == {"eos_token_id": (5,)} and read(eos_token_id=[5]) == {"eos_token_id": [5]}
    ends = {"eos_token_id": (5,)}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=5, num_beams=1, pad_token_id=0,
                              output_attentions=False, cache_implementation="hybrid", no_repeat_ngram_size=2)
    assert read(generation_config=config) == {"temperature": 0.6, "top_p": 0.9, **ends}
    assert read(generation_config=config, stop_token_ids=[7]) == {
        "temperature": 0.6, "top_p": 0.9, "stop_token_ids": [7], **ends}
    assert read(generation_config=config, temperature=0.8) == {"temperature": 0.8, "top_p": 0.9, **ends}
    assert read(generation_config=config, eos_token_id=6, ignore_eos=False)["eos_token_id"] == (6,)
    assert read(generation_config=config, ignore_eos=True) == {"temperature": 0.6, "top_p": 0.9}
    assert read(generation_config=config, do_sample=False) == ends
    for greedy in (GenerationConfig(temperature=0.7, top_p=0.9), GenerationConfig(do_sample=False, top_p=0.9)):
        assert read(generation_config=greedy) == {}  # as in model.generate, where do_sample is False
    assert read(generation_config=GenerationConfig(temperature=0.7, top_p=0.9), do_sample=True) == {
        "temperature": 0.7, "top_p": 0.9}
    assert read(GenerateOptions(temperature=0.7), generation_config=GenerationConfig(top_p=0.9)) == {
        "temperature": 0.7, "top_p": 0.9}
    config = GenerationConfig(max_length=99, max_new_tokens=9, stop_strings="a", repetition_penalty=1.2)
    asked = {"max_new_tokens": 9, "repetition_penalty": 1.2}
    assert read(generation_config=config) == {"stop": "a", **asked}
    assert read(generation_config=config, stop="b") == read(generation_config=config, stop_strings="b") == {
        "stop": "b", **asked}
    assert read(generation_config=GenerationConfig(max_length=99), max_new_tokens=9) == {"max_new_tokens": 9}
    for given, error, said in (
        ({"do_sample": "yes"}, TypeError, "do_sample must be a bool"),
        ({"do_sample": True, "temperature": 0}, ValueError, "temperature must be above 0 with do_sample=True, got 0"),
        ({"stop": "a", "stop_strings": "b"}, ValueError, "stop_strings and stop are the same"),
        ({"generation_config": {"top_p": 0.9}}, TypeError, "must be a GenerationConfig"),
        ({"generation_config": GenerationConfig(num_beams=4)}, TypeError, "'num_beams'; use greedy"),
        ({"generation_config": GenerationConfig(penalty_alpha=0.6)}, TypeError, "unknown option 'penalty_alpha'"),
        ({"generation_config": GenerationConfig(max_length=99)}, TypeError, "'max_length'; use max_new_tokens="),
        ({"ignore_eos": True, "eos_token_id": 5}, ValueError, "eos_token_id names end tokens that ignore_eos=True"),
        ({"eos_token_id": "a"}, TypeError, "eos_token_id must be a token id or a sequence of token ids"),
        ({"response_format": {}, "min_new_tokens": 4}, ValueError, "where an answer ends: leave out min_new_tokens$"),
    ):
        with pytest.raises(error, match=said):
            read(**given)


def test_other_unknown_names_are_told_what_is_accepted(small):
    with pytest.raises(TypeError, match="unknown option 'loudness'; accepted: max_new_tokens, .*, session$"):
        eagle_fsd.generate(PROMPT, small, loudness=1)
    with pytest.raises(TypeError, match=re.escape("unknown option 'tempertaure'; did you mean 'temperature'?")):
        eagle_fsd.generate(PROMPT, small, tempertaure=1)
    with pytest.raises(TypeError, match="unknown option 'max_token'; use max_new_tokens="):
        eagle_fsd.generate(PROMPT, small, max_token=1)
    for name in ("compile", "tp_plan", "torch_dtype"):
        with pytest.raises(TypeError, match=f"unknown option '{name}'; use "):
            eagle_fsd.load("somewhere", **{name: 1})
    with pytest.raises(TypeError, match="unknown option 'loudness'; accepted: target, draft, dtype"):
        eagle_fsd.load("somewhere", loudness=1)


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"device": "cpu", "device_map": "auto"}, ValueError, "not both"),
    ({"attn_implementation": "flash"}, ValueError, "got 'flash'"),
    ({"tree": (16, 5, 4)}, ValueError, "tree must be"),
    ({"prepack": "yes"}, TypeError, "a bool"),
    ({"cuda_graphs": "yes"}, TypeError, "a bool"),
    ({"quantization": "int4"}, ValueError, "must be one of int8, int8-fast, or None .*, got 'int4'"),
    ({"quantization": "int8", "prepack": False}, ValueError, "leave out prepack=False"),
    ({"quantization": "int8", "quantization_config": {}}, ValueError, "not both"),
], ids=str)
def test_bad_options_of_loading(given, error, message):
    with pytest.raises(error, match=message):
        LoadOptions(**given)


def test_custom_generate_takes_the_options_that_model_generate_does_not():
    own = inspect.signature(eagle_fsd.custom_generate).parameters
    for name, field in GenerateOptions.__dataclass_fields__.items():
        if name in ("generation_config", "chat_template_kwargs") or hasattr(GenerationConfig(), name):
            assert name not in own or name == "generation_config"
        else:
            assert own[name].default == field.default


@pytest.mark.parametrize(("options", "functions"), [
    (GenerateOptions, (eagle_fsd.generate, eagle_fsd.Chat, eagle_fsd.Chat.send, eagle_fsd.Engine.submit)),
    (LoadOptions, (eagle_fsd.load,)), (EngineOptions, (eagle_fsd.Engine,)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_signatures_list_every_option(options, functions):
    defaults = {field.name: field.default for field in fields(options)}
    for function in functions:
        listed = inspect.signature(function).parameters
        assert defaults.items() <= {name: parameter.default for name, parameter in listed.items()}.items()


def test_the_keywords_of_a_call_are_those_of_its_static_type():
    listed = inspect.signature(eagle_fsd.generate).parameters
    assert set(listed) - {"prompt", "model"} == set(Keywords.__annotations__)
    assert set(CALL_KEYWORDS) == set(listed) - {"prompt", "model"} - set(GenerateKeywords.__annotations__)


@pytest.mark.parametrize("given", [
    {"options": [GenerateOptions()] * 2}, {"temperature": [0.0, 1.0]}, {"threshold": (0.1, 0.2)},
    {"acceptance": ["fsd"]}, {"max_new_tokens": [3, 4]}, {"tree": [TreeConfig(16, 5, 4)] * 2},
    {"response_format": [{}, {}]},
], ids=str)
def test_lists_of_options_lead_to_the_engine(small, given):
    with pytest.raises(TypeError, match=r"got [\[(].*one by one: Engine\(model\)\.submit\(prompt, \.\.\.\)"):
        eagle_fsd.generate([PROMPT, PROMPT], small, **given)


@pytest.mark.parametrize(("given", "said"), [
    ({"threshold": 0.3}, "fsd with threshold 0.3 changes nothing without a drafter"),
    ({"acceptance": "relaxed", "threshold": 2}, "relaxed with threshold 2 changes nothing without a drafter"),
    ({"threshold": 0.3, "speculative": False}, "changes nothing with speculative=False"),
    ({}, ""), ({"acceptance": "exact"}, ""), ({"acceptance": lambda nodes: nodes.warped}, ""),
    ({"top_p": 0.9}, "top_p= changes nothing at temperature 0: decoding is greedy"),
    ({"top_k": 5, "min_p": 0.1}, "top_k= and min_p= change nothing at temperature 0"),
    ({"top_p": 0.9, "temperature": 1.0}, ""),
    ({"do_sample": False, "temperature": 0.7}, "temperature= changes nothing with do_sample=False"),
    ({"budget": 1.0, "head_guard": None}, "budget= changes nothing without a threshold: decoding is lossless"),
    ({"fuzzy_within": (3, 4), "divergence": "kl"}, "divergence= and fuzzy_within= change nothing without a threshold"),
    ({"reference": "abc", "speculative": False}, "reference= changes nothing with speculative=False"),
    ({"tree": TreeConfig(16, 5, 4), "speculative": False}, "tree= changes nothing with speculative=False"),
    ({"text_drafts": "off", "speculative": False}, ""),
], ids=range(15))
def test_an_option_that_changes_nothing_is_warned_of(small, caplog, given, said):
    pair = eagle_fsd.EagleModel.from_parts(small.target.model, None, small.tokenizer)
    eagle_fsd.generate(PROMPT, pair, max_new_tokens=2, **given)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(said) and said in caplog.text


def test_requests_alike_are_warned_of_once(small, caplog):
    pair = eagle_fsd.EagleModel.from_parts(small.target.model, None, small.tokenizer)
    with eagle_fsd.Engine(pair) as engine:
        for top_p, threshold in ((0.9, 0.3), (0.8, 0.4)):
            engine.submit(PROMPT, max_new_tokens=2, top_p=top_p, threshold=threshold).result()
        engine.submit(PROMPT, max_new_tokens=2, top_k=3).result()
    assert [record.message.partition(" changes")[0] for record in caplog.records] == [
        "fsd with threshold 0.3", "top_p=", "top_k="]


def test_what_is_shown_of_a_model_and_an_answer(small):
    out = eagle_fsd.generate(PROMPT, small, max_new_tokens=40)
    stats = out.stats
    assert repr(stats).startswith(f"Stats(new_tokens=40, tokens_per_second={round(stats.tokens_per_second, 3)}, "
                                  f"mean_accepted_length={round(stats.mean_accepted_length, 3)}, ")
    assert "accepted_lengths" not in repr(stats) and "None" not in repr(stats) and len(repr(stats)) < 400
    assert repr(out) == f"Output(text={out.text!r}, finish_reason='length', seed={out.seed}, stats={stats!r})"
    assert [receipt.token for receipt in out.receipts] == out.token_ids
    plain = sum(each.numel() for each in small.target.model.parameters())
    shown = repr(small)
    assert f"target=LlamaForCausalLM (LlamaForCausalLM, {plain / 1000:.3g} k parameters, float32, plain w" in shown
    assert "draft=a head (EAGLE-1/2, " in shown and "TreeConfig(" in shown and "\n" not in shown


def test_acceptance_in_the_fields_of_vllm(small):
    """Five cycles, the second without a draft; trees of 8 nodes."""
    stats = eagle_fsd.Stats(accepted_lengths=[2, 0, 0, 3, 0], drafts=4, undrafted=1, proposed=Counter(head=25, text=3))
    assert stats.speculative_decoding == {
        "mean_acceptance_length": 2.25, "draft_acceptance_rate": 5 / 28, "acceptance_histogram": [2, 0, 1, 1],
        "num_spec_steps": 4, "num_accepted_draft_tokens": 5, "num_draft_tokens": 28,
        "num_accepted_tokens_per_pos": [2, 2, 1]}
    drafts = eagle_fsd.generate(PROMPT, small, max_new_tokens=40).stats.speculative_decoding
    histogram = drafts["acceptance_histogram"]
    assert sum(histogram) == drafts["num_spec_steps"] > 0
    assert sum(each * count for each, count in enumerate(histogram)) == drafts["num_accepted_draft_tokens"] > 0
    assert eagle_fsd.Stats().speculative_decoding == {
        "mean_acceptance_length": 1, "draft_acceptance_rate": 0, "acceptance_histogram": [0], "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0, "num_draft_tokens": 0, "num_accepted_tokens_per_pos": []}


def test_numbers_and_arrays_of_numpy(small):
    assert GenerateOptions(budget=np.float32(2), max_new_tokens=np.int64(3), seed=[np.int64(1)]).budget == 2
    with pytest.raises(ValueError, match="seed must be below"):
        eagle_fsd.generate([PROMPT, PROMPT], small, seed=np.int64(2**63 - 1))
    first = eagle_fsd.generate(PROMPT, small, max_new_tokens=4).token_ids[0]
    for ids in (iter([first]), np.array([first])):
        options = GenerateOptions(max_new_tokens=4, stop_token_ids=ids)
        for _ in range(2):  # and again, though an iterator is read once
            found = eagle_fsd.generate([PROMPT, PROMPT], small, options=options)
            assert [output.finish_reason for output in found] == ["stop", "stop"]


@pytest.mark.parametrize("options", [{"acceptance": "typical"}, {"acceptance": "fsd_paper"},
                                     {"acceptance": "relaxed", "temperature": 1.0}], ids=str)
def test_without_a_threshold_decoding_is_lossless_or_one_is_asked_for(options):
    with pytest.raises(ValueError, match="needs a threshold: without one decoding is lossless"):
        GenerateOptions(**options)
    assert not GenerateOptions(**options, threshold=0.5).lossless
    assert GenerateOptions(acceptance="relaxed").lossless and GenerateOptions().lossless


def test_a_threshold_that_nothing_exceeds_is_warned_of(small, caplog):
    for given in ({"threshold": 0.6}, {"threshold": 5, "budget": 1.0}, {"threshold": INF, "divergence": "tv"}):
        eagle_fsd.generate(PROMPT, small, max_new_tokens=2, **given)
    assert not caplog.records  # of js, which is at most ln 2
    eagle_fsd.generate(PROMPT, small, threshold=5, max_new_tokens=2)
    message = "a threshold of 5 accepts every token of the drafter that the guard allows: js is at most 0.693"
    assert message in caplog.text


def test_texts_of_options_need_a_tokenizer_and_may_have_no_token(small):
    bare = eagle_fsd.EagleModel.from_parts(small.target.model, small.draft)
    for name, value in (("reference", "ab"), ("stop", "ab"), ("fuzzy_within", ("a", "b"))):
        with pytest.raises(ValueError, match=f"{name} needs a tokenizer, and this model has none"):
            eagle_fsd.generate(PROMPT, bare, **{name: value})
    expected = eagle_fsd.generate(PROMPT, small, max_new_tokens=6)
    for text in ("\u4e16", "\u4e16a"):  # characters that the tokenizer leaves out
        found = eagle_fsd.generate(PROMPT, small, max_new_tokens=6, reference=text)
        assert found.token_ids == expected.token_ids
