"""The estimate of tau from text against real decoding, and against rules that see every cycle's whole tree."""

import numpy as np
import pytest
import torch
from test_eagle3 import deep_target, good_head
from tiny import tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import Verification, make_rule, walk
from eagle_fsd.data.documents import Documents
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.drafting.growth import draft_tree
from eagle_fsd.models.implementations import SPLIT
from eagle_fsd.models.target import TargetModel
from eagle_fsd.pair import EagleModel, fit_head
from train.core import estimate
from train.core.estimate import Stretch, estimate_tau, last_answers, stretches

TREE = TreeConfig(12, 4, 3)
THRESHOLDS = {"exact": 0.0, "fsd 0.05": 0.05, "fsd 0.2": 0.2, "fsd 9": 9.0}


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
    taus = estimate_tau(model.target, model.draft, documents, range(6), THRESHOLDS, TREE)
    lengths = [length + 1 for output in outputs for length in output.stats.accepted_lengths]
    assert taus["exact"] == pytest.approx(np.mean(lengths), rel=0.02)  # the last cycles differ: the text ends there
    assert taus["exact"] <= taus["fsd 0.2"] <= taus["fsd 9"]


def test_on_other_text_the_walk_follows_the_text(model):
    rng = np.random.default_rng(1)
    documents = Documents.of([(rng.integers(3, 32, 30).tolist(), [i > 9 for i in range(30)])])
    taus = estimate_tau(model.target, model.draft, documents, [0], THRESHOLDS, TREE)
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
        estimate_tau(model.target, model.draft, documents, [0], THRESHOLDS, TREE)


def test_nothing_is_trained_or_changed(model, own):
    before = {name: value.clone() for name, value in model.draft.state_dict().items()}
    estimate_tau(model.target, model.draft, own[0], [0], THRESHOLDS, TREE)
    assert all(torch.equal(value, before[name]) for name, value in model.draft.state_dict().items())


@torch.inference_mode()
def one_by_one(model: EagleModel, prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    """What each rule accepts, cycle by cycle, of whole trees that the target verifies behind the text."""
    target, head = model.target, model.draft
    rules = {name: make_rule("fsd", threshold) for name, threshold in THRESHOLDS.items()}
    ids, root = torch.tensor([prompt + answer]), len(prompt)
    expected = torch.cat([ids, torch.full((1, TREE.depth + 1), -1)], 1)
    cache = target.new_cache(ids.shape[1] + TREE.nodes)
    draft_cache = head.new_cache(ids.shape[1] + TREE.nodes + TREE.depth * TREE.top_k)
    features, tokens = target.prefill(ids[:, :root], cache), ids[:, 1 : root + 1]
    accepted = {name: [] for name in rules}
    while root + 1 < ids.shape[1]:
        tree, draft_logits = draft_tree(head, target, features, tokens, draft_cache, TREE)
        found = target.verify(tree.tokens, tree.depths + root, tree.ancestors, cache)
        logits = target.logits(found)
        named = None if head.names_all else head.target_tokens
        verification = Verification(tree, logits, logits, draft_logits, draft_tokens=named)
        for name, rule in rules.items():
            accepted[name] += walk(verification, rule(verification)).length.tolist()
        path = verification.on_whole_path(tree.tokens == expected[0, root + tree.depths])[0].nonzero()[:, 0].tolist()
        cache.commit([root], [[root + node for node in path]])
        features, tokens = found[:, path], ids[:, root + 1 : root + 1 + len(path)]
        root += len(path)
    return accepted


def eagle3_pair() -> EagleModel:
    """A head that reads several layers and names some of the tokens."""
    target = deep_target()
    return EagleModel.from_parts(target, good_head(target, named=range(2, 24)))


def reduced_pair() -> EagleModel:
    model = tiny_pair()
    model.draft.limit_vocabulary(torch.arange(2, 24))
    fit_head(model.draft, model.target)
    return model


@pytest.mark.parametrize("pair", [
    tiny_pair, lambda: tiny_pair("mistral-window"), lambda: tiny_pair("llama4_text"),
    lambda: tiny_pair(attention=SPLIT), eagle3_pair, reduced_pair,
], ids=["llama", "window", "counts positions", "split", "eagle3", "reduced"])
def test_together_and_without_whole_trees_it_is_what_the_rules_do_one_by_one(pair):
    model, rng = pair(), np.random.default_rng(3)
    answered = eagle_fsd.generate(list(range(3, 13)), model, max_new_tokens=30, acceptance="exact").token_ids
    texts = [(list(range(3, 13)), answered)]
    for prompt in (5, 17, 9):  # half of the tokens are the target's own, so that ways leave the text
        ids = rng.integers(3, 24, prompt).tolist()
        for number in range(24):
            own = eagle_fsd.generate(ids, model, max_new_tokens=1, acceptance="exact").token_ids
            ids += own if number % 3 else [int(rng.integers(3, 24))]
        texts.append((ids[:prompt], ids[prompt:]))
    documents = Documents.of([(prompt + answer, [False] * len(prompt) + [True] * len(answer))
                              for prompt, answer in texts])
    expected = {name: [] for name in THRESHOLDS}
    for prompt, answer in texts:
        for name, lengths in one_by_one(model, prompt, answer).items():
            expected[name] += lengths
    taus = estimate_tau(model.target, model.draft, documents, range(4), THRESHOLDS, TREE)
    assert taus == pytest.approx({name: np.mean(lengths) + 1 for name, lengths in expected.items()})
    assert taus["exact"] <= taus["fsd 0.2"] <= taus["fsd 9"] and taus["exact"] < taus["fsd 9"]


def test_the_target_reads_each_text_once_and_verifies_only_what_leaves_it(model, own, monkeypatch):
    """The defect: a forward of the target per cycle and text."""
    forwards, features = [], TargetModel.features
    monkeypatch.setattr(
        TargetModel, "features", lambda self, tokens, **more: forwards.append(tokens.shape) or
        features(self, tokens, **more))
    documents, outputs = own
    estimate_tau(model.target, model.draft, documents, range(6), {"exact": 0.0}, TREE)
    cycles = [len(output.stats.accepted_lengths) for output in outputs]
    assert forwards.count((1, 48)) == 6  # each text, once
    verified = [shape for shape in forwards if shape != (1, 48)]
    # Along the target's own words only the last trees look beyond the text.
    assert len(verified) <= max(cycles) and sum(rows * nodes for rows, nodes in verified) < sum(cycles) * TREE.nodes / 4


def test_no_more_tokens_are_walked_than_are_allowed():
    answers = [([1] * 3, [2] * 100), ([1] * 9, [2] * 10), ([1] * 4, [2] * 300), ([1] * 4, [2] * 300)]
    found = stretches(answers, 100, TREE.depth)
    assert [part.end - part.start for part in found] == [30, 10, 30, 30]
    assert len({(part.start - len(prompt)) / len(answer)
                for part, (prompt, answer) in zip(found, answers, strict=True)}) > 2
    for part, (prompt, answer) in zip(found, answers, strict=True):
        assert len(prompt) <= part.start and part.end <= len(prompt) + len(answer)
        assert len(part.tokens) == min(len(prompt) + len(answer), part.end + TREE.depth + 1)
    assert stretches(answers, 2**62, 4)[0] == Stretch([1] * 3 + [2] * 100, 3, 103)
    assert [part.end - part.start for part in stretches(answers, 1, 4)] == [1, 1, 1, 1]


def test_a_part_of_the_answers_gives_about_the_same(model, own):
    documents, _ = own
    whole, part = (estimate_tau(model.target, model.draft, documents, range(6), THRESHOLDS, TREE, most_tokens=most)
                   for most in (10**6, 120))
    assert whole != part and part == pytest.approx(whole, rel=0.35)


def test_memory_bounds_what_is_walked_together(model, own, monkeypatch):
    documents, _ = own
    together = estimate_tau(model.target, model.draft, documents, range(6), THRESHOLDS, TREE)
    monkeypatch.setitem(estimate.LOGITS, "cpu", 2 * 10 * 32)  # two texts of 10 rows of logits
    seen, begin = [], estimate.TextWalk.__init__
    monkeypatch.setattr(estimate.TextWalk, "__init__", lambda self, target, head, parts, *more: seen.append(len(parts))
                        or begin(self, target, head, parts, *more))
    assert estimate_tau(model.target, model.draft, documents, range(6), THRESHOLDS, TREE) == pytest.approx(together)
    assert seen == [2, 2, 2]
