"""Every rule against the slow reference on random trees; its ends; what is monotone; how rules are made."""

import math
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import ClassVar

import pytest
import torch
from random_trees import random_case
from reference_acceptance import Reference
from tiny import PROMPT, tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import RULES, GatingRule, make_rule
from eagle_fsd.captured.cycle import with_some_threshold

BOTH = pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
DIVERGENCES = [{"divergence": name} for name in ("js", "kl", "reverse_kl", "tv", "js_fsd_code", "js_top3", "kl_top1")]
GUARDS = [{"head_guard": alpha} for alpha in (None, 0.0, 0.5, 0.9, 1.0)]
THRESHOLDS = {  # one for each row of a batch
    "exact": (0.0, 0.0, 0.0, 0.0), "fsd": (0.02, 0.1, 0.4, math.inf), "fsd_paper": (0.02, 0.1, 0.4, math.inf),
    "typical": (0.0, 0.3, 0.7, 0.95), "lenience": (0.1, 0.5, 1.5, 50.0),
    "relaxed": (0.1, 0.6, 1.5, 4.0),
}
OPTIONS = {
    "exact": [{}], "fsd": [*GUARDS, *({**each, "head_guard": None} for each in DIVERGENCES)],
    "fsd_paper": [*GUARDS, *DIVERGENCES], "typical": GUARDS, "lenience": GUARDS,
    "relaxed": [*GUARDS, {"top": 2}, {"top": 2, "head_guard": None}],
}


def extreme_cases(greedy):
    """Logits at the ends of the float range, ties, infinite divergences, children without mass."""
    equal, coarse = random_case(11, greedy, gap=0.0), random_case(13, greedy, coarse=True)
    best = equal.raw.argmax(-1, keepdim=True)
    one_hot = torch.full_like(equal.raw, -math.inf).scatter(-1, best, 0.0)
    zeros, lacking = torch.zeros_like(equal.raw), [level.clone() for level in equal.draft_logits]
    for level in lacking:
        level[..., ::2] = -math.inf
    return {
        "draft equals target": equal,
        "one-hot": replace(equal, raw=one_hot, warped=one_hot),
        "gaps of 1e4": replace(coarse, raw=1e4 * coarse.raw, warped=1e4 * coarse.raw,
                               draft_logits=[1e4 * level for level in coarse.draft_logits]),
        "ties": coarse,
        "uniform": replace(equal, raw=zeros, warped=zeros,
                           draft_logits=[torch.zeros_like(level) for level in equal.draft_logits]),
        "nearly all banned": random_case(12, greedy, banned=0.9),
        "draft lacks tokens": replace(equal, draft_logits=lacking),
        "two tokens": random_case(14, greedy, vocab_size=2, named=2, nodes=6),
        "a root alone": random_case(15, greedy, nodes=1),
    }


def compare(rule, case, thresholds, left, divergences=True):
    """Rows of one walk with the reference and with walks of single rows; returns how many fuzzy steps there were."""
    walks = case.walk(rule, thresholds, left)
    for row, (steps, threshold, budget) in enumerate(zip(walks, thresholds, left, strict=True)):
        reference = Reference(rule, case, row, threshold, budget)
        expected = reference.walk()
        found = [(step.node, step.token, step.is_exact, step.closed) for step in steps]
        assert found == expected, (rule, row, threshold)
        assert sum(step.regret for step in steps if not step.is_exact) <= budget
        alone = case.take([row]).walk(replace(rule, threshold=threshold), left=budget)[0]
        assert [pytest.approx(step[:-1], nan_ok=True, rel=1e-5, abs=1e-6) for step in alone] == [s[:-1] for s in steps]
        for step in steps if divergences else []:
            assert step.divergence == pytest.approx(reference.reported(step.node), rel=1e-3, abs=1e-6, nan_ok=True)
            assert step.regret == pytest.approx(reference.regret(step.node, step.token), abs=1e-5)
            log_probs = case.raw[row, step.node].log_softmax(-1)
            assert step.logprob == pytest.approx(log_probs[step.token].item(), abs=1e-5)
            assert step.logit == case.warped[row, step.node, step.token]
    return sum(not step.is_exact for steps in walks for step in steps)


@BOTH
@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_the_reference(name, greedy):
    """Each row with a threshold and a budget of its own."""
    fuzzy = 0
    for index, options in enumerate(OPTIONS[name]):
        rule = make_rule(name, THRESHOLDS[name][-1], **options)
        cases = [(0.0, None, math.inf), (0.4, 7, 3.0), (0.0, 5, 1.0), (0.6, None, math.inf)]
        for number, (banned, named, most) in enumerate(cases):
            case = random_case(4 * index + number, greedy, banned=banned, named=named)
            budgets = [most, most / 3, 0.0, math.inf]
            fuzzy += compare(rule, case, THRESHOLDS[name], budgets)
    assert (fuzzy > 5) == (name != "exact" and (name, greedy) != ("lenience", True))


@BOTH
@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_the_reference_at_extremes(name, greedy):
    for case in extreme_cases(greedy).values():
        for options in OPTIONS[name][::2]:
            rule = make_rule(name, THRESHOLDS[name][-1], **options)
            compare(rule, case, THRESHOLDS[name], [math.inf, 1.0, math.inf, 3.0], divergences=False)


@pytest.mark.cuda
@BOTH
@pytest.mark.parametrize("name", RULES)
def test_cuda_walks_as_the_cpu(name, greedy):
    for case in (random_case(10, greedy, banned=0.2), random_case(11, greedy, named=6)):
        rule, given = make_rule(name, THRESHOLDS[name][-1]), (THRESHOLDS[name], [math.inf, 0.0, 1.0, 3.0])
        for steps, expected in zip(case.to("cuda").walk(rule, *given), case.walk(rule, *given), strict=True):
            ours, theirs = ([step[:-1] for step in each] for each in (steps, expected))
            assert [pytest.approx(step, nan_ok=True, rel=1e-4, abs=1e-5) for step in ours] == theirs


# --- the ends of the threshold -------------------------------------------------------------------

LOSSLESS_AT_ZERO = {"exact": (True, True), "fsd": (True, True), "fsd_paper": (False, False),
                    "typical": (False, False), "lenience": (True, True), "relaxed": (True, False)}  # greedy, sampling


@BOTH
@pytest.mark.parametrize("name", RULES)
def test_the_lossless_end_is_exact(name, greedy):
    """Also where a gate `divergence <= 0` would pass; and no other setting says that it is lossless."""
    cases = [*extreme_cases(greedy).values(), random_case(7, greedy), random_case(8, greedy, banned=0.4)]
    for options in OPTIONS[name]:
        rule = make_rule(name, **options)
        assert (rule.threshold, rule.is_lossless(greedy)) == (0, LOSSLESS_AT_ZERO[name][0 if greedy else 1])
        if name != "exact":
            assert replace(rule, threshold=1e-9).is_lossless(greedy) == (name == "lenience" and greedy)
        for case in cases if rule.is_lossless(greedy) else []:
            assert repr(case.walk(rule)) == repr(case.walk(make_rule("exact")))


def accepted(case, rule, thresholds):
    """[rows, thresholds]: accepted lengths."""
    lengths = [len(steps) - 1 for row in range(len(case.raw))
               for steps in case.take([row] * len(thresholds)).walk(rule, thresholds)]
    return torch.tensor(lengths).view(len(case.raw), -1)


MONOTONE = {  # rule: options, thresholds, whether also with noise and processors
    "fsd": ([{}, {"divergence": "kl"}, {"divergence": "tv_top3", "head_guard": None}],
            [0.001, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0, math.inf], True),
    "fsd_paper": ([{}, {"head_guard": 0.5}], [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0, math.inf], True),
    "lenience": ([{}, {"head_guard": 0.5}], [0.001, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 50.0], True),
    # Which child the target picks depends on which may be taken; without noise it is its best, which passes first.
    "typical": ([{}, {"head_guard": None}], [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99], False),
    "relaxed": ([{}, {"top": 3}], [0.001, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 50.0], False),
}


@BOTH
@pytest.mark.parametrize("name", [name for name in RULES if name != "exact"])
def test_a_captured_cycle_serves_all_thresholds_above_0(name, greedy):
    some = with_some_threshold(RULES[name]())
    assert {some.is_lossless(greedy)} == {
        replace(some, threshold=threshold).is_lossless(greedy) for threshold in (1e-3, 0.3, 0.99)}


@pytest.mark.parametrize("name", MONOTONE)
def test_a_larger_threshold_never_accepts_less(name):
    """For a fixed prefix, tree and noise."""
    every, thresholds, always = MONOTONE[name]
    longer = 0
    for seed in range(24):
        greedy = name != "lenience" and (seed % 2 == 0 or not always)
        case = random_case(seed, greedy, nodes=14, banned=0.3 * (always and seed % 3 == 0), coarse=seed % 4 == 1,
                           temperature=1.6, gap=1.5)
        for options in every:
            lengths = accepted(case, make_rule(name, thresholds[-1], **options), thresholds)
            assert (lengths.diff(dim=1) >= 0).all(), (seed, options, lengths)
            longer += int((lengths[:, -1] > lengths[:, 0]).sum())
    assert longer > 10


@pytest.mark.parametrize("share", [0.7, 0.3, 0.05])
def test_fsd_without_a_limit_is_its_guard_alone(share):
    """As `relaxed` among all tokens with that distance from the best, which speculative cascades call TokenV3."""
    fuzzy = 0
    for seed in range(40):
        case = random_case(seed, seed % 2 == 0, nodes=14, temperature=1.6, gap=1.5)
        unlimited, among_all = (case.walk(rule) for rule in (
            make_rule("fsd", math.inf, head_guard=1 - share),
            make_rule("relaxed", -math.log(share), top=case.raw.shape[-1], head_guard=None)))
        assert ([[step.token for step in row] for row in unlimited]
                == [[step.token for step in row] for row in among_all])
        fuzzy += sum(not step.is_exact for row in unlimited for step in row)
    assert fuzzy > 10


# --- making rules --------------------------------------------------------------------------------


def test_options_reach_the_rule():
    for name, rule in RULES.items():
        assert rule.name == name and make_rule(name) == rule() and make_rule(name).threshold == 0
        guard = 0.7 if name in ("fsd", "typical", "relaxed") else None
        assert getattr(make_rule(name), "head_guard", None) == guard
    rule = make_rule("fsd", 0.3, "kl_top32", head_guard=None)
    assert (rule.threshold, rule.divergence, rule.head_guard) == (0.3, "kl_top32", None)
    assert make_rule(rule) == rule and make_rule(rule, 0.1, head_guard=0.5) == make_rule(
        "fsd", 0.1, "kl_top32", head_guard=0.5)
    assert make_rule("typical", torch.tensor(0.5).numpy()[()]).threshold == 0.5
    assert hash(make_rule("relaxed", 1)) == hash(make_rule("relaxed", 1.0))
    with pytest.raises(FrozenInstanceError):
        rule.threshold = 0.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rule": "magic"}, ValueError, "unknown rule 'magic'; accepted: exact, fsd, fsd_paper, typical, .*function$"),
        ({"rule": "tilt", "threshold": 1.0}, ValueError, "rule 'tilt', which was removed: use 'fsd'"),
        ({"rule": "fly"}, ValueError, "rule 'fly', which was removed: use 'fsd', .*; accepted: exact, fsd, "),
        ({"rule": 3}, TypeError, "a rule is a name, a rule or a function, got 3"),
        ({"rule": RULES["fsd"]}, TypeError, "a rule is a name, a rule or a function"),
        ({"rule": "exact", "threshold": 0.1}, ValueError, r"rule 'exact' must be 0, got 0.1"),
        ({"rule": "fsd", "threshold": -0.1}, ValueError, r"must lie in \[0, inf\], got -0.1"),
        ({"rule": "fsd", "threshold": math.nan}, ValueError, r"must lie in \[0, inf\], got nan"),
        ({"rule": "fsd", "threshold": "0.1"}, TypeError, "must be a number, got '0.1'"),
        ({"rule": "lenience", "threshold": math.inf}, ValueError, r"\[0, inf\), got inf"),
        ({"rule": "typical", "threshold": 1.0}, ValueError, r"\[0, 1\), got 1.0"),
        ({"rule": "fsd", "divergence": "jsd"}, ValueError, "unknown divergence 'jsd'; accepted: kl"),
        ({"rule": "typical", "divergence": "js"}, ValueError, "has no option 'divergence'; accepted: threshold"),
        ({"rule": "ensemble", "threshold": 0.3}, ValueError, "rule 'ensemble', which was removed: use 'fsd'"),
        ({"rule": "relaxed", "top": 0}, ValueError, "top must be at least 1, got 0"),
        ({"rule": "exact", "head_guard": 0.5}, ValueError, "'exact' has no option 'head_guard'"),
        ({"rule": "typical", "head_guard": 1.1}, ValueError, r"head_guard must lie in \[0, 1\], got 1.1"),
        ({"rule": lambda nodes: None, "threshold": 0.1}, ValueError, "takes no options, got threshold"),
    ],
    ids=lambda value: value["rule"] if isinstance(value, dict) and isinstance(value["rule"], str) else "",
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        make_rule(**arguments)


# --- a rule of one's own -------------------------------------------------------------------------


@dataclass(frozen=True)
class MARS(GatingRule):
    """Allow the target's second best token where its logit is above a share of the best one's (arXiv 2601.15498).

    Args:
        threshold: T in [0, 1): the share is 1 - T.
    """

    name: ClassVar[str] = "mars"
    threshold_limit: ClassVar[tuple[float, bool]] = (1.0, False)

    def is_lossless(self, greedy: bool) -> bool:
        return False

    def gate(self, nodes):
        best, second = nodes.raw.topk(2).values.T  # [B] each
        near = second > (1 - nodes.threshold.float()) * best  # z2 / z1 > 1 - T, for positive logits
        runner_up = nodes.raw.gather(1, nodes.tokens) == second[:, None]
        return runner_up & near[:, None], None


def test_a_rule_of_ones_own_decodes():
    pair = tiny_pair()

    def answer(rule, **options):
        return eagle_fsd.generate(PROMPT, pair, max_new_tokens=48, acceptance=rule, tree=eagle_fsd.TreeConfig(8, 3, 3),
                                  text_drafts="off", **options)

    mars, exact = answer(MARS(0.1)), answer("exact")
    assert mars.stats.target_forwards < exact.stats.target_forwards
    raw = pair.target.model(torch.tensor([PROMPT + mars.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    best, second = raw.topk(2).values.T
    fuzzy = torch.tensor([receipt.source == "fuzzy" for receipt in mars.receipts])
    assert fuzzy.any() and (second[fuzzy] > 0.9 * best[fuzzy]).all()
    assert [each.regret for each in mars.receipts] == pytest.approx((fuzzy * (best - second)).tolist(), abs=1e-4)
    assert answer(MARS(0.1), threshold=0.0).token_ids == answer(MARS(0.1), budget=0).token_ids == exact.token_ids


@pytest.mark.parametrize("name", ["window", "mixes_draft"])
def test_what_a_rule_of_ones_own_no_longer_may_have_is_refused(name):
    with pytest.raises(TypeError, match=f"rule 'mars' has '{name}', which was removed: "):
        type("Earlier", (MARS,), {name: 1})(0.1)
