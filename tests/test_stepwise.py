"""The walk node by node is that of the whole tree, and what is said of it too. V = 11 or 32 vocabulary."""

import math
from functools import partial

import pytest
import torch
from random_trees import random_verification
from reference_acceptance import Reference
from test_acceptance_reference import SETTINGS
from test_eagle3 import NAMED, deep_target, good_head
from tiny import PROMPT, judged, tiny_pair
from transformers import LogitsProcessor

import eagle_fsd
from eagle_fsd import RULES, EagleModel, TreeConfig, Verification, make_rule
from eagle_fsd.acceptance import ChildWeights, draw, walk
from eagle_fsd.acceptance.divergence import DIVERGENCES, get_divergence, widen
from eagle_fsd.engine import decoder
from eagle_fsd.engine.emission import read_walk, walk_stepwise

TREE = TreeConfig(16, 5, 4)


def with_children(tree, row, node):
    return [node, *(n for n in range(1, tree.tokens.shape[1]) if tree.parents[row, n] == node)]


def alone(verification, row, node):
    """A node with its children, as the walk asks about it."""
    here, place = slice(row, row + 1), slice(node, node + 1)
    noise = None if verification.noise is None else verification.noise[here, place]
    family = with_children(verification.tree, row, node)
    tree = verification.tree.family(row, family)
    return Verification(tree, verification.target_logits[here, place], verification.warped_logits[here, place],
                        verification.own_logits[here], noise, verification.draft_tokens,
                        verification.features[here, family])


def asked(verification, row, family, said):
    """As the engine is: the tokens are those of the path."""
    tree = verification.tree
    assert family == with_children(tree, row, family[0])
    assert said == tree.tokens[row, tree.ancestors[row, family[0]]].tolist()
    return alone(verification, row, family[0])


def test_a_family_by_hand():
    tree = random_verification(0, True, batch=2, nodes=9).tree
    for node in range(9):
        _, *children = with_children(tree, 1, node)
        family = tree.family(1, [node, *children])
        assert family.tokens.tolist() == [tree.tokens[1, [node, *children]].tolist()]
        assert family.parents.tolist() == [[0] * (len(children) + 1)]
        assert family.depths.tolist() == [[0] + [1] * len(children)] and family.max_depth == bool(children)
        assert family.draft_rows[0, 0] == tree.draft_rows[1, node]
        assert family.ancestors[0].tolist() == [[i in (0, j) for i in range(len(children) + 1)]
                                                for j in range(len(children) + 1)]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_rule_that_does_not_look_ahead_decides_alike_about_each_node_alone(name, greedy):
    rules = [make_rule(name, **setting) for setting in SETTINGS[name]]
    looking = [rule for rule in rules if not rule.looks_ahead]
    assert [rule for rule in rules if rule.looks_ahead] == [
        rule for rule in rules if any(
            part.name in ("tilt", "regret", "prose", "afterword") or getattr(part, "sibling", "") == "longest"
            or getattr(part, "window", 1) > 1 for part in rule.parts)]
    for index, rule in enumerate(looking):
        verification = random_verification(
            index, greedy, batch=2, gap=0.7, temperature=0.8, banned=0.4 * (index % 2), coarse=index % 3 == 0)
        decision = rule(verification)
        choice = draw(verification, decision)
        for row in range(2):
            reference = Reference(rule, verification, row)
            for node in range(12):
                here = alone(verification, row, node)
                own = rule(here)
                assert torch.equal(draw(here, own)[0, 0], choice[row, node]), (rule, row, node)
                if index % 3:
                    assert draw(here, own).item() == reference.choice(node)[0]
                assert torch.equal(own.log_weights[0, 0], decision.log_weights[row, node])
                for part in ("divergence", "stop"):
                    whole, single = getattr(decision, part), getattr(own, part)
                    assert (single is None) == (whole is None)
                    if whole is not None:
                        torch.testing.assert_close(single[0, 0], whole[row, node], equal_nan=True)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "tilt"])
def test_walks_and_what_is_read_of_them(name, greedy):
    rules = [rule for rule in (make_rule(name, **setting) for setting in SETTINGS[name]) if not rule.looks_ahead]
    for index, rule in enumerate(rules):
        verification = random_verification(index, greedy, batch=3, gap=0.7, temperature=0.8, banned=0.4 * (index % 2))
        decision = rule(verification)
        paths, emissions = read_walk(verification, decision, walk(verification, decision))
        for row in range(3):
            steps = walk_stepwise(rule, verification.tree.row(row), partial(asked, verification, row))
            assert [step.node for step in steps] == paths[row]
            assert [step.token for step in steps] == emissions[row].tokens
            assert [step.drawn for step in steps] == emissions[row].logits
            for step, receipt in zip(steps, emissions[row].receipts, strict=True):
                assert (step.logprob, step.regret) == pytest.approx((receipt.logprob, receipt.regret), abs=1e-6)
                assert math.isnan(step.divergence) == (receipt.divergence is None)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_of_children_draw_what_they_draw_written_out(name, greedy, coarse):
    """With coarse logits there are ties: the first token counts, as with argmax."""
    for index, setting in enumerate(SETTINGS[name]):
        rule = make_rule(name, **setting)
        verification = random_verification(index, greedy, gap=0.7, banned=0.4 * (index % 2), coarse=coarse)
        decision = rule(verification)
        lossless = rule.is_lossless(greedy)
        assert isinstance(decision.weights, ChildWeights) is not lossless
        noise = 0 if greedy else verification.noise
        assert torch.equal(draw(verification, decision), (decision.log_weights + noise).argmax(-1)), rule


@pytest.mark.parametrize("name", [*DIVERGENCES, "js_top3", "kl_top9"])
def test_a_divergence_over_the_drafts_own_tokens_is_that_over_all(name):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([9, 1, 4, 6, 2])
    target_logits, own = (3 * torch.randn(20, size, generator=generator) for size in (11, 5))
    target_logits[3, 7], target_logits[4, 4], target_logits[5] = -math.inf, -math.inf, -math.inf
    target_logits[5, 1], own[6] = 0.0, 40 * own[6]
    expected = get_divergence(name)(target_logits, widen(own, tokens, 11))
    torch.testing.assert_close(get_divergence(name, tokens)(target_logits, own), expected, rtol=1e-4, atol=1e-6)


# In the engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs():
    target = deep_target()
    return {"eagle": tiny_pair(), "eagle3, 21 of 32 tokens": EagleModel.from_parts(target, good_head(target, NAMED))}


class NotTwice(LogitsProcessor):
    """Looks at the text: no token right after itself."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -math.inf)


def both(monkeypatch, pair, prompt, **options):
    """Decoded with whole trees, then stepwise; how many nodes were asked about."""
    whole = eagle_fsd.generate(prompt, pair, max_new_tokens=24, tree=TREE, **options)
    families, family = [], decoder.DraftTree.family
    monkeypatch.setattr(decoder, "STEPWISE_FROM", 0)
    monkeypatch.setattr(decoder.DraftTree, "family", lambda tree, *at: families.append(at) or family(tree, *at))
    stepwise = eagle_fsd.generate(prompt, pair, max_new_tokens=24, tree=TREE, **options)
    monkeypatch.undo()
    return whole, stepwise, len(families)


def assert_same(whole, stepwise):
    assert stepwise.token_ids == whole.token_ids
    assert stepwise.stats.accepted_lengths == whole.stats.accepted_lengths
    assert stepwise.stats.budget_spent == pytest.approx(whole.stats.budget_spent, abs=1e-4)
    assert stepwise.stats.exact_because == whole.stats.exact_because
    for ours, theirs in zip(stepwise.receipts, whole.receipts, strict=True):
        assert (ours.source, ours.exact_because) == (theirs.source, theirs.exact_because)
        assert ours.divergence == pytest.approx(theirs.divergence, abs=1e-5)
        assert (ours.logprob, ours.regret) == pytest.approx((theirs.logprob, theirs.regret), abs=1e-5)


SAMPLING = {
    "greedy": {}, "penalised": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 0.9, "seed": 3}, "warped": {"temperature": 1.2, "top_p": 0.8, "top_k": 9, "seed": 4},
    "processed": {"temperature": 1.0, "seed": 5, "min_new_tokens": 4, "logits_processor": [NotTwice()]},
}


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("pair", ["eagle", "eagle3, 21 of 32 tokens"])
def test_answers(pairs, pair, name, kind, monkeypatch):
    threshold = None if name == "exact" else 0.4
    whole, stepwise, asked = both(
        monkeypatch, pairs[pair], PROMPT, acceptance=make_rule(name, threshold, **judged(name)), **SAMPLING[kind])
    assert_same(whole, stepwise)
    assert sum(whole.stats.accepted_lengths) > 0
    lengths = whole.stats.accepted_lengths
    on_path = 0 if RULES[name]().looks_ahead else sum(lengths) + len(lengths)
    assert asked == on_path, "other nodes than those of the path"


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", ["exact", "fsd"])
def test_batches(pairs, name, kind, monkeypatch):
    prompts = [PROMPT, PROMPT[:4], PROMPT[3:]]
    rule = make_rule(name, **({} if name == "exact" else {"threshold": 0.4}))
    whole, stepwise, asked = both(monkeypatch, pairs["eagle"], prompts, acceptance=rule, **SAMPLING[kind])
    for one, other in zip(whole, stepwise, strict=True):
        assert_same(one, other)
    assert asked


@pytest.mark.parametrize("limit", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("kind", ["greedy", "penalised", "sampled"])
def test_budgets(pairs, kind, limit, monkeypatch):
    """When sampling they count the KL over the whole tree."""
    whole, stepwise, asked = both(
        monkeypatch, pairs["eagle"], PROMPT, acceptance="fsd", threshold=0.6, budget=limit, **SAMPLING[kind])
    assert_same(whole, stepwise)
    assert bool(asked) == (kind != "sampled")
    assert kind != "greedy" or limit == math.inf or whole.stats.exact_because == "budget"


def test_rules_that_do_not_say_so_see_the_whole_tree(pairs, monkeypatch):
    sizes = set()

    def rule(verification):
        sizes.add(tuple(verification.target_logits.shape[:2]))
        return verification.warped_logits

    assert_same(*both(monkeypatch, pairs["eagle"], PROMPT, acceptance=rule)[:2])
    assert sizes == {(1, 16)}
