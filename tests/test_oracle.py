"""Parity with the published code: tokens and accepted lengths of a recording of EAGLE-2, in tests/oracle, with trees
and masks, and of one of EAGLE-3, in tests/oracle3."""

import json
from pathlib import Path

import pytest
import torch
from tiny import prefill
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.sizing import Drafting, Plan
from eagle_fsd.drafting.tree import DraftTree

ORACLE = Path(__file__).parent / "oracle"
ORACLE3 = Path(__file__).parent / "oracle3"


def load(target: Path, head: Path) -> eagle_fsd.EagleModel:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return eagle_fsd.EagleModel.from_parts(model, eagle_fsd.load_head(head))


def decode(pair: eagle_fsd.EagleModel, prompt: list[int], run: dict) -> tuple[Request, list[DraftTree]]:
    """As many cycles as the recorded run has, with its tree: the request, and the tree of each cycle."""
    trees = []
    plan = Plan(eagle_fsd.TreeConfig(run["total_token"], run["depth"] + 1, run["top_k"]))
    request = Request(prompt, eagle_fsd.GenerateOptions(), max_new_tokens=200)
    batch = Batch(pair.target, pair.draft, [request], Drafting(lambda _: plan))
    batch.observe = lambda tree, *_: trees.append(tree)
    prefill(batch)
    for _ in run["accept_lengths"]:
        cycle.step(batch)
    assert request.stats.accepted_lengths == run["accept_lengths"]
    return request, trees


@pytest.mark.parametrize("setting", [0, 1], ids=["60-7-10", "16-4-4"])
@torch.inference_mode()
def test_trees_tokens_and_lengths_equal_the_recording(setting):
    pair = load(ORACLE / "target", ORACLE / "head")
    prompts = json.loads((ORACLE / "expected.json").read_text())["prompts"]
    assert len(prompts) == 8
    for prompt in prompts:
        run = prompt["runs"][setting]
        request, trees = decode(pair, prompt["prompt_ids"], run)
        assert request.answer[: len(prompt["greedy_ids"])] == prompt["greedy_ids"]
        for tree, recorded in zip(trees, run["cycles"], strict=False):
            assert tree.tokens[0].tolist() == recorded["draft_tokens"]
            assert tree.depths[0].tolist() == recorded["tree_position_ids"]
            if "tree_mask" in recorded:
                assert tree.ancestors[0].int().tolist() == [list(map(int, row)) for row in recorded["tree_mask"]]


@pytest.mark.parametrize("name", ["reduced", "qwen3"])
@torch.inference_mode()
def test_tokens_and_lengths_of_eagle3_equal_the_recording(name):
    recorded = json.loads((ORACLE3 / "expected.json").read_text())["heads"][name]
    pair = load(ORACLE3 / recorded["target"], ORACLE3 / recorded["head"])
    assert len(recorded["runs"]) == 24
    for run in recorded["runs"]:
        request, _ = decode(pair, run["prompt_ids"], run)
        assert request.answer[: len(run["tokens"])] == run["tokens"]
