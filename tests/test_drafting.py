"""Drafting against the one-node-at-a-time reference, and the rerank on a tree drawn by hand. V = 32."""

import math

import pytest
import reference_eagle
import torch
from tiny import PROMPT, PROMPTS, draft_tree, prefill, tiny_head, tiny_pair, tiny_target

import eagle_fsd
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.drafting.language_model import DraftModel
from eagle_fsd.drafting.sizing import Drafting, Latency, Plan, Prices, Sizing
from eagle_fsd.drafting.tree import Scored, rerank
from eagle_fsd.loading.curves import default_curves
from eagle_fsd.loading.timing import greedy_batch
from eagle_fsd.models import target as target_module
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.topk import BLOCK, WORTH_IT, first_largest, largest

SHAPES = [(2, 1, 1), (16, 5, 4), (60, 8, 10), (9, 1, 3), (99, 3, 3), (12, 6, 1)]


def paths_of(tree, row=0):
    """The nodes of a tree as paths below the root."""
    paths = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def assert_same_tree(tree, draft_logits, reference, config, row=0):
    paths = paths_of(tree, row)
    assert paths == reference.paths
    assert tree.depths[row].tolist() == [len(path) for path in paths]
    assert tree.parents[row, 0] == 0 and all(p < i for i, p in enumerate(tree.parents[row, 1:].tolist(), 1))
    is_prefix = [[paths[i][: len(path)] == path for path in paths] for i in range(len(paths))]
    assert tree.ancestors[row].tolist() == is_prefix
    scores = torch.stack([reference.scores[path] for path in paths])
    torch.testing.assert_close(tree.scores[row], scores, rtol=1e-4, atol=1e-4)
    assert tree.max_depth == config.depth
    assert [level.shape[1] for level in draft_logits] == [1] + [config.top_k] * (config.depth - 1)
    for node, path in enumerate(paths):
        has_children = any(other[:-1] == path for other in paths if other)
        if has_children:  # a leaf's row is not to be read
            drafted = draft_logits[len(path)][row, tree.draft_rows[row, node]]
            torch.testing.assert_close(drafted, reference.logits[path], rtol=1e-4, atol=1e-4)


def draft_both(pair, prompt, config):
    """The tree below the last token of a prompt, drafted by the library and by the reference."""
    features = reference_eagle.forward(pair.target.model, prompt[:-1])[0]
    cache = pair.draft.new_cache(len(prompt) + config.depth * config.top_k)
    tokens = torch.tensor([prompt[1:]])
    drafted = draft_tree(pair.draft, pair.target, features[None], tokens, cache, Plan(config))
    assert cache.length == len(prompt) - 1
    return drafted, reference_eagle.draft(pair.draft, pair.target.model, list(features), prompt[1:], config)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_equal_the_reference(shape):
    config = TreeConfig(*shape)
    for pair, prompt in ((tiny_pair(), PROMPT), (tiny_pair(seed=1), PROMPT[:2])):
        (tree, draft_logits), reference = draft_both(pair, prompt, config)
        assert tree.tokens.shape == (1, config.nodes)
        assert_same_tree(tree, draft_logits, reference, config)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_draft_temperature_shapes_the_tree_but_not_the_logits(temperature):
    pair, config = tiny_pair(), TreeConfig(16, 5, 4, draft_temperature=temperature)
    (tree, draft_logits), reference = draft_both(pair, PROMPT, config)
    assert_same_tree(tree, draft_logits, reference, config)
    (plain, plain_logits), _ = draft_both(pair, PROMPT, TreeConfig(16, 5, 4))
    assert paths_of(tree) != paths_of(plain)
    assert len(set(plain.depths[0].tolist())) > 3 and len(set(plain.parents[0].tolist())) < 15  # no chain
    assert torch.equal(draft_logits[0], plain_logits[0])


@torch.no_grad()
def test_rows_of_a_batch_are_independent():
    pair, config = tiny_pair(), TreeConfig(16, 5, 4)
    prompts = [PROMPT, PROMPT[::-1]]
    features = torch.stack([reference_eagle.forward(pair.target.model, prompt[:-1])[0] for prompt in prompts])
    cache = pair.draft.new_cache(len(PROMPT) + 20, batch=2)
    tokens = torch.tensor([prompt[1:] for prompt in prompts])
    tree, draft_logits = draft_tree(pair.draft, pair.target, features, tokens, cache, Plan(config))
    for row, prompt in enumerate(prompts):
        _, reference = draft_both(pair, prompt, config)
        assert_same_tree(tree, draft_logits, reference, config, row)


#   K = 2, depth 3. Scored nodes by number: token (cumulative log-probability); brackets: expanded.
#
#                     [0: root 9 (0)]
#               /                    \
#        [1: a (-0.5)]            [2: b (-1.0)]                    level 1
#         /         \              /         \
#  [3: c (-0.6)]  4: d (-3)  [5: e (-1.0)]  6: f (-2.5)            level 2; e was certain after b
#    /      \                  /      \
#  7: g     8: h             9: i    10: j                         level 3; i was certain after e
#  (-0.9)   (-2)             (-1.0)   (-4)
TOKENS = [[9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
SCORES = [[0.0, -0.5, -1.0, -0.6, -3.0, -1.0, -2.5, -0.9, -2.0, -1.0, -4.0]]
EXPANDED = [[0, 1, 2, 3, 5]]
DEPTH = 3


@pytest.mark.parametrize(
    ("total", "tokens", "parents", "depths", "rows"),
    [
        (2, [9, 10], [0, 0], [0, 1], [0, 0]),
        (4, [9, 10, 12, 16], [0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, -1]),
        # b, e and i tie: the parent goes first
        (5, [9, 10, 11, 12, 16], [0, 0, 0, 1, 3], [0, 1, 1, 2, 3], [0, 0, 1, 0, -1]),
        (7, [9, 10, 11, 12, 14, 16, 18], [0, 0, 0, 1, 2, 3, 4], [0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 0, 1, -1, -1]),
    ],
)
def test_rerank_on_the_picture(total, tokens, parents, depths, rows):
    config = TreeConfig(total, 3, 2)
    tree = rerank(Scored(torch.tensor(TOKENS), torch.tensor(SCORES), torch.tensor(EXPANDED), DEPTH), Plan(config))
    assert tree.tokens.tolist() == [tokens]
    assert tree.parents.tolist() == [parents]
    assert tree.depths.tolist() == [depths]
    assert tree.draft_rows.tolist() == [rows]
    by_token = dict(zip(TOKENS[0], SCORES[0], strict=True))
    assert tree.scores.tolist() == [[0.0, *(pytest.approx(by_token[token]) for token in tokens[1:])]]


def test_the_root_stays_whatever_the_scores():
    """A sum of log rates can round to above 0, and it may be that no further node pays."""
    above = torch.tensor(SCORES) + torch.tensor([0.0] + [9.0] * 10)
    config = TreeConfig(3, 3, 2)
    assert rerank(Scored(torch.tensor(TOKENS), above, torch.tensor(EXPANDED), DEPTH), Plan(config)).tokens[0, 0] == 9
    dear = Plan(config, prices=Prices(lambda nodes, levels: 9.0 * nodes))
    none = rerank(Scored(torch.tensor(TOKENS), torch.tensor(SCORES), torch.tensor(EXPANDED), DEPTH), dear)
    assert none.tokens.tolist() == [[9]] and none.max_depth == 0


@torch.no_grad()
@pytest.mark.parametrize(("family", "shape"), [("llama", (16, 5, 4)), ("gemma2", (4, 1, 3))], ids=str)
def test_greedy_cycles_equal_the_reference(family, shape):
    pair, config, seen = tiny_pair(family), TreeConfig(*shape), []
    batch = greedy_batch(pair.target, pair.draft, [PROMPT], Plan(config), 60)
    batch.observe = lambda *drafted: seen.append(drafted)
    first, cycles = reference_eagle.decode(pair.target.model, pair.draft, PROMPT, config, cycles=6)
    prefill(batch)
    (request,) = batch.requests
    assert request.answer == [first]
    for reference, path, token in cycles:
        assert [receipt.token for receipt in cycle.step(batch)[0]] == [*path, token]
        tree, draft_logits, (accepted,) = seen[-1]
        assert_same_tree(tree, draft_logits, reference, config)
        assert paths_of(tree)[accepted[-1]] == path
    said = [first] + [t for _, path, token in cycles for t in (*path, token)]
    assert request.answer == said
    assert sum(len(path) for _, path, _ in cycles) > 0


@torch.inference_mode()
@pytest.mark.parametrize(("family", "shape"), [
    ("llama", (16, 5, 4)), ("mistral-window", (16, 5, 4)), ("gemma3_text", (12, 9, 3)), ("llama4_text", (12, 4, 3)),
    ("gpt2", (9, 8, 1)), ("deepseek_v3", (12, 4, 3)),
], ids=str)
def test_levels_of_a_draft_model_are_read_as_plain_text(family, shape):
    """The logits at each expanded node are those of the text up to it, whose keys lie among those of other branches."""
    model, config, rows = tiny_target(family), TreeConfig(*shape), 1 if family == "llama4_text" else 2
    drafter, prompts = DraftModel(model), [PROMPT, PROMPT[::-1][:9]][:rows]
    cache = drafter.new_cache(20 + config.depth * config.top_k, rows)
    for _ in range(2):  # the second one after rows of unequal lengths
        unread = [torch.tensor(prompt[length:]) for prompt, length in zip(prompts, cache.lengths, strict=True)]
        tree, draft_logits = draft_tree(drafter, drafter, None, unread, cache, Plan(config))
        assert cache.lengths == [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            for node, path in enumerate(paths_of(tree, row)):
                if tree.draft_rows[row, node] >= 0:
                    drafted = draft_logits[len(path)][row, tree.draft_rows[row, node]]
                    expected = model(torch.tensor([[*prompt, *path]]), use_cache=False).logits[0, -1]
                    torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-4)
        prompts = [prompt + [7, 2, 11][: 3 - row] for row, prompt in enumerate(prompts)]


@torch.inference_mode()
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=len)
@pytest.mark.parametrize("shape", [(6, 5, 1), (12, 4, 3)], ids=str)
@pytest.mark.parametrize("same", [True, False])
def test_a_causal_model_drafts(same, shape, prompts, monkeypatch):
    """Where it is the target itself, all drafts are accepted; the texts are the target's in any case. A later request
    goes on with both caches."""
    monkeypatch.setitem(target_module.PREFILL, "cpu", 5)  # prompts in parts
    model, tree = tiny_target(), TreeConfig(*shape, draft_temperature=0.05)
    target, drafter = TargetModel(model), DraftModel(model if same else tiny_target(seed=1, num_hidden_layers=1))
    batch = greedy_batch(target, drafter, prompts, Plan(tree), 60)
    prefill(batch)
    accepted = [[len(receipts) - 1 for receipts in cycle.step(batch)] for _ in range(5)]
    assert not same or accepted == [[tree.depth] * len(prompts)] * 5
    for request, prompt in zip(batch.requests, prompts, strict=True):
        count = len(request.tokens) - len(prompt)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        assert request.tokens == expected[0].tolist()
    if len(prompts) > 1:
        return
    text = [*batch.requests[0].tokens[:-3], 7, 8]
    (request,) = greedy_batch(target, drafter, [text], Plan(tree), 20).requests
    later = Batch(target, drafter, [request], Drafting(lambda _: Plan(tree)), parked=batch.row(0))
    prefill(later)
    assert request.stats.prefill_tokens == 2
    emitted = [len(receipts) for _ in range(2) for receipts in cycle.step(later)]
    expected = model.generate(torch.tensor([text]), max_new_tokens=len(request.tokens) - len(text), do_sample=False)
    assert request.tokens == expected[0].tolist() and (not same or emitted == [tree.depth + 1] * 2)


@pytest.mark.parametrize("sized", [False, True])
def test_a_head_of_nans_costs_acceptance_only(sized):
    pair = tiny_pair()
    expected = eagle_fsd.generate(PROMPT, pair, acceptance="exact", max_new_tokens=12).token_ids
    pair.draft.fc.weight.data.fill_(math.nan)
    if sized:
        pair.sizing = Sizing(Latency({1: 1.0, 64: 2.0}, {1: 0.1}, 1.0), default_curves())
    tree = None if sized else TreeConfig(5, 3, 2)
    output = eagle_fsd.generate(PROMPT, pair, acceptance="exact", tree=tree, max_new_tokens=12)
    assert output.token_ids == expected and sum(output.stats.accepted_lengths) == 0


def test_rotary_frequencies_stay_float32_as_the_targets():
    head = tiny_head(tiny_target())
    exact = head.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.dtype == torch.bfloat16 and torch.equal(head.rotary_emb.inv_freq, exact)
    hidden, positions = torch.zeros(1, 1, 16), torch.tensor([[3001]])
    for got, wanted in zip(head.rotary_emb(hidden, positions), tiny_head(tiny_target()).rotary_emb(hidden, positions),
                           strict=True):
        assert torch.equal(got, wanted)
    assert head.to("meta").rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize(("size", "count"), [(BLOCK, 1), (WORTH_IT // 10 + 57, 3), (49_152, 1)])
def test_the_largest_of_long_rows(size, count):
    rows = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size)).bfloat16().float()  # with ties
    rows[0, 0, -2:] = 9.0  # what is no whole block
    rows[0, 1, :] = -math.inf
    rows[0, 2, 7:] = -math.inf
    found = rows.gather(-1, largest(rows, count))
    assert torch.equal(found, rows.topk(count).values)
    assert largest(rows, count).sort().values.diff().ne(0).all()
    assert torch.equal(first_largest(rows), rows.argmax(-1))
    rows[1, 3, [5, size - 1]] = math.nan
    assert torch.equal(first_largest(rows), rows.argmax(-1)) and first_largest(rows)[1, 3] == 5
    assert largest(rows, count)[1, 3, 0] in (5, size - 1)
    assert torch.equal(first_largest(rows[:, ::2]), rows[:, ::2].argmax(-1))
    assert torch.equal(first_largest(rows[0, 0].expand(3, -1)), rows[0, 0].argmax().expand(3))
