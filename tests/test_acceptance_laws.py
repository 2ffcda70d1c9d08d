"""The law of a rule's output, by enumeration over a small vocabulary, and that the noise draws it.

A segment is what one cycle emits. With independent noise at every depth, the token at a node has probability
softmax(log_weights), so the law of segments is a product along the tree.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from random_trees import emitted, rows_of, tree_from_parents
from tiny import MARKS, tiny_judge
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_fsd.acceptance import Verification, make_rule, walk
from eagle_fsd.engine.noise import gumbel_noise

VOCAB = 6
#                          root
#              /            |            \
#          1: token 0   2: token 3   3: token 5
#          /     \          |
#      4: 1     5: 2      6: 3
#     /   \      |
#  7: 4  8: 0   9: 2
PARENTS = [0, 0, 0, 0, 1, 1, 2, 4, 4, 5]
TOKENS = [3, 0, 3, 5, 1, 2, 3, 4, 0, 2]
NODES, DEPTH = len(PARENTS), 3
CHILDREN = [[n for n in range(1, NODES) if PARENTS[n] == v] for v in range(NODES)]
PATHS = [()]
for node in range(1, NODES):
    PATHS.append((*PATHS[PARENTS[node]], TOKENS[node]))

WARPERS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_p": [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)],
    "top_k": [TopKLogitsWarper(3)],
    "top_k_2": [TopKLogitsWarper(2)],
}


class PathModel:
    """A target whose next-token logits are an arbitrary function of the path."""

    def __init__(self, seed, scale=1.5):
        generator = torch.Generator().manual_seed(seed)
        paths = [path for length in range(DEPTH + 1) for path in product(range(VOCAB), repeat=length)]
        self.logits = {path: scale * torch.randn(VOCAB, generator=generator) for path in paths}

    def warped(self, path, warpers):
        scores = self.logits[path][None]
        for warper in warpers:
            scores = warper(None, scores)
        return scores[0]


def verify(model: PathModel, warpers=(), gap=0.5, noise=None) -> Verification:
    target_logits = torch.stack([model.logits[path] for path in PATHS])[None]
    warped_logits = torch.stack([model.warped(path, warpers) for path in PATHS])[None]
    difference = torch.randn(1, NODES, VOCAB, generator=torch.Generator().manual_seed(9))
    draft_logits = target_logits + gap * difference
    tree = tree_from_parents([PARENTS], [TOKENS])
    if noise is None:  # any noise: says "sampling" to rules whose weights do not read it
        noise = torch.zeros(1, NODES, VOCAB)
    features = torch.randn(1, NODES, 5, generator=torch.Generator().manual_seed(8))
    return Verification(tree, target_logits, warped_logits, draft_logits, noise, features=features)


def segment_law(node_probs) -> dict[tuple, float]:
    """Probability of each segment from the probabilities [N, V] of the token drawn at each node."""
    law = {}

    def descend(v, prob):
        for token in range(VOCAB):
            child = next((c for c in CHILDREN[v] if TOKENS[c] == token), None)
            p = prob * float(node_probs[v][token])
            if child is not None:
                descend(child, p)
            elif p > 0:
                law[(*PATHS[v], token)] = p

    descend(0, 1.0)
    return law


def law_of(rule, verification):
    return segment_law(rule(verification).log_weights[0].double().softmax(-1))


def assert_same_law(first, second, tolerance=1e-6):
    for segment in first.keys() | second.keys():
        assert first.get(segment, 0.0) == pytest.approx(second.get(segment, 0.0), abs=tolerance), segment


def kl_of(law, other):
    return sum(p * math.log(p / other[segment]) for segment, p in law.items() if p > 0)


def mean_length(law):
    return sum(p * (len(segment) - 1) for segment, p in law.items())


# --- lossless -----------------------------------------------------------------------------------


LOSSLESS = [("exact", {}), ("fsd", {}), ("tilt", {}), ("lenience", {}), ("fsd", {"sibling": "longest"}), ("fly", {}),
            ("regret", {}), ("judge", {}), ("fsd+fly", {}), ("fsd+fly", {"threshold": math.inf, "gate_threshold": 0.0})]
UNSURE, JUDGE = make_rule("fly", 0.4, window=1), tiny_judge(5)


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize(("name", "options"), LOSSLESS, ids=str)
def test_lossless_rules_have_the_law_of_plain_sampling(name, options, warpers):
    """Segments, continued by plain sampling to DEPTH + 1 tokens, against products of target probabilities."""
    model, warpers = PathModel(1), WARPERS[warpers]
    target_probs = {path: model.warped(path, warpers).double().softmax(-1).tolist() for path in model.logits}

    def plain(sequence, start=0):
        return math.prod(target_probs[sequence[:i]][sequence[i]] for i in range(start, DEPTH + 1))

    law = law_of(make_rule(name, **options), verify(model, warpers))
    assert sum(law.values()) == pytest.approx(1.0)
    for sequence in product(range(VOCAB), repeat=DEPTH + 1):
        prob = sum(
            law.get(sequence[:length], 0.0) * plain(sequence, length) for length in range(1, DEPTH + 2)
        )
        assert prob == pytest.approx(plain(sequence), abs=1e-7)


def test_exact_accepts_as_much_as_testing_sibling_by_sibling():
    """Test the children in turn with probability p, renormalising p after each refusal (EAGLE-2)."""
    verification = verify(PathModel(2))
    target_probs = verification.warped_logits[0].double().softmax(-1)
    sequential = target_probs.clone()
    for v in range(NODES):
        left, residual = 1.0, target_probs[v].clone()
        for child in CHILDREN[v]:
            accept = residual[TOKENS[child]] / residual.sum()
            sequential[v, TOKENS[child]] = left * accept
            left *= 1 - accept
            residual[TOKENS[child]] = 0
        for token in set(range(VOCAB)) - {TOKENS[child] for child in CHILDREN[v]}:
            sequential[v, token] = left * residual[token] / residual.sum()
    assert_same_law(segment_law(sequential), law_of(make_rule("exact"), verification))


@pytest.mark.parametrize("warpers", WARPERS)
def test_exact_emits_the_tokens_of_plain_sampling_with_the_same_noise(warpers):
    model, warpers = PathModel(3), WARPERS[warpers]
    depths = verify(model).tree.depths[0]
    for seed in range(200):
        by_position = gumbel_noise(torch.tensor([seed]), torch.arange(100, 100 + DEPTH + 1)[None], VOCAB)
        verification = verify(model, warpers, noise=by_position[:, depths])
        tokens = emitted(verification, walk(verification, make_rule("exact")(verification)))
        plain = ()
        while len(plain) < len(tokens):
            plain += (int((model.warped(plain, warpers) + by_position[0, len(plain)]).argmax()),)
        assert tuple(tokens) == plain


# --- fsd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("warpers", WARPERS)
def test_fsd_at_infinity_draws_among_the_children_wherever_they_have_mass(warpers):
    verification = verify(PathModel(4), WARPERS[warpers])
    target_probs = verification.warped_logits[0].double().softmax(-1)
    restricted = target_probs * verification.child_mask[0]
    has_mass = restricted.sum(-1, keepdim=True) > 0
    expected = torch.where(has_mass, restricted / restricted.sum(-1, keepdim=True), target_probs)
    assert_same_law(segment_law(expected), law_of(make_rule("fsd", math.inf), verification))
    if warpers == "top_k_2":
        assert not has_mass[:3].all()  # the case of children without mass does occur


@pytest.mark.parametrize("seed", range(5))
def test_fsd_gates_node_by_node(seed):
    verification = verify(PathModel(seed))
    divergence = verification.divergence("js")[0]
    threshold = float(divergence[:6].nanmedian())
    gate = (divergence <= threshold) & verification.has_children[0]
    assert 0 < gate[:7].sum() < verification.has_children.sum()
    target_probs = verification.warped_logits[0].double().softmax(-1)
    restricted = target_probs * verification.child_mask[0]
    expected = torch.where(gate[:, None], restricted / restricted.sum(-1, keepdim=True), target_probs)
    assert_same_law(segment_law(expected), law_of(make_rule("fsd", threshold), verification))


# --- tilt ---------------------------------------------------------------------------------------


def leading_head_run(verification, head_guard):
    """Accepted steps of a segment up to the first outside the head."""
    inside = verification.in_head(head_guard)[0].tolist() if head_guard is not None else [True] * NODES

    def run(segment):
        count = 0
        while count < len(segment) - 1 and inside[PATHS.index(segment[: count + 1])]:
            count += 1
        return count

    return run


@pytest.mark.parametrize("head_guard", [None, 0.5, 0.9])
@pytest.mark.parametrize("warpers", ["plain", "temperature", "top_p", "top_k_2"])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.3, 1.0, 5.0])
def test_tilt_law_and_its_kl(threshold, warpers, head_guard):
    """p(segment) exp(T * r(segment)) / Z, and the KL that is announced before anything is drawn."""
    verification = verify(PathModel(6), WARPERS[warpers])
    rule = make_rule("tilt", threshold, head_guard=head_guard)
    target_law = law_of(make_rule("exact"), verification)
    run = leading_head_run(verification, head_guard)
    weights = {segment: p * math.exp(threshold * run(segment)) for segment, p in target_law.items()}
    expected = {segment: weight / sum(weights.values()) for segment, weight in weights.items()}
    law = law_of(rule, verification)
    assert_same_law(expected, law)
    assert rule(verification).kl().item() == pytest.approx(kl_of(expected, target_law), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_rule_reaches_the_length_of_tilt_with_less_kl(seed):
    verification = verify(PathModel(seed), WARPERS["temperature"])
    target_law = law_of(make_rule("exact"), verification)
    for name, threshold in (("lenience", 0.3), ("lenience", 1.0), ("fsd", 0.02), ("fsd", math.inf)):
        other = law_of(make_rule(name, threshold), verification)
        low, high = 0.0, 200.0
        for _ in range(60):
            middle = (low + high) / 2
            longer = mean_length(law_of(make_rule("tilt", middle), verification)) > mean_length(other)
            low, high = (low, middle) if longer else (middle, high)
        tilted = law_of(make_rule("tilt", low), verification)
        assert mean_length(tilted) == pytest.approx(mean_length(other), abs=1e-3)
        assert kl_of(tilted, target_law) <= kl_of(other, target_law) + 1e-4


def test_tilt_survives_the_ends_of_its_range():
    verification = verify(PathModel(7), WARPERS["top_k_2"])
    for threshold in (1e-30, 1000.0):
        decision = make_rule("tilt", threshold)(verification)
        assert not decision.log_weights.isnan().any() and decision.kl().isfinite().all()


# --- lenience -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1e-6, 0.2, 1.0, 60.0, 1e300])
@pytest.mark.parametrize("warpers", ["plain", "top_k_2"])
def test_lenience_lifts_the_mass_of_the_children(threshold, warpers):
    verification = verify(PathModel(8), WARPERS[warpers])
    target_probs = verification.warped_logits[0].double().softmax(-1)
    children = verification.child_mask[0]
    inside = (target_probs * children).sum(-1, keepdim=True)
    lifted = (inside / math.exp(-threshold) if threshold < 700 else (inside > 0) * math.inf).clamp_max(1.0)
    lifted = torch.where(inside > 0, lifted, 0.0)
    scale = torch.where(children, lifted / inside, (1 - lifted) / (1 - inside))
    law = law_of(make_rule("lenience", threshold), verification)
    assert_same_law(segment_law(torch.where(target_probs > 0, target_probs * scale, 0.0)), law)


# --- the noise draws these laws -----------------------------------------------------------------


def guarded_fsd_probs(verification, threshold, head_guard):
    """A guard makes log-weights depend on the noise; the law is known all the same.

    Where the gate is open, a draw outside the children goes to the guarded children in proportion.
    """
    target_probs = verification.warped_logits[0].double().softmax(-1)
    node_probs = target_probs.clone()
    inside_head = verification.in_head(head_guard)[0]
    for v in range(NODES):
        guarded = [TOKENS[c] for c in CHILDREN[v] if inside_head[c]]
        if guarded and verification.divergence("js")[0, v] <= threshold:
            outside = [token for token in range(VOCAB) if token not in [TOKENS[c] for c in CHILDREN[v]]]
            node_probs[v, outside] = 0
            stops = target_probs[v, outside].sum()
            node_probs[v, guarded] += stops * target_probs[v, guarded] / target_probs[v, guarded].sum()
    return node_probs


EMPIRICAL = {
    "exact": ("exact", {}),
    "fsd": ("fsd", {"threshold": 0.05}),
    "fsd, guarded": ("fsd", {"threshold": math.inf, "head_guard": 0.6}),
    "tilt": ("tilt", {"threshold": 0.5}),
    "tilt, guarded": ("tilt", {"threshold": 0.5, "head_guard": 0.6}),
    "typical": ("typical", {"threshold": 0.5}),
    "lenience": ("lenience", {"threshold": 0.4}),
    "relaxed": ("relaxed", {"threshold": 1.0}),
    "fly, no window": ("fly", {"threshold": 0.4, "window": 1}),
    "fsd and fly": ("fsd", {"threshold": 0.05, "gates": [UNSURE]}),
}


@pytest.mark.parametrize("case", EMPIRICAL)
def test_walk_with_gumbel_noise_draws_the_law(case):
    name, options = EMPIRICAL[case]
    rule = make_rule(name, **options)
    draws = 20_000
    one = verify(PathModel(10), WARPERS["temperature"])
    if case == "fsd, guarded":
        law = segment_law(guarded_fsd_probs(one, math.inf, 0.6))
    elif case in ("typical", "relaxed", "fly, no window", "fsd and fly"):  # to an allowed child or to the exact one
        law = law_by_exact_choice(rule, one)
    else:
        law = law_of(rule, one)

    everything = rows_of(one, torch.zeros(draws, dtype=torch.long))
    by_depth = gumbel_noise(torch.arange(draws), torch.arange(DEPTH + 1).expand(draws, -1), VOCAB)
    noise = by_depth.gather(1, everything.tree.depths[..., None].expand(-1, -1, VOCAB))
    everything = replace(everything, noise=noise)
    walked = walk(everything, rule(everything))
    code = walked.last * VOCAB + walked.choice.gather(1, walked.last[:, None])[:, 0]
    counts = code.bincount(minlength=NODES * VOCAB).double()
    expected = torch.zeros(NODES * VOCAB).double()
    for segment, p in law.items():
        expected[PATHS.index(segment[:-1]) * VOCAB + segment[-1]] = p * draws
    assert counts[expected == 0].sum() == 0
    pooled = expected < 5  # too rare for the chi-square statistic one by one
    observed = torch.cat([counts[~pooled], counts[pooled].sum()[None]])
    expected = torch.cat([expected[~pooled], expected[pooled].sum()[None] + 1e-9])
    freedom = len(observed) - 1
    chi_square = ((observed - expected) ** 2 / expected.clamp_min(1.0)).sum().item()
    assert chi_square < freedom + 3.5 * math.sqrt(2 * freedom), (chi_square, freedom)


def law_by_exact_choice(rule, verification):
    """Law of a rule whose fuzzy steps only replace draws that are no child: what it does for each draw."""
    target_probs = verification.warped_logits[0].double().softmax(-1)
    node_probs = torch.zeros(NODES, VOCAB).double()
    for token in range(VOCAB):
        loud = torch.zeros(1, NODES, VOCAB)
        loud[..., token] = 50.0  # the target draws this token everywhere
        weights = rule(replace(verification, noise=loud)).log_weights[0].double()
        drawn = torch.nn.functional.one_hot(torch.tensor(token), VOCAB)
        stands = weights[:, token, None] > -math.inf
        node_probs += target_probs[:, token, None] * torch.where(stands, drawn, weights.softmax(-1))
    return segment_law(node_probs)


# --- the KL that a decision announces ------------------------------------------------------------


@pytest.mark.parametrize("warpers", ["plain", "temperature", "top_k_2"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exact", {}), ("fsd", {"threshold": 0.05}), ("fsd", {"threshold": math.inf}),
        ("fsd", {"threshold": math.inf, "head_guard": 0.6}), ("fsd", {"threshold": 0.05, "sibling": "draft"}),
        ("typical", {"threshold": 0.5}), ("relaxed", {"threshold": 1.0}), ("relaxed", {"threshold": 2.0, "top": 4}),
        ("lenience", {"threshold": 0.4}), ("lenience", {"threshold": 5.0}),
        ("fly", {"threshold": 0.4, "window": 1}), ("fly", {"threshold": 0.9, "window": 1, "renormalised": False}),
        ("fsd", {"threshold": 0.05, "gates": [UNSURE]}),
        ("typical+relaxed", {"threshold": 0.5, "gate_threshold": 1.5}), ("judge", {"threshold": 1.0, "learned": JUDGE}),
        ("judge", {"threshold": 0.5, "learned": JUDGE, "head_guard": 0.8}),
        ("fsd", {"threshold": 0.1, "gates": [make_rule("judge", 0.6, learned=JUDGE)]}),
    ],
    ids=str,
)
def test_announced_kl_is_that_of_the_enumerated_law(name, options, warpers):
    verification = verify(PathModel(10), WARPERS[warpers])
    rule = make_rule(name, **options)
    law = law_of(rule, verification) if name in ("lenience", "exact") else law_by_exact_choice(rule, verification)
    expected = kl_of(law, law_of(make_rule("exact"), verification))
    assert rule.knows_kl
    assert rule(verification).kl().item() == pytest.approx(expected, abs=2e-5)
    assert expected > 1e-3 or name == "exact" or warpers == "top_k_2"  # something is given up


@pytest.mark.parametrize("head_guard", [None, 0.3])
@pytest.mark.parametrize("threshold", [0.0, 0.05, math.inf])
def test_announced_kl_of_fsd_paper(threshold, head_guard):
    """The walk goes on only over the draft's first child; where the guard keeps it out, only if the target draws it."""
    verification = verify(PathModel(10), WARPERS["temperature"])
    target_probs = verification.warped_logits[0].double().softmax(-1)
    inside = verification.in_head(head_guard)[0] if head_guard is not None else torch.ones(NODES, dtype=torch.bool)
    passes = verification.divergence("js")[0] <= threshold
    law = {}

    def descend(v, prob):
        first = max(CHILDREN[v], key=lambda c: verification.tree.scores[0, c], default=None)
        if first is not None and passes[v] and inside[first]:
            return descend(first, prob)
        for token in range(VOCAB):
            p = prob * target_probs[v, token].item()
            if first is not None and passes[v] and token == TOKENS[first]:
                descend(first, p)
            else:
                law[(*PATHS[v], token)] = p

    descend(0, 1.0)
    # The segments of one cycle against the target's: the same stops, each step at its target probability.
    expected = 0.0
    for segment, p in law.items():
        steps = [PATHS.index(segment[:i]) for i in range(len(segment))]
        expected += p * math.log(p / math.prod(target_probs[v, t].item() for v, t in zip(steps, segment, strict=True)))
    rule = make_rule("fsd_paper", threshold, head_guard=head_guard)
    assert rule(verification).kl().item() == pytest.approx(expected, abs=2e-5)


def test_rules_say_where_their_kl_is_not_known():
    verification = verify(PathModel(10))
    for name, options in (("fsd", {"sibling": "longest"}), ("relaxed", {"sibling": "longest"}),
                          ("typical", {"sibling": "longest"}), ("lenience", {"head_guard": 0.5}), ("fly", {}),
                          ("regret", {}), ("fsd+fly", {}), ("fsd+regret", {"gate_threshold": 1.0}),
                          ("prose", {"marks": MARKS}), ("afterword", {"marks": MARKS}),
                          ("fsd", {"gates": [make_rule("prose", 1.0, marks=MARKS)]})):
        rule = make_rule(name, 0.5, **options)
        assert not rule.knows_kl and rule(verification).kl is None
    greedy = replace(verification, noise=None)
    for name in ("fsd", "tilt", "relaxed", "typical", "fsd_paper", "fly", "fsd+fly"):
        assert make_rule(name, 0.5)(greedy).kl is None
