"""The contract of `generate`. V = 32: four special tokens, then letters, a space and a full stop."""

import copy
import logging
import math
import pickle

import pytest
import reference_eagle
import torch
from tiny import PROMPT, VOCAB, tiny_pair, tiny_target
from transformers import LogitsProcessor, TextIteratorStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd import Decision, TreeConfig, make_rule
from eagle_fsd.acceptance.divergence import get_divergence
from eagle_fsd.drafting.choice import AutoTree
from eagle_fsd.drafting.latency import Latency
from eagle_fsd.measure.calibrations import Calibration
from eagle_fsd.pair import EagleModel

TREE = TreeConfig(16, 5, 4)


def generate(pair, prompt=PROMPT, **options):
    return eagle_fsd.generate(prompt, pair, **{"max_new_tokens": 24, "tree": TREE, "threshold": 0.0} | options)


def stock_greedy(pair, max_new_tokens=24, **options):
    ids = torch.tensor([PROMPT])
    output = pair.target.model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **options)
    return output[0, len(PROMPT) :].tolist()


class Recorder(BaseStreamer):
    """Keeps what a streamer is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1

    @property
    def prompt(self):
        return self.values[0].flatten().tolist()

    @property
    def tokens(self):
        return [token for value in self.values[1:] for token in value.tolist()]


def first_inside_a_path(output):
    """Index of a token that occurs for the first time, as an accepted draft token with another one after it."""
    start = 1  # the prefill emits one token
    for length in output.stats.accepted_lengths:
        for index in range(start, start + length - 1):
            if output.token_ids[index] not in output.token_ids[:index] + [0, 1, 2, 3]:
                return index
        start += length + 1
    raise AssertionError("no such token: choose another seed")


# Prompts


def prompt_given(pair, prompt):
    """Token ids that the model is given for a prompt, and whether the result is a list."""
    recorder = Recorder()
    output = generate(pair, prompt, max_new_tokens=1, streamer=recorder)
    return recorder.prompt, isinstance(output, list)


def test_text_is_tokenised_as_it_is(pair, tokenizer):
    assert prompt_given(pair, "hello world.") == (tokenizer("hello world.")["input_ids"], False)
    assert prompt_given(pair, "<user>hi") == ([0, 2, 11, 12], False)


def test_a_chat_goes_through_the_template(pair, tokenizer):
    chat = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(prompt_given(pair, chat)[0]) == "<s><user>hi<bot>a<user>b<bot>"


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, torch.IntTensor, lambda ids: torch.tensor([ids])])
def test_token_ids(pair, form):
    prompt = form(PROMPT)
    assert prompt_given(pair, prompt) == (PROMPT, False)


@pytest.mark.parametrize(
    ("batch", "ids"),
    [
        (["hi"], [0, 11, 12]),
        ([PROMPT], PROMPT),
        ([torch.tensor(PROMPT)], PROMPT),
        ([[{"role": "user", "content": "hi"}]], [0, 2, 11, 12, 3]),
    ],
    ids=str,
)
def test_a_batch_of_one_gives_a_list_of_one(pair, batch, ids):
    assert prompt_given(pair, batch) == (ids, True)


def test_without_a_tokenizer_only_ids_work():
    pair = tiny_pair()
    output = generate(pair)
    assert output.text is None and len(output.token_ids) == 24
    for options in ({"prompt": "hi"}, {"prompt": [{"role": "user", "content": "hi"}]}, {"stop": "a"}):
        with pytest.raises(ValueError, match="no tokenizer"):
            generate(pair, **options)


def test_no_model_means_the_default_pair(pair, monkeypatch):
    monkeypatch.setattr(eagle_fsd.api, "default_model", lambda: pair)
    expected = generate(pair).token_ids
    assert eagle_fsd.generate(PROMPT, max_new_tokens=24, tree=TREE, threshold=0.0).token_ids == expected


# Ends


def test_the_limit_is_never_exceeded(pair):
    answer = generate(pair).token_ids
    assert len(answer) == 24
    for limit in range(1, 16):
        output = generate(pair, max_new_tokens=limit)
        assert output.token_ids == answer[:limit]
        assert output.finish_reason == "length"


def test_the_last_position_of_the_target_is_the_limit(caplog):
    pair = tiny_pair(max_position_embeddings=20)
    with caplog.at_level(logging.WARNING):
        output = generate(pair)
    assert len(output.token_ids) == 20 - len(PROMPT) and output.finish_reason == "length"
    assert "lowered from 24 to the 8 positions left" in caplog.text


SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.mark.parametrize("ends", ["number", "list"])
def test_an_end_token_inside_an_accepted_path(pair, ends):
    free = generate(pair, **SAMPLED)
    index = first_inside_a_path(free)
    end = free.token_ids[index]
    pair.target.model.generation_config.eos_token_id = end if ends == "number" else [VOCAB - 1, end]
    recorder = Recorder()
    output = generate(pair, **SAMPLED, streamer=recorder)
    assert output.token_ids == recorder.tokens == free.token_ids[: index + 1]
    assert output.finish_reason == "eos"
    assert len(output.receipts) == output.stats.new_tokens == index + 1
    cycles = output.stats.target_forwards
    assert output.stats.accepted_lengths == free.stats.accepted_lengths[:cycles]  # before the cut
    assert 1 + sum(output.stats.accepted_lengths) + cycles > index + 1
    assert generate(pair, **SAMPLED, ignore_eos=True).token_ids == free.token_ids


def test_a_stop_token_inside_an_accepted_path(pair):
    free = generate(pair, **SAMPLED)
    index = first_inside_a_path(free)
    output = generate(pair, **SAMPLED, stop_token_ids=[free.token_ids[index], VOCAB - 1])
    assert output.token_ids == free.token_ids[: index + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_inside_an_accepted_path(pair, tokenizer, as_list):
    free = generate(pair, **SAMPLED)
    index = first_inside_a_path(free)
    stop = tokenizer.decode(free.token_ids[index - 1 : index + 1])
    output = generate(pair, **SAMPLED, stop=["zzz", stop] if as_list else stop)
    assert output.token_ids == free.token_ids[: index + 1]
    assert output.finish_reason == "stop"
    assert len(stop) == 2 and free.text.startswith(output.text + stop) and stop not in output.text


def test_text_is_the_decoded_answer(pair, tokenizer):
    output = generate(pair)
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_min_new_tokens_holds_the_end_back(pair):
    end = generate(pair).token_ids[4]
    pair.target.model.generation_config.eos_token_id = end
    assert len(generate(pair).token_ids) <= 5
    for least in (7, 15):
        output = generate(pair, min_new_tokens=least)
        assert output.token_ids == stock_greedy(pair, min_new_tokens=least, pad_token_id=0)
        assert end not in output.token_ids[:least]


# Processors, criteria, rules, seeds


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_repetition_penalty_equals_the_stock_one(pair, penalty):
    output = generate(pair, repetition_penalty=penalty)
    assert output.token_ids == stock_greedy(pair, repetition_penalty=penalty) != generate(pair).token_ids
    assert sum(output.stats.accepted_lengths) > 0


def test_logits_processors_see_the_path(pair):
    processors = [NoRepeatNGramLogitsProcessor(2)]
    output = generate(pair, logits_processor=processors)
    assert output.token_ids == stock_greedy(pair, logits_processor=processors) != generate(pair).token_ids
    assert sum(output.stats.accepted_lengths) > 0


def test_a_processor_that_bans_tokens_also_binds_fuzzy_steps(pair):
    free = generate(pair, threshold=math.inf)
    banned = {token for token in free.token_ids if token % 2}
    assert banned

    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.tensor(sorted(banned)), -math.inf)

    for temperature in (0.0, 1.0):
        output = generate(pair, threshold=math.inf, logits_processor=[Ban()], temperature=temperature, seed=1)
        assert not banned & set(output.token_ids)


def test_stopping_criteria_inside_an_accepted_path(pair):
    free = generate(pair, **SAMPLED)
    index = first_inside_a_path(free)
    seen = []

    def reached(input_ids, scores, **kwargs):
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] == len(PROMPT) + index + 1])

    output = generate(pair, **SAMPLED, stopping_criteria=[reached])
    assert output.token_ids == free.token_ids[: index + 1]
    assert output.finish_reason == "stop"
    assert seen == [PROMPT + output.token_ids[:count] for count in range(1, index + 2)]


def test_a_function_as_rule(pair):
    expected = generate(pair, acceptance="exact", **SAMPLED).token_ids
    sizes = []

    def rule(verification):
        sizes.append((verification.tree.tokens.shape, verification.draft_logits.shape))
        return verification.warped_logits

    assert generate(pair, acceptance=rule, threshold=None, **SAMPLED).token_ids == expected
    assert set(sizes) == {((1, 16), (1, 17, VOCAB))}
    decide = make_rule("fsd", 0.3)
    output = generate(pair, acceptance=lambda v: Decision(decide(v).log_weights), threshold=None, **SAMPLED)
    assert output.token_ids == generate(pair, threshold=0.3, **SAMPLED).token_ids != expected


def test_rule_objects(pair):
    by_name = generate(pair, threshold=0.3, divergence="tv")
    assert generate(pair, acceptance=make_rule("fsd", 0.3, "tv"), threshold=None).token_ids == by_name.token_ids
    assert generate(pair, acceptance=make_rule("fsd", 0.9, "tv"), threshold=0.3).token_ids == by_name.token_ids
    rule = make_rule("fsd", 0.3)
    assert generate(pair, acceptance=rule, threshold=None, divergence="tv").token_ids == by_name.token_ids


@pytest.mark.parametrize("rule", ["fsd_paper", "tilt", "typical", "lenience", "relaxed"])
def test_every_rule_decodes_by_name(pair, rule):
    for temperature in (0.0, 1.0):
        output = generate(pair, acceptance=rule, threshold=0.9, temperature=temperature, seed=5)
        assert len(output.token_ids) == 24


def test_a_loose_threshold_accepts_more(pair):
    lengths = [generate(pair, threshold=t).stats.mean_accepted_length for t in (0.0, 0.2, math.inf)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_seeds(pair):
    first = generate(pair, temperature=1.0, seed=7)
    assert generate(pair, temperature=1.0, seed=7).token_ids == first.token_ids and first.seed == 7
    assert generate(pair, temperature=1.0, seed=8).token_ids != first.token_ids
    drawn = generate(pair, temperature=1.0)
    assert generate(pair, temperature=1.0, seed=drawn.seed).token_ids == drawn.token_ids
    assert generate(pair, temperature=1.0).seed != drawn.seed


def test_without_a_threshold_decoding_is_lossless_and_says_so(pair, caplog):
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        output = generate(pair, threshold=None)
    assert "lossless" in caplog.text
    assert output.token_ids == stock_greedy(pair)


def test_without_a_threshold_the_calibrated_one_is_used(pair, caplog):
    circumstances = pair._circumstances(0.0, None)
    pair.calibrations = [
        Calibration(promise, {"rule": "fsd", "threshold": threshold}, prompts="p", answers=300, measured={}, curve=[],
                    **circumstances)
        for promise, threshold in (("accuracy_drop<=5%", 0.6), ("accuracy_drop<=1%", 0.3), ("diverging<=1%", 0.1))
    ]
    with caplog.at_level(logging.INFO, logger="eagle_fsd"):
        output = generate(pair, threshold=None, tree=None)
    assert "lossless" not in caplog.text
    assert output.token_ids == generate(pair, threshold=0.3, tree=None).token_ids
    assert output.token_ids != generate(pair, tree=None).token_ids
    # Only where it was calibrated: not for another divergence, temperature or tree.
    for options in ({"divergence": "tv"}, {"temperature": 1.0, "seed": 3}, {"tree": TreeConfig(6, 3, 2)}):
        given = {"tree": None, **options}
        assert generate(pair, threshold=None, **given).token_ids == generate(pair, threshold=0.0, **given).token_ids
    # Nor where more than the temperature shapes the distribution.
    for options in ({"repetition_penalty": 1.1}, {"logits_processor": [lambda ids, scores: scores * 1.1]}):
        given = {"tree": None, **options}
        assert generate(pair, threshold=None, **given).token_ids == generate(pair, threshold=0.0, **given).token_ids
        assert generate(pair, threshold=0.3, **given).token_ids != generate(pair, threshold=0.0, **given).token_ids
    pair.calibrations = []


def test_a_tree_larger_than_can_be_scored_is_clamped_with_a_warning(pair, caplog):
    with caplog.at_level(logging.WARNING, logger="eagle_fsd"):
        output = generate(pair, tree=TreeConfig(50, 2, 3))
    assert "lowered from 50 to 13" in caplog.text
    assert output.token_ids == stock_greedy(pair)


# Statistics and receipts


@pytest.mark.parametrize("options", [{}, {"threshold": 0.3}, SAMPLED], ids=str)
def test_statistics(pair, options):
    stats = generate(pair, **options).stats
    assert stats.new_tokens == 24
    assert stats.target_forwards == len(stats.accepted_lengths)
    emitted = 1 + sum(length + 1 for length in stats.accepted_lengths)  # the prefill's token, then each cycle's
    assert emitted - stats.accepted_lengths[-1] <= 24 <= emitted
    assert stats.mean_accepted_length == pytest.approx((emitted - 1) / stats.target_forwards)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.tokens_per_second == pytest.approx(24 / (stats.prefill_seconds + stats.decode_seconds))


def target_logits(pair, output):
    """The target's raw logits for every new token, from one fresh forward."""
    with torch.no_grad():
        logits = pair.target.model(torch.tensor([PROMPT + output.token_ids])).logits[0]
    return logits[len(PROMPT) - 1 : -1]


RECEIPT_SETTINGS = [
    {"acceptance": "exact"},
    {"acceptance": "fsd", "threshold": 0.25},
    {"acceptance": "fsd", "threshold": 0.25, "temperature": 0.8, "top_k": 20, "seed": 5, "repetition_penalty": 1.1},
    {"acceptance": "tilt", "threshold": 1.0},
]


@pytest.mark.parametrize("options", RECEIPT_SETTINGS, ids=str)
def test_receipts_give_sources_and_log_probabilities(pair, options):
    output = generate(pair, **options)
    assert len(output.receipts) == 24
    logits = target_logits(pair, output)
    for receipt, token, row in zip(output.receipts, output.token_ids, logits, strict=True):
        assert receipt.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-4)
        if options.get("temperature", 0) == 0 and receipt.source != "target":
            assert (receipt.source == "exact") == (token == row.argmax())
    emitted = ["target"]
    for length in output.stats.accepted_lengths:
        emitted += ["draft"] * length + ["target"]
    sources = [receipt.source for receipt in output.receipts]
    assert ["target" if source == "target" else "draft" for source in sources] == emitted[:24]
    fuzzy = options["acceptance"] != "exact"
    assert set(sources) == ({"target", "exact", "fuzzy"} if fuzzy else {"target", "exact"})


@pytest.mark.parametrize(("name", "threshold"), [("js", 0.15), ("kl", 1.0), ("tv_top3", 0.45)])
def test_receipts_give_divergences_where_the_rule_gates_on_them(pair, name, threshold):
    output = generate(pair, divergence=name, threshold=threshold)
    steps = [receipt for receipt in output.receipts if receipt.source != "target"]
    assert all(receipt.divergence <= threshold for receipt in steps if receipt.source == "fuzzy")
    assert any(receipt.divergence > threshold for receipt in steps)
    assert any(receipt.source == "fuzzy" for receipt in steps)
    assert output.receipts[0].divergence is None  # the prefill drafts nothing
    # The first token of each cycle was drafted from target features alone: recompute its divergence.
    tokens, logits = PROMPT + output.token_ids, target_logits(pair, output)
    index = 1
    for length in output.stats.accepted_lengths[:4]:
        with torch.no_grad():
            features = reference_eagle.forward(pair.target.model, tokens[: len(PROMPT) + index - 1])[0]
            drafted = reference_eagle.predict(pair.draft, list(features), tokens[1 : len(PROMPT) + index])
            expected = get_divergence(name)(logits[index], pair.target.logits(drafted))
        assert output.receipts[index].divergence == pytest.approx(expected.item(), abs=1e-4)
        index += length + 1
    assert all(receipt.divergence is None for receipt in generate(pair, acceptance="exact").receipts)


# Streaming


@pytest.mark.parametrize("options", [{}, {"threshold": 0.3}, {"max_new_tokens": 7}, {"stop": "a"}], ids=str)
def test_a_streamer_gets_exactly_the_tokens(pair, options):
    recorder = Recorder()
    output = generate(pair, streamer=recorder, **options)
    assert recorder.values[0].shape == (1, len(PROMPT)) and recorder.prompt == PROMPT
    assert recorder.tokens == output.token_ids
    assert recorder.ended == 1
    assert len(recorder.values) == 2 + output.stats.target_forwards  # as they come, not all at the end


def test_a_streamer_of_transformers(pair, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=5)
    output = generate(pair, streamer=streamer)
    assert "".join(streamer) == output.text


def test_a_streamer_that_wants_receipts_gets_them_before_their_tokens(pair):
    class Receipts(Recorder):
        receipts = ()

        def on_receipts(self, receipts):
            assert len(self.receipts) == len(self.tokens)
            self.receipts = [*self.receipts, *receipts]

    streamer = Receipts()
    output = generate(pair, streamer=streamer)
    assert streamer.receipts == output.receipts


# Errors

CHAT = [{"role": "user", "content": "hi"}]
BAD = [
    # prompts
    ({"prompt": []}, ValueError, "empty"),
    ({"prompt": [[]]}, ValueError, "empty"),
    ({"prompt": torch.tensor([]).long()}, ValueError, "empty"),
    ({"prompt": None}, TypeError, "NoneType"),
    ({"prompt": 7}, TypeError, "int"),
    ({"prompt": [1, "a"]}, TypeError, "mixture"),
    ({"prompt": [1.5]}, TypeError, "token ids"),
    ({"prompt": [True, False]}, TypeError, "token ids"),
    ({"prompt": torch.tensor([1.0])}, ValueError, "integer"),
    ({"prompt": torch.tensor([True])}, ValueError, "integer"),
    ({"prompt": torch.ones(1, 1, 3).long()}, ValueError, r"\[1, 1, 3\]"),
    ({"prompt": [3, VOCAB]}, ValueError, f"token id {VOCAB}"),
    ({"prompt": [-1]}, ValueError, "token id -1"),
    ({"prompt": [1] * 128}, ValueError, "128 tokens.*at most 127"),
    ({"prompt": [{"role": "user"}]}, ValueError, "content"),
    ({"prompt": [{"role": "user", "text": "hi"}]}, ValueError, "content"),
    ({"prompt": [{"role": "user", "content": 7}]}, ValueError, "content"),
    ({"prompt": [*CHAT, "hi"]}, TypeError, "mixture"),
    # options
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens"),
    ({"temperature": -0.1}, ValueError, "temperature"),
    ({"temperature": math.nan}, ValueError, "temperature"),
    ({"temperature": "hot"}, ValueError, "temperature"),
    ({"top_p": 0}, ValueError, "top_p"),
    ({"top_p": 1.5}, ValueError, "top_p"),
    ({"top_k": -1}, ValueError, "top_k"),
    ({"top_k": 1.5}, TypeError, "top_k"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty"),
    ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
    ({"seed": -1}, ValueError, "seed"),
    ({"seed": "x"}, TypeError, "seed"),
    ({"stop": ""}, ValueError, "stop"),
    ({"stop": ["a", 7]}, ValueError, "stop"),
    ({"stop_token_ids": 7}, TypeError, "stop_token_ids"),
    ({"stop_token_ids": "ab"}, TypeError, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids"),
    ({"stop_token_ids": [VOCAB]}, ValueError, f"token id {VOCAB}"),
    ({"acceptance": "greedy"}, ValueError, "greedy.*accepted: exact, fsd"),
    ({"acceptance": 7}, TypeError, "rule"),
    ({"threshold": -0.1}, ValueError, "threshold"),
    ({"threshold": math.nan}, ValueError, "threshold"),
    ({"threshold": "high"}, TypeError, "threshold"),
    ({"acceptance": "exact", "threshold": 0.1}, ValueError, "threshold"),
    ({"acceptance": "typical", "threshold": 1.0}, ValueError, "threshold"),
    ({"acceptance": lambda v: v.warped_logits, "threshold": 0.1}, ValueError, "no options"),
    ({"divergence": "euclid"}, ValueError, "euclid.*accepted: kl"),
    ({"tree": (16, 5, 4)}, TypeError, "TreeConfig"),
    ({"tree": TreeConfig(16, 5, VOCAB + 1)}, ValueError, "top_k 33.*32"),
    ({"speed": 1}, TypeError, "speed"),
    ({"quality": 1, "threshold": None}, TypeError, "a promise is a string"),
    ({"quality": "fast", "threshold": None}, ValueError, "is no promise"),
    ({"budget": -1}, ValueError, "budget"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_input_is_refused_before_any_forward(pair, monkeypatch, options, error, message):
    def forward(*args, **kwargs):
        raise AssertionError("a forward ran")

    monkeypatch.setattr(pair.target.decoder, "forward", forward)
    monkeypatch.setattr(pair.draft, "forward", forward)
    with pytest.raises(error, match=message):
        generate(pair, **options)


def test_a_bare_model_is_refused():
    with pytest.raises(TypeError, match="eagle_fsd.load.*LlamaForCausalLM"):
        eagle_fsd.generate(PROMPT, tiny_target())


def test_a_chat_without_a_template_is_refused(pair, tokenizer):
    bare = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        generate(EagleModel.from_parts(pair.target.model, pair.draft, bare), CHAT)


def test_a_rule_function_that_returns_something_else_is_refused(pair):
    with pytest.raises(TypeError, match="Decision or a Tensor"):
        generate(pair, acceptance=lambda v: None, threshold=None)
    with pytest.raises(ValueError, match="log-weights of shape"):
        generate(pair, acceptance=lambda v: v.warped_logits[:, 0], threshold=None)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
                         ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["plain", "reduced vocabulary", "shared embeddings", "trees"])
def test_a_model_can_be_copied_and_pickled(again, kind):
    """And the copy shares nothing with it."""
    pair, tree = tiny_pair(), TREE
    if kind == "reduced vocabulary":
        pair.draft.limit_vocabulary(torch.arange(3, 25))
        pair = EagleModel.from_parts(pair.target.model, pair.draft)
    if kind == "shared embeddings":
        pair.draft.share_embeddings(pair.target.embed_tokens)
    if kind == "trees":
        pair.trees, tree = AutoTree([], Latency({1: 1.0, 2: 1.1}, {1: 0.1}, 1.0), stopping=True), None
    expected = generate(pair, tree=tree)
    pair.pauses.clear()
    found = again(pair)
    if kind == "reduced vocabulary":
        assert found.draft.output_rows.belong_to(found.target.lm_head.weight)
    with torch.no_grad():
        for weight in {*pair.target.model.parameters(), *pair.draft.parameters()}:
            weight.zero_()
    output = generate(found, tree=tree)
    assert output.token_ids == expected.token_ids
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths
