"""The walk on a tree drawn by hand, V = 11."""

import math
from dataclasses import replace

import pytest
import torch
from random_trees import emitted, fuzzy_nodes, random_verification, tree_from_parents
from reference_acceptance import Reference
from tiny import HIDDEN, judged

from eagle_fsd.acceptance import RULES, Decision, Verification, make_rule, walk

VOCAB = 11

#              node 0: token 7
#              /             \
#     node 1: 3              node 2: 7        (the root's own token once more)
#      /      \                 |
# node 3: 2   node 4: 9      node 5: 3
PARENTS = [0, 0, 0, 1, 1, 2]
TOKENS = [7, 3, 7, 2, 9, 3]
ANCESTORS = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 0, 1, 0, 0, 1],
]


def picture(target_best: list[int], second: dict[int, int] | None = None, draft_equal=False) -> Verification:
    """The tree with target logit 2 for each node's best token, 1.5 for a second one and 0 for the rest."""
    tree = tree_from_parents([PARENTS], [TOKENS], [[0.0, -0.1, -2.0, -0.3, -1.0, -2.1]])
    target_logits = torch.zeros(1, 6, VOCAB)
    for node, token in enumerate(target_best):
        target_logits[0, node, token] = 2.0
    for node, token in (second or {}).items():
        target_logits[0, node, token] = 1.5
    draft_logits = target_logits.clone() if draft_equal else torch.zeros(1, 6, VOCAB)
    return Verification(tree, target_logits, target_logits, draft_logits)


def test_the_picture():
    verification = picture([0] * 6)
    assert verification.tree.ancestors.int().tolist() == [ANCESTORS]
    assert verification.tree.depths.tolist() == [[0, 1, 1, 2, 2, 2]]
    children = [[3, 7], [2, 9], [3], [], [], []]
    expected = [[token in children[node] for token in range(VOCAB)] for node in range(6)]
    assert verification.child_mask.tolist() == [expected]
    assert verification.has_children.tolist() == [[True, True, True, False, False, False]]
    assert verification.is_child.tolist() == [[False, True, True, True, True, True]]


@pytest.mark.parametrize(
    ("target_best", "path", "tokens"),
    [
        ([5, 2, 3, 0, 0, 0], [0], [5]),  # no child of the root
        ([3, 5, 3, 0, 0, 0], [0, 1], [3, 5]),
        ([3, 9, 3, 0, 8, 0], [0, 1, 4], [3, 9, 8]),  # to a leaf, which emits
        ([7, 9, 3, 0, 0, 6], [0, 2, 5], [7, 3, 6]),
        ([7, 9, 2, 0, 0, 6], [0, 2], [7, 2]),  # 2 is a child of node 1, not of node 2
        ([5, 2, 3, 7, 7, 7], [0], [5]),  # matches below a refused node do not count
    ],
)
def test_exact_greedy_walk(target_best, path, tokens):
    verification = picture(target_best)
    walked = walk(verification, make_rule("exact")(verification))
    assert walked.choice.tolist() == [target_best]
    assert walked.accepted[0].nonzero()[:, 0].tolist() == path
    assert walked.last.tolist() == [path[-1]]
    assert walked.length.tolist() == [len(path) - 1]
    assert emitted(verification, walked) == tokens
    assert not fuzzy_nodes(verification, walked).any()


def test_noise_decides_and_nodes_of_one_depth_share_it():
    verification = picture([5, 5, 5, 5, 5, 5])
    noise = torch.zeros(1, 6, VOCAB)
    noise[0, 0, 3] = noise[0, 1:3, 9] = noise[0, 3:, 1] = 3.0
    sampled = Verification(verification.tree, *(verification.target_logits,) * 3, noise)
    walked = walk(sampled, make_rule("exact")(sampled))
    assert emitted(sampled, walked) == [3, 9, 1]


@pytest.mark.parametrize(
    ("rule", "path", "fuzzy"),
    [
        # the root's best token 5 is no child; of its children the target prefers 7 (1.5), the draft 3 (0)
        (make_rule("fsd", math.inf), [0, 2, 5], [2, 5]),
        (make_rule("fsd", math.inf, sibling="draft"), [0, 1, 4], [1]),
        (make_rule("fsd", math.inf, sibling="longest"), [0, 2, 5], [2, 5]),
        (make_rule("fsd", math.inf, head_guard=0.5), [0, 2], [2]),  # exp(1.5 - 2) = 0.61, exp(0 - 2) = 0.14
        (make_rule("fsd", math.inf, head_guard=0.3), [0], []),
        (make_rule("fsd", 0.0), [0], []),
        (make_rule("fsd_paper", math.inf), [0, 1, 3], [1, 3]),
        (make_rule("fsd_paper", 0.0), [0], []),
        (make_rule("relaxed", 0.5), [0, 2], [2]),
        (make_rule("relaxed", 0.5, top=1), [0], []),
        (make_rule("relaxed", 2.0, top=2), [0, 2, 5], [2, 5]),  # node 5's token ties for the second place
        (make_rule("lenience", 5.0), [0], []),
        # the entropy of the root's best three, of logits 2, 1.5 and 0, is 0.885; node 2's are 2, 0 and 0: 0.665
        (make_rule("fly", math.log(3) - 0.88, window=1), [0, 2], [2]),
        (make_rule("fly", math.log(3) - 0.89, window=1), [0], []),
        (make_rule("fly", math.log(3) - 0.66, window=1), [0, 2, 5], [2, 5]),
        (make_rule("fly", math.log(3) - 0.88), [0, 1, 4], [1]),  # 9 is node 1's best; node 2's is no child
        (make_rule("fly", math.log(3), window=3), [0], []),  # longer than the tree is deep
        (make_rule("fsd", math.inf, gates=["fly"]), [0, 1, 4], [1]),
        (make_rule("fly", 0.4, gates=["relaxed"]), [0], []),  # 0.5 nats are within relaxed's 0.6, but open no window
        (make_rule("fly", 0.4, window=1, gates=["relaxed"]), [0, 2], [2]),
        (make_rule("regret", 0.4), [0], []),  # the target prefers node 2, at a regret of 0.5, then node 5, of 2
        (make_rule("regret", 0.5), [0, 2], [2]),
        (make_rule("regret", 2.5), [0, 2, 5], [2, 5]),
        (make_rule("regret", 2.5, most=1), [0, 2], [2]),
        (make_rule("regret", math.inf, head_guard=0.3), [0], []),
        (make_rule("fsd+regret", math.inf, gate_threshold=2.0), [0, 2], [2]),
        # through node 2 the regrets are 0.5 and 2, through node 1 they are 2 and 0 (its best token is 9)
        (make_rule("tilt", 0.4), [0], []),
        (make_rule("tilt", 0.5), [0], []),  # a step that gains exactly nothing is not taken
        (make_rule("tilt", 1.9), [0, 1, 4], [1]),  # (1 - 2 / 1.9) + 1 > 1 - 0.5 / 1.9
        (make_rule("tilt", 1.9, max_regret=1.0), [0, 2], [2]),
        (make_rule("tilt", 0.4, max_regret=1.0), [0], []),
        (make_rule("tilt", 9.0, head_guard=0.5), [0, 2], [2]),
    ],
    ids=str,
)
def test_fuzzy_greedy_walks(rule, path, fuzzy):
    verification = picture([5, 9, 0, 0, 0, 0], second={0: 7})
    walked = walk(verification, rule(verification))
    assert walked.accepted[0].nonzero()[:, 0].tolist() == path
    assert fuzzy_nodes(verification, walked)[0].nonzero()[:, 0].tolist() == fuzzy
    assert walked.last.tolist() == [path[-1]] and walked.length.tolist() == [len(path) - 1]


@pytest.mark.parametrize(
    ("spent", "said", "path"),
    [
        (0.0, 1, [0, 2, 5]), (0.1, 1, [0, 2]), (2.0, 1, [0, 2]), (2.1, 1, [0]),  # 2.5 for the first 100 tokens
        (2.1, 98, [0]), (2.0, 98, [0, 2]), (2.0, 99, [0, 2, 5]), (2.1, 99, [0]),  # node 5 would be the 101st
        (2.5, 100, [0, 2, 5]), (2.6, 100, [0, 2]), (4.6, 199, [0]), (4.6, 200, [0, 2, 5]),
    ],
)
def test_regret_goes_by_what_the_request_has_given_up(spent, said, path):
    verification = picture([5, 9, 0, 0, 0, 0], second={0: 7})
    memory = {"regret": torch.tensor([spent], dtype=torch.float64), "said": torch.tensor([said])}
    walked = walk(verification, make_rule("regret", 2.5)(replace(verification, **memory)))
    assert walked.accepted[0].nonzero()[:, 0].tolist() == path


def test_paper_rule_stops_at_a_drawn_child_where_the_divergence_is_too_large():
    verification = picture([3, 2, 3, 0, 0, 0])
    walked = walk(verification, make_rule("fsd_paper", 0.01)(verification))
    assert emitted(verification, walked) == [3] and walked.length.tolist() == [0]


def test_divergence_is_reported_where_there_are_children():
    verification = picture([3, 2, 3, 0, 0, 0])
    divergence = make_rule("fsd", 0.1)(verification).divergence
    assert divergence.isnan().tolist() == [[False, False, False, True, True, True]]
    assert picture([3] * 6, draft_equal=True).divergence("kl")[0, :3].tolist() == [0.0, 0.0, 0.0]


def test_a_root_alone():
    tree = tree_from_parents([[0], [0]], [[4], [5]])
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    for noise in (None, torch.zeros(2, 1, VOCAB)):
        features = torch.ones(2, 1, HIDDEN)
        verification = Verification(tree, logits, logits, torch.zeros(2, 1, VOCAB), noise, features=features)
        for name in RULES:
            rule = make_rule(name, 0.0 if name == "exact" else 0.5, **judged(name))
            walked = walk(verification, rule(verification))
            assert walked.length.tolist() == [0, 0] and walked.last.tolist() == [0, 0]
            assert torch.equal(walked.choice, logits.argmax(-1))


@pytest.mark.parametrize("seed", range(20))
def test_walk_follows_arbitrary_log_weights_and_stops(seed):
    """Against a loop over nodes, for log-weights and stop marks that no rule would return."""
    verification = random_verification(seed, greedy=seed % 2 == 0, nodes=15, vocab_size=5)
    generator = torch.Generator().manual_seed(seed)
    log_weights = verification.warped_logits + torch.randn(3, 15, 5, generator=generator)
    stop = torch.rand(3, 15, generator=generator) < 0.2
    walked = walk(verification, Decision(log_weights, stop=stop))
    noise = 0 if verification.noise is None else verification.noise
    assert torch.equal(walked.choice, (log_weights + noise).argmax(-1))
    for row in range(3):
        reference = Reference(make_rule("exact"), verification, row)
        v, path = 0, [0]
        while not stop[row, v]:
            token = int(walked.choice[row, v])
            v = next((c for c in reference.children(v) if reference.tokens[c] == token), None)
            if v is None:
                break
            path.append(v)
        assert walked.accepted[row].nonzero()[:, 0].tolist() == path
        assert walked.last[row] == path[-1] and walked.length[row] == len(path) - 1
