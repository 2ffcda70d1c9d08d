"""Budgets: nats of regret that fuzzy tokens pay, never exceeded; exact once they are spent or a text repeats itself.
Marks: between them alone a rule decides."""

import math

import pytest
import torch
from tiny import PROMPT, tiny_pair

import eagle_fsd
from eagle_fsd.decoding.request import repeats

TREE = eagle_fsd.TreeConfig(8, 3, 3)
MODES = pytest.mark.parametrize("mode", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
FUZZY = ["fsd", "fsd_paper", "typical", "lenience", "relaxed"]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


def answer(pair, new_tokens=36, prompt=PROMPT, **options):
    return eagle_fsd.generate(prompt, pair, max_new_tokens=new_tokens, tree=TREE, text_drafts="off", **options)


def paid(output) -> float:
    return sum(receipt.regret for receipt in output.receipts if receipt.source == "fuzzy")


@MODES
@pytest.mark.parametrize("name", FUZZY)
def test_answers_pay_for_their_fuzzy_tokens_alone(pair, name, mode):
    options = {"acceptance": name, "threshold": 0.9, **mode}
    exact, free = answer(pair, acceptance="exact", **mode), answer(pair, **options)
    assert free.stats.budget_spent is None and not any(receipt.exact_because for receipt in free.receipts)
    none, plenty = answer(pair, budget=0, **options), answer(pair, budget=1e9, **options)
    assert none.token_ids == exact.token_ids and plenty.token_ids == free.token_ids
    assert plenty.stats.budget_spent == pytest.approx(paid(free))
    if (name, mode) == ("lenience", {}):  # exact, whatever the budget
        assert (none.stats.budget_spent, none.stats.exact_from, none.stats.exact_because) == (0, None, None)
        return
    assert (none.stats.budget_spent, none.stats.exact_from, none.stats.exact_because) == (0, 0, "budget")
    assert all(receipt.exact_because == "budget" for receipt in none.receipts)
    assert paid(free) > 1 and plenty.stats.exact_because is None
    limited = answer(pair, budget=0.9 * paid(free), **options)
    assert paid(limited) == pytest.approx(limited.stats.budget_spent) and 0 < paid(limited) <= 0.9 * paid(free)
    at = limited.stats.exact_from
    assert limited.stats.exact_because == "budget" and limited.token_ids[:at] == free.token_ids[:at]
    assert [receipt.exact_because for receipt in limited.receipts] == [None] * at + ["budget"] * (36 - at)
    assert all(receipt.source != "fuzzy" for receipt in limited.receipts[at:])
    seed = {"seed": 3} if mode else {}  # noise goes by position: the rest is what `exact` says to the text so far
    rest = answer(pair, 36 - at, PROMPT + limited.token_ids[:at], acceptance="exact", **mode | seed)
    assert rest.token_ids == limited.token_ids[at:]


@MODES
def test_tokens_after_an_end_cost_nothing(pair, mode):
    """At the limit or after a stop token, wherever in a cycle it comes; also where they would have been refused."""
    options = {"threshold": 0.9, "head_guard": None, **mode}
    whole = answer(pair, **options)
    for budget in (1e9, paid(whole) / 2):
        for end in [*({"new_tokens": count} for count in range(1, 36, 3)), {"stop_token_ids": [whole.token_ids[9]]}]:
            cut = answer(pair, budget=budget, **end, **options)
            assert cut.stats.budget_spent == pytest.approx(paid(cut))
            assert cut.stats.exact_from is None or cut.stats.exact_from < len(cut.token_ids) <= 36
            assert (cut.stats.exact_from is None) == all(each.exact_because is None for each in cut.receipts)


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


def always_seven(nodes):
    return torch.nn.functional.one_hot(torch.tensor(7), nodes.raw.shape[-1]).float()


def test_with_a_budget_a_text_that_repeats_itself_returns_to_exact(pair):
    output = answer(pair, 24, acceptance=always_seven, budget=math.inf)
    at = output.stats.exact_from
    assert output.stats.exact_because == "repetition"
    assert 12 <= at < 20 and output.token_ids[1:at] == [7] * (at - 1)
    assert [receipt.exact_because for receipt in output.receipts] == [None] * at + ["repetition"] * (24 - at)
    follow = answer(pair, 24 - at, PROMPT + output.token_ids[:at], acceptance="exact")
    assert output.token_ids[at:] == follow.token_ids
    assert answer(pair, 24, acceptance=always_seven).token_ids[1:] == [7] * 23


# Marks ------------------------------------------------------------------------------------------------------------


@MODES
def test_a_rule_decides_between_its_marks(pair, mode):
    """Fuzzy tokens stand there alone; the prompt's marks count; what comes before the first fuzzy one is exact's."""
    options = {"threshold": math.inf, "head_guard": None, **mode}
    free, exact = answer(pair, **options), answer(pair, acceptance="exact", **mode)
    assert free.token_ids != exact.token_ids
    never, other = sorted({*range(32)} - {*PROMPT, *free.token_ids, *exact.token_ids})[:2]
    assert answer(pair, fuzzy_within=(never, other), **options).token_ids == exact.token_ids
    assert answer(pair, fuzzy_within=(PROMPT[-1], never), **options).token_ids == free.token_ids
    for opening in set(exact.token_ids[:20]):
        for closing in set(free.token_ids) - {opening}:
            output, inside = answer(pair, fuzzy_within=[opening, closing], **options), False
            for token in PROMPT:
                inside = (inside or token == opening) and token != closing
            for token, receipt in zip(output.token_ids, output.receipts, strict=True):
                assert inside or receipt.source != "fuzzy"
                inside = (inside or token == opening) and token != closing
