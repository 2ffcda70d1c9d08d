"""Gumbel noise by seed, position and token."""

import math
from itertools import product

import pytest
import torch

from eagle_fsd.drafting.noise import gumbel_noise

EULER_GAMMA = 0.5772156649015329


def test_moments_and_distribution_function():
    noise = gumbel_noise(torch.arange(40), torch.arange(50).expand(40, 50), 500).double().flatten()
    assert noise.isfinite().all()
    count = len(noise)  # 10^6
    assert abs(noise.mean().item() - EULER_GAMMA) < 4 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.015
    # Kolmogorov-Smirnov: the largest distance of the empirical distribution function, 1.95 at p = 0.001
    uniform = (-(-noise).exp()).exp().sort().values
    steps = torch.arange(count + 1).double() / count
    distance = torch.maximum((steps[1:] - uniform).max(), (uniform - steps[:-1]).max())
    assert distance.item() * math.sqrt(count) < 1.95


def test_neighbours_are_independent():
    """A value and its neighbour, and their squares, in seed, position and token."""
    noise = gumbel_noise(torch.arange(100), torch.arange(100).expand(100, 100), 100).double()
    uniform = (-(-noise).exp()).exp() - 0.5
    for dim, lag, power in product(range(3), (1, 2, 64), (1, 2)):
        length = 100 - lag
        pair = torch.stack([uniform.narrow(dim, at, length).flatten() ** power for at in (0, lag)])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 4 / math.sqrt(pair.shape[1])


def test_seed_and_position_do_not_add_up():
    """(seed, position) = (a, b + 1) and (a + 1, b) are different keys."""
    seeds = torch.tensor([0, 1, 2, 3, 5, 1 << 40, -1, (1 << 63) - 1])
    positions = torch.tensor([0, 1, 2, 3, 1 << 20, 1 << 40]).expand(8, 6)
    rows = gumbel_noise(seeds, positions, 50).flatten(0, 1)
    assert len(rows.unique(dim=0)) == 48
    assert len(rows.flatten().unique()) > 0.99 * rows.numel()


def test_a_function_of_seed_position_and_token_alone():
    seeds, positions = torch.tensor([7, 8, 9]), torch.tensor([[5, 6], [6, 7], [100, 0]])
    state = torch.random.get_rng_state()
    noise = gumbel_noise(seeds, positions, 37)
    assert noise.shape == (3, 2, 37) and noise.dtype == torch.float32
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(noise, gumbel_noise(seeds, positions, 37))
    for row in range(3):
        for place in range(2):
            alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1, place : place + 1], 37)
            assert torch.equal(noise[row, place], alone[0, 0])
    assert torch.equal(noise, gumbel_noise(seeds, positions, 50)[..., :37])


@pytest.mark.cuda
def test_cuda_gives_the_same_noise():
    seeds, positions = torch.arange(20), torch.arange(30).expand(20, 30)
    on_cuda = gumbel_noise(seeds.cuda(), positions.cuda(), 1000).cpu()
    torch.testing.assert_close(on_cuda, gumbel_noise(seeds, positions, 1000), rtol=1e-6, atol=1e-6)
