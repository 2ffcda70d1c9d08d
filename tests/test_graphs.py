"""Cycles of static shapes: the tokens of ordinary ones. V = 32 vocabulary.

CUDA graphs of them are captured where there is a GPU; everywhere else their functions are called.
"""

import logging

import pytest
import torch
from test_eagle3 import NAMED, deep_target, good_head
from tiny import PROMPT, tiny_pair
from transformers.generation.streamers import BaseStreamer

import eagle_fsd
from eagle_fsd import EagleModel, TreeConfig, make_rule
from eagle_fsd.drafting.latency import Latency
from eagle_fsd.drafting.machine import known_latency
from eagle_fsd.drafting.measuring import greedy_decoder, measure
from eagle_fsd.engine import graphs
from eagle_fsd.engine.graphs import MOST_NODES, GraphCycles, bucket_of

TREES = [TreeConfig(16, 5, 4), TreeConfig(6, 5, 1), TreeConfig(4, 1, 3), None]
NAMES = {"drafting": "_draft", "verifying": "_verify"}  # of the phases' functions


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Texts of these tests outgrow several."""
    monkeypatch.setattr(graphs, "LEAST", 16)


def with_cycles(pair: EagleModel, max_length: int = 96, capture: bool = False) -> EagleModel:
    own = EagleModel(pair.target, pair.draft, pair.tokenizer)
    own.graphs = GraphCycles(pair.target, pair.draft, max_length, capture=capture)
    return own


def same(pair, static, prompt=PROMPT, **options):
    """Both decode alike; returns the output of the one with static cycles."""
    options = {"max_new_tokens": 40, "acceptance": "exact"} | options
    expected, found = (eagle_fsd.generate(prompt, model, **options) for model in (pair, static))
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted_lengths == expected.stats.accepted_lengths
    for ours, theirs in zip(found.receipts, expected.receipts, strict=True):
        assert ours.source == theirs.source and ours.divergence == pytest.approx(theirs.divergence, abs=1e-4)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    return found


def test_buckets_grow_by_a_half_and_a_third():
    assert [bucket_of(length) for length in (1, 16, 17, 24, 25, 33, 49, 65)] == [16, 16, 24, 24, 32, 48, 64, 96]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window", "qwen3", "ministral"])
def test_tokens_are_those_of_ordinary_cycles(family, tree):
    pair = tiny_pair(family)
    if tree is None:
        pair = EagleModel(pair.target, None)
    static = with_cycles(pair)
    for prompt in (PROMPT, PROMPT[:1], PROMPT * 3):
        found = same(pair, static, prompt, tree=tree)
    assert len({place for _, _, place in static.graphs.cycles}) > 3
    assert tree is None or sum(found.stats.accepted_lengths) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["exact", "fsd", "tilt", "lenience"])
def test_rules_and_sampling(rule, temperature):
    pair = tiny_pair()
    static, options = with_cycles(pair), {"temperature": temperature, "seed": 3, "tree": TREES[0]}
    same(pair, static, acceptance=rule, threshold=None if rule == "exact" else 0.5, **options)
    same(pair, static, acceptance=rule, repetition_penalty=1.2, **options)


def test_heads_that_read_several_layers():
    target = deep_target()
    pair = EagleModel.from_parts(target, good_head(target, NAMED))
    assert sum(same(pair, with_cycles(pair), tree=TREES[0]).stats.accepted_lengths) > 0


def test_what_was_emitted_during_a_pause_is_read_later():
    pair, answers = tiny_pair(), []
    static = with_cycles(pair)
    for cycles in (None, static.graphs):
        decoder = greedy_decoder(pair.target, pair.draft, PROMPT, TREES[2], 40, cycles)
        assert isinstance(decoder.forwards, graphs.GraphForwards) == (cycles is not None)
        with torch.inference_mode():
            decoder.prefill()
            for number in range(12):
                decoder.drafting.pause.left = 5 if 2 <= number < 8 else 0
                decoder.step()
        answers.append(decoder.requests[0].tokens)
    assert answers[0] == answers[1]


def test_what_they_do_not_serve_is_decoded_without(monkeypatch):
    pair = tiny_pair()
    static = with_cycles(pair, max_length=30)
    for options in ({"max_new_tokens": 40}, {"tree": TreeConfig(8, 3, 2, least_reach=0.2)},
                    {"tree": TreeConfig(8, 3, 2, least_probability=0.01)}, {"tree": TreeConfig(MOST_NODES + 1, 9, 9)}):
        same(pair, static, **{"max_new_tokens": 10, "tree": TREES[0], **options})
        assert not static.graphs.cycles
    prompts = [PROMPT, PROMPT[:3]]
    batch = eagle_fsd.generate(prompts, static, max_new_tokens=10, acceptance="exact", tree=TREES[0])
    assert [each.token_ids for each in batch] == [
        eagle_fsd.generate(prompt, pair, max_new_tokens=10, acceptance="exact", tree=TREES[0]).token_ids
        for prompt in prompts]
    assert not static.graphs.cycles
    same(pair, static, max_new_tokens=18, tree=TREES[0])
    assert static.graphs.cycles


def test_a_request_inside_another_has_caches_of_its_own():
    pair, inner = tiny_pair(), []
    static, options = with_cycles(pair), {"max_new_tokens": 30, "acceptance": "exact", "tree": TREES[0]}

    class Asking(BaseStreamer):
        def put(self, value):
            inner.append(eagle_fsd.generate(PROMPT[::-1], static, **options).token_ids)

        def end(self):
            pass

    expected = [eagle_fsd.generate(prompt, pair, **options).token_ids for prompt in (PROMPT, PROMPT[::-1])]
    assert eagle_fsd.generate(PROMPT, static, streamer=Asking(), **options).token_ids == expected[0]
    assert len(inner) > 2 and all(answer == expected[1] for answer in inner)


@pytest.mark.parametrize("phase", ["drafting", "verifying"])
@pytest.mark.parametrize("at", [0, 5])
def test_a_failed_capture_goes_on_without(phase, at, monkeypatch, caplog):
    pair, calls = tiny_pair(), []
    static, call = with_cycles(pair), graphs.CapturedForward.__call__

    def failing(self):
        result = call(self)
        if self.function.__name__ == NAMES[phase]:
            calls.append(phase)
            if len(calls) > at:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return result

    monkeypatch.setattr(graphs.CapturedForward, "__call__", failing)
    with caplog.at_level(logging.WARNING):
        same(pair, static, tree=TREES[0])
        same(pair, static, tree=TREES[0])
    assert caplog.text.count("without CUDA graphs: RuntimeError: operation not permitted when stream") == 1
    assert len(calls) == at + 1


def test_warming_up_runs_every_bucket_and_says_what_memory_they_take(caplog):
    pair = tiny_pair()
    static = with_cycles(pair, max_length=50)
    with caplog.at_level(logging.INFO):
        assert static.warm_up_graphs()
    assert {place for _, _, place in static.graphs.cycles} == {16, 24, 32, 48, 64}
    assert "CUDA graphs of 10 cycles take" in caplog.text and "caches for 50 tokens" in caplog.text
    same(pair, static, max_new_tokens=30, tree=TREES[0])


@pytest.mark.parametrize("phase", ["drafting", "verifying"])
def test_a_graph_that_differs_is_not_used(phase, monkeypatch, caplog):
    static, kept = with_cycles(tiny_pair()), {}

    def once(self):  # as a graph would that did not read its inputs
        result = self.function()
        return kept.setdefault(self, result) if self.function.__name__ == NAMES[phase] else result

    monkeypatch.setattr(graphs.CapturedForward, "__call__", once)
    assert not static.warm_up_graphs() and f"{phase} by a graph differs by" in caplog.text
    assert static.graphs is None


@pytest.mark.parametrize("tree", TREES[:3], ids=str)
@torch.inference_mode()
def test_both_phases_need_nothing_of_the_host(tree):
    """Each traces into a single graph: no value is waited for, nothing depends on data."""
    pair = tiny_pair()
    cycles = with_cycles(pair).graphs
    cycle = cycles.of(tree, True, 20)
    cycle.draft(torch.randn(2, 16), torch.tensor([3, 4]), 11, 12)
    for phase in (cycle.drafting, cycle.verifying):
        expected = phase.function()
        found = torch.compile(phase.function, backend="eager", fullgraph=True)()
        if isinstance(expected, tuple):
            found, expected = found[0].scores, expected[0].scores
        torch.testing.assert_close(found, expected)


def test_bad_length():
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        tiny_pair().compile(max_length=0)


def test_what_a_broken_request_leaves_does_not_reach_the_next():
    pair = tiny_pair()
    static, weight = with_cycles(pair), pair.draft.fc.weight
    kept = weight.detach().clone()
    weight.data.fill_(float("nan"))
    eagle_fsd.generate(PROMPT, static, max_new_tokens=40, acceptance="exact", tree=TREES[0])
    weight.data.copy_(kept)
    assert sum(same(pair, static, tree=TREES[0]).stats.accepted_lengths) > 0


def test_only_so_many_cycles_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_CYCLES", 3)
    static = with_cycles(tiny_pair()).graphs
    for depth in range(1, 6):
        static.of(TreeConfig(4, depth, 2), False, 10)
    assert [tree.depth for tree, _, _ in static.cycles] == [3, 4, 5]


def test_latencies_with_graphs_are_those_of_single_prompts(monkeypatch):
    pair, asked = tiny_pair(max_position_embeddings=1024), []

    def known(target, head, cycles=None):
        asked.append(cycles)
        return Latency({1: 1.0, 64: 1.0}, {1: 0.1 if cycles else 10.0, 4: 0.1 if cycles else 10.0}, 1.0)

    monkeypatch.setattr("eagle_fsd.pair.known_latency", known)
    pair.graphs = GraphCycles(pair.target, pair.draft, 600, capture=False)
    pair.choose_trees([], stopping=False, default=TREES[0])
    assert asked == [None, pair.graphs]
    costs = [pair.trees.of(make_rule("exact"), 0.0, rows).cost(1, 5) for rows in (1, 2)]
    assert costs[0] < 2 < costs[1]


def test_measured_with_graphs_where_they_serve_the_text(monkeypatch):
    pair, measured = tiny_pair(max_position_embeddings=1024), []
    monkeypatch.setattr("eagle_fsd.drafting.measuring.ROUNDS", 1)
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *parts: measured.append(parts) or measure(*parts))
    for length, used in ((600, True), (300, False)):
        static = GraphCycles(pair.target, pair.draft, length, capture=False)
        latency = known_latency(pair.target, pair.draft, static)
        assert (measured[-1][2] is static) == used and not static.cycles
        assert 0 < latency.plain and sorted(latency.base) == list(latency.base)
    assert known_latency(pair.target, pair.draft) == latency and len(measured) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
def test_captured_as_graphs(family):
    own = tiny_pair(family)
    pair = EagleModel.from_parts(own.target.model.cuda(), own.draft)
    static = with_cycles(pair, capture=True)
    for tree in TREES[:3]:
        for prompt in (PROMPT, PROMPT * 3):
            same(pair, static, prompt, tree=tree)
            same(pair, static, prompt, tree=tree, acceptance="fsd", threshold=0.5, temperature=1.0, seed=1)
    assert all(cycle.verifying.graph is not None for cycle in static.graphs.cycles.values())


@pytest.mark.cuda
def test_compiling_captures_graphs():
    pair = tiny_pair()
    pair = EagleModel.from_parts(pair.target.model.cuda(), pair.draft)
    expected = eagle_fsd.generate(PROMPT, pair, max_new_tokens=30, acceptance="exact").token_ids
    assert pair.compile(max_length=96) and pair.graphs.cycles
    assert eagle_fsd.generate(PROMPT, pair, max_new_tokens=30, acceptance="exact").token_ids == expected


@pytest.mark.cuda
def test_what_waits_for_the_device_is_not_captured(caplog):
    pair = tiny_pair()
    pair = EagleModel.from_parts(pair.target.model.cuda(), pair.draft)
    static = with_cycles(pair, capture=True)
    layer = pair.target.decoder_layers[0]
    handle = layer.register_forward_pre_hook(lambda layer, inputs: inputs[0].sum().item() and None)
    same(pair, static, tree=TREES[0])
    assert "without CUDA graphs" in caplog.text
    handle.remove()
    torch.cuda.empty_cache()
    assert torch.randn(3, device="cuda").isfinite().all()
    same(pair, static, tree=TREES[0])
