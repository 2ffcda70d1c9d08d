"""A user's own `Drafter`, whose class implements no more than it has to."""

import pytest
import torch
from tiny import PROMPT, PROMPTS, VOCAB, tiny_target

import eagle_fsd
from eagle_fsd import Session, TreeConfig
from eagle_fsd.drafting.drafter import Drafter, weights_key
from eagle_fsd.loading.pair import EagleModel, described_size
from eagle_fsd.loading.timing import circumstances
from eagle_fsd.models.cache import TreeCache

TREE = TreeConfig(12, 4, 3)
ALONE = {"text_drafts": "off", "max_new_tokens": 24, "tree": TREE}


class Fixed(Drafter):
    """Proposes the same tokens everywhere, and has no weights; its cache only counts."""

    draft_vocab_size = VOCAB

    def __init__(self, tokens):
        self.logits = torch.zeros(VOCAB).index_fill(0, torch.tensor(tokens), 5.0)

    def new_cache(self, capacity, batch=1):
        return TreeCache([torch.device("cpu")], capacity, batch)

    def predict(self, states, tokens, positions, ancestors, cache):
        return tokens[..., None].float()

    def own_logits(self, states, output):
        return self.logits.expand(*states.shape[:-1], -1)


class Reading(Fixed):
    """Reads the target's features, without using them, and names three tokens only."""

    reads_features, draft_vocab_size = True, 3

    def __init__(self, tokens):
        self.draft_tokens, self.logits = torch.tensor(tokens), torch.arange(3.0)


@pytest.fixture(scope="module")
def expected():
    """The answer without a drafter, and three tokens in it."""
    target = tiny_target()
    alone = eagle_fsd.generate(PROMPTS, EagleModel.from_parts(target, None), ignore_eos=True, speculative=False,
                               max_new_tokens=24)
    return target, [each.token_ids for each in alone], sorted(set(alone[0].token_ids))[:3]


@pytest.mark.parametrize("kind", [Fixed, Reading])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_class_of_a_users_own_drafts(kind, temperature, expected):
    target, answers, tokens = expected
    pair = EagleModel.from_parts(target, kind(tokens))
    options = {"ignore_eos": True, "acceptance": "exact", "temperature": temperature, "seed": 5, **ALONE}
    drafted = eagle_fsd.generate(PROMPTS, pair, **options)
    plain = eagle_fsd.generate(PROMPTS, pair, **options | {"speculative": False})
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    if temperature == 0:
        assert [each.token_ids for each in drafted] == answers
        assert drafted[0].stats.accepted.total() > 0
    assert eagle_fsd.generate(PROMPTS[0], pair, acceptance="fsd", threshold=5.0, head_guard=None,
                              **ALONE).stats.drafts > 0


def test_it_goes_with_sessions_engines_and_records(expected):
    target, answers, tokens = expected
    drafter = Fixed(tokens)
    pair, session = EagleModel.from_parts(target, drafter), Session()
    for _ in range(2):
        output = eagle_fsd.generate(PROMPT, pair, session=session, ignore_eos=True, **ALONE)
    with eagle_fsd.Engine(pair) as engine:
        assert engine.submit(PROMPT, ignore_eos=True, **ALONE).result().token_ids == output.token_ids
    assert "a drafter (custom, 0 k parameters)" in repr(pair) and described_size(drafter.module) == "0 k parameters"
    assert circumstances(pair.target, drafter)["head"] == f"Fixed/{VOCAB}/0"
    assert weights_key(pair.target, drafter) == weights_key(pair.target, drafter)


def test_two_targets_do_not_share_it(expected):
    target, _, tokens = expected
    first = EagleModel.from_parts(target, Fixed(tokens))
    second = EagleModel.from_parts(tiny_target(seed=1), first.draft)
    assert second.draft is not first.draft and second.draft.logits is first.draft.logits


def test_a_class_that_lacks_a_method_is_refused_by_name():
    with pytest.raises(TypeError, match="own_logits"):
        type("Half", (Drafter,), {"new_cache": Fixed.new_cache, "predict": Fixed.predict})()
