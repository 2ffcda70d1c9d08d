"""Decoding inside the target's own `generate`."""

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from test_generate import TREE, Recorder
from tiny import PROMPT, PROMPTS, VOCAB, readable, small_model, tiny_head, tiny_pair, tiny_target, tiny_tokenizer
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.generation.stopping_criteria import StopStringCriteria

import eagle_fsd
from eagle_fsd import custom_generate, hf
from eagle_fsd.captured.capture import uncollected
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.cache import cache_name

IDS = torch.tensor([PROMPT])
HUB = Path(__file__).parents[1] / "hub"


@pytest.fixture
def target(pair):
    return pair.target.model


@pytest.fixture
def ours(pair, target):
    """`generate` of the target with our decode loop."""

    def call(input_ids=IDS, **options):
        options = {"draft": pair.draft, "threshold": 0.0, "tree": TREE, "max_new_tokens": 24} | options
        return target.generate(input_ids, **{"custom_generate": custom_generate} | options)

    return call


@pytest.mark.parametrize("options", [
    {},
    {"max_new_tokens": None, "max_length": 20},
    {"repetition_penalty": 1.3},
    {"bad_words_ids": [[5]], "suppress_tokens": [5, 6, 7]},
    {"logits_processor": [NoRepeatNGramLogitsProcessor(3)]},
    {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, do_sample=False)},
], ids=readable)
def test_greedy_decoding_respects_the_generation_config(target, ours, options, caplog):
    expected = target.generate(IDS, do_sample=False, **{"max_new_tokens": 24} | options)
    sequences = ours(do_sample=False, **options)
    assert sequences.dtype == expected.dtype and torch.equal(sequences, expected)
    assert "lowered" not in caplog.text  # there is room for what was asked for


def test_end_tokens_and_their_delay(target, ours):
    free = ours()[0, len(PROMPT) :].tolist()
    target.generation_config.eos_token_id = [free[6], VOCAB - 1]
    target.generation_config.pad_token_id = 0
    assert ours().shape[1] < len(PROMPT) + 24
    assert torch.equal(ours(), target.generate(IDS, max_new_tokens=24))
    assert torch.equal(ours(min_new_tokens=12), target.generate(IDS, max_new_tokens=24, min_new_tokens=12))


def test_sampling_uses_the_warpers_of_the_config(pair, ours):
    """The same seed in `eagle_fsd.generate` with the same options gives the same tokens."""
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    for seed in range(3):
        sequences = ours(do_sample=True, seed=seed, **options)
        expected = eagle_fsd.generate(PROMPT, pair, max_new_tokens=24, seed=seed, threshold=0.0, tree=TREE, **options)
        assert sequences[0, len(PROMPT) :].tolist() == expected.token_ids


def test_sampling_follows_the_global_seed(ours):
    def sample(seed):
        torch.manual_seed(seed)
        return [ours(do_sample=True)[0].tolist() for _ in range(2)]

    first = sample(1)
    assert first == sample(1) != sample(2) and first[0] != first[1]


def test_rules_thresholds_and_budgets(pair, ours):
    for options in ({"threshold": 0.3, "head_guard": None}, {"acceptance": "relaxed", "threshold": 1.0},
                    {"threshold": 0.5, "divergence": "tv", "budget": 0.5}):
        sequences = ours(**options)
        expected = eagle_fsd.generate(PROMPT, pair, max_new_tokens=24, tree=TREE, **options)
        assert sequences[0, len(PROMPT) :].tolist() == expected.token_ids
        assert not torch.equal(sequences, ours())


@pytest.mark.parametrize("options", [
    {"frequency_penalty": 1.5}, {"presence_penalty": 2.0, "repetition_penalty": 1.1}, {"logit_bias": {7: 3.0, 20: -9}},
    {"fuzzy_within": (7, 20), "threshold": 0.5}, {"speculative": False}, {"stop_token_ids": [28]}, {"top_logprobs": 3},
    {"frequency_penalty": 1.5, "temperature": 0.9, "do_sample": True, "top_k": 7, "seed": 4},
    {"ignore_eos": True, "eos_token_id": 28}, {"reference": "abc abd"},
], ids=readable)
def test_other_options_of_generate(pair, ours, tokenizer, options):
    sequences = ours(text_tokenizer=tokenizer, pad_token_id=0, **options)
    if "ignore_eos" in options:
        del options["eos_token_id"]
    named = eagle_fsd.EagleModel.from_parts(pair.target.model, pair.draft, tokenizer)
    expected = eagle_fsd.generate(PROMPT, named, max_new_tokens=24, tree=TREE, **options)
    assert sequences[0, len(PROMPT) :].tolist() == expected.token_ids


def test_padding_does_not_count_in_the_answer(ours):
    options = {"frequency_penalty": 1.5, "pad_token_id": 0, "max_new_tokens": 12}
    alone = [ours(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert ours(**padded(PROMPTS, pad=0), **options)[:, max(map(len, PROMPTS)) :].tolist() == alone


def test_a_streamer(ours, tokenizer):
    recorder = Recorder()
    text = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=5)
    sequences = ours(text_streamer=recorder)
    assert recorder.prompt == PROMPT and recorder.tokens == sequences[0, len(PROMPT) :].tolist()
    assert recorder.ended == 1 and len(recorder.values) > 3
    ours(text_streamer=text)
    assert "".join(text) == tokenizer.decode(sequences[0, len(PROMPT) :], skip_special_tokens=True)


def test_what_generate_does_not_pass_on(target, ours):
    """docs/python.md says so; once a version passes more on, custom_generate can take it."""
    recorder = Recorder()
    assert torch.equal(ours(streamer=recorder, assistant_model=target, synced_gpus=True), ours())
    assert (recorder.prompt, recorder.tokens, recorder.ended) == (PROMPT, [], 0)


def test_a_caller_that_has_sent_the_prompt(target, ours):
    @functools.wraps(custom_generate)
    def streaming(*args, **options):
        return custom_generate(*args, streamer=recorder, **options)

    recorder = Recorder()
    recorder.put(IDS)
    sequences = ours(custom_generate=streaming)
    assert recorder.prompt == PROMPT and recorder.tokens == sequences[0, len(PROMPT) :].tolist()
    assert recorder.ended == 1


def test_streamers_end_where_a_call_is_refused(target, ours, hub, tokenizer):
    for call, message in ((functools.partial(custom_generate, target, IDS), "one streamer"), (hub, "pass one of them")):
        ended = [Recorder(), Recorder()]
        with pytest.raises(ValueError, match=message):
            call(streamer=ended[0], text_streamer=ended[1])
        assert [streamer.ended for streamer in ended] == [1, 1]
    text = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    with pytest.raises(ValueError, match="output_scores"):
        ours(text_streamer=text, return_dict_in_generate=True, output_scores=True)
    assert "".join(text) == ""


def cache_of(target, ids):
    cache = DynamicCache(config=target.config)
    target(ids, **{cache_name(type(target)): cache}) if ids is not None else None
    return cache


@pytest.mark.parametrize(("name", "value", "refused"), [
    ("cache", lambda target: cache_of(target, None), False),
    ("cache", lambda target: cache_of(target, IDS[:, :3]), True),
    ("news", lambda target: None, False),
    ("news", lambda target: False, False),
    ("news", lambda target: 0, True),
    ("news", lambda target: torch.zeros(1), True),
    ("position_ids", lambda target: torch.arange(len(PROMPT))[None], False),
    ("position_ids", lambda target: torch.arange(len(PROMPT))[None] + 1, True),
    ("position_ids", lambda target: torch.arange(len(PROMPT) - 1)[None], True),
])
def test_what_other_versions_of_generate_pass_on(target, ours, name, value, refused):
    @functools.wraps(custom_generate)
    def newer(*args, **options):
        return custom_generate(*args, **options | {name: value(target)})

    if refused:
        with pytest.raises(ValueError, match=name):
            ours(custom_generate=newer)
    else:
        assert torch.equal(ours(custom_generate=newer), ours())


def test_stop_strings_and_criteria(target, ours, tokenizer):
    stop = tokenizer.decode(ours()[0, len(PROMPT) + 8 : len(PROMPT) + 10], skip_special_tokens=True)
    expected = target.generate(IDS, max_new_tokens=24, stop_strings=stop, tokenizer=tokenizer)
    assert expected.shape[1] < len(PROMPT) + 24
    assert torch.equal(ours(stop=stop, text_tokenizer=tokenizer), expected)
    assert torch.equal(ours(stopping_criteria=[StopStringCriteria(tokenizer, [stop])]), expected)
    with pytest.raises(ValueError, match="text_tokenizer="):
        ours(stop=stop, tokenizer=tokenizer)


def test_a_special_token_as_stop_string(target, ours):
    tokenizer, end = tiny_tokenizer(), ours()[0, len(PROMPT) + 6]
    stop = tokenizer.decode([end])
    tokenizer.add_tokens(stop, special_tokens=True)
    expected = target.generate(IDS, max_new_tokens=24, stop_strings=stop, tokenizer=tokenizer)
    assert expected[0, -1] == end and expected.shape[1] <= len(PROMPT) + 7
    assert torch.equal(ours(stop=stop, text_tokenizer=tokenizer), expected)


def test_an_output_object_where_asked_for(ours):
    assert torch.equal(ours(return_dict_in_generate=True).sequences, ours())


def padded(prompts, pad):
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "options", [{}, {"min_new_tokens": 6}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_batches_are_padded_as_generate_does(target, ours, options):
    inputs = padded(PROMPTS, pad=0)
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [2, 4, 9], "pad_token_id": 0, **options}
    assert torch.equal(ours(**inputs, **options), target.generate(**inputs, **options))


def test_without_a_pad_token(target, ours):
    """`generate` pads with the first end token then; without one there is nothing to pad with."""
    inputs, options = padded(PROMPTS, pad=0), {"do_sample": False, "max_new_tokens": 20}
    expected = target.generate(**inputs, eos_token_id=[2, 4, 9], **options)
    assert torch.equal(ours(**inputs, eos_token_id=[2, 4, 9], **options), expected)
    with pytest.raises(ValueError, match="pad_token_id"):
        ours(**inputs, **options)
    streamer = Recorder()
    with pytest.raises(ValueError, match="a streamer serves one prompt"):
        ours(**inputs, **options, text_streamer=streamer)
    assert streamer.ended == 1


def test_criteria_that_keep_count_of_their_rows(target, ours):
    """Such as those of lm-evaluation-harness: one state for each row, met when every row has met it."""
    class AnyOf:
        def __init__(self, tokens, rows):
            self.tokens, self.done = set(tokens), [False] * rows
            self.lock = threading.Lock()  # which cannot be copied

        def __call__(self, input_ids, scores):
            for row, done in enumerate(self.done):
                self.done[row] = done or input_ids[row, -1].item() in self.tokens
            return all(self.done)

    inputs, options = padded(PROMPTS, pad=0), {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    found = ours(**inputs, stopping_criteria=[AnyOf([2, 4, 9], len(PROMPTS))], **options)
    assert torch.equal(found, target.generate(**inputs, eos_token_id=[2, 4, 9], **options))


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"draft": None, "text_drafts": "on"}, TypeError, 'text_drafts must be "auto", "off"'),
    ({"draft": 5}, TypeError, "draft must be a Drafter, .*got int"),
    ({"draft": tiny_head(tiny_target(vocab_size=40))}, ValueError, "vocabulary size is 40"),
    ({"prompt_lookup_num_tokens": 3}, ValueError, "a method of its own .*prompt_lookup_num_tokens"),
    ({"guidance_scale": 1.5}, ValueError, "Unbatched.* keeps a state"),
    ({"num_beams": 2}, ValueError, "num_beams must be 1"),
    ({"attention_mask": torch.tensor([[1, 0] + [1] * (len(PROMPT) - 2)])}, ValueError, "padded on the left only"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 16)}, ValueError, "inputs_embeds"),
    ({"return_dict_in_generate": True, "output_scores": True}, ValueError, "output_scores"),
    ({"draft_head": 5}, ValueError, "draft_head"),
    ({"assistant_ensemble_weight": 0.7}, ValueError, 'assistant_ensemble_weight=0.7 .*acceptance="fsd"'),
    *(({name: value}, ValueError, f"{name}= needs text_tokenizer=") for name, value in (
        ("reference", "a"), ("fuzzy_within", ("a", "b")), ("response_format", {"type": "json_object"}))),
], ids=lambda value: ", ".join(value) if isinstance(value, dict) else "")
def test_bad_input_is_refused_before_any_forward(ours, monkeypatch, options, error, message):
    def forward(*args, **kwargs):
        raise AssertionError("a forward ran")

    with monkeypatch.context() as context, pytest.raises(error, match=message):
        context.setattr(torch.nn.functional, "embedding", forward)
        ours(**options)
    expected = eagle_fsd.generate(PROMPT, tiny_pair(), max_new_tokens=24, tree=TREE)
    assert ours()[0, len(PROMPT) :].tolist() == expected.token_ids


def test_captured_cycles_serve_later_calls(monkeypatch):
    """With the same drafter; weights and modules may have been replaced, and hooks added since. Graphs and caches of a
    replaced pair are freed at once, before the next pair is made."""
    made = []

    def from_parts(*parts):
        assert not any(pair() for pair in made)
        pair = EagleModel.from_parts(*parts)
        pair.captured = CapturedCycles(pair.target, pair.draft)  # as on CUDA
        made.append(weakref.ref(pair))
        return pair

    monkeypatch.setattr(hf, "EagleModel", SimpleNamespace(from_parts=from_parts))
    def call(target, draft):
        options = {"max_new_tokens": 12, "do_sample": False}
        found = target.generate(IDS, custom_generate=custom_generate, draft=draft, tree=TREE, text_drafts="off",
                                threshold=0.0, **options)
        assert torch.equal(found, target.generate(IDS, **options))
        (home,) = made[-1]().captured._known
        return set(home.pool.programs.values())

    target = tiny_target(tie_word_embeddings=True)
    drafts = [tiny_head(target), small_model(target)]
    with uncollected():
        for number, draft in enumerate(drafts, 1):
            programs = call(target, draft)
            assert programs == call(target, draft) and len(made) == number
        with torch.no_grad():
            target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
        changed = call(target, draft)
        assert not programs & changed and len(made) == 2
        graphs = [weakref.ref(program) for program in changed]
        del programs, changed
        target.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
        call(target, None)
        assert made[-1]().target.vocab_size == VOCAB + 3 and not any(program() for program in graphs)
        target.resize_token_embeddings(VOCAB)
        call(target, None)
        assert made[-1]().target.vocab_size == VOCAB and len(made) == 3
    for copied in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert vars(copied)[hf.ATTRIBUTE] is None
    target.lm_head = torch.nn.Linear(16, VOCAB, bias=False)
    with uncollected():
        call(target, draft)
        target.model.layers[0] = type(target.model.layers[0])(target.config, 0)
        hook = target.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: -output)
        call(target, draft)
        hook.remove()
        call(target, draft)
        assert len(made) == 4
        del target.eagle_fsd_pair
        assert made[-1]() is None
    call(target, draft)
    del target
    gc.collect()
    assert made[-1]() is None


@pytest.mark.parametrize("kind", ["a head", "a small model"])
def test_a_drafter_named_by_its_folder_is_loaded_once(tmp_path, monkeypatch, kind):
    """The model keeps it for later calls with the same name, until another drafter comes or the user deletes it."""
    target = tiny_target()
    small_model(target).save_pretrained(tmp_path / "a small model")
    eagle_fsd.save_head(tiny_head(target), tmp_path / "a head")
    loaded, load_drafter = [], hf.load_drafter
    monkeypatch.setattr(hf, "load_drafter", lambda *args: loaded.append(load_drafter(*args)) or loaded[-1])

    def call(draft):
        options = {"max_new_tokens": 6, "do_sample": False}
        found = target.generate(IDS, custom_generate=custom_generate, draft=draft, tree=TREE, threshold=0.0, **options)
        assert torch.equal(found, target.generate(IDS, **options))
        return len(loaded)

    place = tmp_path / kind
    assert [call(place), call(place), call(str(place)), call(str(place))] == [1, 1, 2, 2]
    del target.eagle_fsd_pair
    assert call(str(place)) == 3
    assert [call(None), call(str(place))] == [3, 4]


def test_calls_from_elsewhere_are_refused(target):
    with pytest.raises(TypeError, match="by generate"):
        custom_generate(target, IDS)
    with pytest.raises(ValueError, match="cannot take an assistant_model as well"):
        custom_generate(target, IDS, assistant_model=target)
    with pytest.raises(ValueError, match="synced_gpus=True"):
        custom_generate(target, IDS, synced_gpus=True)


@pytest.fixture
def hub(pair, target, monkeypatch, tmp_path):
    """`generate` of the target with the folder `hub/` as a repository, whose code is copied to a temporary folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(input_ids=IDS, **options):
        options = {"assistant_model": pair.draft, "threshold": 0.0, "tree": TREE, "max_new_tokens": 24} | options
        return target.generate(input_ids, custom_generate=str(HUB), trust_remote_code=True, **options)

    return call


@pytest.mark.parametrize("options", [
    {"threshold": 0.5, "head_guard": None},
    {"do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 9, "num_return_sequences": 2, "pad_token_id": 0},
    {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.2, do_sample=False)},
    {"logits_processor": [NoRepeatNGramLogitsProcessor(3)], "prefix_allowed_tokens_fn": lambda row, ids: range(4, 30),
     "stopping_criteria": [lambda ids, scores: ids.shape[1] == 20]},
], ids=readable)
def test_a_hub_repository_decodes_as_the_callable_does(ours, hub, options):
    assert torch.equal(hub(**options, revision="main"), ours(**options))


def test_stop_strings_and_streamers_of_a_hub_repository(pair, target, hub, tokenizer):
    free = hub()[0, len(PROMPT) :]
    stop, other = (tokenizer.decode(free[at : at + 2]) for at in (8, 14))
    expected = target.generate(IDS, max_new_tokens=24, stop_strings=stop, tokenizer=tokenizer)
    recorder = Recorder()
    assert torch.equal(hub(stop_strings=stop, tokenizer=tokenizer, streamer=recorder), expected)
    assert recorder.prompt == PROMPT and recorder.tokens == expected[0, len(PROMPT) :].tolist()
    assert recorder.ended == 1 and expected.shape[1] < len(PROMPT) + 24
    config = GenerationConfig(stop_strings=[other], max_new_tokens=24)
    assert torch.equal(hub(generation_config=config, stop=stop, tokenizer=tokenizer), expected)
    with pytest.raises(ValueError, match="`tokenizer` argument"):
        hub(stop_strings=stop)
    target.generate = functools.partial(target.load_custom_generate(str(HUB), trust_remote_code=True), model=target)
    options = {"max_new_tokens": 24, "assistant_model": pair.draft}
    assert target.generate(IDS, custom_generate=None, **options)[0, len(PROMPT) :].equal(free)
    with pytest.raises(ValueError, match="own generate .*got custom_generate="):
        target.generate(IDS, custom_generate=custom_generate, **options)


def test_the_assistant_of_a_hub_repository_drafts(target, hub):
    small = small_model(target, num_hidden_layers=1)
    options = {"acceptance": "fsd_paper", "threshold": 1.0, "tree": TREE, "max_new_tokens": 24}
    expected = eagle_fsd.generate(PROMPT, eagle_fsd.EagleModel.from_parts(target, small), **options).token_ids
    assert hub(assistant_model=small, **options)[0, len(PROMPT) :].tolist() == expected
    assert expected != hub(assistant_model=small)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("options", "message"), [
    ({"draft": 5}, "both name the drafter"),
    ({"assistant_tokenizer": tiny_tokenizer()}, "the target's tokens, got assistant_tokenizer="),
    ({"num_assistant_tokens": 5}, "num_assistant_tokens: .* use tree= instead"),
    ({"assistant_ensemble_weight": 0.7}, 'acceptance="fsd"'),
    ({"prompt_lookup_num_tokens": 3}, "a method of its own"),
    ({"synced_gpus": True}, "synced_gpus=True"),
], ids=lambda value: ", ".join(value) if isinstance(value, dict) else "")
def test_a_hub_repository_refuses_what_it_cannot_do(hub, options, message):
    recorder = Recorder()
    with pytest.raises(ValueError, match=message):
        hub(**options, streamer=recorder)
    assert recorder.ended == 1


def test_the_card_of_the_hub_repository():
    """The hub lists repositories with this tag as methods of `generate`."""
    card = ModelCard.load(HUB / "README.md")
    assert "custom_generate" in card.data.tags and card.data.library_name == "transformers"
