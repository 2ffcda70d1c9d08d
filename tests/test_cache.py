"""The tree cache against the stock cache. H key/value heads, C capacity, D head size."""

import pytest
import torch
from transformers import DynamicCache

from eagle_fsd.models.cache import TreeCache

CPU = torch.device("cpu")


def random_states(count, heads=2, size=4, batch=1):
    return torch.randn(batch, heads, count, size), torch.randn(batch, heads, count, size)


def assert_holds(cache, expected):
    """`expected`: per layer, keys and values [B, H, L, D]."""
    assert cache.length == cache.get_seq_length() == expected[0][0].shape[-2]
    for number, (keys, values) in enumerate(expected):
        heads, size, batch = keys.shape[1], keys.shape[3], keys.shape[0]
        nothing = random_states(0, heads, size, batch)
        held_keys, held_values = cache.update(*nothing, number)  # an update without rows shows what is held
        assert torch.equal(held_keys, keys) and torch.equal(held_values, values)


def test_updates_return_what_the_stock_cache_returns():
    cache, stock = TreeCache([CPU] * 3, 20), DynamicCache()
    for count in (5, 1, 7):
        for layer in range(3):
            states = random_states(count)
            for ours, theirs in zip(cache.update(*states, layer), stock.update(*states, layer), strict=True):
                assert torch.equal(ours, theirs)
        assert cache.length == cache.get_seq_length() == stock.get_seq_length()
        assert cache.get_mask_sizes(4, 0) == stock.get_mask_sizes(4, 0)


#  prefix      tree rows            commit of rows 0, 2 and 5
#  p p p p   | 0 1 2 3 4 5 6   ->   p p p p 0 2 5
@pytest.mark.parametrize("rows", [[0, 2, 5], [0, 1, 2], []], ids=str)
def test_commit_keeps_the_accepted_rows(rows):
    cache, expected = TreeCache([CPU] * 2, 16), []
    for layer in range(2):
        prefix, tree = random_states(4), random_states(7)
        cache.update(*prefix, layer)
        cache.update(*tree, layer)
        expected.append([torch.cat([p, t[:, :, rows]], 2) for p, t in zip(prefix, tree, strict=True)])
    cache.commit([4], [rows])
    assert_holds(cache, expected)
    more = random_states(2)
    keys, values = cache.update(*more, 1)
    assert torch.equal(keys, torch.cat([expected[1][0], more[0]], 2))
    assert torch.equal(values, torch.cat([expected[1][1], more[1]], 2))
    cache.truncate(3)
    assert_holds(cache, [[states[:, :, :3] for states in layer] for layer in expected])


@pytest.mark.parametrize("shapes", [[(2, 4), (1, 8), (2, 4), (1, 8)], [(3, 2), (1, 2), (2, 2)]], ids=str)
def test_layers_of_different_shapes(shapes):
    cache, expected = TreeCache([CPU] * len(shapes), 12, batch=2), []
    for layer, (heads, size) in enumerate(shapes):
        prefix, tree = random_states(3, heads, size, batch=2), random_states(5, heads, size, batch=2)
        cache.update(*prefix, layer)
        cache.update(*tree, layer)
        expected.append([torch.cat([p, t[:, :, [1, 4]]], 2) for p, t in zip(prefix, tree, strict=True)])
    cache.commit([3, 3], [[1, 4]] * 2)
    assert_holds(cache, expected)


def test_storage_is_allocated_once_and_never_exceeded():
    cache = TreeCache([CPU] * 2, 6)
    first = cache.update(*random_states(4), 0)[0]
    cache.update(*random_states(4), 1)
    second = cache.update(*random_states(2), 0)[0]
    assert second.data_ptr() == first.data_ptr()
    assert first.untyped_storage().data_ptr() == cache.layers[1].keys.untyped_storage().data_ptr()
    with pytest.raises(AssertionError, match="capacity of 6"):
        cache.update(*random_states(1), 0)
    assert cache.layers[0].get_max_length() == 6


def test_keys_and_values_of_different_shapes():
    """As in latent attention; the layer between them has its storage as always."""
    cache, expected = TreeCache([CPU] * 3, 9), []
    for layer, size in enumerate((3, 4, 3)):
        prefix, tree = [[random_states(n)[0], random_states(n, size=size)[0]] for n in (3, 4)]
        cache.update(*prefix, layer)
        cache.update(*tree, layer)
        expected.append([torch.cat([p, t[:, :, [1, 3]]], 2) for p, t in zip(prefix, tree, strict=True)])
    cache.commit([3], [[1, 3]])
    for (keys, values), layer in zip(expected, cache.layers, strict=True):
        assert torch.equal(layer.keys[:, :, : cache.length], keys)
        assert torch.equal(layer.values[:, :, : cache.length], values)


def test_rows_come_from_other_caches():
    """`add_row` is the inverse of `keep_rows`: rows of any length, into places that others have left."""
    source, expected = TreeCache([CPU] * 2, 9, batch=3), []
    for layer in range(2):
        states = random_states(9, batch=3)
        source.update(*states, layer)
        expected.append(states)
    source.commit([5, 9, 0], [[], [], []])
    cache = TreeCache([CPU] * 2, 12, batch=3)
    cache.keep_rows([])
    assert cache.lengths == [] and cache.length == 0
    for row in (0, 1, 2):
        cache.add_row(source, row)
    assert cache.lengths == [5, 9, 0]
    cache.keep_rows([1])
    cache.add_row(source.resized(5, 1, [0]), 0)
    assert cache.lengths == [9, 5]
    grown = cache.resized(20, 4)
    grown.add_row(source, 1)
    grown.copy_row(1, source, 0, 3)
    assert (grown.capacity, grown.batch, grown.lengths) == (20, 4, [9, 3, 9])
    for layer, states in enumerate(expected):
        for held, known in ((grown.layers[layer].keys, states[0]), (grown.layers[layer].values, states[1])):
            for row, (other, length) in enumerate([(1, 9), (0, 3), (1, 9)]):
                assert torch.equal(held[row, :, :length], known[other, :, :length])
            assert held.isfinite().all() and held[:, :, 9:].eq(0).all()  # stale places hold no NaN
    grown.erase_row(0)
    assert all(held[0].eq(0).all() and held[2].ne(0).any() for held, _ in (
        (layer.keys, layer.values) for layer in grown.layers))
    with pytest.raises(AssertionError, match="room for 3 sequences only"):
        for _ in range(3):
            cache.add_row(source, 0)
    with pytest.raises(AssertionError, match="exceed the capacity of 12"):
        cache.copy_row(0, grown, 2, 13)
