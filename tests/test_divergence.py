import math
import weakref

import pytest
import torch
from reference_acceptance import divergence as reference

from eagle_fsd.acceptance.divergence import DIVERGENCES, get_divergence

NAMES = [*DIVERGENCES, *(f"{name}_top{k}" for name in DIVERGENCES for k in (1, 3, 40))]
BOUND = {"js": math.log(2), "tv": 1.0}


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name):
    """In any shape; with a draft that names some tokens, the others have none of its mass."""
    target, draft, names = random_logits(2, 10, 11), random_logits(2, 10, 11, seed=1), torch.tensor([0, 2, 3, 7, 10])
    widened = torch.full_like(draft, -math.inf).index_copy(-1, names, draft[..., names])
    for computed, second in ((get_divergence(name)(target, draft), draft),
                             (get_divergence(name, names)(target, draft[..., names]), widened)):
        expected = [[reference(name, *pair) for pair in zip(*rows, strict=True)]
                    for rows in zip(target.tolist(), second.tolist(), strict=True)]
        torch.testing.assert_close(computed, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert get_divergence(name)(target.bfloat16(), draft.bfloat16()).dtype == torch.float32


def test_values_worked_by_hand():
    target_logits = torch.tensor([0.5, 0.5, 0.0]).log()
    draft_logits = torch.tensor([0.25, 0.25, 0.5]).log()
    # mean (3/8, 3/8, 1/4)
    expected = {
        "kl": math.log(2),
        "reverse_kl": math.inf,
        "tv": 0.5,
        "js": 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2)),
        "js_fsd_code": math.inf,
        "kl_top1": 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75),
    }
    for name, value in expected.items():
        assert get_divergence(name)(target_logits, draft_logits).item() == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("name", NAMES)
def test_limits_at_extreme_logits_and_no_nan(name):
    """Never negative, 0 for equal distributions, within its bound."""
    measure, bound, inf = get_divergence(name), BOUND.get(name.split("_")[0], math.inf), math.inf
    bound = inf if "fsd" in name else bound
    rows = torch.tensor([
        [0.0, -inf, -inf, -inf], [-inf, -inf, -inf, 0.0], [1e4, 0.0, -1e4, 3.0], [-1e4, 0.0, 1e4, 3.0],
        [0.0, 0.0, 0.0, -inf], [88.0, -88.0, 88.0, -88.0],
    ])
    extreme = measure(rows[:, None].expand(6, 6, 4), rows.expand(6, 6, 4))
    assert (extreme.diagonal() < 1e-6).all()
    if bound < inf:
        assert extreme[0, 1].item() == pytest.approx(bound)
    logits = random_logits(300, 64, scale=5.0)
    assert (measure(logits, logits + 3.0) < 1e-5).all()
    for values in (extreme, measure(logits, logits + 3.0), measure(logits, random_logits(300, 64, seed=1, scale=5.0))):
        assert ((values >= 0) & (values <= bound)).all()


@pytest.mark.parametrize("name", ["", "jsd", "js_top", "js_top0", "js_top-1", "js_top1.5", "top3", "JS", None, ["js"]])
def test_unknown_names_are_refused_with_what_is_accepted(name):
    with pytest.raises(ValueError, match="kl, reverse_kl, js, tv, js_fsd_code"):
        get_divergence(name)


@pytest.mark.parametrize("name", ["kl", "js_top8"])
def test_tokens_of_a_draft_are_read_at_each_call_and_not_kept(name):
    """A head may name other tokens after a change in place, and its tensors go with it."""
    torch.manual_seed(0)
    tokens, target, draft = torch.tensor([1, 4, 5, 9]), torch.randn(3, 11), torch.randn(3, 4)
    divergence, wide = get_divergence(name, tokens), get_divergence(name)
    for named in ([1, 4, 5, 9], [0, 2, 3, 10]):
        tokens.copy_(torch.tensor(named))
        expected = wide(target, torch.full((3, 11), -math.inf).index_copy(1, tokens, draft))
        torch.testing.assert_close(divergence(target, draft), expected)
    kept = weakref.ref(tokens)
    del tokens, divergence
    assert kept() is None
