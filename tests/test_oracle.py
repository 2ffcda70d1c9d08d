"""Parity with the published EAGLE-2 code: trees, masks, tokens and accepted lengths of a recording in tests/oracle."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd.decoding.decoder import Decoder
from eagle_fsd.decoding.request import Request, RequestParams
from eagle_fsd.drafting.sizing import Choice, Drafting

ORACLE = Path(__file__).parent / "oracle"


@pytest.mark.parametrize("setting", [0, 1], ids=["60-7-10", "16-4-4"])
@torch.inference_mode()
def test_trees_tokens_and_lengths_equal_the_recording(setting):
    target = AutoModelForCausalLM.from_pretrained(ORACLE / "target").eval()
    pair = eagle_fsd.EagleModel.from_parts(target, eagle_fsd.load_head(ORACLE / "head"))
    prompts = json.loads((ORACLE / "expected.json").read_text())["prompts"]
    assert len(prompts) == 8
    for prompt in prompts:
        run, trees = prompt["runs"][setting], []
        choice = Choice(eagle_fsd.TreeConfig(run["total_token"], run["depth"] + 1, run["top_k"]))
        request = Request(prompt["prompt_ids"], RequestParams(max_new_tokens=200))
        decoder = Decoder(pair.target, pair.draft, [request], Drafting(choice))
        decoder.observe = lambda tree, *_, trees=trees: trees.append(tree)
        decoder.prefill()
        for _ in run["accept_lengths"]:
            decoder.step()
        assert request.answer[: len(prompt["greedy_ids"])] == prompt["greedy_ids"]
        assert request.stats.accepted_lengths == run["accept_lengths"]
        for tree, cycle in zip(trees, run["cycles"], strict=False):
            assert tree.tokens[0].tolist() == cycle["draft_tokens"]
            assert tree.depths[0].tolist() == cycle["tree_position_ids"]
            if "tree_mask" in cycle:
                assert tree.ancestors[0].int().tolist() == [list(map(int, row)) for row in cycle["tree_mask"]]
