"""Cycles of fixed shapes, as CUDA graphs replay them: without a graph, and on tensors without data, as if on CUDA."""

import itertools
import json

import pytest
import torch
from test_oracle import ORACLE
from tiny import NAMED, PROMPT, PROMPTS, random_head, tiny_head, tiny_pair, tiny_target
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd import EagleModel, TreeConfig
from eagle_fsd.captured import buffers as captured_buffers
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.decoding.decoder import Decoder, Session
from eagle_fsd.decoding.request import Request, RequestParams
from eagle_fsd.drafting.sizing import Choice, Drafting

TREE = TreeConfig(12, 3, 3)
RULES = {
    "exact": {}, "fsd": {"acceptance": "fsd", "threshold": 0.3}, "typical": {"acceptance": "typical", "threshold": 0.3},
    "relaxed": {"acceptance": "relaxed", "threshold": 2.0}, "lenience": {"acceptance": "lenience", "threshold": 1.0},
    "fsd_paper": {"acceptance": "fsd_paper", "threshold": 0.4},
    "js_top8": {"acceptance": "fsd", "threshold": 0.3, "divergence": "js_top8", "head_guard": None},
}
DRAWS = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}}


def limited():
    target = tiny_target()
    head = tiny_head(target)
    head.limit_vocabulary(torch.tensor(NAMED))
    return EagleModel.from_parts(target, head)


def eagle3(named=None):
    options = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    return EagleModel.from_parts(tiny_target(num_hidden_layers=4), random_head(named, **options))


PAIRS = {"EAGLE-2": tiny_pair, "reduced": limited, "EAGLE-3": eagle3, "EAGLE-3, reduced": lambda: eagle3(NAMED)}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Texts of the tests cross the borders of buckets."""
    monkeypatch.setattr(captured_buffers, "BUCKET", 32)
    monkeypatch.setattr(captured_buffers, "ALIGNED", 8)


def capturing(pair: EagleModel) -> EagleModel:
    pair.captured = CapturedCycles(pair.target, pair.draft)
    pair.captured.taken = []  # whether each cycle was captured
    step = pair.captured.step

    def spy(*args):
        walked = step(*args)
        pair.captured.taken.append(walked is not None)
        return walked

    pair.captured.step = spy
    return pair


def assert_equal(found, expected):
    """Tokens, accepted lengths and receipts; numbers up to rounding, as a bucket has more keys than the text."""
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("token_ids", "finish_reason"):
            assert getattr(mine, name) == getattr(theirs, name)
        for name in ("accepted_lengths", "proposed", "accepted", "exact_from", "exact_because", "undrafted"):
            assert getattr(mine.stats, name) == getattr(theirs.stats, name)
        for one, other in zip(mine.receipts, theirs.receipts, strict=True):
            assert one._replace(logprob=0, regret=0, divergence=0) == other._replace(logprob=0, regret=0, divergence=0)
            assert one.divergence == other.divergence or one.divergence == pytest.approx(other.divergence, abs=1e-4)
            assert (one.logprob, one.regret) == pytest.approx((other.logprob, other.regret), abs=1e-4)


def both(pair, prompts, **options):
    """The outputs of the captured path, which must be those of the dynamic one."""
    options = {"max_new_tokens": 24, "tree": TREE, "text_drafts": "off"} | options
    expected = eagle_fsd.generate(prompts, pair, **options)
    found = eagle_fsd.generate(prompts, capturing(pair), **options)
    assert_equal(found, expected)
    return found


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", PAIRS)
def test_the_programs_compute_the_cycle(kind, rule, draw):
    pair = PAIRS[kind]()
    outputs = both(pair, PROMPTS[:1], **RULES[rule], **DRAWS[draw])
    assert all(pair.captured.taken) and len(pair.captured.taken) == len(outputs[0].stats.accepted_lengths)


@pytest.mark.parametrize("options", [
    {}, RULES["fsd"], RULES["fsd"] | {"budget": 3.0}, RULES["relaxed"] | {"fuzzy_within": (5, 8)},
    DRAWS["sampled"] | RULES["fsd"] | {"seed": [1, 2, 3, 4, 5]}, {"text_drafts": "auto"},
    {"text_drafts": "auto", "stop_token_ids": [9]} | RULES["fsd"], {"temperature": 1.0, "seed": 1},
], ids=str)
def test_rows_of_unequal_length_that_end_at_different_times(options):
    pair = tiny_pair()
    both(pair, PROMPTS, max_new_tokens=60, **options)
    assert any(pair.captured.taken)
