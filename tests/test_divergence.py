import math

import pytest
import torch
from reference_acceptance import divergence as reference

from eagle_fsd.acceptance.divergence import DIVERGENCES, coarsen, get_divergence

NAMES = [*DIVERGENCES, *(f"{name}_top{k}" for name in DIVERGENCES for k in (1, 3, 11, 40))]


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name):
    target_logits, draft_logits = random_logits(20, 11), random_logits(20, 11, seed=1)
    computed = get_divergence(name)(target_logits, draft_logits)
    expected = [
        reference(name, target, draft)
        for target, draft in zip(target_logits.tolist(), draft_logits.tolist(), strict=True)
    ]
    torch.testing.assert_close(computed, torch.tensor(expected), rtol=1e-4, atol=1e-6)


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
        computed = get_divergence(name)(target_logits, draft_logits).item()
        assert computed == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("name", NAMES)
def test_zero_for_equal_distributions_and_never_negative(name):
    measure = get_divergence(name)
    logits = random_logits(500, 64, scale=5.0)
    shifted = measure(logits, logits + 3.0)
    assert (shifted >= 0).all() and (shifted < 1e-5).all()
    assert (measure(logits, random_logits(500, 64, seed=1, scale=5.0)) >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_extreme_logits_give_limits_and_no_nan(name):
    inf = math.inf
    rows = torch.tensor(
        [
            [0.0, -inf, -inf, -inf],
            [-inf, -inf, -inf, 0.0],
            [1e4, 0.0, -1e4, 3.0],
            [-1e4, 0.0, 1e4, 3.0],
            [0.0, 0.0, 0.0, -inf],
            [88.0, -88.0, 88.0, -88.0],
        ]
    )
    values = get_divergence(name)(rows[:, None].expand(6, 6, 4), rows.expand(6, 6, 4))
    assert not values.isnan().any() and (values >= 0).all()
    assert (values.diagonal() < 1e-6).all()
    if name.startswith("js") and "fsd" not in name:
        assert (values <= math.log(2)).all()
        assert values[0, 1].item() == pytest.approx(math.log(2))
    if name.startswith("tv"):
        assert (values <= 1).all() and values[2, 3].item() == pytest.approx(1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_top_k_form_never_exceeds_the_full_form(name):
    """Merging tokens into a bucket cannot raise an f-divergence."""
    target_logits, draft_logits = random_logits(300, 40), random_logits(300, 40, seed=1)
    full = get_divergence(name)(target_logits, draft_logits)
    previous = torch.zeros_like(full)
    for k in (1, 4, 16, 39, 40):
        coarse = get_divergence(f"{name}_top{k}")(target_logits, draft_logits)
        assert (coarse <= full + 1e-5).all() and (coarse >= previous - 1e-5).all()
        previous = coarse
    torch.testing.assert_close(previous, full, rtol=1e-4, atol=1e-6)


def test_coarsen_keeps_the_mass():
    logits, kept = random_logits(7, 20), torch.arange(5).expand(7, 5)
    probs = coarsen(logits, kept).softmax(-1)
    torch.testing.assert_close(probs[:, :5], logits.softmax(-1)[:, :5])
    torch.testing.assert_close(probs[:, 5], logits.softmax(-1)[:, 5:].sum(-1))


@pytest.mark.parametrize("name", NAMES)
def test_leading_shape_and_half_precision(name):
    target_logits, draft_logits = random_logits(2, 3, 11), random_logits(2, 3, 11, seed=1)
    measure = get_divergence(name)
    values = measure(target_logits, draft_logits)
    assert values.shape == (2, 3) and values.dtype == torch.float32
    torch.testing.assert_close(values[1, 2], measure(target_logits[1, 2], draft_logits[1, 2]))
    assert measure(target_logits.bfloat16(), draft_logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["", "jsd", "js_top", "js_top0", "js_top-1", "js_top1.5", "top3", "JS", None]
)
def test_unknown_names_are_refused_with_what_is_accepted(name):
    with pytest.raises(ValueError, match="kl, reverse_kl, js, tv, js_fsd_code"):
        get_divergence(name)
