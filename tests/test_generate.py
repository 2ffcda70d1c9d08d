"""The contract of `generate`. V = 32: four special tokens, then letters, a space and a full stop."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import reference_eagle
import torch
from tiny import PROMPT, VOCAB, tiny_pair, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd import GenerateOptions, TreeConfig, make_rule
from eagle_fsd.acceptance.divergence import get_divergence
from eagle_fsd.drafting.sizing import Latency, Sizing
from eagle_fsd.inputs.prompts import encode_prompts
from eagle_fsd.loading.curves import default_curves
from eagle_fsd.loading.pair import EagleModel

TREE = TreeConfig(16, 5, 4)
SAMPLED = {"temperature": 1.0, "seed": 3}


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


CHAT = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(("prompt", "ids", "batch"), [
    ("hi.", [0, 11, 12, 31], False),
    ("<user>hi", [0, 2, 11, 12], False),
    (CHAT, [0, 2, 11, 12, 3, 4, 2, 5, 3], False),
    (tuple(PROMPT), PROMPT, False),
    (torch.tensor(PROMPT), PROMPT, False),
    (torch.IntTensor([PROMPT]), PROMPT, False),
    (["hi"], [0, 11, 12], True),
    ([PROMPT], PROMPT, True),
    ([torch.tensor(PROMPT)], PROMPT, True),
    ([CHAT[:1]], [0, 2, 11, 12, 3], True),
    ({"input_ids": PROMPT}, PROMPT, False),
], ids=str)
def test_forms_of_a_prompt(pair, prompt, ids, batch):
    recorder = Recorder()
    output = generate(pair, prompt, max_new_tokens=1, streamer=recorder)
    assert recorder.prompt == ids and isinstance(output, list) == batch


@pytest.mark.parametrize(("form", "side"), [("pt", "left"), ("pt", "right"), ("np", "left"), (None, None)])
def test_what_a_tokenizer_returns_is_a_prompt(pair, tokenizer, form, side):
    """Padded on either side, or not at all; alone as soon as there is one."""
    texts, side = ["hello world.", "a"], {"padding_side": side} if form else {}
    tokenizer.pad_token = "</s>"
    encoded = tokenizer(texts, return_tensors=form, padding=bool(form), **side)
    found = generate(pair, encoded)
    assert [output.token_ids for output in found] == [output.token_ids for output in generate(pair, texts)]
    assert generate(pair, tokenizer(texts[0], return_tensors=form)).token_ids == found[0].token_ids
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True, add_generation_prompt=True, return_tensors=form)
    assert generate(pair, chat).token_ids == generate(pair, CHAT).token_ids


def test_padding_elsewhere_and_other_inputs_are_refused(pair):
    ids = torch.tensor([PROMPT])
    for mask in ([0, 1, 0] + [1] * 9, [2] * 12, [0] * 12, [1] * 5):
        with pytest.raises(ValueError, match="for padding before or after the tokens|is empty"):
            generate(pair, {"input_ids": ids, "attention_mask": torch.tensor([mask])})
    with pytest.raises(ValueError, match="2 rows of input_ids have 1 rows of attention_mask"):
        generate(pair, {"input_ids": [PROMPT, PROMPT], "attention_mask": [[1] * len(PROMPT)]})
    with pytest.raises(ValueError, match="input_ids and attention_mask.* got pixel_values"):
        generate(pair, {"input_ids": ids, "pixel_values": 0})


def test_without_a_tokenizer_only_ids_work():
    pair = tiny_pair()
    assert generate(pair).text is None
    for options, message in (({"prompt": "hi"}, "pass the prompt as token ids"), ({"prompt": CHAT}, "as token ids"),
                             ({"stop": "a"}, "stop needs a tokenizer")):
        with pytest.raises(ValueError, match=message):
            generate(pair, **options)


def test_no_model_means_the_default_pair(pair, monkeypatch):
    monkeypatch.setattr(eagle_fsd.api, "default_model", lambda: pair)
    assert eagle_fsd.generate(PROMPT, max_new_tokens=24, tree=TREE).token_ids == generate(pair).token_ids


@pytest.mark.parametrize(("template", "texts"), [
    ("<s> $A", {"ab": [0, 4, 5], "<s>ab": [0, 4, 5], "<s><s>ab": [0, 0, 4, 5], "<s>": [0], "</s>ab": [0, 1, 4, 5]}),
    ("<user> <s> $A", {"ab": [2, 0, 4, 5], "<user><s>ab": [2, 0, 4, 5], "<s>ab": [2, 0, 0, 4, 5], "<user>": [2, 0, 2]}),
    ("<s> $A </s>", {"ab": [0, 4, 5, 1], "<s>ab": [0, 4, 5, 1]}),
    ("$A", {"ab": [4, 5], "<s>ab": [0, 4, 5], "<s><s>": [0, 0]}),
])
def test_a_text_that_begins_as_its_tokenizer_begins_texts_gets_no_second_beginning(template, texts):
    """As what a chat template has rendered."""
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    special = [(name, pair.tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>", "<user>")]
    pair.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    assert encode_prompts(list(texts), pair) == (list(texts.values()), True)
    rendered = pair.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    if template == "<s> $A":
        assert encode_prompts(rendered, pair) == encode_prompts(CHAT, pair)


# Ends


def test_the_limit_is_never_exceeded(pair):
    answer = generate(pair).token_ids
    for limit in range(1, 16):
        output = generate(pair, max_new_tokens=limit)
        assert output.token_ids == answer[:limit] and output.finish_reason == "length"


def test_the_last_position_of_the_target_is_the_limit(caplog):
    output = generate(tiny_pair(max_position_embeddings=20), max_new_tokens=10**30)
    assert len(output.token_ids) == 20 - len(PROMPT) and output.finish_reason == "length"
    assert "to the 8 free positions" in caplog.text


def test_ends_inside_an_accepted_path(pair, tokenizer):
    free = generate(pair, **SAMPLED)
    index = first_inside_a_path(free)
    end, seen = free.token_ids[index], []
    stop = tokenizer.decode(free.token_ids[index - 1 : index + 1])

    def reached(input_ids, scores, **kwargs):
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] == len(PROMPT) + index + 1])

    config = pair.target.model.generation_config
    for eos, options in (
        (end, {}), ([VOCAB - 1, end], {}), (None, {"stop_token_ids": [end, VOCAB - 1]}), (None, {"stop": stop}),
        (None, {"stop": ["zzz", stop]}), (None, {"stopping_criteria": [reached]}),
    ):
        config.eos_token_id, recorder = eos, Recorder()
        output = generate(pair, **SAMPLED, **options, streamer=recorder)
        assert output.token_ids == recorder.tokens == free.token_ids[: index + 1]
        assert output.finish_reason == ("stop" if eos is None else "eos")
        assert len(output.receipts) == output.stats.new_tokens == index + 1
        cycles = output.stats.target_forwards
        assert output.stats.accepted_lengths == free.stats.accepted_lengths[:cycles]  # before the cut
        assert 1 + sum(output.stats.accepted_lengths) + cycles > index + 1
        if "stop" in options:
            assert free.text.startswith(output.text + stop) and stop not in output.text
    assert seen == [PROMPT + output.token_ids[:count] for count in range(1, index + 2)]
    config.eos_token_id = end
    assert generate(pair, **SAMPLED, ignore_eos=True).token_ids == free.token_ids


# Options, rules, seeds


def test_options_by_object_and_by_name(pair):
    options = GenerateOptions(max_new_tokens=24, tree=TREE, temperature=1.0, seed=7, threshold=0.3)
    assert eagle_fsd.generate(PROMPT, pair, options=options).token_ids == generate(
        pair, temperature=1.0, seed=7, threshold=0.3).token_ids
    output = eagle_fsd.generate(PROMPT, pair, options=options, temperature=0.0, threshold=0.0)
    assert output.token_ids == stock_greedy(pair) and output.seed == 7
    assert eagle_fsd.generate(PROMPT, pair, options=options, seed=8).token_ids == eagle_fsd.generate(
        PROMPT, pair, options=replace(options, seed=8)).token_ids


def test_a_function_as_rule(pair):
    expected, sizes = generate(pair, acceptance="exact", **SAMPLED).token_ids, set()

    def rule(nodes):
        sizes.add((nodes.warped.shape, nodes.tokens.shape, nodes.draft_logits.shape))
        return nodes.warped[0]

    assert generate(pair, acceptance=rule, threshold=None, **SAMPLED).token_ids == expected
    assert sizes == {((1, VOCAB), (1, 16), (1, VOCAB))}

def test_rule_objects(pair):
    by_name = generate(pair, threshold=0.3, divergence="tv").token_ids
    assert generate(pair, acceptance=make_rule("fsd", 0.3, "tv"), threshold=None).token_ids == by_name
    assert generate(pair, acceptance=make_rule("fsd", 0.9), threshold=0.3, divergence="tv").token_ids == by_name
    free = generate(pair, threshold=math.inf, head_guard=None).token_ids
    assert generate(pair, acceptance=make_rule("fsd", math.inf, head_guard=None), threshold=None).token_ids == free
    assert generate(pair, threshold=math.inf, head_guard=0.0).token_ids == stock_greedy(pair) != free


def test_seeds(pair):
    first = generate(pair, temperature=1.0, seed=7)
    assert generate(pair, temperature=1.0, seed=7).token_ids == first.token_ids and first.seed == 7
    assert generate(pair, temperature=1.0, seed=8).token_ids != first.token_ids
    drawn = generate(pair, temperature=1.0)
    assert generate(pair, temperature=1.0, seed=drawn.seed).token_ids == drawn.token_ids
    assert generate(pair, temperature=1.0).seed != drawn.seed


# Statistics and receipts


def target_logits(pair, output):
    """The target's raw logits for every new token, from one fresh forward."""
    with torch.no_grad():
        return pair.target.model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]


@pytest.mark.parametrize("options", [
    {"acceptance": "exact"},
    {"threshold": 0.25, "temperature": 0.8, "top_k": 20, "seed": 5, "repetition_penalty": 1.1},
    {"acceptance": "relaxed", "threshold": 1.0},
], ids=str)
def test_statistics_and_receipts(pair, options):
    output = generate(pair, **options)
    stats, lengths = output.stats, output.stats.accepted_lengths
    assert (stats.new_tokens, stats.prefill_tokens, stats.target_forwards) == (24, len(PROMPT), len(lengths))
    assert stats.mean_accepted_length == pytest.approx(1 + sum(lengths) / len(lengths))
    assert stats.tokens_per_second == pytest.approx(24 / (stats.prefill_seconds + stats.decode_seconds))
    for receipt, token, row in zip(output.receipts, output.token_ids, target_logits(pair, output), strict=True):
        assert receipt.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-4)
        assert receipt.regret == pytest.approx((row.max() - row[token]).item(), abs=1e-4)
        if options.get("temperature", 0) == 0 and receipt.source != "target":
            assert (receipt.source == "exact") == (token == row.argmax())
    emitted = ["target"]  # the prefill's token, then each cycle's
    for length in lengths:
        emitted += ["draft"] * length + ["target"]
    sources = [receipt.source for receipt in output.receipts]
    assert ["target" if source == "target" else "draft" for source in sources] == emitted[:24]
    assert set(sources) == {"target", "exact"} | ({"fuzzy"} if options.get("acceptance") != "exact" else set())


def test_receipts_give_divergences_where_the_rule_gates_on_them(pair):
    output = generate(pair, divergence="kl", threshold=1.0, head_guard=None)
    steps = [receipt for receipt in output.receipts if receipt.source == "fuzzy"]
    assert steps and all(receipt.divergence <= 1.0 for receipt in steps)
    # The first token of each cycle was drafted from target features alone: recompute its divergence.
    tokens, logits, index, compared = PROMPT + output.token_ids, target_logits(pair, output), 1, 0
    for length in output.stats.accepted_lengths:
        given = output.receipts[index].divergence if index < 24 else None
        if given is not None:  # where a child might have been taken that the target would not draw
            with torch.no_grad():
                features = reference_eagle.forward(pair.target.model, tokens[: len(PROMPT) + index - 1])[0]
                drafted = reference_eagle.predict(pair.draft, list(features), tokens[1 : len(PROMPT) + index])
                expected = get_divergence("kl")(logits[index], pair.target.logits(drafted))
            assert given == pytest.approx(expected.item(), abs=1e-4)
            compared += 1
        index += length + 1
    assert compared
    assert all(receipt.divergence is None for receipt in generate(pair, acceptance="exact").receipts)


def test_a_streamer_gets_receipts_and_tokens_as_they_come(pair):
    class Receipts(Recorder):
        receipts = ()

        def on_receipts(self, receipts):
            assert len(self.receipts) == len(self.tokens)
            self.receipts = [*self.receipts, *receipts]

    for options in ({}, {"threshold": 0.3}, {"max_new_tokens": 7}):
        streamer = Receipts()
        output = generate(pair, streamer=streamer, **options)
        assert streamer.values[0].shape == (1, len(PROMPT)) and streamer.prompt == PROMPT
        assert (streamer.tokens, streamer.receipts) == (output.token_ids, output.receipts) and streamer.ended == 1
        assert len(streamer.values) == 2 + output.stats.target_forwards


@pytest.mark.parametrize("kind", ["reduced vocabulary", "shared embeddings", "trees"])
def test_a_model_can_be_copied_and_pickled(kind):
    """And the copy shares nothing with it."""
    pair, tree = tiny_pair(), TREE
    if kind == "reduced vocabulary":
        pair.draft.limit_vocabulary(torch.arange(3, 25))
        pair = EagleModel.from_parts(pair.target.model, pair.draft)
    if kind == "shared embeddings":
        pair.draft.share_embeddings(pair.target.embed_tokens)
    if kind == "trees":
        latency = Latency({1: 1.0, 2: 1.1}, {1: 0.1}, 1.0)
        pair.sizing, tree = Sizing(latency, default_curves()), None
    expected = generate(pair, tree=tree)
    if pair.sizing is not None:
        pair.sizing.pauses.clear()
    copies = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))
    with torch.no_grad():
        for weight in {*pair.target.model.parameters(), *pair.draft.parameters()}:
            weight.zero_()
    for found in copies:
        if kind == "reduced vocabulary":
            assert found.draft.output_rows.copied_from(found.target.lm_head)
        output = generate(found, tree=tree)
        assert output.token_ids == expected.token_ids
        assert output.stats.accepted_lengths == expected.stats.accepted_lengths
