"""Parity with the published EAGLE-2 code, on a recording that development checkouts keep beside the repository."""

import json
import os
from pathlib import Path

import pytest
import torch

import eagle_fsd
from eagle_fsd.engine.timing import greedy_decoder

ORACLE = Path(os.environ.get("EAGLE_FSD_ORACLE", Path(__file__).parents[2] / "shared" / "oracle"))
pytestmark = pytest.mark.skipif(not (ORACLE / "expected.json").exists(), reason=f"no recording in {ORACLE}")


@pytest.fixture(scope="module")
def pair():
    return eagle_fsd.load(ORACLE / "target", ORACLE / "head", device="cpu")


@pytest.fixture(scope="module")
def prompts():
    return json.loads((ORACLE / "expected.json").read_text())["prompts"] if ORACLE.exists() else []


def decode(pair, prompt, run, spy):
    """New tokens and accepted lengths of one recorded run; `spy(tree)` sees every drafted tree."""
    tree = eagle_fsd.TreeConfig(run["total_token"], run["depth"] + 1, run["top_k"])
    decoder = greedy_decoder(pair.target, pair.draft, [prompt["prompt_ids"]], tree, 200)
    draft = decoder.forwards.draft
    decoder.forwards.draft = lambda *given: spy(draft(*given))
    tokens, lengths = decoder.prefill()[0].tokens, []
    while len(lengths) < len(run["accept_lengths"]):
        emitted = decoder.step()[0].tokens
        tokens += emitted
        lengths.append(len(emitted) - 1)
    return tokens, lengths


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("setting", range(2))
def test_trees_tokens_and_lengths_equal_the_recording(pair, prompts, index, setting):
    prompt = prompts[index]
    run = prompt["runs"][setting]
    trees = []

    def spy(drafted):
        trees.append(drafted[0])
        return drafted

    with torch.inference_mode():
        tokens, lengths = decode(pair, prompt, run, spy)
    greedy = prompt["greedy_ids"]
    assert tokens[: len(greedy)] == greedy
    assert lengths == run["accept_lengths"]
    for tree, cycle in zip(trees, run["cycles"], strict=False):
        assert tree.tokens[0].tolist() == cycle["draft_tokens"]
        assert tree.depths[0].tolist() == cycle["tree_position_ids"]
        if "tree_mask" in cycle:
            recorded = [[int(bit) for bit in row] for row in cycle["tree_mask"]]
            assert tree.ancestors[0].long().tolist() == recorded
