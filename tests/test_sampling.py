"""Processed logits of a tree: every node with its own path as context. V = 11."""

import pytest
import torch
from random_trees import tree_from_parents
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_fsd.engine.sampling import build_processors, warp_tree
from eagle_fsd.options import SamplingOptions

CONTEXT = [5, 1, 5]  # before the root
#        0: 1
#        /  \
#     1: 5  2: 3
#      /     /  \
#    3: 1  4: 1  5: 7
TREE = tree_from_parents([[0, 0, 0, 1, 2, 2]], [[1, 5, 3, 1, 1, 7]])
PATHS = [[1], [1, 5], [1, 3], [1, 5, 1], [1, 3, 1], [1, 3, 7]]


class OnlyAfterThree(LogitsProcessor):
    """Changes its argument in place, and only where the last token but one is 3."""

    def __call__(self, input_ids, scores):
        scores[input_ids[:, -2] == 3] = scores[input_ids[:, -2] == 3].flip(-1)
        return scores


class LastToken(TemperatureLogitsWarper):
    """Depends on the context although its parent class does not."""

    def __call__(self, input_ids, scores):
        return scores / (1 + input_ids[:, -1:])


def is_possible(node, warped):
    """Whether no token of the path has been ruled out at the node before it."""
    parents, tokens = TREE.parents[0], TREE.tokens[0]
    steps = []
    while node:
        steps.append(warped[0, parents[node], tokens[node]] > -torch.inf)
        node = parents[node]
    return all(steps)


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
        [RepetitionPenaltyLogitsProcessor(3.0)],
        [NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(2.0), TopKLogitsWarper(6)],
        [MinNewTokensLengthLogitsProcessor(3, 3, [0], device="cpu")],
        [OnlyAfterThree()],
        [LastToken(1.0)],
    ],
    ids=lambda processors: "-".join(type(processor).__name__ for processor in processors) or "none",
)
def test_every_node_is_processed_with_its_own_path(processors):
    logits = torch.randn(1, 6, 11, generator=torch.Generator().manual_seed(0))
    raw = logits.clone()
    warped = warp_tree(LogitsProcessorList(processors), CONTEXT, TREE, logits)
    assert torch.equal(logits, raw)  # gates still need them
    for node, path in enumerate(PATHS):
        expected = raw[0, node : node + 1].clone()
        for processor in processors:
            expected = processor(torch.tensor([CONTEXT + path]), expected)
        assert torch.equal(warped[0, node], expected[0]) or not is_possible(node, warped)


def test_what_lies_below_an_impossible_token_is_not_asked_about():
    asked = []

    def no_three_after_one(input_ids, scores):
        asked.append(input_ids[0, len(CONTEXT) :].tolist())
        if asked[-1] == [1]:
            scores[0, 3] = -torch.inf
        return scores

    logits = torch.randn(1, 6, 11)
    warped = warp_tree(LogitsProcessorList([no_three_after_one]), CONTEXT, TREE, logits)
    assert asked == [[1], [1, 5], [1, 5, 1]]
    assert torch.equal(warped[0, 1:], logits[0, 1:])


def build(custom=None, eos_ids=(2,), **options):
    processors = build_processors(SamplingOptions(**{"temperature": 1.0} | options), custom, prompt_length=3,
                                  eos_ids=eos_ids, device=torch.device("cpu"))
    return [type(processor) for processor in processors]


def test_options_become_processors_in_the_order_of_transformers():
    own = OnlyAfterThree()
    assert build() == []
    assert build(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1) == []  # greedy: no warpers
    assert build(min_new_tokens=4, eos_ids=[]) == []
    every = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "min_new_tokens": 4}
    assert build(**every, custom=[own]) == [
        RepetitionPenaltyLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        OnlyAfterThree,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
    ]
