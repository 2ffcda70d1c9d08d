"""Requests decoded together: every one is what it would be alone, whatever the others ask for or end in."""

from collections import Counter

import pytest
import torch
from tiny import PROMPT, PROMPTS, VOCAB, tiny_pair, tiny_tokenizer
from transformers import LogitsProcessor
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

import eagle_fsd
from eagle_fsd import GenerateOptions
from eagle_fsd.api import decode_requests
from eagle_fsd.decoding import batch as batch_module
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.models.cache import TreeCache

TREE = eagle_fsd.TreeConfig(12, 4, 3)


class NoThreeAfterOne(LogitsProcessor):
    """A user's processor: token 3 may not follow token 1."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[input_ids[:, -1] == 1, 3] = -torch.inf
        return scores


def assert_as_alone(row, alone):
    assert row.token_ids == alone.token_ids and row.seed == alone.seed
    assert (row.finish_reason, row.text) == (alone.finish_reason, alone.text)
    assert row.stats.accepted_lengths == alone.stats.accepted_lengths
    assert row.stats.prefill_tokens == alone.stats.prefill_tokens
    assert [each.source for each in row.receipts] == [each.source for each in alone.receipts]
    for name in ("logprob", "regret"):
        ours, theirs = ([getattr(each, name) for each in found.receipts] for found in (row, alone))
        assert ours == pytest.approx(theirs, abs=1e-4)
    if alone.stats.budget_spent is not None:
        assert row.stats.budget_spent == pytest.approx(alone.stats.budget_spent, abs=1e-3)
        assert row.stats.exact_because == alone.stats.exact_because
        assert [each.exact_because for each in row.receipts] == [each.exact_because for each in alone.receipts]


def assert_rows_as_alone(pair, prompts=PROMPTS, seeds=None, **options):
    options = {"max_new_tokens": 24, "tree": TREE, **options}
    seeds = list(range(len(prompts))) if seeds is None else seeds
    together = eagle_fsd.generate(prompts, pair, seed=seeds, **options)
    for prompt, seed, row in zip(prompts, seeds, together, strict=True):
        assert_as_alone(row, eagle_fsd.generate(prompt, pair, seed=seed, **options))
    return together


def test_text_and_chats():
    pair = tiny_pair(tokenizer=tiny_tokenizer())
    prompts = ["hello world.", [{"role": "user", "content": "hi"}], torch.tensor([[3, 1, 4]]), "a"]
    outputs = assert_rows_as_alone(pair, prompts, stop=["w", "q"])
    assert any(output.finish_reason == "stop" for output in outputs)


def test_rows_near_the_last_position():
    """The target has 128 positions: a long row ends by length while the others go on."""
    prompts = [[(3 * i) % VOCAB for i in range(118)], PROMPT, [(7 * i) % VOCAB for i in range(125)]]
    outputs = assert_rows_as_alone(tiny_pair(), prompts, acceptance="exact", max_new_tokens=30)
    assert [len(output.token_ids) for output in outputs] == [10, 30, 3]


def test_one_seed_for_a_batch():
    pair, options = tiny_pair(), {"temperature": 1.0, "max_new_tokens": 8, "tree": TREE}
    outputs = eagle_fsd.generate([PROMPT, PROMPT], pair, seed=5, **options)
    assert [output.seed for output in outputs] == [5, 6]
    assert outputs[1].token_ids == eagle_fsd.generate(PROMPT, pair, seed=6, **options).token_ids
    drawn = eagle_fsd.generate([PROMPT, PROMPT], pair, **options)
    assert drawn[0].seed != drawn[1].seed


# Requests that ask for different things: `generate` gives one set of options to all, `Batch` need not.

RULES = [
    {"acceptance": "exact"}, {"threshold": 0.3}, {"threshold": 0.6}, {"threshold": 0.6, "divergence": "tv"},
    {"acceptance": lambda nodes: nodes.warped},
    {"threshold": 0.5, "head_guard": None, "budget": 0.5}, {"threshold": 0.6, "budget": 0},
    {"acceptance": "lenience", "threshold": 1.0}, {"acceptance": "typical", "threshold": 0.0},
    {"acceptance": "fsd_paper", "threshold": 0.4}, {"acceptance": "relaxed", "threshold": 3.0},
]
OTHERS = [
    {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 4, "max_new_tokens": 9},
    {"repetition_penalty": 1.3}, {"min_new_tokens": 9}, {"stop_token_ids": [2, 4, 9, 17], "max_new_tokens": 30},
    {"logits_processor": [NoThreeAfterOne()]}, {"logits_processor": [NoRepeatNGramLogitsProcessor(2)], "seed": 1},
    {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 19]},
]


def request_of(pair, prompt, logits_processor=None, stopping_criteria=None, **options):
    options = GenerateOptions(**{"max_new_tokens": 20, "tree": TREE} | options)
    (request,) = make_requests(pair, [prompt], options, logits_processor, stopping_criteria)
    return request


def test_requests_of_all_kinds_together():
    """Every rule and every other option beside every one, in batches of several sizes."""
    pair = tiny_pair()
    wanted = [(PROMPTS[number % 5], {"seed": 0} | rule | other)
              for number, (rule, other) in enumerate((rule, other) for rule in RULES for other in OTHERS)]
    wanted = [wanted[(5 * number) % len(wanted)] for number in range(len(wanted))]
    sources = Counter()
    for start in range(0, len(wanted), 14):
        batch = wanted[start : start + 14]
        requests = [request_of(pair, prompt, **options) for prompt, options in batch]
        decode_requests(pair, requests)
        outputs = [request.output() for request in requests]
        for (prompt, options), row in zip(batch, outputs, strict=True):
            assert_as_alone(row, eagle_fsd.generate(prompt, pair, **{"max_new_tokens": 20} | options, tree=TREE))
            sources.update(receipt.source for receipt in row.receipts)
    assert sources["fuzzy"] > 40 and sources["exact"] > 300


def test_caches_grow_with_the_answers(model, monkeypatch):
    """Room that is allowed but not used costs nothing, and growing changes no token, in a batch and in a session."""
    monkeypatch.setattr(batch_module, "STEP", 3)
    sizes, new = [], TreeCache._storage
    monkeypatch.setattr(TreeCache, "_storage", lambda cache, *shape: sizes.append(cache.capacity) or new(cache, *shape))
    options = {"tree": TREE, "temperature": 0.9}
    prompts, session = [PROMPT, PROMPT[:3], PROMPT * 4], eagle_fsd.Session()
    outputs = eagle_fsd.generate(prompts, model, seed=3, max_new_tokens=60, **options)
    first, draft_first, *grown = sizes  # of the target and of the drafter
    assert first == len(prompts[2]) + 3 + TREE.nodes and draft_first == first + TREE.depth * TREE.top_k
    assert max(grown) == len(prompts[2]) + 60 + TREE.nodes + TREE.depth * TREE.top_k
    for prompt, seed, output in zip(prompts, (3, 4, 5), outputs, strict=True):
        for more in ({"speculative": False, "tree": None}, {"session": session}):
            assert eagle_fsd.generate(
                prompt, model, seed=seed, max_new_tokens=60, **options | more).token_ids == output.token_ids
    sizes.clear()
    eagle_fsd.generate(prompts, model, stopping_criteria=[lambda ids, scores: True], max_new_tokens=100_000, **options)
    assert sizes == [first, draft_first]
