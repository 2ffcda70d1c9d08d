"""Drafts copied from the text: how they are found, joined with the head's and chosen; no lossless text changes.

Everything is compared with something slow: a search of all places, dicts of paths, laws by enumeration. V = 32.
"""

import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from random_trees import Case, tree_from_parents
from test_engine import eagle3_pair
from test_laws import chi_square_fits
from test_lossless import PROMPTS, REPEATS, check_counts
from tiny import PROMPT, VOCAB, draft_tree, prefill, tiny_chat_pair, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd import GenerateOptions, TextDrafts, TreeConfig, make_rule
from eagle_fsd.decoding import cycle
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.request import EXACT
from eagle_fsd.drafting import copies as copies_module
from eagle_fsd.drafting.config import MOST_NODES
from eagle_fsd.drafting.copies import (
    GRAMS,
    LONGEST_MATCH,
    MOST_PLACES,
    SEPARATOR,
    Copies,
    Rates,
    TextIndex,
    TextSource,
)
from eagle_fsd.drafting.noise import gumbel_noise
from eagle_fsd.drafting.sizing import Drafting, Plan, Prices
from eagle_fsd.drafting.tree import candidates_of, columns_of, join_copies, root_only
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.loading.pair import EagleModel

TREE = TreeConfig(12, 4, 3)
# The index --------------------------------------------------------------------------------------------------------


def search(text, tokens, most, own):
    """`TextIndex.matches` by looking at every place, from the newest on."""
    def matched(place):
        count = 0
        while count < min(LONGEST_MATCH, place, len(text)) and text[-1 - count] == tokens[place - 1 - count]:
            count += 1
        return count

    for gram in GRAMS:
        found = [(matched(place), place) for place in range(len(tokens) - own, 0, -1) if matched(place) >= gram]
        if found:
            return sorted(found[:MOST_PLACES], key=lambda each: (-each[0], -each[1]))[:most]
    return []


def continued(tokens, place, most):
    """`TextIndex.after`, token by token: what is appended can be copied in turn."""
    said = list(tokens)
    for at in range(place, place + most if place < len(tokens) else place):
        if said[at] == SEPARATOR:
            break
        said.append(said[at])
    return said[len(tokens) :]


@pytest.mark.parametrize("letters", [2, 3, 4])
def test_matches_are_those_of_a_search_of_all_places(letters):
    draw, found = random.Random(letters), set()

    def written(length):
        text = [draw.randrange(letters) for _ in range(length)]
        return text + text[length // 2 :] if draw.random() < 0.5 else text  # half of them end in a long match

    for length in [*range(10), *[30] * 10, *[90] * 15]:
        text, own = written(length), TextIndex()
        while len(own.tokens) < len(text):
            own.extend(text[len(own.tokens) :][: draw.randint(1, 9)])
        others = TextIndex(*(written(draw.randrange(60)) for _ in range(draw.randint(1, 4))))
        for index, query, most in ((own, own.tokens, 4), (others, text, MOST_PLACES), (others, tuple(text), 1)):
            matches = index.matches(query, most)
            assert matches == search(text, index.tokens, most, own=index is own)
            for count, place in matches:
                assert SEPARATOR not in index.tokens[place - count : place]
                for ahead in (0, 1, 7, 48):
                    assert index.continuation(place, ahead) == continued(index.tokens, place, ahead)
            found |= {count for count, _ in matches}
    assert found >= {2, 3, 7, LONGEST_MATCH}


def test_a_text_that_repeats_itself_goes_on_so_past_its_end():
    index = TextIndex()
    index.extend([8, 1, 2, 3, 1, 2, 3])
    assert index.continuation(4, 8) == [1, 2, 3, 1, 2, 3, 1, 2] and index.continuation(7, 8) == []
    apart = TextIndex([8, 1, 2], [3, 4])
    assert apart.tokens == [8, 1, 2, SEPARATOR, 3, 4, SEPARATOR]
    assert apart.continuation(1, 8) == [1, 2] and apart.continuation(3, 8) == [] and apart.continuation(4, 8) == [3, 4]
    assert apart.matches([2, 3], 4) == [] and apart.matches([9, 3, 4], 4) == [(2, 6)]


def test_texts_of_one_token_and_of_different_ones():
    same, different = TextSource([7] * 20_000, TextDrafts()), TextSource(list(range(20_000)), TextDrafts())
    assert same.index.matches(same.index.tokens, 4) == [(LONGEST_MATCH, 20_000 - at) for at in range(1, 5)]
    copies = same.propose()
    assert 1 < len(copies.tokens) <= 48 and set(copies.tokens) == {7} and set(copies.ranks) == {0}
    assert different.index.matches(different.index.tokens, 4) == [] and different.propose() is None


# The trie ---------------------------------------------------------------------------------------------------------

#   7 2 3 4 6   1 2 3 4 5   8 2 3 9 9   1 2 3             at most two tokens ahead:
#
#                  root                  1 2 3 is followed by 4 5, three tokens match;
#               /        \               2 3 by 9 9 and, earlier, by 4 6: two tokens match
#            0: 4        2: 9
#           /    \         |
#        1: 5   4: 6     3: 9
TEXT = [7, 2, 3, 4, 6, 1, 2, 3, 4, 5, 8, 2, 3, 9, 9, 1, 2, 3]


@pytest.fixture
def even_rates(monkeypatch):
    """A half for first children, a quarter of what is left for others; nothing is too unlikely."""
    for name, value in (("FIRST", 0.5), ("OTHERS", 0.25)):
        monkeypatch.setattr(copies_module, name, (value,) * len(copies_module.BOUNDS))
    monkeypatch.setattr(copies_module, "LEAST_SCORE", -math.inf)


def test_the_trie_on_the_picture(even_rates):
    source = TextSource(TEXT, TextDrafts(longest=2))
    copies = source.propose()
    assert copies.tokens == [4, 5, 9, 9, 6] and copies.parents == [-1, 0, -1, 2, 0]
    assert copies.matched == [3, 4, 2, 3, 3] and copies.ranks == [0, 0, 1, 0, 1]
    assert list(map(math.exp, copies.scores)) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    learned = []
    source.rates.learn = lambda *judged: learned.append(judged)
    source.extend([4, 6, 30])  # those behind the one that was taken are not judged, nor is what nobody proposed
    assert learned == [(3, 0, True), (4, 0, False), (3, 1, True)]
    assert source.index.tokens == [*TEXT, 4, 6, 30] and source.proposed is None
    assert TextSource(TEXT, TextDrafts(longest=2, places=1)).propose().tokens == [4, 5]


def test_references_are_copied_from(even_rates):
    def proposed(*texts):
        return TextSource([1, 2, 3], TextDrafts(longest=3), [TextIndex(text) for text in texts]).propose()

    assert proposed() is None and proposed([1, 3, 2, 9]) is None
    copies = proposed([8, 2, 3, 6], [9, 1, 2, 3, 4, 5])  # the longer match is the first child
    assert (copies.tokens, copies.parents, copies.matched) == ([4, 5, 6], [-1, 0, -1], [3, 4, 2])


def test_tries_of_random_texts():
    draw, wide = random.Random(5), 0
    for length in range(2, 120):
        config = TextDrafts(longest=draw.randint(1, 20), places=draw.randint(1, MOST_PLACES))
        source = TextSource([draw.randrange(3) for _ in range(length)], config,
                            [TextIndex([draw.randrange(3) for _ in range(40)])])
        copies, depths, groups = source.propose(), [], {}
        for number, (token, parent, score, matched, rank) in enumerate(zip(*copies or [[]] * 5, strict=True)):
            above = copies.scores[parent] if parent >= 0 else 0.0
            assert -1 <= parent < number and GRAMS[-1] <= matched <= LONGEST_MATCH
            assert copies_module.LEAST_SCORE <= score <= above
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            group = groups.setdefault(parent, {})
            assert token not in group and rank == len(group)
            group[token] = math.exp(score - above)
        assert max(depths, default=0) <= config.longest
        assert all(sum(group.values()) <= 1 + 1e-5 for group in groups.values())
        wide += any(len(group) > 1 for group in groups.values())
        source.extend([draw.randrange(3) for _ in range(draw.randrange(30))])  # longer than the trie, too
    assert wide > 10


def test_rates_learn():
    for emitted, better in (([4, 5], True), ([30], False)):
        source = TextSource(TEXT, TextDrafts())
        matched = source.propose().matched[0]
        before = source.rates.of(matched, 0)
        source.extend(emitted)
        assert (source.rates.of(matched, 0) > before) == better != (source.rates.of(matched, 0) < before)
        assert source.rates.of(LONGEST_MATCH, 0) == Rates().of(LONGEST_MATCH, 0)  # of other matches nothing is learned
    source = TextSource([1], TextDrafts())
    for emitted in ([], [1], [1, 1, 1], [99] * 70, []):  # nothing was proposed, or only just
        for _ in range(2):
            source.extend(emitted)
            source.propose()
    assert source.index.tokens == [1] * 9 + [99] * 140


# Joining ----------------------------------------------------------------------------------------------------------


def paths_of(tokens, parents):
    """The path below the root of every node."""
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def joined_scores(head, copies):
    """From path to score, where both sources are such dicts: the better step, from the better parent."""
    best = {(): 0.0}
    for path in sorted({*head, *copies} - {()}, key=len):
        best[path] = best[path[:-1]] + max(
            source[path] - source[path[:-1]] for source in (head, copies) if path in source)
    return best


@torch.no_grad()
def head_trees(seed, config):
    """Of two rows, as they are drafted to be joined."""
    if config is None:
        return root_only(torch.tensor([4, 9]))
    pair = tiny_pair(seed=seed % 2)
    prompts = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    features = pair.target.prefill(prompts[:, :-1], pair.target.new_cache(9, 2))
    cache = pair.draft.new_cache(8 + config.depth * config.top_k, 2)
    return draft_tree(pair.draft, pair.target, features, prompts[:, 1:], cache, Plan(config), wide=True)[0]


def random_copies(draw, head):
    """A trie that shares some of its paths with the head's; and the same as a dict from path to score."""
    scores, columns = {(): 0.0}, Copies([], [], [], [], [])
    for _ in range(draw.randint(1, 6)):
        said = [*draw.choice(head)[: draw.randrange(4)], *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 8)))]
        for path in [tuple(said[:at]) for at in range(1, len(said) + 1)]:
            if path not in scores:
                parent, scores[path] = list(scores).index(path[:-1]) - 1, scores[path[:-1]] - draw.random()
                for column, value in zip(columns, (path[-1], parent, scores[path], 2, 0), strict=True):
                    column.append(value)
    return columns, scores


def check_row(tree, row, head, copies, head_rows, wanted):
    """A joined row, against the dicts; returns how many nodes it lacked."""
    tokens, parents, depths, draft_rows, scores, from_text = (part[row].tolist() for part in (
        tree.tokens, tree.parents, tree.depths, tree.draft_rows, tree.scores, tree.origins))
    best = joined_scores(head, copies)
    chosen = sorted(best, key=lambda path: -best[path])[:wanted]
    count, nodes = len(chosen), len(tokens)
    paths = paths_of(tokens[:count], parents[:count])
    assert sorted(paths) == sorted(chosen)  # all of them, and none twice: siblings differ
    assert depths == sorted(map(len, chosen)) + [0] * (nodes - count) and tree.max_depth >= max(depths)
    for node, path in enumerate(paths):
        assert parents[node] < node or node == parents[node] == 0
        assert depths[node] == len(path) and scores[node] == pytest.approx(best[path], abs=1e-4)
        assert draft_rows[node] == head_rows.get(path, -1) and from_text[node] == (path not in head)
        assert tree.ancestors[row, node].tolist() == [
            at < count and path[: len(paths[at])] == paths[at] for at in range(nodes)]
    for node in range(count, nodes):  # a root of its own
        assert (tokens[node], parents[node], from_text[node]) == (tokens[0], node, False)
        assert tree.ancestors[row, node].nonzero()[:, 0].tolist() == [node]
    return nodes - count


@pytest.mark.parametrize("config", [TreeConfig(12, 4, 3), TreeConfig(40, 3, 5), TreeConfig(9, 1, 4), None], ids=str)
def test_joined_trees_are_the_best_paths_of_both(config):
    lacked = shared = 0
    for seed in range(6):
        draw, head = random.Random(seed), head_trees(seed, config)
        if config is not None:  # more nodes than will be verified, of which those were read that have a row
            assert head.tokens.shape[1] == min(MOST_NODES, config.scored_nodes)
            for row, depth in itertools.product(range(2), range(config.depth + 1)):
                read = [at for at in head.draft_rows[row, head.depths[row] == depth].tolist() if at >= 0]
                assert len(read) == len({*read}) <= config.top_k and (read == []) == (depth == config.depth)
        paths = [paths_of(*parts) for parts in zip(head.tokens.tolist(), head.parents.tolist(), strict=True)]
        ours, rows = ([dict(zip(*each, strict=True)) for each in zip(paths, part.tolist(), strict=True)]
                      for part in (head.scores, head.draft_rows))
        copies, theirs = map(list, zip(*(random_copies(draw, each) for each in paths), strict=True))
        if seed % 3 < 2:  # one row has none
            copies[seed % 3], theirs[seed % 3] = None, {(): 0.0}
        sizes = [len({*mine, *other}) for mine, other in zip(ours, theirs, strict=True)]
        shared += sum(len({*mine} & {*other}) - 1 for mine, other in zip(ours, theirs, strict=True))
        for wanted in (1, 2, 7, 20, 90):
            def count(scores, wanted=wanted, sizes=sizes):
                assert list(map(len, scores)) == sizes and all(row == sorted(row, reverse=True) for row in scores)
                return min(wanted, max(sizes))

            tree = join_copies(head, copies, SimpleNamespace(nodes=count))
            assert_joined_alike(head, copies, tree)
            assert tree.tokens.shape == (2, min(wanted, max(sizes)))
            lacked += sum(check_row(tree, row, ours[row], theirs[row], rows[row], wanted) for row in range(2))
    assert lacked and (shared or config is None)


def assert_joined_alike(head, copies, tree):
    """In fixed shapes, filled up and with more levels, it is the same tree."""
    nodes, levels = tree.tokens.shape[1], head.max_depth
    columns, scores, deepest = columns_of(copies, 64)
    deepest = max(levels, deepest) + 2
    other = candidates_of(head, torch.tensor(columns), torch.tensor(scores, dtype=torch.float64), deepest).best(
        nodes, deepest)
    for name in ("tokens", "parents", "depths", "ancestors", "draft_rows", "scores", "origins"):
        assert torch.equal(getattr(other, name), getattr(tree, name)), name


def verifying(count):
    """A plan with this many nodes."""
    return SimpleNamespace(nodes=lambda scores: count)


#                 0: 9                  The head drafted 10, 11 and 12, and read 9, 10 and 11; copied were 11 13 14 and,
#              /         \              unlikely, 15. By the text, 11 is likelier than the head says (-1.0).
#      1: 10 (-0.5)   2: 11 (-0.2)
#           |             |
#      3: 12 (-0.6)   4: 13 (-0.3)
#                         |
#                     5: 14 (-0.4)
def test_joining_on_the_picture():
    head = tree_from_parents([[0, 0, 0, 1]], [[9, 10, 11, 12]], [[0.0, -0.5, -1.0, -0.6]],
                             torch.tensor([[0, 0, 1, -1]]))
    copies = Copies([11, 13, 15, 14], [-1, 0, -1, 1], [-0.2, -0.3, -2.0, -0.4], [4, 5, 2, 6], [0, 0, 1, 0])
    tree = join_copies(head, [copies], verifying(6))
    assert_joined_alike(head, [copies], tree)
    assert tree.tokens.tolist() == [[9, 10, 11, 12, 13, 14]] and tree.parents.tolist() == [[0, 0, 0, 1, 2, 4]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]] and tree.max_depth == 3
    assert tree.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]
    assert tree.scores[0].tolist() == pytest.approx([0.0, -0.5, -0.2, -0.6, -0.3, -0.4])
    assert tree.draft_rows.tolist() == [[0, 0, 1, -1, -1, -1]]
    assert tree.origins.tolist() == [[False, False, False, False, True, True]]


def test_what_a_broken_head_says_comes_last():
    head = tree_from_parents([[0, 0, 1]], [[9, 10, 11]], [[0.0, math.nan, math.nan]])
    copies = [Copies([10, 12], [-1, -1], [-0.5, -3.0], [2, 2], [0, 1])]
    tree = join_copies(head, copies, verifying(3))
    assert_joined_alike(head, copies, tree)
    assert tree.tokens.tolist() == [[9, 10, 12]]


# Decoding ---------------------------------------------------------------------------------------------------------


@functools.cache
def pair_of(kind):
    if kind == "EAGLE-3":
        return eagle3_pair(range(4, 20))  # of few tokens
    pair = tiny_pair(max_position_embeddings=512)
    return EagleModel.from_parts(pair.target.model, None) if kind == "no head" else pair


def generate(prompt, pair, **options):
    return eagle_fsd.generate(prompt, pair, **{"max_new_tokens": 40, "tree": TREE, "seed": 1} | options)


def plainly(prompt, pair, **options):
    """One token at a time."""
    alone = EagleModel.from_parts(pair.target.model, None, pair.tokenizer)
    return generate(prompt, alone, **{**options, "text_drafts": "off"})


@torch.inference_mode()
@pytest.mark.parametrize(("cost", "lag"), [(None, 5), (lambda nodes, levels: 1 + 0.01 * nodes + 9 * levels, 100)],
                         ids=["asked", "skipped"])
def test_a_head_catches_up_after_more_than_its_tree_is_deep(cost, lag):
    """Then it drafts what it would after the same text as a prompt; also where it was not asked for some cycles, and a
    row beside it is long and has no room for as much."""
    pair, plan = pair_of("EAGLE-2"), Plan(TreeConfig(40, 2, 2), prices=Prices(cost) if cost else None)
    draw, turning = random.Random(0), plainly(REPEATS, pair, max_new_tokens=150).token_ids  # greedy texts go in circles
    prompts = [REPEATS + turning, PROMPT, [draw.randrange(VOCAB) for _ in range(330)]]

    def begun(prompts, *options):
        requests = [make_requests(pair, [prompt], GenerateOptions(**own))[0]
                    for prompt, own in zip(prompts, options, strict=True)]
        batch = Batch(pair.target, pair.draft, requests, Drafting(lambda _: plan))
        prefill(batch)
        return batch

    batch, unread = begun(
        prompts, *[{"max_new_tokens": 160}] * 2, {"max_new_tokens": 20, "text_drafts": "off"}), [1]
    while max(unread) - min(unread) <= lag:
        cycle.step(batch)
        unread = [len(batch.feature(row)) for row in range(len(prompts))]
    assert len(batch.requests[2].tokens) < 350
    whole = Plan(plan.tree)
    drafted, logits = cycle.draft_trees(batch, [EXACT] * 3, whole)
    for row, request in enumerate(batch.requests):
        alone = begun([request.tokens[:-1]], {})
        assert alone.requests[0].tokens == request.tokens
        expected, theirs = cycle.draft_trees(alone, [EXACT], whole)
        assert drafted.tokens[row].tolist() == expected.tokens[0].tolist()
        for ours, wanted in zip(logits, theirs, strict=True):
            torch.testing.assert_close(ours[row], wanted[0], rtol=1e-3, atol=1e-3)


def test_an_answer_is_copied_from_references():
    pair = tiny_chat_pair(max_position_embeddings=512)
    pair = EagleModel.from_parts(pair.target.model, None, pair.tokenizer)
    expected = plainly("what", pair)
    for reference in (expected.text, ["", "zzz", expected.text]):
        output = generate("what", pair, reference=reference, text_drafts=TextDrafts(places=1))
        assert output.token_ids == expected.token_ids and output.stats.accepted["text"] > 25
        check_counts(output)
        assert output.stats.target_forwards < expected.stats.target_forwards / 2


# The law ----------------------------------------------------------------------------------------------------------

SMALL = 6  # vocabulary


def small_case(seed, temperature=0.8):
    """Two joined trees of a vocabulary of 6: the second has no copies and is filled up. Levels 0 and 1 were drafted,
    and the draft agrees with the target in all that it said."""
    head = tree_from_parents([[0, 0, 0, 1]] * 2, [[3, 0, 5, 1]] * 2, [[0.0, -0.4, -1.2, -0.9]] * 2,
                             torch.tensor([[0, 0, 1, -1]] * 2))
    copies = Copies([0, 2, 4, 2, 4], [-1, 0, 1, -1, 3], [-0.2, -0.5, -0.8, -1.5, -1.6], [3] * 5, [0, 0, 0, 1, 0])
    tree = join_copies(head, [copies, None], verifying(8))
    raw = 1.5 * torch.randn(2, 8, SMALL, generator=torch.Generator().manual_seed(seed))
    drafted = [raw[:, :1], torch.zeros(2, 2, SMALL)]
    for row, node in (tree.draft_rows.ge(0) & tree.depths.eq(1)).nonzero().tolist():
        drafted[1][row, tree.draft_rows[row, node]] = raw[row, node]
    return Case(tree, drafted, raw, raw / temperature)


def draw_from(case, rule, row, draws):
    noise = gumbel_noise(torch.arange(draws), torch.arange(case.tree.max_depth + 1).expand(draws, -1), SMALL)
    return replace(case.take([row] * draws), gumbel=noise).walk(rule)


def segment_law(case, row):
    """What a cycle emits under `exact`, by enumeration."""
    tree = case.tree
    tokens, parents, depths = (part[row].tolist() for part in (tree.tokens, tree.parents, tree.depths))
    probs, law = case.warped[row].double().softmax(-1).tolist(), {}

    def descend(node, path, prob):
        children = {tokens[child]: child for child, parent in enumerate(parents) if parent == node and depths[child]}
        for token, p in enumerate(probs[node]):
            if token in children:
                descend(children[token], (*path, token), prob * p)
            else:
                law[(*path, token)] = prob * p

    descend(0, (), 1.0)
    return law


@pytest.mark.parametrize("row", [0, 1])
def test_segments_of_joined_trees_have_their_law(row):
    case = small_case(152)  # whose longest copy is drawn often
    walks = draw_from(case, make_rule("exact"), row, 20_000)
    counts = Counter(tuple(step.token for step in steps) for steps in walks)
    law = segment_law(case, row)
    assert not counts.keys() - law.keys() and chi_square_fits(counts, law)
    assert max(map(len, counts)) == [4, 3][row]


@pytest.mark.parametrize("name", ["fsd", "lenience", "relaxed", "typical"])
def test_copies_are_accepted_exactly(name):
    """Whatever a rule would take of the head's, of the text's copies it takes what the target draws."""
    case, seen = small_case(4), Counter()
    for steps in draw_from(case, make_rule(name, 0.9, head_guard=None), 0, 2000):
        for step, after in itertools.pairwise(steps):
            seen[bool(case.tree.by_drafter[0, after.node]), step.is_exact] += 1
    assert seen[True, False] > 10 and seen[False, True] > 10 and not seen[False, False]


def test_fsd_is_exact_where_the_head_said_nothing():
    case, seen = small_case(4), Counter()
    for steps in draw_from(case, make_rule("fsd", math.inf, head_guard=None), 0, 2000):
        for step in steps:
            read, divergence = case.tree.draft_rows[0, step.node] >= 0, step.divergence
            inner = (case.tree.parents[0].eq(step.node) & case.tree.depths[0].gt(0)).any()
            assert step.is_exact or read and inner and divergence == pytest.approx(0, abs=1e-6)
            assert read or math.isnan(divergence)
            seen[bool(read), bool(inner), step.is_exact] += 1
    assert min(seen[True, True, False], seen[True, True, True], seen[False, True, True]) > 20
    pair, options = pair_of("no head"), {"temperature": 0.8}  # which says nothing anywhere
    output = generate(REPEATS, pair, threshold=math.inf, head_guard=None, **options)
    assert output.token_ids == plainly(REPEATS, pair, **options).token_ids and output.stats.accepted["text"]
    assert {(each.source, each.divergence) for each in output.receipts} == {("exact", None), ("target", None)}


# What pays --------------------------------------------------------------------------------------------------------


def chain(p, count):
    return Copies(list(range(count)), list(range(-1, count - 1)), [at * math.log(p) for at in range(1, count + 1)],
                  [2] * count, [0] * count)


def drafting_of(plan, rows=1):
    policy = Drafting(lambda _: plan)
    policy.resize([None] * rows)
    return policy


def test_the_head_is_asked_where_it_pays():
    """What it adds, which is known from cycles without copies, counts where the first copy is refused."""
    for level in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5):
        for p in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
            for copies in ([chain(p, 20)], [chain(p, 20), None]):
                prices = Prices(lambda nodes, levels: 1 + 0.02 * nodes + level * levels)  # noqa: B023
                policy = drafting_of(Plan(TREE, prices=prices), len(copies))
                for _ in range(60):  # five tokens with nine nodes and three levels
                    policy.learn(policy.plan([None] * len(copies)), 9, 3, [5] * len(copies), copied=False)
                missed = sum(1 - p if each else 1 for each in copies) / len(copies)
                pace = policy.pace
                worth = missed * (4 - pace * 0.02 * 8) >= pace * 3 * level
                assert policy.plan(copies).drafts == worth and policy.plan([None]).drafts
    dear = Plan(TREE, prices=Prices(lambda nodes, levels: 1 + nodes + 9 * levels))
    assert drafting_of(dear).plan([None]).drafts  # that is for the pauses to say
    assert not drafting_of(dear).plan([chain(0.99, 9)]).drafts
    assert drafting_of(Plan(TREE)).plan([chain(0.99, 9)]) == Plan(TREE)  # a given tree is always drafted


def test_a_given_tree_says_how_many_nodes_are_verified():
    for kind in ("EAGLE-2", "no head"):
        pair, own = pair_of(kind), {"tree": TreeConfig(9, 2, 2)}
        requests = make_requests(pair, [PROMPT], GenerateOptions(**own))
        policy = pair.drafting(requests)
        policy.resize(requests)
        plan = policy.plan([None] * 2)
        assert plan.drafts == (kind == "EAGLE-2")
        assert plan.nodes([[0.0, -0.1], [0.0, -0.5, -0.6, -0.69, -3.0]]) == 5
        assert plan.nodes([[0.0] * 20, [0.0]]) == 9


@pytest.mark.parametrize("kind", ["EAGLE-2", "no head"])
def test_a_given_tree_is_never_exceeded(kind, monkeypatch):
    pair, sizes = pair_of(kind), []
    verify = pair.target.verify

    def spy(tokens, *args):
        sizes.append(tokens.shape[1])
        return verify(tokens, *args)

    monkeypatch.setattr(pair.target, "verify", spy)
    for tree in (TREE, TreeConfig(40, 2, 2), TreeConfig(5, 4, 3)):
        sizes.clear()
        outputs = generate(PROMPTS, pair, tree=tree)
        assert min(tree.total_tokens, 20) <= max(sizes) <= tree.total_tokens
        assert sum(output.stats.accepted["text"] for output in outputs)


def test_there_is_room_for_more_copies_than_the_head_scores_nodes():
    """Chains as long as the tree allows, of which 7 nodes are the head's, up to the end of the answer."""
    for most in (400, 380, 360, 340, 320):
        output = generate(REPEATS, pair_of("EAGLE-2"), tree=TreeConfig(120, 2, 2), max_new_tokens=most,
                          text_drafts=TextDrafts(longest=256))
        assert len(output.token_ids) == most and max(output.stats.accepted_lengths) > MOST_NODES


# Options ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["longest", "places"])
def test_bad_text_drafts(name):
    for value, error, message in ((0, ValueError, "at least"), (257, ValueError, "at most"), (2.5, TypeError, "an int"),
                                  (True, TypeError, "an int"), ("all", TypeError, "an int")):
        with pytest.raises(error, match=rf"TextDrafts\.{name} must be {message}"):
            TextDrafts(**{name: value})


def test_references_as_they_come():
    for given in (["a", "b"], ("a", "b"), iter(["a", "b"])):  # what is read once, too
        assert GenerateOptions(reference=given).references == ["a", "b"]
    assert GenerateOptions(reference=None).references == GenerateOptions(reference=[]).references == []


def test_references_need_a_tokenizer_of_the_targets():
    with pytest.raises(ValueError, match="reference needs a tokenizer"):
        eagle_fsd.generate(PROMPT, tiny_pair(), reference="a")
    small = tiny_pair(tokenizer=tiny_tokenizer(), vocab_size=20)  # the tokenizer knows more tokens than the target
    with pytest.raises(ValueError, match="outside the vocabulary"):
        eagle_fsd.generate([4, 5], small, reference="abz abz")
