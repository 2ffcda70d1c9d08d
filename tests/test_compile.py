"""Every part of a cycle traces into one graph, so it neither waits for the device nor branches on what is drafted.

`fullgraph=True` raises for both. B batch, N nodes, V = 11 or 32 vocabulary.
"""

import logging
from dataclasses import fields

import pytest
import torch
from random_trees import random_verification
from tiny import MARKS, PROMPT, readable, tiny_judge, tiny_pair

from eagle_fsd import RULES, TreeConfig, Verification, make_rule
from eagle_fsd.acceptance import walk
from eagle_fsd.drafting.config import Confidence
from eagle_fsd.drafting.growth import draft_tree
from eagle_fsd.drafting.tree import DraftTree

CONFIDENCE = Confidence((-4.0, -1.0, 0.0), (-3.0, -0.5, -0.1), (-5.0, -2.0, -1.0))
TREES = [TreeConfig(16, 5, 4), TreeConfig(6, 5, 1), TreeConfig(4, 1, 3), TreeConfig(16, 4, 3, confidence=CONFIDENCE)]
DIALS = {"exact": [{}], "typical": [{"threshold": 0.5}], "lenience": [{"threshold": 1.0}],
         "relaxed": [{"threshold": 1.0}], "fsd_paper": [{"threshold": 0.3}],
         "tilt": [{"threshold": 1.0}, {"threshold": 1.0, "head_guard": 0.5}],
         "fly": [{"threshold": 0.8, "window": 1}, {"threshold": 0.8, "window": 3}], "regret": [{"threshold": 3.0}],
         "judge": [{"threshold": 0.5, "learned": tiny_judge(5)}], "prose": [{"threshold": 3.0, "marks": MARKS}],
         "afterword": [{"threshold": 3.0, "marks": MARKS}],
         "fsd+fly": [{"threshold": 0.3, "gate_threshold": 0.9}],
         "relaxed+fsd+regret": [{"threshold": 1.0, "gate_threshold": [0.3, 3.0], "divergence": "js_top4"}],
         "fsd": [{"threshold": 0.3}, {"threshold": 0.3, "divergence": "js_top4", "sibling": "longest"},
                 {"threshold": 0.3, "divergence": "kl", "sibling": "draft", "head_guard": 0.5}]}
RULE_OPTIONS = [(name, options) for name in dict.fromkeys([*RULES, *DIALS]) for options in DIALS[name]]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No graphs of other tests, and none of what torch traces for itself gathered as logs."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="eager")


def tensors(given):
    """The tensors of a dataclass by name."""
    return {each.name: value for each in fields(given) if isinstance(value := getattr(given, each.name), torch.Tensor)}


def assert_same(found, expected):
    for name, value in tensors(expected).items():
        torch.testing.assert_close(getattr(found, name), value, equal_nan=True, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("name", "options"), RULE_OPTIONS, ids=readable)
def test_acceptance(name, options, greedy):
    rule = make_rule(name, **options)

    def accept(tree, depth, target_logits, warped_logits, draft_logits, noise, **memory):
        tree = DraftTree(**tree, max_depth=depth)
        verification = Verification(tree, target_logits, warped_logits, draft_logits, noise, **memory)
        return walk(verification, rule(verification))

    accept_compiled = compiled(accept)
    for seed in range(2):
        given = random_verification(seed, greedy)
        parts = (given.target_logits, given.warped_logits, given.draft_logits, given.noise)
        memory = {"regret": given.regret, "said": given.said, "answers": given.answers, "features": given.features}
        found = accept_compiled(tensors(given.tree), given.tree.max_depth, *parts, **memory)
        assert_same(found, walk(given, rule(given)))


def drafting_state(pair, rows):
    """Both caches behind a prompt, and what the draft has yet to read."""
    ids = torch.tensor([PROMPT] * rows)
    cache, draft_cache = pair.target.new_cache(64, rows), pair.draft.new_cache(128, rows)
    features = pair.target.prefill(ids, cache)
    tokens = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    with torch.inference_mode():
        pair.draft(pair.draft.read(features[:, :-2]), tokens[:, :-2], torch.arange(len(PROMPT) - 2).expand(rows, -1),
                   None, draft_cache)
    return cache, draft_cache, list(features[:, -2:]), list(tokens[:, -2:])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("config", TREES, ids=["wide", "chain", "flat", "calibrated"])
@torch.inference_mode()
def test_drafting(config, rows):
    """The levels, their selection and the reranking."""
    pair = tiny_pair()
    _, cache, features, tokens = drafting_state(pair, rows)
    expected, expected_logits = draft_tree(pair.draft, pair.target, features, tokens, cache, config)
    _, cache, features, tokens = drafting_state(pair, rows)
    found, logits = compiled(draft_tree)(pair.draft, pair.target, features, tokens, cache, config)
    assert_same(found, expected)
    torch.testing.assert_close(logits, expected_logits)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@torch.inference_mode()
def test_verification(family):
    """Masks, positions and the forward."""
    pair, config = tiny_pair(family), TREES[0]
    cache, draft_cache, features, tokens = drafting_state(pair, 1)
    tree, _ = draft_tree(pair.draft, pair.target, features, tokens, draft_cache, config)
    length = cache.length
    inputs = (tree.tokens, tree.depths + length, tree.ancestors, cache)
    expected = pair.target.verify(*inputs)
    cache.truncate(length)
    torch.testing.assert_close(compiled(pair.target.verify)(*inputs), expected)
    assert cache.length == length + config.nodes
