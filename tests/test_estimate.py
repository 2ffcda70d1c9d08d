"""The estimate of tau from text against real decoding."""

import numpy as np
import pytest
import torch
from tiny import tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.data.documents import Documents
from eagle_fsd.trees.config import TreeConfig
from train.core.estimate import estimate_tau, last_answers

TREE = TreeConfig(12, 4, 3)
RULES = {"exact": make_rule("exact"), "fsd 0.2": make_rule("fsd", 0.2), "fsd 9": make_rule("fsd", 9.0)}


@pytest.fixture(scope="module")
def model():
    return tiny_pair()


@pytest.fixture(scope="module")
def own(model) -> tuple[Documents, list]:
    """The target's own greedy answers to random prompts, with what decoding accepted."""
    rng, documents, outputs = np.random.default_rng(0), [], []
    for _ in range(6):
        prompt = rng.integers(3, 32, 8).tolist()
        output = eagle_fsd.generate(prompt, model, max_new_tokens=40, acceptance="exact", tree=TREE)
        documents.append((prompt + output.token_ids, [False] * 8 + [True] * 40))
        outputs.append(output)
    return Documents.of(documents), outputs


def test_on_the_targets_own_answers_exact_is_what_decoding_accepts(model, own):
    documents, outputs = own
    taus = estimate_tau(model.target, model.draft, documents, range(6), RULES, TREE)
    lengths = [length + 1 for output in outputs for length in output.stats.accepted_lengths]
    assert taus["exact"] == pytest.approx(np.mean(lengths), rel=0.02)  # the last cycles differ: the text ends there
    assert taus["exact"] <= taus["fsd 0.2"] <= taus["fsd 9"]


def test_on_other_text_the_walk_follows_the_text(model):
    rng = np.random.default_rng(1)
    documents = Documents.of([(rng.integers(3, 32, 30).tolist(), [i > 9 for i in range(30)])])
    taus = estimate_tau(model.target, model.draft, documents, [0], RULES, TREE)
    assert 1 <= taus["exact"] <= taus["fsd 9"] <= 1 + TREE.depth


def test_the_last_answer_is_what_is_walked():
    marks = [False, False, True, True, False, False, True, True, True, True, False]
    documents = Documents.of([
        (list(range(11)), marks), ([1] * 12, [False] + [True] * 11), ([1] * 6, [False] * 6),
        ([1] * 5, [False, False, False, False, True]),
    ])
    found = list(last_answers(documents, range(4)))
    assert found[0] == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9])
    assert found[1] == ([1] * 6, [1] * 6)  # plain text: from its middle
    assert len(found) == 2


def test_nothing_to_walk_is_an_error(model):
    documents = Documents.of([([1, 2, 3], [False, True, True])])
    with pytest.raises(ValueError, match="no held-out document"):
        estimate_tau(model.target, model.draft, documents, [0], RULES, TREE)


def test_nothing_is_trained_or_changed(model, own):
    before = {name: value.clone() for name, value in model.draft.state_dict().items()}
    estimate_tau(model.target, model.draft, own[0], [0], RULES, TREE)
    assert all(torch.equal(value, before[name]) for name, value in model.draft.state_dict().items())
