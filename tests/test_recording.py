"""Tokens and accepted lengths of every rule on the small pair: greedy ones, and those of `lenience`, as of
commit 767fce7, the other sampled ones since drafts know the noise (of `exact` the tokens are still those)."""

import json
import lzma
from pathlib import Path

import pytest
import torch

import eagle_fsd
from eagle_fsd.api import decode_requests
from eagle_fsd.inputs.requests import make_requests

TESTS = Path(__file__).parent
RECORD = json.loads(lzma.decompress((TESTS / "recorded" / "small.json.xz").read_bytes()))
RUNS = {setting: runs for setting, runs in RECORD["runs"].items() if "tilt" not in setting}  # gone since


@pytest.fixture(scope="module")
def model():
    pairs = TESTS / "pairs"
    return eagle_fsd.load(pairs / "small-target", pairs / "small-draft", device="cpu", dtype=torch.float32,
                          tree=eagle_fsd.TreeConfig(16, 5, 4))


def recorded(model, setting, numbers):
    """Requests for some of the prompts, and their runs."""
    rule, threshold, divergence, temperature = setting.split(" ")
    unguarded = {} if rule == "exact" else {"head_guard": None}
    options = eagle_fsd.GenerateOptions(
        acceptance=eagle_fsd.make_rule(rule, float(threshold), divergence or None, **unguarded), max_new_tokens=32,
        temperature=float(temperature), ignore_eos=True, seed=[100 + number for number in numbers],
        text_drafts="off")
    requests = make_requests(model, [RECORD["prompts"][number] for number in numbers], options)
    return list(zip(requests, (RUNS[setting][number] for number in numbers), strict=True))


def differing(model, pairs):
    decode_requests(model, [request for request, _ in pairs])
    return sum([request.answer, request.stats.accepted_lengths] != run for request, run in pairs)


def test_all_rules_together_equal_the_recording(model):
    """34 settings with one of 8 prompts each, in one batch. A processor that rounds otherwise may turn one run."""
    pairs = [pair for number, setting in enumerate(RUNS)
             for pair in recorded(model, setting, [number % 8])]
    assert len(pairs) == 34 and differing(model, pairs) <= 1


def test_batches_of_one_rule_equal_the_recording(model):
    for setting in list(RUNS)[::9]:
        assert differing(model, recorded(model, setting, range(3))) == 0, setting
