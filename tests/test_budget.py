"""Budgets: never exceeded, exact once they are spent, and the return when a text repeats itself."""

import math

import pytest
import torch
from tiny import PROMPT, readable, tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.acceptance.budget import repeats
from eagle_fsd.engine import decoder

TREE = eagle_fsd.TreeConfig(8, 3, 3)
SAMPLED = {"temperature": 1.0}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


def answer(pair, new_tokens=24, **options):
    return eagle_fsd.generate(PROMPT, pair, max_new_tokens=new_tokens, tree=TREE, **options)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1] * 12, True), ([1] * 11, False), ([5, 1, 2, 3, 4] + [1, 2, 3, 4] * 2, True),
        ([1, 2, 3, 4] * 2 + [1, 2, 3], False), (list(range(32)) * 3, True), (list(range(33)) * 3, False),
        ([1] * 20 + [2], False), ([], False),
    ],
)
def test_repetition(tokens, found):
    assert repeats(tokens) is found


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", ["fsd", "tilt", "typical", "lenience", "relaxed", "fsd_paper"])
def test_without_a_budget_left_decoding_is_exact(pair, rule, options):
    spent = answer(pair, acceptance=rule, threshold=0.6, budget=0, **options)
    assert spent.token_ids == answer(pair, acceptance="exact", **options).token_ids
    assert (spent.stats.budget_spent, spent.stats.exact_because) == (0, "budget")
    assert all(receipt.source != "fuzzy" for receipt in spent.receipts)


def kl_by_hand(verification, decision) -> float:
    """KL of a cycle's law, node by node down the tree, from the log-weights that were walked."""
    drawn, own = decision.log_weights[0].double().softmax(-1), verification.warped_logits[0].double().softmax(-1)
    parents, tokens = verification.tree.parents[0].tolist(), verification.tree.tokens[0].tolist()
    reach = [1.0]
    for node in range(1, len(parents)):
        reach.append(reach[parents[node]] * drawn[parents[node], tokens[node]].item())
    node_kl = torch.where(drawn > 0, drawn * (drawn / own).log(), 0.0).sum(-1)
    return sum(r * k for r, k in zip(reach, node_kl.tolist(), strict=True))


@pytest.mark.parametrize(("rule", "limit"), [(make_rule("fsd", 0.3), 9.0), (make_rule("tilt", 0.3), 0.15)], ids=str)
def test_a_thousand_sampled_requests_stay_within_their_kl(pair, rule, limit, monkeypatch):
    """500 for each rule, summed over the decisions that were really walked."""
    spent = []

    def record(verification, decision):
        spent.append(kl_by_hand(verification, decision))
        return walk(verification, decision)

    walk = decoder.walk
    monkeypatch.setattr(decoder, "walk", record)
    endings = []
    for seed in range(500):
        spent.clear()
        output = eagle_fsd.generate(
            PROMPT, pair, max_new_tokens=12, tree=TREE, acceptance=rule, budget=limit, seed=seed, **SAMPLED
        )
        assert sum(spent) <= limit + 1e-5
        assert output.stats.budget_spent <= limit
        assert output.stats.budget_spent == pytest.approx(sum(spent), abs=1e-4)
        endings.append(output.stats.exact_because)
        if output.stats.exact_from is not None:
            assert all(receipt.source != "fuzzy" for receipt in output.receipts[output.stats.exact_from :])
    assert endings.count("budget") > 50 and endings.count(None) > 50


@pytest.mark.parametrize("rule", ["fsd", "tilt", "relaxed", "typical", "fly", "fsd+fly"])
def test_greedy_regret_stays_within_the_limit_and_is_used(pair, rule):
    free = answer(pair, 36, acceptance=rule, threshold=0.6)
    regret = sum(receipt.regret for receipt in free.receipts)
    assert regret > 1
    unlimited = answer(pair, 36, acceptance=rule, threshold=0.6, budget=1e9)
    assert unlimited.token_ids == free.token_ids
    assert unlimited.stats.budget_spent == pytest.approx(regret, abs=1e-3)
    limited = answer(pair, 36, acceptance=rule, threshold=0.6, budget=regret / 2)
    given_up = sum(receipt.regret for receipt in limited.receipts)
    assert 0 < given_up <= limited.stats.budget_spent + 1e-4 <= regret / 2 + 1e-4
    assert limited.stats.exact_because == "budget"
    at = limited.stats.exact_from
    assert all(receipt.regret == 0 for receipt in limited.receipts[at:])
    assert limited.token_ids[:at] == free.token_ids[:at]
    assert [receipt.exact_because for receipt in limited.receipts] == [None] * at + ["budget"] * (36 - at)
    assert not any(receipt.exact_because for receipt in free.receipts)


@pytest.mark.parametrize("rule", ["fsd", "tilt", "relaxed", "typical", "fly", "fsd+fly"])
def test_tokens_that_an_end_cuts_off_cost_nothing(pair, rule):
    """At the limit or behind a stop token, wherever in a cycle it comes."""
    whole = answer(pair, 36, acceptance=rule, threshold=0.6, budget=1e9)
    ends = [{"new_tokens": count} for count in range(1, 36, 3)]
    for end in [*ends, {"stop_token_ids": [whole.token_ids[9]]}]:
        cut = answer(pair, **{"new_tokens": 36, **end}, acceptance=rule, threshold=0.6, budget=1e9)
        assert len(cut.token_ids) < 36
        assert cut.stats.budget_spent == pytest.approx(sum(each.regret for each in cut.receipts), abs=1e-3)


def test_regrets_are_those_of_the_targets_own_forward(pair):
    output = answer(pair, acceptance="relaxed", threshold=2.0)
    ids = torch.tensor([PROMPT + output.token_ids])
    with torch.no_grad():
        log_probs = pair.target.model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = log_probs.amax(-1) - log_probs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    assert [receipt.regret for receipt in output.receipts] == pytest.approx(expected.tolist(), abs=1e-4)


class Always(eagle_fsd.acceptance.Rule):
    """Log-weights that want one token everywhere."""

    name = "always"

    def is_lossless(self, greedy):
        return False

    def decide(self, verification):
        wanted = torch.zeros_like(verification.warped_logits)
        wanted[..., 7] = 100.0
        return eagle_fsd.Decision(wanted)


def test_a_text_that_repeats_itself_returns_to_exact(pair):
    output = answer(pair, acceptance=Always(), budget=math.inf)
    assert output.stats.exact_because == "repetition"
    at = output.stats.exact_from
    assert 12 <= at < 20 and output.token_ids[1:at] == [7] * (at - 1)
    follow = eagle_fsd.generate(
        PROMPT + output.token_ids[:at], pair, max_new_tokens=24 - at, tree=TREE, acceptance="exact"
    )
    assert output.token_ids[at:] == follow.token_ids
    assert answer(pair, acceptance=Always()).stats.exact_because is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": -1}, ValueError, "at least 0 nats, got -1"),
        ({"budget": math.nan}, ValueError, "got nan"),
        ({"budget": "1"}, TypeError, "must be a number of nats, got '1'"),
        ({"budget": 1, "temperature": 1.0, "acceptance": make_rule("fsd", 0.1, sibling="longest")}, ValueError,
         "whose KL is known"),
        ({"budget": 1, "temperature": 1.0, "acceptance": lambda v: v.warped_logits}, ValueError, "whose KL is known"),
    ],
    ids=readable,
)
def test_bad_budgets_are_refused(pair, options, error, message):
    with pytest.raises(error, match=message):
        answer(pair, **options)
