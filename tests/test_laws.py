"""The law of what a cycle emits (a segment), by enumeration over a small vocabulary, and that the noise draws it.

With independent noise at every depth the law of segments is a product along the tree.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import pytest
import torch
from random_trees import Case, tree_from_parents
from reference_acceptance import divergence
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_fsd.acceptance import Nodes, Rule, TokenWeights, Weights, make_rule
from eagle_fsd.drafting.noise import gumbel_noise

VOCAB, DEPTH = 6, 3
#                          root
#              /            |            \
#          1: token 0   2: token 3   3: token 5
#          /     \          |
#      4: 1     5: 2      6: 3
#     /   \      |
#  7: 4  8: 0   9: 2
PARENTS = [0, 0, 0, 0, 1, 1, 2, 4, 4, 5]
TOKENS = [3, 0, 3, 5, 1, 2, 3, 4, 0, 2]
NODES = range(len(PARENTS))
CHILDREN = [{TOKENS[n]: n for n in NODES[1:] if PARENTS[n] == v} for v in NODES]  # by token
PATHS = [()]
for node in NODES[1:]:
    PATHS.append((*PATHS[PARENTS[node]], TOKENS[node]))

WARPERS = {
    "plain": [], "temperature": [TemperatureLogitsWarper(0.6)], "top_k_2": [TopKLogitsWarper(2)],
    "top_p": [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)],
}


def case_of(seed: int, warpers: str = "temperature") -> Case:
    """That tree with random logits; the noise says "sampling"."""
    generator = torch.Generator().manual_seed(seed)
    raw = 1.5 * torch.randn(1, len(NODES), VOCAB, generator=generator)
    draft = raw + 0.5 * torch.randn(raw.shape, generator=generator)
    return Case(tree_from_parents([PARENTS], [TOKENS]), [draft] * DEPTH, raw, warped(raw, warpers),
                torch.zeros(1, DEPTH + 1, VOCAB))


def warped(raw, warpers):
    scores = raw.flatten(0, -2)
    for warper in WARPERS[warpers]:
        scores = warper(None, scores)
    return scores.view_as(raw)


@dataclass(frozen=True)
class Steered(Rule):
    """Leads each row along the path to a node of its own, and keeps what a rule answers at each depth."""

    name: ClassVar[str] = "steered"
    rule: Rule = None
    answers: list[tuple[Nodes, Weights | TokenWeights]] = field(default_factory=list)

    def is_lossless(self, greedy):
        return False

    def weigh(self, nodes):
        depth = len(self.answers)
        self.answers.append((nodes, self.rule.weigh(nodes)))
        to = torch.tensor([path[depth] if depth < len(path) else 0 for path in PATHS])
        return TokenWeights(torch.nn.functional.one_hot(to, VOCAB).float())


def law_of(name, threshold, case, **options) -> dict[tuple, float]:
    """From the log-weights that the rule answers at each node, where these do not depend on the noise."""
    rule, node_probs = Steered(rule=make_rule(name, threshold, **options)), []
    case.take([0] * len(NODES)).walk(rule, threshold)
    for v, path in enumerate(PATHS):
        nodes, answer = rule.answers[len(path)]
        if isinstance(answer, TokenWeights):
            weights = answer.tokens[v]
        else:
            weights, own = nodes.warped[v] + torch.as_tensor(answer.others).expand(len(NODES))[v], nodes.children[v]
            if answer.children is not None:
                weights = weights.index_copy(0, nodes.tokens[v, own], answer.children[v, own])
        node_probs.append(weights.double().softmax(-1).tolist())
    return segment_law(node_probs)


def target_probs(case):
    return case.warped[0].double().softmax(-1).tolist()


def segment_law(node_probs) -> dict[tuple, float]:
    """Probability of each segment from the probabilities of the token at each node."""
    law = {}

    def descend(v, prob):
        for token, p in enumerate(node_probs[v]):
            if token in CHILDREN[v]:
                descend(CHILDREN[v][token], prob * p)
            elif prob * p > 0:
                law[(*PATHS[v], token)] = prob * p

    descend(0, 1.0)
    return law


def approx(law):
    return pytest.approx({segment: p for segment, p in law.items() if p > 1e-12}, abs=1e-6)


def drawn(law):
    return {segment: p for segment, p in law.items() if p > 1e-12}


# --- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warpers", WARPERS)
def test_exact_emits_what_plain_sampling_does_with_the_same_noise(warpers):
    """With logits that are an arbitrary function of the path; and so does every rule at its lossless end."""
    generator = torch.Generator().manual_seed(3)
    paths = [path for length in range(DEPTH + 1) for path in product(range(VOCAB), repeat=length)]
    logits = warped(1.5 * torch.randn(len(paths), VOCAB, generator=generator), warpers)
    model = dict(zip(paths, logits, strict=True))
    rows = 300
    noise = gumbel_noise(torch.arange(rows), torch.arange(100, 101 + DEPTH).expand(rows, -1), VOCAB)
    case = replace(case_of(0), warped=torch.stack([model[path] for path in PATHS])[None]).take([0] * rows)
    for name in ("exact", "fsd", "lenience"):
        for row, steps in enumerate(replace(case, gumbel=noise).walk(make_rule(name))):
            plain = ()
            while len(plain) < len(steps):
                plain += (int((model[plain] + noise[row, len(plain)]).argmax()),)
            assert tuple(step.token for step in steps) == plain and all(step.is_exact for step in steps)


def test_exact_accepts_as_much_as_testing_sibling_by_sibling():
    """Test the children in turn with probability p, renormalising p after each refusal (EAGLE-2)."""
    case = case_of(2)
    sequential = []
    for children, probs in zip(CHILDREN, target_probs(case), strict=True):
        left, residual, law = 1.0, list(probs), [0.0] * VOCAB
        for token in children:
            accept = residual[token] / sum(residual)
            law[token], left = left * accept, left * (1 - accept)
            residual[token] = 0
        sequential.append([p + left * r / sum(residual) for p, r in zip(law, residual, strict=True)])
    assert law_of("exact", 0.0, case) == approx(segment_law(sequential)) == segment_law(target_probs(case))


# --- rules that are not lossless -----------------------------------------------------------------


@pytest.mark.parametrize("warpers", ["plain", "top_k_2"])
def test_lenience_lifts_the_mass_of_the_children(warpers):
    """P becomes min(1, P / l), in the target's odds on both sides."""
    case = case_of(8, warpers)
    for threshold in (1e-6, 0.2, 1.0, 60.0, 1e300):
        lifted = []
        for children, probs in zip(CHILDREN, target_probs(case), strict=True):
            mass = sum(probs[token] for token in children)
            more = min(1.0, mass * math.exp(min(threshold, 700.0)))
            lifted.append([p if not mass else p * more / mass if token in children else p * (1 - more) / (1 - mass)
                           for token, p in enumerate(probs)])
        assert drawn(law_of("lenience", threshold, case)) == approx(segment_law(lifted))


# --- the noise draws the laws --------------------------------------------------------------------


def chi_square_fits(counts, law) -> bool:
    """What is expected less than five times is counted as one."""
    draws = sum(counts.values())
    pairs = [(counts[each], p * draws) for each, p in law.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    cells = [pair for pair in pairs if pair[1] >= 5] + [tuple(map(sum, zip(*rare, strict=True)))] * bool(rare)
    freedom = len(cells) - 1
    chi_square = sum((seen - expected) ** 2 / max(expected, 1.0) for seen, expected in cells)
    return chi_square < freedom + 3.5 * math.sqrt(2 * freedom)


def fsd_law(case, threshold):
    """The target's law among the children where the divergence is small, and its own elsewhere."""
    law = []
    for v, probs in enumerate(target_probs(case)):
        mass = sum(probs[token] for token in CHILDREN[v])
        passes = mass and divergence("js", case.raw[0, v].tolist(), case.draft_logits[0][0, v].tolist()) <= threshold
        law.append([p / mass * (token in CHILDREN[v]) if passes else p for token, p in enumerate(probs)])
    return segment_law(law)


@pytest.mark.parametrize(
    ("name", "threshold", "options"),
    [("exact", 0.0, {}), ("fsd", 0.02, {"head_guard": None}), ("fsd", math.inf, {"head_guard": None}),
     ("lenience", 0.4, {})],
)
def test_walks_draw_the_law(name, threshold, options):
    draws, case = 20_000, case_of(10)
    law = fsd_law(case, threshold) if name == "fsd" else law_of(name, threshold, case, **options)
    noise = gumbel_noise(torch.arange(draws), torch.arange(DEPTH + 1).expand(draws, -1), VOCAB)
    counts = Counter(tuple(step.token for step in steps) for steps in replace(
        case.take([0] * draws), gumbel=noise).walk(make_rule(name, threshold, **options)))
    assert not counts.keys() - law.keys() and chi_square_fits(counts, law)
    assert chi_square_fits(counts, segment_law(target_probs(case))) == (name == "exact")


@pytest.mark.parametrize("name", ["exact", "fsd"])
def test_of_a_larger_vocabulary_too(name):
    """The first token, of 300: the target's law, or that of its children."""
    vocab, draws, children = 300, 10_000, [5, 17, 40, 299]
    logits = 3 * torch.randn(1, 5, vocab, generator=torch.Generator().manual_seed(1))
    case = Case(tree_from_parents([[0] * 5], [[0, *children]]), [logits], logits, logits).take([0] * draws)
    noise = gumbel_noise(torch.arange(draws), torch.arange(2).expand(draws, -1), vocab)
    rule = make_rule("exact") if name == "exact" else make_rule("fsd", 0.1, head_guard=None)
    counts = Counter(steps[0].token for steps in replace(case, gumbel=noise).walk(rule))
    probs = logits[0, 0].double().softmax(-1)
    law = {token: probs[token].item() for token in (range(vocab) if name == "exact" else children)}
    assert chi_square_fits(counts, {token: p / sum(law.values()) for token, p in law.items()})
