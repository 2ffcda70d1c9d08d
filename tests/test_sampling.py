"""Processed logits of a tree: every node with its own path as context. V = 11."""

import pytest
import torch
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

from eagle_fsd.drafting.tree import DraftTree, ancestors_of
from eagle_fsd.engine.request import Request
from eagle_fsd.engine.sampling import build_processors, warp_nodes, warp_trees
from eagle_fsd.options import GenerateOptions

CONTEXT = [5, 1, 5]  # before the root
#        0: 1
#        /  \
#     1: 5  2: 3
#      /     /  \
#    3: 1  4: 1  5: 7
PARENTS, TOKENS = torch.tensor([[0, 0, 0, 1, 2, 2]]), torch.tensor([[1, 5, 3, 1, 1, 7]])
ANCESTORS = ancestors_of(PARENTS, 2)
TREE = DraftTree(TOKENS, PARENTS, ANCESTORS.sum(-1) - 1, ANCESTORS, PARENTS, torch.zeros(1, 6), max_depth=2)
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


def request(processors):
    return Request([*CONTEXT, 1], max_new_tokens=9, processors=LogitsProcessorList(processors))


def is_possible(node, warped):
    """Whether no token of the path has been ruled out at the node before it."""
    steps = []
    while node:
        parent = PARENTS[0, node]
        steps.append(warped[0, parent, TOKENS[0, node]] > -torch.inf)
        node = parent
    return all(steps)


@pytest.mark.parametrize("processors", [
    [],
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper(0.8)],
    [RepetitionPenaltyLogitsProcessor(3.0)],
    [NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(2.0), TopKLogitsWarper(6)],
    [MinNewTokensLengthLogitsProcessor(3, 3, [0], device="cpu")],
    [OnlyAfterThree()],
    [LastToken(1.0)],
], ids=lambda processors: "-".join(type(processor).__name__ for processor in processors) or "none")
def test_every_node_is_processed_with_its_own_path(processors):
    """All at once, as rules that look ahead need them, and one node of each row, as the walk does."""
    logits, errors = torch.randn(1, 6, 11, generator=torch.Generator().manual_seed(0)), {}
    raw = logits.clone()
    warped = warp_trees([request(processors)], TREE, logits, errors)
    for node, path in enumerate(PATHS):
        expected = raw[0, node : node + 1].clone()
        for processor in processors:
            expected = processor(torch.tensor([CONTEXT + path]), expected)
        assert torch.equal(warped[0, node], expected[0]) or not is_possible(node, warped)
        said, going = [torch.tensor([token]) for token in path], torch.tensor([True])
        assert torch.equal(warp_nodes([request(processors)], logits[:, node], said, going, errors), expected)
    assert torch.equal(logits, raw) and not errors  # gates still need them


def test_what_lies_below_an_impossible_token_is_not_asked_about():
    asked = []

    def no_three_after_one(input_ids, scores):
        asked.append(input_ids[0, len(CONTEXT) :].tolist())
        if asked[-1] == [1]:
            scores[0, 3] = -torch.inf
        return scores

    logits = torch.randn(1, 6, 11)
    warped = warp_trees([request([no_three_after_one])], TREE, logits, {})
    assert asked == [[1], [1, 5], [1, 5, 1]]
    assert torch.equal(warped[0, 1:], logits[0, 1:])


def build(custom=None, eos_ids=(2,), **options):
    processors = build_processors(GenerateOptions(**{"temperature": 1.0} | options), custom, prompt_length=3,
                                  eos_ids=eos_ids, device=torch.device("cpu"))
    return [type(processor) for processor in processors]


def test_options_become_processors_in_the_order_of_transformers():
    assert build() == []
    assert build(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1) == []  # greedy: no warpers
    assert build(min_new_tokens=4, eos_ids=[]) == []
    every = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "min_new_tokens": 4}
    assert build(**every, custom=[OnlyAfterThree()]) == [
        RepetitionPenaltyLogitsProcessor, MinNewTokensLengthLogitsProcessor, OnlyAfterThree, TemperatureLogitsWarper,
        TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper,
    ]
