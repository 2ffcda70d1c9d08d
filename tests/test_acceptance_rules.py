"""What must hold of every rule in RULES, and what a user can get wrong."""

import math
from dataclasses import FrozenInstanceError, dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import moved, random_verification, rows_of
from tiny import MARKS, readable, tiny_judge

from eagle_fsd.acceptance import RULES, Custom, Decision, Gated, Verification, make_rule, walk
from eagle_fsd.acceptance.divergence import get_divergence

OPTIONS = {
    "exact": [{}],
    "fsd": [{"sibling": sibling} for sibling in ("target", "draft", "longest")],
    "fsd_paper": [{}],
    "tilt": [{}, {"max_regret": 0.8}],
    "typical": [{"sibling": "target"}, {"sibling": "longest"}],
    "lenience": [{}],
    "fly": [{}, {"window": 1}, {"window": 3, "renormalised": False}],
    "regret": [{}, {"most": 1}],
    "judge": [{"learned": tiny_judge(5)}],
    "relaxed": [{"sibling": "target"}, {"sibling": "longest"}, {"top": 2}],
    "prose": [{"marks": MARKS}],
    "afterword": [{"marks": MARKS}],
    "fsd+fly": [{"gate_threshold": 0.9}, {"sibling": "draft"}],
    "fsd+regret": [{"gate_threshold": 2.0}],
    "relaxed+fsd": [{"gate_threshold": 0.1, "divergence": "tv"}],
    "typical+fly+regret": [{"gate_threshold": [1.0, 3.0]}],
}
GATED = (0.0, 0.1, math.inf)
DIALS = {"exact": (0.0,), "typical": (0.0, 0.7), "fsd": GATED, "fsd_paper": GATED, "fly": (0.0, 0.6, math.log(3)),
         "judge": (0.0, 0.3, 1.0), "regret": (0.0, 0.5, 4.0, math.inf),
         "prose": (0.0, 0.5, math.inf), "afterword": (0.0, 0.5, math.inf)}
GUARDS = (None, 0.0, 0.4, 0.8)


def all_rules(name):
    for options in OPTIONS[name]:
        for threshold in DIALS.get(name.split("+")[0], (0.0, 0.3, 2.0)):
            for head_guard in GUARDS if name != "exact" else (None,):
                guard = {} if head_guard is None else {"head_guard": head_guard}
                yield make_rule(name, threshold, **options, **guard)


def extreme(kind: str, greedy: bool) -> Verification:
    """Random trees under logits at the ends of the float range."""
    verification = random_verification(11, greedy, batch=4, gap=0.0)
    target_logits, draft_logits = verification.target_logits, verification.draft_logits
    if kind == "one-hot":
        best = target_logits.argmax(-1, keepdim=True)
        target_logits = torch.full_like(target_logits, -math.inf).scatter(-1, best, 0.0)
    elif kind == "gaps of 1e4":
        target_logits, draft_logits = 1e4 * target_logits.round(), 1e4 * draft_logits.round()
    elif kind == "uniform":
        target_logits, draft_logits = torch.zeros_like(target_logits), torch.zeros_like(draft_logits)
    warped_logits = target_logits
    if kind == "half banned":
        warped_logits = random_verification(11, greedy, batch=4, gap=0.0, banned=0.5).warped_logits
    if kind == "draft lacks tokens":
        draft_logits = draft_logits.clone()
        draft_logits[..., ::2] = -math.inf
    return Verification(verification.tree, target_logits, warped_logits, draft_logits, verification.noise,
                        features=verification.features)


KINDS = ("draft equals target", "one-hot", "gaps of 1e4", "uniform", "half banned", "draft lacks tokens")


# --- invariants of every rule -------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", OPTIONS)
def test_invariants(name, greedy):
    verifications = [random_verification(seed, greedy, gap=0.6, banned=0.3 * (seed % 2)) for seed in range(4)]
    verifications += [extreme(kind, greedy) for kind in KINDS]
    for rule in all_rules(name):
        for verification in verifications:
            decision = rule(verification)
            walked = walk(verification, decision)
            assert decision.log_weights.dtype == torch.float32
            assert (decision.log_weights < math.inf).all(), (rule, "nan or inf")

            steps = walked.accepted & verification.is_child
            assert (verification.step_logits[steps] > -math.inf).all(), "a step without warped mass"
            fuzzy = steps & ~verification.is_exact
            head_guard = getattr(rule.parts[0], "head_guard", None)
            if head_guard is not None:
                assert verification.in_head(head_guard)[fuzzy].all(), "a fuzzy step outside the head"

            assert torch.equal(walked.length, steps.sum(-1))
            assert torch.equal(walked.length, verification.tree.depths.gather(1, walked.last[:, None])[:, 0])
            last_token = walked.choice.gather(1, walked.last[:, None])
            exact_token = verification.exact_choice.gather(1, walked.last[:, None])
            assert torch.equal(last_token, exact_token), "another last token than the target's own"
            if name != "fsd_paper":
                stops_at_child = verification.of_parent(verification.exact_choice) == verification.tree.tokens
                stops_at_child &= (verification.tree.parents == walked.last[:, None]) & verification.is_child
                assert not stops_at_child.any(), "an exact step was refused"


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_do_not_depend_on_the_batch(name, greedy):
    verification = random_verification(5, greedy, batch=4, banned=0.2)
    for rule in all_rules(name):
        together = walk(verification, rule(verification))
        for row in range(4):
            single = rows_of(verification, slice(row, row + 1))
            alone = walk(single, rule(single))
            for field in ("choice", "accepted", "last", "length"):
                assert torch.equal(getattr(together, field)[row], getattr(alone, field)[0]), (rule, field)


def test_divergence_does_not_depend_on_skipping_leaves():
    verification = random_verification(9, greedy=True)
    everywhere = get_divergence("js")(verification.target_logits, verification.node_draft_logits)
    expected = torch.where(verification.has_children, everywhere, math.nan)
    torch.testing.assert_close(verification.divergence("js"), expected, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cuda_walks_as_the_cpu(name, greedy):
    verification = random_verification(10, greedy, batch=4, gap=0.6, banned=0.2)
    on_cuda = moved(verification, "cuda")
    for rule in all_rules(name):
        expected, walked = walk(verification, rule(verification)), walk(on_cuda, rule(on_cuda))
        for field in ("choice", "accepted", "last", "length"):
            assert torch.equal(getattr(walked, field).cpu(), getattr(expected, field)), (rule, field)


@pytest.mark.parametrize("name", OPTIONS)
def test_inputs_are_left_alone(name):
    for greedy in (True, False):
        verification, untouched = (random_verification(6, greedy, banned=0.2) for _ in range(2))
        for rule in all_rules(name):
            rule(verification)
        for field in ("target_logits", "warped_logits", "draft_logits", "noise"):
            if getattr(untouched, field) is not None:
                assert torch.equal(getattr(verification, field), getattr(untouched, field))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_says_that_it_does_not_read_the_draft_decides_without_it(name):
    for greedy in (True, False):
        verification = random_verification(6, greedy)
        blind = replace(verification, own_logits=verification.own_logits[:, :0])
        for rule in all_rules(name):
            if not rule.reads_draft or rule.is_lossless(greedy):
                assert torch.equal(rule(blind).log_weights, rule(verification).log_weights), rule
    assert all(rule.reads_draft is ("fsd" in name or name == "judge") for rule in all_rules(name))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_says_that_it_has_no_memory_and_reads_no_features_decides_without_them(name):
    for greedy in (True, False):
        verification = random_verification(6, greedy)
        for rule in all_rules(name):
            blind = verification
            if not rule.reads_features or rule.is_lossless(greedy):
                blind = replace(blind, features=None)
            if not rule.remembers or rule.is_lossless(greedy):
                blind = replace(blind, regret=None, said=None, answers=None)
            assert torch.equal(rule(blind).log_weights, rule(verification).log_weights), rule
    remembers = any(part in name for part in ("regret", "prose", "afterword"))
    assert all(rule.remembers is remembers for rule in all_rules(name))


# --- the lossless end ---------------------------------------------------------------------------

LOSSLESS_AT_ZERO = {  # rule: (greedy, sampling)
    "exact": (True, True),
    "fsd": (True, True),
    "fsd_paper": (False, False),
    "tilt": (True, True),
    "typical": (False, False),
    "lenience": (True, True),
    "fly": (True, True),
    "regret": (True, True),
    "judge": (True, True),
    "relaxed": (True, False),
    "prose": (True, True),
    "afterword": (True, True),
    "fsd+fly": (True, True),
    "fsd+regret": (True, True),
    "relaxed+fsd": (True, False),
    "typical+fly+regret": (False, False),
}


@pytest.mark.parametrize("kind", ["random", *KINDS])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", OPTIONS)
def test_dial_zero_is_exact_bit_by_bit(name, greedy, kind):
    verification = random_verification(7, greedy) if kind == "random" else extreme(kind, greedy)
    exact = walk(verification, make_rule("exact")(verification))
    if kind in ("draft equals target", "uniform"):  # a gate `divergence <= 0` would pass here
        assert (verification.divergence("js")[verification.has_children] == 0).any()
    for rule in all_rules(name):
        if rule.threshold != 0:
            continue
        lossless = LOSSLESS_AT_ZERO[name][0 if greedy else 1]
        assert rule.is_lossless(greedy) == lossless
        if lossless:
            decision = rule(verification)
            walked = walk(verification, decision)
            assert torch.equal(decision.log_weights, verification.warped_logits)
            assert torch.equal(walked.choice, exact.choice) and torch.equal(walked.accepted, exact.accepted)
            assert decision.kl().tolist() == [0.0] * len(decision.log_weights)


@pytest.mark.parametrize("name", OPTIONS)
def test_only_the_lossless_settings_say_so(name):
    for rule in all_rules(name):
        for greedy in (True, False):
            if rule.is_lossless(greedy):
                assert rule.threshold == 0 or (name, greedy) == ("lenience", True)


def test_fsd_at_infinity_always_descends():
    for seed in range(10):
        verification = random_verification(seed, greedy=seed % 2 == 0, gap=3.0)
        walked = walk(verification, make_rule("fsd", math.inf)(verification))
        assert not verification.has_children.gather(1, walked.last[:, None]).any()


def test_a_head_of_everything_is_no_guard():
    for kind in KINDS:
        for name in ("fsd", "tilt", "relaxed"):
            for greedy in (True, False):
                verification, threshold = extreme(kind, greedy), 1000.0
                unguarded = make_rule(name, threshold)(verification).log_weights
                guarded = make_rule(name, threshold, head_guard=1.0)(verification).log_weights
                assert torch.equal(guarded, unguarded)


# --- monotonicity -------------------------------------------------------------------------------


def accepted_length(rule, verification):
    return walk(verification, rule(verification)).length[:, None].double()


def tail_probabilities(rule, verification):
    """[B, k]: probability that at least k steps are taken inside the head before the first outside it."""
    node_probs = rule(verification).log_weights.double().softmax(-1)
    steps = torch.where(verification.is_child, verification.of_step(node_probs).log(), 0.0)
    reached = verification.path_sum(steps).exp()
    inside = verification.is_child
    if rule.head_guard is not None:
        inside = inside & verification.on_whole_path(verification.in_head(rule.head_guard))
    depths = range(1, verification.tree.max_depth + 1)
    counted = [inside & (verification.tree.depths == k) for k in depths]
    return torch.stack([(reached * mask).sum(-1) for mask in counted], dim=-1)


@dataclass
class Claim:
    """For a fixed prefix, tree and noise the quantity never falls as the dial grows."""

    options: list[dict]
    dials: st.SearchStrategy = st.floats(0.0, 4.0)
    greedy: tuple[bool, ...] = (True, False)
    processors: bool = True  # also where warped logits order tokens differently from the raw ones
    quantity: object = accepted_length
    tolerance: float = 0.0


UNIT = st.floats(0.0, 1.0, exclude_max=True)
GATES = [{"divergence": name} for name in ("js", "kl", "tv_top3")]
MONOTONE = {
    "exact": [Claim([{}], dials=st.just(0.0))],
    "fsd": [Claim([{**gate, **sibling} for gate in GATES for sibling in OPTIONS["fsd"]], st.floats(0.0))],
    "fsd_paper": [Claim(GATES, st.floats(0.0))],
    "lenience": [Claim([{}])],
    # which child the target picks depends on which are allowed, but the longest path only gains from more of
    # them, and without noise or processors the target's pick is its best child, which is allowed first
    "typical": [
        Claim([{"sibling": "longest"}], UNIT),
        Claim([{"sibling": "target"}], UNIT, greedy=(True,), processors=False),
    ],
    "relaxed": [
        Claim([{"sibling": "longest"}, {"sibling": "longest", "top": 3}]),
        Claim([{"sibling": "target"}, {"top": 3}], greedy=(True,), processors=False),
    ],
    "fly": [Claim([*OPTIONS["fly"], {"window": 4}], st.floats(0.0, math.log(3)))],
    "regret": [Claim([*OPTIONS["regret"], {"most": 5}], st.floats(0.0))],
    "judge": [Claim(OPTIONS["judge"], st.floats(0.0, 1.0))],
    "prose": [Claim(OPTIONS["prose"], st.floats(0.0))],
    "afterword": [Claim(OPTIONS["afterword"], st.floats(0.0))],
    "fsd+fly": [Claim(OPTIONS["fsd+fly"], st.floats(0.0))],
    "fsd+regret": [Claim([{"gate_threshold": 2.0}, {"gate_threshold": 20.0, "sibling": "longest"}], st.floats(0.0))],
    "relaxed+fsd": [
        Claim([{"gate_threshold": 0.2, "sibling": "longest"}]),
        Claim([{"gate_threshold": 0.2}], greedy=(True,), processors=False),
    ],
    "typical+fly+regret": [Claim([{"gate_threshold": [1.0, 3.0]}], UNIT, greedy=(True,), processors=False)],
    "tilt": [
        Claim([{}, {"max_regret": 0.5}, {"max_regret": math.inf}], st.floats(0.0, 20.0), greedy=(True,)),
        Claim([{}], st.floats(0.0, 8.0), greedy=(False,), quantity=tail_probabilities, tolerance=1e-5),
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_looser_dials_never_accept_less(name, data):
    claim = data.draw(st.sampled_from(MONOTONE[name]))
    verification = random_verification(
        seed=data.draw(st.integers(0, 10**6)),
        greedy=data.draw(st.sampled_from(claim.greedy)),
        batch=2,
        nodes=data.draw(st.integers(2, 14)),
        vocab_size=data.draw(st.integers(5, 12)),
        max_children=data.draw(st.integers(1, 4)),
        gap=data.draw(st.sampled_from([0.0, 0.1, 0.7, 3.0])),
        temperature=data.draw(st.sampled_from([0.3, 1.0, 1.6])),
        banned=data.draw(st.sampled_from([0.0, 0.4])) if claim.processors else 0.0,
        coarse=data.draw(st.booleans()),
    )
    options = dict(data.draw(st.sampled_from(claim.options)))
    if name != "exact":
        options["head_guard"] = data.draw(st.sampled_from(GUARDS))
    dials = claim.dials
    if "divergence" in options:  # also exactly at the divergence of a node
        present = verification.divergence(options["divergence"])[verification.has_children].tolist()
        dials = st.sampled_from(present) | dials
    tight, loose = sorted((data.draw(dials), data.draw(dials)))
    before = claim.quantity(make_rule(name, tight, **options), verification)
    after = claim.quantity(make_rule(name, loose, **options), verification)
    assert (after >= before - claim.tolerance).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_looser_gates_never_accept_less(data):
    """The dial of a gate behind a +; with relaxed and typical where the target's pick is its best child."""
    name, most = data.draw(st.sampled_from([("fsd+fly", math.log(3)), ("relaxed+fly", math.log(3)), ("fsd+fsd", 1.0),
                                            ("fsd+regret", 30.0), ("fsd+judge", 1.0), ("relaxed+regret", 30.0),
                                            ("fsd+prose", 9.0), ("fsd+afterword", 9.0),
                                            ("fly+relaxed", 9.0), ("fsd+typical", 0.99)]))
    free = name not in ("fly+relaxed", "fsd+typical")
    verification = random_verification(
        data.draw(st.integers(0, 10**6)), greedy=not free or data.draw(st.booleans()), gap=0.7,
        banned=data.draw(st.sampled_from([0.0, 0.4])) if free else 0.0, coarse=data.draw(st.booleans()))
    tight, loose = sorted(data.draw(st.floats(0.0, most)) for _ in range(2))
    threshold = data.draw(st.sampled_from([0.2, 1.0]))
    known = {"fsd+judge": make_rule("judge", learned=tiny_judge(5)), "fsd+prose": make_rule("prose", marks=MARKS),
             "fsd+afterword": make_rule("afterword", marks=MARKS)}
    before, after = (accepted_length(
        make_rule("fsd", threshold, gates=[replace(known[name], threshold=dial)]) if name in known else
        make_rule(name, threshold, gate_threshold=dial), verification) for dial in (tight, loose))
    assert (after >= before).all()


@pytest.mark.parametrize("name", ["fsd+regret", "fsd+fly", "fsd+judge"])
def test_looser_gates_never_accept_less_when_sampling(name):
    dials = {"fsd+regret": (0.0, 0.3, 1.0, 2.0, 4.0, math.inf), "fsd+fly": (0.0, 0.3, 0.6, 0.9, math.log(3)),
             "fsd+judge": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}[name]
    gate = make_rule(name[4:], **({"learned": tiny_judge(5)} if name == "fsd+judge" else {}))
    longer = 0
    for seed in range(40):
        verification = random_verification(seed, greedy=False, batch=8, nodes=14, gap=0.7, temperature=1.6)
        lengths = [accepted_length(make_rule("fsd", 1.0, gates=[replace(gate, threshold=dial)]), verification)
                   for dial in dials]
        assert all((after >= before).all() for before, after in zip(lengths, lengths[1:], strict=False))
        longer += (lengths[-1] > lengths[0]).sum()
    assert longer > 5


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_mars_is_a_setting_of_relaxed(ratio):
    """A child passes iff it is the target's second best, or its best, and p2 / p1 is above the ratio (2601.15498)."""
    rule = make_rule("relaxed", -math.log(ratio), top=2)
    some = 0
    for seed in range(10):
        verification = random_verification(seed, greedy=True)
        passes, probs = rule.passes(verification), verification.target_logits.softmax(-1)
        for row, node in verification.is_child.nonzero().tolist():
            parent, token = verification.tree.parents[row, node], verification.tree.tokens[row, node]
            (best, second), tokens = probs[row, parent].topk(2)
            expected = token == tokens[0] or token == tokens[1] and second / best > ratio
            assert passes[row, node] == expected
            some += int(expected and token == tokens[1])
    assert some > 3


# --- making rules -------------------------------------------------------------------------------


def test_defaults_are_the_tight_end():
    for name, rule in RULES.items():
        assert rule.name == name
        assert make_rule(name) == rule() and make_rule(name).threshold == 0


def test_composed_rules():
    rule = make_rule("fsd+fly", 0.3, "kl", head_guard=0.8)
    assert (rule.name, rule.threshold, rule.threshold_limit) == ("fsd+fly", 0.3, (math.inf, True))
    assert rule.parts == (make_rule("fsd", 0.3, "kl", head_guard=0.8), make_rule("fly", math.log(3) - 0.3))
    assert make_rule(rule) == rule and hash(make_rule(rule)) == hash(rule)
    assert make_rule(rule, 0.1, gate_threshold=0.5).parts == (
        make_rule("fsd", 0.1, "kl", head_guard=0.8), make_rule("fly", 0.5))
    assert replace(rule, threshold=0.2).parts[0].threshold == 0.2
    windowed = make_rule("fsd", 0.3, gates=[make_rule("fly", 0.5, window=3), "relaxed"])
    assert windowed.name == "fsd+fly+relaxed" and windowed.parts[1].window == 3
    assert make_rule(windowed, gate_threshold=[0.4, 0.6]).parts[1:] == (
        make_rule("fly", 0.4, window=3), make_rule("relaxed", 0.6))
    assert make_rule("relaxed+fsd+fsd", divergence="tv", gate_threshold=[0.1, 0.2]).parts[1].divergence == "tv"
    assert make_rule("relaxed+fsd", gate_threshold=0.1).reads_draft and not make_rule("relaxed+fly").reads_draft
    assert make_rule("fsd+fly").looks_ahead and not make_rule("fsd+relaxed").looks_ahead
    assert make_rule("fsd+relaxed").knows_kl and not make_rule("fsd+fly").knows_kl
    assert eval(repr(rule), {"Gated": Gated, **{cls.__name__: cls for cls in RULES.values()}}) == rule


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
def test_gates_are_a_logical_and(greedy):
    """What a composed rule lets pass, each part alone lets pass, and nothing else is stopped."""
    verification = random_verification(8, greedy, batch=30, gap=0.7)
    parts = [make_rule("fsd", 0.2), make_rule("fly", 0.9), make_rule("relaxed", 1.0)]
    passes = torch.stack([part.passes(verification) for part in parts])
    assert (passes.any(0) & ~passes.all(0)).any() and passes.all(0)[verification.is_child].any()
    assert torch.equal(make_rule(parts[0], gates=parts[1:]).passes(verification), passes.all(0))


def test_options_reach_the_rule():
    rule = make_rule("fsd", 0.3, "kl_top32", sibling="longest", head_guard=0.8)
    assert (rule.threshold, rule.divergence) == (0.3, "kl_top32")
    assert (rule.sibling, rule.head_guard) == ("longest", 0.8)
    assert make_rule(rule) == rule
    assert make_rule(rule, 0.1) == replace(rule, threshold=0.1)
    assert make_rule("fsd", head_guard=None).head_guard is None
    assert make_rule("typical", np.float64(0.5)).threshold == 0.5
    assert hash(make_rule("relaxed", 1)) == hash(make_rule("relaxed", 1.0))
    with pytest.raises(FrozenInstanceError):
        rule.threshold = 0.5


@pytest.mark.parametrize("greedy", [True, False])
def test_a_function_as_rule(greedy):
    verification = random_verification(8, greedy)
    exact = walk(verification, make_rule("exact")(verification))
    for function in (
        lambda verification: verification.warped_logits,
        lambda verification: Decision(verification.warped_logits.log_softmax(-1)),
    ):
        rule = make_rule(function)
        assert isinstance(rule, Custom)
        assert torch.equal(walk(verification, rule(verification)).accepted, exact.accepted)
    with pytest.raises(TypeError, match=r"returns a Decision or a Tensor of log-weights, got list"):
        make_rule(lambda verification: [1])(verification)
    with pytest.raises(ValueError, match=r"shape \[3, 12, 11\], got \[3, 12\]"):
        make_rule(lambda verification: verification.exact_choice)(verification)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rule": "magic"}, ValueError, "unknown rule 'magic'; accepted: exact, fsd, fsd_paper, tilt"),
        ({"rule": 3}, TypeError, "a rule is a name, a rule or a function, got 3"),
        ({"rule": RULES["fsd"]}, TypeError, "a rule is a name, a rule or a function"),
        ({"rule": "exact", "threshold": 0.1}, ValueError, r"rule 'exact' must lie in \[0, 0\], got 0.1"),
        ({"rule": "fsd", "threshold": -0.1}, ValueError, r"must lie in \[0, inf\], got -0.1"),
        ({"rule": "fsd", "threshold": math.nan}, ValueError, r"must lie in \[0, inf\], got nan"),
        ({"rule": "fsd", "threshold": "0.1"}, TypeError, "must be a number, got '0.1'"),
        ({"rule": "fsd", "threshold": True}, TypeError, "must be a number, got True"),
        ({"rule": "fsd_paper", "threshold": -1}, ValueError, r"\[0, inf\], got -1"),
        ({"rule": "tilt", "threshold": math.inf}, ValueError, r"\[0, 1000\], got inf"),
        ({"rule": "lenience", "threshold": math.inf}, ValueError, r"\[0, inf\), got inf"),
        ({"rule": "relaxed", "threshold": math.inf}, ValueError, r"\[0, inf\), got inf"),
        ({"rule": "typical", "threshold": 1.0}, ValueError, r"\[0, 1\), got 1.0"),
        ({"rule": "fsd", "divergence": "jsd"}, ValueError, "unknown divergence 'jsd'; accepted: kl"),
        ({"rule": "fsd_paper", "divergence": "js_top0"}, ValueError, "unknown divergence 'js_top0'"),
        ({"rule": "tilt", "divergence": "js"}, ValueError, "'tilt' has no option 'divergence'"),
        ({"rule": "fsd", "siblings": "draft"}, ValueError, "no option 'siblings'; accepted: .*sibling"),
        ({"rule": "fsd", "sibling": "best"}, ValueError, "one of target, draft, longest, got 'best'"),
        ({"rule": "typical", "sibling": "draft"}, ValueError, "one of target, longest, got 'draft'"),
        ({"rule": "relaxed", "sibling": "draft"}, ValueError, "one of target, longest, got 'draft'"),
        ({"rule": "relaxed", "top": 0}, ValueError, "top must be at least 1, got 0"),
        ({"rule": "relaxed", "top": 2.5}, TypeError, "top must be an integer, got 2.5"),
        ({"rule": "tilt", "max_regret": -1}, ValueError, r"max_regret must lie in \[0, inf\], got -1"),
        ({"rule": "exact", "head_guard": 0.5}, ValueError, "'exact' has no option 'head_guard'"),
        ({"rule": lambda _: None, "threshold": 0.1}, ValueError, "takes no options, got threshold"),
        ({"rule": lambda _: None, "gate_threshold": 0.1}, ValueError, "takes no options, got gate_threshold"),
        ({"rule": lambda _: None, "gates": ["fly"]}, ValueError, "takes no options, got gates"),
        ({"rule": "fly", "threshold": 1.2}, ValueError, r"rule 'fly' must lie in \[0, 1.09861\], got 1.2"),
        ({"rule": "fly", "window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"rule": "fly", "window": 2.0}, TypeError, "window must be an int, got 2.0"),
        ({"rule": "fly", "renormalised": 1}, TypeError, "renormalised must be a bool, got 1"),
        ({"rule": "fsd+fly", "sibling": "longest"}, ValueError, "may leave the window of 2 tokens that 'fly' looked"),
        ({"rule": "fly", "sibling": "longest"}, ValueError, "'fly' has no option 'sibling'"),
        ({"rule": "regret", "threshold": -1}, ValueError, r"rule 'regret' must lie in \[0, inf\], got -1"),
        ({"rule": "regret", "most": 0}, ValueError, "most must be at least 1, got 0"),
        ({"rule": "fsd+magic"}, ValueError, "unknown rule 'magic' in 'fsd\\+magic'; accepted: exact, fsd"),
        ({"rule": "fsd+"}, ValueError, "unknown rule '' in 'fsd\\+'"),
        ({"rule": "fsd+tilt"}, ValueError, "'tilt' has no gate, .* of 'fsd\\+tilt'; rules that have one: fsd, typical"),
        ({"rule": "exact+fly"}, ValueError, "'exact' has no gate"),
        ({"rule": "fsd+fsd"}, ValueError, "gate 'fsd' of 'fsd\\+fsd' has no default: give gate_threshold"),
        ({"rule": "fsd+regret"}, ValueError, "gate 'regret' of 'fsd\\+regret' has no default"),
        ({"rule": "fsd+fly", "gate_threshold": 2}, ValueError, r"rule 'fly' must lie in \[0, 1.09861\], got 2"),
        ({"rule": "fsd+fly", "gate_threshold": "0.2"}, TypeError, "rule 'fly' must be a number, got '0.2'"),
        ({"rule": "fsd+fly", "gate_threshold": [0.1, 0.2]}, ValueError, r"each gate .*: 1, got \[0.1, 0.2\]"),
        ({"rule": "fsd+fly+relaxed", "gate_threshold": 0.1}, ValueError, "one dial for each gate .*: 2, got 0.1"),
        ({"rule": "fsd+fly", "window": 3}, ValueError, "'fsd' has no option 'window'"),
        ({"rule": "fly+relaxed", "divergence": "js"}, ValueError, "'fly' has no option 'divergence'"),
        ({"rule": "fsd", "gate_threshold": 0.1}, ValueError, "dial of a gate behind a \\+, and 'fsd' has none"),
        ({"rule": "fsd", "gates": [3]}, TypeError, "a gate is a rule's name or a rule, got 3"),
        *(
            ({"rule": name, "head_guard": guard}, ValueError, r"head_guard must lie in \[0, 1\]")
            for name in RULES
            if name != "exact"
            for guard in (-0.1, 1.1, math.nan)
        ),
    ],
    ids=readable,
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        make_rule(**arguments)
