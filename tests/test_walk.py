"""The walk on a tree drawn by hand; users' functions as rules; requests of different rules decoded together."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from random_trees import Case, random_case, tree_from_parents
from reference_acceptance import Reference
from tiny import PROMPT, prefill, tiny_pair

import eagle_fsd
from eagle_fsd.acceptance import Nodes, TokenWeights, Weights, make_rule
from eagle_fsd.acceptance.walk import Within
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.drafting.sizing import Drafting, Plan
from eagle_fsd.inputs.requests import make_requests

VOCAB, TREE = 11, eagle_fsd.TreeConfig(8, 3, 3)


@pytest.fixture(scope="module")
def pair():
    return tiny_pair()


#              node 0: token 7
#              /             \
#     node 1: 3              node 2: 7        (the root's own token once more)
#      /      \                 |
# node 3: 2   node 4: 9      node 5: 3
PARENTS = [0, 0, 0, 1, 1, 2]
TOKENS = [7, 3, 7, 2, 9, 3]


def picture(best: list[int], second: dict[int, int] | None = None, rows: int = 1) -> Case:
    """The tree with target logit 2 for each node's best token, 1.5 for a second one, 0 for the rest; the draft's are
    0 throughout. Without noise."""
    tree = tree_from_parents([PARENTS], [TOKENS], [[0.0, -0.1, -2.0, -0.3, -1.0, -2.1]])
    raw = torch.zeros(1, 6, VOCAB)
    raw[0, range(6), best] = 2.0
    for node, token in (second or {}).items():
        raw[0, node, token] = 1.5
    return Case(tree, [torch.zeros(1, 6, VOCAB)] * 2, raw, raw).take([0] * rows)


@pytest.mark.parametrize(
    ("best", "path", "tokens"),
    [
        ([5, 2, 3, 0, 0, 0], [0], [5]),  # no child of the root
        ([3, 5, 3, 0, 0, 0], [0, 1], [3, 5]),
        ([3, 9, 3, 0, 8, 0], [0, 1, 4], [3, 9, 8]),  # to a leaf, which emits
        ([7, 9, 3, 0, 0, 6], [0, 2, 5], [7, 3, 6]),
        ([7, 9, 2, 0, 0, 6], [0, 2], [7, 2]),  # 2 is a child of node 1, not of node 2
        ([5, 2, 3, 7, 7, 7], [0], [5]),  # matches below a refused node do not count
    ],
)
def test_exact_greedy_walk(best, path, tokens):
    steps = picture(best).walk(make_rule("exact"))[0]
    assert ([step.node for step in steps], [step.token for step in steps]) == (path, tokens)
    assert all(step.is_exact and step.regret == 0 and step.logit == 2 and math.isnan(step.divergence) for step in steps)
    assert [step.logprob for step in steps] == pytest.approx([2 - math.log(10 + math.exp(2))] * len(steps))


def test_noise_decides_and_nodes_of_one_depth_share_it():
    case = picture([5] * 6)
    noise = torch.zeros(1, 3, VOCAB)
    noise[0, 0, 3] = noise[0, 1, 9] = noise[0, 2, 1] = 3.0
    assert [step.token for step in replace(case, gumbel=noise).walk(make_rule("exact"))[0]] == [3, 9, 1]


@pytest.mark.parametrize(
    ("name", "threshold", "options", "path", "fuzzy"),
    [
        # the root's best token 5 is no child; of its children the target prefers 7 (1.5), the draft 3 (0)
        ("fsd", math.inf, {"head_guard": None}, [0, 2, 5], [2, 5]),
        ("fsd", math.inf, {}, [0, 2], [2]),  # the guard of 0.7: exp(1.5 - 2) = 0.61, exp(0 - 2) = 0.14
        ("fsd_paper", math.inf, {}, [0, 1, 3], [1, 3]),
        ("relaxed", 0.5, {}, [0, 2], [2]),
        ("relaxed", 2.0, {"top": 2, "head_guard": None}, [0, 2, 5], [2, 5]),  # node 5's token ties for the second place
        ("typical", 0.0, {}, [0, 2], [2]),  # p = 0.24 and 0.06, the bar is at 0.3 exp(-H) = 0.04 at the root
        ("lenience", 5.0, {}, [0], []),  # greedy: exact
    ],
)
def test_fuzzy_greedy_walks(name, threshold, options, path, fuzzy):
    steps = picture([5, 9, 0, 0, 0, 0], second={0: 7}).walk(make_rule(name, threshold, **options))[0]
    assert [step.node for step in steps] == path
    assert [after.node for step, after in zip(steps, steps[1:], strict=False) if not step.is_exact] == fuzzy


def test_what_is_left_of_a_budget_is_paid_along_the_path():
    """The regrets of fsd's path are 0.5 and 2; a tie with what is left is paid."""
    budgets = [math.inf, 2.5, 2.49, 0.5, 0.49, 0.0]
    walks = picture([5, 9, 0, 0, 0, 0], second={0: 7}, rows=6).walk(
        make_rule("fsd", math.inf, head_guard=None), left=budgets)
    assert [[step.node for step in steps] for steps in walks] == [[0, 2, 5]] * 2 + [[0, 2]] * 2 + [[0]] * 2
    assert [[step.token for step in steps] for steps in walks[1:5:2]] == [[7, 3, 0], [7, 0]]
    assert [sum(step.closed for step in steps) for steps in walks] == [0, 0, 1, 1, 1, 1]
    # After a refusal all is exact, also below children that the rule would have left: here 3, then 9.
    steps = picture([3, 9, 0, 0, 0, 0], second={0: 7}).walk(make_rule(lambda nodes: -nodes.raw), left=0.3)[0]
    assert [(step.node, step.token, step.closed) for step in steps] == [(0, 3, True), (1, 9, True), (4, 0, True)]


def test_the_guard_is_not_for_exact_steps():
    """Node 1's best token after processors, 9, is far from its best before; the way to it costs 0.5 nats."""
    case = picture([5, 2, 0, 0, 0, 0], second={0: 3})
    warped = case.raw.clone()
    warped[0, 1, 2], warped[0, 1, 9] = -math.inf, 1.0
    case = replace(case, warped=warped)
    assert case.paths(make_rule("fsd", 1.0)) == [[0, 1, 4]]
    assert case.paths(make_rule("fsd", 1.0, head_guard=0.3)) == [[0]]


@pytest.mark.parametrize(("best", "threshold", "step"), [(5, math.inf, (3, [0, 1])), (1, math.inf, (3, [0, 1])),
                                                         (5, 0.01, (3, [0, 1])), (1, 0.01, (1, [0]))])
def test_ties_go_to_the_first_token(best, threshold, step):
    """The children 3 and 7 tie with the best token, which is no child, and with one another."""
    case = picture([best, 0, 0, 0, 0, 0])
    case.raw[0, 0, [3, 7]] = 2.0
    steps = replace(case, warped=case.raw).walk(make_rule("fsd", threshold))[0]
    assert (steps[0].token, [each.node for each in steps][:2]) == step


# --- users' functions ----------------------------------------------------------------------------


class Backwards(Reference):
    """Adds the logits in reverse order and stops where the first one is large."""

    def custom(self, v):
        return [a + b for a, b in zip(self.warped[v], reversed(self.raw[v]), strict=True)], self.raw[v][0] < 1


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
def test_a_function_may_draw_any_token_and_stop_anywhere(greedy):
    asked = []

    def backwards(nodes):
        asked.append(nodes)
        weights = nodes.warped + nodes.raw.flip(-1)
        return TokenWeights(weights, stop=nodes.raw[:, 0] >= 1)

    for seed in range(8):
        case, budgets = random_case(seed, greedy, banned=0.2), [math.inf, 0.0, 2.0, 6.0]
        for row, steps in enumerate(case.walk(make_rule(backwards), left=budgets)):
            expected = Backwards(make_rule(backwards), case, row, 0.0, budgets[row]).walk()
            assert [(step.node, step.token, step.is_exact, step.closed) for step in steps] == expected
    nodes = asked[0]
    assert isinstance(nodes, Nodes) and nodes.raw.shape == nodes.warped.shape == (1, 11) and nodes.greedy == greedy
    assert nodes.tokens.shape == nodes.children.shape == nodes.scores.shape == (1, 12)
    assert nodes.draft_logits.shape == (1, 11)
    assert nodes.exact.shape == nodes.threshold.shape == nodes.left.shape == nodes.divergence("js").shape == (1,)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
def test_outside_of_its_marks_a_rule_does_not_decide(greedy):
    """Step by step as the reference, which looks at one row alone; a row without marks has the rule everywhere."""
    rules = [make_rule("fsd", 0.5, head_guard=None), make_rule("typical", 0.5), make_rule("relaxed", 2.0)]
    changed = 0
    for seed, rule in itertools.product(range(12), rules):
        case, budgets = random_case(seed, greedy), [math.inf, math.inf, math.inf, 1.0]
        inside, marks = [True, False, True, False], [(-1, -1), (3, 5), (7, 2), (1, 8)]
        within = Within(torch.tensor(inside), *torch.tensor(marks).unbind(1))
        walked = case.walk(rule, left=budgets, within=within)
        for row, steps in enumerate(walked):
            expected = Reference(rule, case, row, rule.threshold, budgets[row], inside[row], marks[row]).walk()
            assert [(step.node, step.token, step.is_exact, step.closed) for step in steps] == expected
        everywhere = case.walk(rule, left=budgets)
        assert repr(walked[0]) == repr(everywhere[0])  # of NaN too
        changed += repr(walked) != repr(everywhere)
    assert changed > 6


def test_a_function_may_answer_in_several_forms():
    """That of all tokens [V] or [1, V], or that of the children and the others."""
    case = random_case(3, greedy=False)
    exact, fuzzy = case.paths(make_rule("exact")), case.paths(make_rule("fsd", math.inf, head_guard=None))
    for function in (lambda nodes: nodes.warped[0], lambda nodes: nodes.warped.double(),
                     lambda nodes: Weights(nodes.child_logits - 3.0, torch.tensor([-3.0]))):
        assert case.paths(make_rule(function)) == exact
    assert case.paths(make_rule(lambda nodes: Weights(nodes.child_logits, -1e9))) == fuzzy != exact
    stopped = case.walk(make_rule(lambda nodes: Weights(nodes.child_logits, -1e9, stop=torch.tensor([True]))))
    assert [len(steps) for steps in stopped] == [1] * 4


def test_a_function_that_raised_is_not_asked_again():
    asked = []

    def raises(nodes):
        asked.append(nodes.raw)
        raise KeyError(len(asked))

    case = random_case(3, greedy=True)
    assert max(map(len, case.paths(make_rule("exact")))) > 2
    case.walk(make_rule(raises))
    assert [str(case.errors[row]) for row in range(4)] == ["1", "2", "3", "4"] and len(asked) == 4


# --- requests decoded together -------------------------------------------------------------------


@torch.inference_mode()
def decode(pair, requests):
    """Requests decoded together to their ends; what each one raised, or None."""
    batch = Batch(pair.target, pair.draft, requests, Drafting(lambda _: Plan(TREE)))
    prefill(batch)
    batch.drop_finished()
    while batch.requests:
        cycle.step(batch)
        batch.drop_finished()
    return [request.error for request in requests]


def request(pair, number=0, **options):
    options = eagle_fsd.GenerateOptions(max_new_tokens=16 + number, seed=number, **options)
    return make_requests(pair, [PROMPT[number % 3 :]], options)[0]


def broken(nodes):
    raise KeyError("mine")


def late(nodes):
    return nodes.warped if nodes.tokens[0, 0] % 4 else [1]


BROKEN = {
    broken: (KeyError, "mine"),
    late: (TypeError, "Weights or a tensor of log-weights .V., got list"),
    lambda nodes: None: (TypeError, "got NoneType"),
    lambda nodes: nodes.exact: (ValueError, r"shape \[32\], got \[1\]"),
    lambda nodes: nodes.warped[0, :-1]: (ValueError, r"shape \[32\], got \[31\]"),
    lambda nodes: nodes.warped.repeat(2, 1): (ValueError, r"shape \[32\], got \[2, 32\]"),
    lambda nodes: nodes.warped * math.nan: (ValueError, "not NaN"),
    lambda nodes: nodes.warped + math.inf: (ValueError, "below inf"),
    lambda nodes: nodes.warped - math.inf: (ValueError, "above -inf somewhere"),
    lambda nodes: Weights(nodes.warped): (ValueError, r"Weights.children must be a tensor \[1, 8\], got \[1, 32\]"),
    lambda nodes: Weights(3.0): (ValueError, "Weights.children must be a tensor .*, got 3.0"),
    lambda nodes: Weights(nodes.child_logits, stop=torch.ones(2)): (RuntimeError, "Boolean value of Tensor"),
}


def test_what_a_function_does_wrong_ends_its_request_and_no_other(pair):
    settings = [each for function in BROKEN for each in ({"acceptance": function}, {"threshold": 0.4})]
    together = [request(pair, number, **options) for number, options in enumerate(settings)]
    errors = decode(pair, together)
    for error, (kind, message) in zip(errors[::2], BROKEN.values(), strict=True):
        with pytest.raises(kind, match=message):
            raise error
    assert errors[1::2] == [None] * len(BROKEN)
    for number in range(1, len(settings), 6):
        alone = request(pair, number, threshold=0.4)
        decode(pair, [alone])
        assert alone.answer == together[number].answer and len(alone.answer) == 16 + number
    with pytest.raises(KeyError, match="mine"):  # and the call that asked for it
        eagle_fsd.generate(PROMPT, pair, acceptance=broken, tree=TREE)


def test_all_forms_of_weights_count_for_a_function(pair):
    """Log-weights of any float type, of children or of all tokens; a divergence gets to receipts."""
    def ask(function):
        return eagle_fsd.generate(PROMPT, pair, tree=eagle_fsd.TreeConfig(12, 4, 3), max_new_tokens=20,
                                  acceptance=function)

    exact = ask("exact").token_ids
    assert ask(lambda nodes: Weights()).token_ids == exact
    assert ask(lambda nodes: Weights(nodes.child_logits.double())).token_ids == exact
    assert ask(lambda nodes: TokenWeights(nodes.warped)).token_ids == exact
    receipts = ask(lambda nodes: Weights(nodes.child_logits, divergence=nodes.divergence("js"))).receipts
    assert any(receipt.divergence is not None for receipt in receipts)
