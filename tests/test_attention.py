"""Attention implementations against a slow one, by hand, and against the stock ones in every family.

B batch, H query heads, K key heads, L prefix, N nodes, D head size, W head size of the values.
"""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_lossless import assert_nodes_are_verified_like_their_paths
from tiny import FAMILIES, PROMPT, VOCAB, save_pair, tiny_pair, tiny_target
from transformers import CONFIG_MAPPING

import eagle_fsd
from eagle_fsd.drafting import machine, measuring
from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.models import flash as flash_module
from eagle_fsd.models.attention import grouped_attention, split_attention, stock_attention
from eagle_fsd.models.flash import find_flash
from eagle_fsd.models.implementations import GROUPED, IMPLEMENTATIONS, SPLIT
from eagle_fsd.models.masks import tree_masks
from eagle_fsd.models.target import TargetModel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
#       0
#     / | \
#    1  2  3
#   / \    |
#  4   5   6
#      |
#      7
PARENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 3, 5]])
ANCESTORS = ancestors_of(PARENTS, 3)
DEPTHS = ANCESTORS.sum(-1) - 1
NODES = 8


def seen_by(prefix, rows, window=None, chunk=None):
    """[B, N, L + N] bool and the positions [B, N]: what each node sees, from first principles.

    rows: (first, end) of what a row sees of the prefix.
    """
    grid = torch.zeros(len(rows), NODES, prefix + NODES, dtype=torch.bool)
    positions = torch.stack([DEPTHS[0] + end for _, end in rows])
    for row, (first, end) in enumerate(rows):
        for node in range(NODES):
            at = positions[row, node].item()
            places = [j if first <= j < end else None for j in range(prefix)]
            places += [positions[row, m].item() if ANCESTORS[0, node, m] else None for m in range(NODES)]
            for key, place in enumerate(places):
                seen = place is not None
                seen = seen and (window is None or at - place < window)
                grid[row, node, key] = seen and (chunk is None or at // chunk == place // chunk)
    return grid, positions


def slow_attention(query, key, value, seen, scale, softcap=None, sinks=None):
    """[B, N, H, W] in float64, score by score."""
    query, key, value = query.double(), key.double(), value.double()
    batch, heads, nodes, _ = query.shape
    out = query.new_zeros(batch, nodes, heads, value.shape[-1])
    for row in range(batch):
        for head in range(heads):
            shared = head * key.shape[1] // heads
            for node in range(nodes):
                keys = seen[row, node].nonzero()[:, 0]
                scores = key[row, shared, keys] @ query[row, head, node] * scale
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: len(keys)]
                out[row, node, head] = weights @ value[row, shared, keys]
    return out


def states(keys, heads=(4, 2), size=8, width=None, batch=1, nodes=NODES, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (heads[0], nodes, size), (heads[1], keys, size), (heads[1], keys, width or size)
    query, key, value = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    return query.transpose(1, 2).contiguous().transpose(1, 2), key, value  # in memory as models have it


def call(function, query, key, value, mask, **options):
    module = SimpleNamespace(layer_idx=0, num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return function(module, query, key, value, mask, **options)[0]


def assert_close(found, expected):
    """Relative to the largest value there is."""
    difference = (found.double() - expected).abs().max() / expected.abs().max()
    assert found.shape == expected.shape and difference < TOLERANCE[found.dtype]


KINDS = {"window": "sliding_attention", "chunk": "chunked_attention"}
WAYS = [{}, {"window": 3}, {"window": 8}, {"window": 16}, {"window": 60}, {"chunk": 4}, {"chunk": 16}, {"chunk": 64}]
ROWS = {
    "one": lambda prefix: [(0, prefix)],
    "two": lambda prefix: [(0, prefix)] * 2,
    "ragged": lambda prefix: [(0, prefix), (0, (prefix + 1) // 2), (0, min(1, prefix))],
    "left-padded": lambda prefix: [(0, prefix), (prefix // 3, prefix)],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 15, 40])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_implementations_see_what_they_should(way, rows, prefix, dtype):
    rows = ROWS[rows](prefix)
    seen, positions = seen_by(prefix, rows, **way)
    query, key, value = states(prefix + NODES, batch=len(rows), dtype=dtype)
    expected = slow_attention(query, key, value, seen, 0.4)
    kind = KINDS[next(iter(way))] if way else "full_attention"
    whole = all(first == 0 and end == prefix for first, end in rows)
    visible = {} if whole else {"prefix_visible": torch.tensor(
        [[first <= j < end for j in range(prefix)] for first, end in rows]).view(len(rows), prefix)}
    if not whole and all(first == 0 for first, _ in rows):
        visible = {"lengths": torch.tensor([end for _, end in rows])}
    functions = {"sdpa": stock_attention, GROUPED: grouped_attention, SPLIT: split_attention}
    for name, function in functions.items():
        ancestors = ANCESTORS.expand(len(rows), -1, -1)
        masks, kept = tree_masks(name, ancestors, positions, prefix, dtype, ["full_attention", kind], **way, **visible)
        if name == SPLIT and whole and (not way or prefix + NODES <= max(way.values())):
            assert masks[kind].shape[-1] == NODES and kept is None
        if kept is not None:  # of the second layer, for a module that is number 0
            kept = kept._replace(starts=kept.starts[1:], partial=kept.partial[1:])
        assert_close(call(function, query, key, value, masks[kind], scaling=0.4, tree_prefix=kept), expected)


# Five keys, then a tree 0 - 1, 0 - 2 - 3, behind a window of 4. Key 0 and 1 are out of everybody's reach; 2 to 4 are
# seen by the root, fewer by those below it.
def test_masks_of_a_window_drawn():
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]).bool()
    positions = torch.tensor([[5, 6, 6, 7]])
    layers = ["full_attention", "sliding_attention"]
    masks, kept = tree_masks(SPLIT, ancestors, positions, 5, torch.float32, layers, window=4)
    assert (kept.starts, kept.partial, kept.bias, kept.lengths) == ((0, 2), (0, 3), None, None)
    assert (masks["full_attention"][0, 0] == 0).equal(ancestors[0])
    drawn = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1, 1]])
    assert (masks["sliding_attention"][0, 0] == 0).equal(drawn.bool())
    whole, nothing = tree_masks("sdpa", ancestors, positions, 5, torch.float32, layers, window=4)
    assert nothing is None and (whole["sliding_attention"][0, 0, :, 2:] == 0).equal(drawn.bool())
    assert not (whole["sliding_attention"][..., :2] == 0).any()


def test_masks_of_ragged_rows_stay_small():
    ancestors, lengths = ANCESTORS.expand(2, -1, -1), torch.tensor([6, 2])
    masks, kept = tree_masks(
        SPLIT, ancestors, DEPTHS + lengths[:, None], 6, torch.float32, ["full_attention"], lengths=lengths
    )
    assert masks["full_attention"].shape == (2, 1, NODES, NODES)
    assert (kept.bias[:, 0, 0] == 0).tolist() == [[True] * 6, [True] * 2 + [False] * 4]
    assert kept.lengths.tolist() == [6, 2] and kept.lengths.dtype == torch.int32


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"width": 6}, {"softcap": 3.0}, {"sinks": True}, {"softcap": 2.0, "sinks": 1}],
                         ids=str)
def test_heads_sizes_softcaps_and_sinks(options, heads, dtype):
    query, key, value = states(20 + NODES, heads, width=options.get("width"), dtype=dtype)
    sinks = torch.randn(heads[0]).to(dtype) if "sinks" in options else None
    seen, positions = seen_by(20, [(0, 20)])
    expected = slow_attention(query, key, value, seen, 0.5, options.get("softcap"), sinks)
    for name, function in ((GROUPED, grouped_attention), (GROUPED, split_attention), (SPLIT, split_attention)):
        masks, _ = tree_masks(name, ANCESTORS, positions, 20, dtype, ["full_attention"])
        found = call(function, query, key, value, masks["full_attention"], scaling=0.5,
                     softcap=options.get("softcap"), s_aux=sinks)
        assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("nodes", [1, NODES])
def test_without_a_mask_attention_is_causal(nodes, options):
    query, key, value = states(9 if nodes == 1 else nodes, nodes=nodes)
    sinks = torch.randn(4) if "sinks" in options else None
    seen = torch.ones(1, nodes, key.shape[2]).tril(key.shape[2] - nodes).bool()
    expected = slow_attention(query, key, value, seen, 8**-0.5, options.get("softcap"), sinks)
    for function in (grouped_attention, split_attention):
        found = call(function, query, key, value, None, softcap=options.get("softcap"), s_aux=sinks)
        assert_close(found, expected)


@pytest.mark.parametrize("mask", ["additive", "bool"])
def test_grouped_is_stock_sdpa_bit_by_bit(mask):
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = states(300 + NODES, (6, 2), 16, dtype=dtype)
        seen, positions = seen_by(300, [(0, 300)])
        masks, _ = tree_masks(GROUPED, ANCESTORS, positions, 300, dtype, ["full_attention"])
        given = masks["full_attention"] if mask == "additive" else seen[:, None]
        ours = call(grouped_attention, query, key, value, given, scaling=0.3)
        assert torch.equal(ours, call(stock_attention, query, key, value, given, scaling=0.3))


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ragged_rows_are_stock_sdpa_up_to_rounding(dtype, nodes, heads):
    """Of float32 bit by bit; heads that stand side by side as positions see what each saw."""
    torch.manual_seed(nodes)
    query = torch.randn(3, heads[0], nodes, 16).to(dtype)
    key, value = (torch.randn(3, heads[1], 40, 16).to(dtype) for _ in range(2))
    seen = torch.rand(3, 1, nodes, 40) < 0.6
    seen[..., 0] = True
    each_head = seen.expand(-1, heads[0], -1, -1).contiguous()
    for mask in (seen, torch.where(seen, 0.0, -torch.inf).to(dtype), each_head, *([None] if nodes == 1 else [])):
        ours, stock = (call(function, query, key, value, mask, scaling=0.3)
                       for function in (grouped_attention, stock_attention))
        if dtype == torch.float32:
            assert torch.equal(ours, stock)
        else:
            assert_close(ours, stock)
            every = seen[:, 0] if mask is not None else torch.ones(3, nodes, 40).bool()
            assert_close(ours, slow_attention(query, key, value, every, 0.3))


# Families ----------------------------------------------------------------------------------------------------

OWN_CLASS = {"falcon", "gptj"}  # choose their attention in their own way
DROPS_KEYWORDS = {"stablelm", "nemotron"}  # their layers do not pass on `tree_prefix`
NOT_SDPA = {"gemma2", "gpt_oss"}


def known_families():
    return [name for name in FAMILIES if FAMILIES[name].get("model_type", name) in CONFIG_MAPPING]


def reference_of(family):
    return tiny_target(family, attention="eager" if family in NOT_SDPA | {"gptj"} else "sdpa")


def tree_features(target, prefix, rows):
    """[2, N, D]: of the drawn tree behind `prefix` tokens, of which rows see some; padding tokens come first."""
    batch, implementation = len(rows), target.config._attn_implementation
    tokens = torch.randint(VOCAB, (batch, prefix + NODES), generator=torch.Generator().manual_seed(3))
    visible = torch.tensor([[first <= j < end for j in range(prefix)] for first, end in rows]).view(batch, prefix)
    padding = torch.tensor([first for first, _ in rows])
    cache = target.new_cache(prefix + NODES, batch)
    if prefix and padding.any():
        places = (torch.arange(prefix) - padding[:, None]).clamp_min(0)
        target.decoder(input_ids=tokens[:, :prefix], attention_mask=visible.long(), position_ids=places,
                       past_key_values=cache, use_cache=True)
    elif prefix:
        target.prefill(tokens[:, :prefix], cache)
    positions = torch.stack([DEPTHS[0] + end for _, end in rows])
    if target.counts_positions:
        cache.skew = positions[0] - torch.arange(prefix, prefix + NODES)
    lengths = None if padding.any() else torch.tensor([end for _, end in rows])
    layers = target.masked_layers
    masks, kept = tree_masks(
        implementation, ANCESTORS.expand(batch, -1, -1), positions, prefix, target.dtype, layers.kinds,
        window=layers.window, chunk=layers.chunk, lengths=lengths, prefix_visible=None if visible.all() else visible,
    )
    return target.features(
        tokens[:, prefix:], position_ids=positions - padding[:, None], past_key_values=cache, use_cache=True,
        attention_mask=masks if layers.by_type else masks[layers.kinds[0]],
        **({} if kept is None else {"tree_prefix": kept}),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", known_families())
@torch.no_grad()
def test_every_family_agrees_with_its_reference(family, dtype):
    """Rows that see all of the prefix, its beginning or, left-padded, its end; windows and chunks are of 8."""
    target = TargetModel(reference_of(family).to(dtype))
    reference = target.config._attn_implementation
    for name in (GROUPED, SPLIT):
        if family in OWN_CLASS | (DROPS_KEYWORDS if name == SPLIT else set()):
            with pytest.raises(ValueError, match=f"stays with attention {reference}, {name} fails: "):
                target.use_attention(name)
            assert target.config._attn_implementation == reference
            continue
        for prefix in (0, 1, 20):
            for row in {(0, prefix), (0, max(1, prefix // 2)), (prefix // 3, prefix)} if prefix else [(0, 0)]:
                expected = tree_features(target, prefix, [(0, prefix), row])
                target.use_attention(name)
                found = tree_features(target, prefix, [(0, prefix), row])
                target.model.set_attn_implementation(reference)
                assert ((found - expected).norm() / expected.norm()).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("family", [name for name in known_families() if name not in OWN_CLASS | DROPS_KEYWORDS])
def test_split_verifies_nodes_like_their_paths(family):
    assert_nodes_are_verified_like_their_paths(tiny_target(family, attention=SPLIT))


@pytest.mark.parametrize("family", sorted(DROPS_KEYWORDS))
def test_a_model_that_arrives_with_split_is_checked_as_well(family):
    with pytest.raises(ValueError, match="stays with attention eager, split fails: the features of a tree differ"):
        TargetModel(tiny_target(family, attention=SPLIT))


@pytest.mark.parametrize("name", [GROUPED, SPLIT])
def test_tokens_are_those_of_stock_attention(name):
    options = {"max_new_tokens": 24, "tree": eagle_fsd.TreeConfig(12, 4, 3)}
    for family in ("llama", "mistral-window"):
        expected = eagle_fsd.generate(PROMPT, tiny_pair(family, attention="sdpa"), **options).token_ids
        assert eagle_fsd.generate(PROMPT, tiny_pair(family, attention=name), **options).token_ids == expected


@pytest.mark.parametrize("name", [GROUPED, SPLIT])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt_oss", "deepseek_v3"])
def test_rows_of_a_batch_are_those_of_stock_attention_alone(family, name):
    options = {"max_new_tokens": 16, "tree": eagle_fsd.TreeConfig(12, 4, 3), "threshold": 0.0}
    prompts = [PROMPT, PROMPT[:2], PROMPT * 2]
    stock = tiny_pair(family, attention="eager")
    found = eagle_fsd.generate(prompts, tiny_pair(family, attention=name), **options)
    for prompt, output in zip(prompts, found, strict=True):
        assert output.token_ids == eagle_fsd.generate(prompt, stock, **options).token_ids


@pytest.mark.parametrize("name", [GROUPED, SPLIT])
def test_attention_compiles_without_breaks(name):
    function = {GROUPED: grouped_attention, SPLIT: split_attention}[name]
    query, key, value = states(6 + NODES, batch=2)
    lengths = torch.tensor([6, 2])
    masks, kept = tree_masks(
        name, ANCESTORS.expand(2, -1, -1), DEPTHS + lengths[:, None], 6, torch.float32, ["full_attention"],
        lengths=lengths,
    )
    arguments = (SimpleNamespace(layer_idx=0), query, key, value, masks["full_attention"])
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments, tree_prefix=kept)[0], function(*arguments, tree_prefix=kept)[0])


# flash-attn, of which only the signatures are here ------------------------------------------------------------


class Package(ModuleType):
    """A slow and exact package with the published signatures of `names`; keeps the calls."""

    def __init__(self, name, *names):
        super().__init__(name)
        self.calls = []
        for each in names:
            setattr(self, each, getattr(self, "_" + each))

    def _attend(self, q, k, v, lengths, scale, causal, softcap):
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.dim() == 4 and q.shape[-1] % 8 == 0
        assert k.stride(-1) == v.stride(-1) == 1 and (lengths is None or lengths.dtype == torch.int32)
        self.calls.append((causal, None if lengths is None else lengths.tolist(), k.shape[1]))
        batch, nodes, heads, _ = q.shape
        keys = k.shape[1]
        seen = torch.ones(batch, nodes, keys).tril(keys - nodes if causal else keys).bool()
        if lengths is not None:
            seen &= torch.arange(keys) < lengths[:, None, None]
        groups = heads // k.shape[2]
        k, v = (each.double().repeat_interleave(groups, 2) for each in (k, v))
        scores = torch.einsum("bnhd,bkhd->bhnk", q.double(), k) * scale
        scores = (scores / softcap).tanh() * softcap if softcap else scores
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        out = torch.einsum("bhnk,bkhd->bnhd", scores.softmax(-1), v)
        return out.to(q.dtype), scores.logsumexp(-1).float()

    # Versions 2 and 3 (flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py): out, or (out, lse, ...).
    def _flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, *, cache_seqlens=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, num_splits=0, return_softmax_lse=False,
    ):
        assert k is None and v is None and window_size == (-1, -1)
        out, lse = self._attend(q, k_cache, v_cache, cache_seqlens, softmax_scale, causal, softcap)
        return (out, lse, None, None) if return_softmax_lse else out

    # Version 4 (flash_attn/cute/interface.py of 4.0.0b36): always (out, lse).
    def _flash_attn_func(
        self, q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, return_lse=False,
    ):
        out, lse = self._attend(q, k, v, None, softmax_scale, causal, softcap)
        return out, lse if return_lse else None

    def _flash_attn_varlen_func(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
        seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
        num_splits=1, return_lse=False,
    ):
        out, lse = self._attend(q, k, v, seqused_k, softmax_scale, causal, softcap)
        return out, lse if return_lse else None


PACKAGES = {
    "flash_attn": (8, ["flash_attn_with_kvcache"]),
    "flash_attn_interface": (9, ["flash_attn_with_kvcache"]),
    "flash_attn.cute": (10, ["flash_attn_func", "flash_attn_varlen_func"]),
}


@pytest.fixture
def install(monkeypatch):
    """Installs fake packages on a device of a given compute capability, and nothing else."""

    def install(capability, *names, **broken):
        monkeypatch.setattr(flash_module, "_capability", lambda device: capability)
        monkeypatch.setattr(flash_module, "_flash", {})
        for name in PACKAGES:
            monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
        packages = {name: Package(name, *broken.get("functions", PACKAGES[name][1])) for name in names}
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name, package)
            parent, _, child = name.rpartition(".")
            if parent and not sys.modules[parent]:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
                monkeypatch.setattr(sys.modules[parent], child, package, raising=False)
        return packages

    return install


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("rows", [[(0, 20)], [(0, 20), (0, 7)]], ids=str)
@pytest.mark.parametrize("name", PACKAGES)
def test_flash_takes_the_prefix(name, rows, options, install):
    package = install(PACKAGES[name][0], name)[name]
    query, key, value = states(20 + NODES, batch=len(rows), dtype=torch.bfloat16)
    sinks = torch.randn(4).bfloat16() if "sinks" in options else None
    seen, positions = seen_by(20, rows)
    lengths = torch.tensor([end for _, end in rows]) if len(rows) > 1 else None
    masks, kept = tree_masks(SPLIT, ANCESTORS.expand(len(rows), -1, -1), positions, 20, torch.bfloat16,
                             ["full_attention"], lengths=lengths)
    found = call(split_attention, query, key, value, masks["full_attention"], scaling=0.5, tree_prefix=kept,
                 softcap=options.get("softcap"), s_aux=sinks)
    assert_close(found, slow_attention(query, key, value, seen, 0.5, options.get("softcap"), sinks))
    assert package.calls == [(False, lengths if lengths is None else lengths.tolist(), 20)]


def test_flash_takes_what_all_nodes_see_of_a_window(install):
    package = install(8, "flash_attn")["flash_attn"]
    query, key, value = states(40 + NODES, dtype=torch.bfloat16)
    seen, positions = seen_by(40, [(0, 40)], window=16)
    masks, kept = tree_masks(
        SPLIT, ANCESTORS, positions, 40, torch.bfloat16, ["sliding_attention"], window=16
    )
    found = call(split_attention, query, key, value, masks["sliding_attention"], scaling=0.5, tree_prefix=kept)
    assert_close(found, slow_attention(query, key, value, seen, 0.5))
    assert package.calls == [(False, None, 16 - NODES)]


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("nodes", [1, NODES])
@pytest.mark.parametrize("name", PACKAGES)
def test_flash_takes_the_prefill(name, nodes, options, install):
    package = install(PACKAGES[name][0], name)[name]
    keys = 5 if nodes == 1 else nodes
    query, key, value = states(keys, nodes=nodes, dtype=torch.bfloat16)
    sinks = torch.randn(4).bfloat16() if "sinks" in options else None
    seen = torch.ones(1, nodes, keys).tril(keys - nodes).bool()
    found = call(split_attention, query, key, value, None, softcap=options.get("softcap"), s_aux=sinks)
    assert_close(found, slow_attention(query, key, value, seen, 8**-0.5, options.get("softcap"), sinks))
    assert package.calls == [(nodes > 1, None, keys)]


def test_padded_rows_and_odd_sizes_do_without_flash(install):
    package = install(9, "flash_attn_interface")["flash_attn_interface"]
    seen, positions = seen_by(20, [(0, 20), (6, 20)])
    visible = torch.arange(20) >= torch.tensor([[0], [6]])
    masks, kept = tree_masks(SPLIT, ANCESTORS.expand(2, -1, -1), positions, 20, torch.bfloat16, ["full_attention"],
                             prefix_visible=visible)
    query, key, value = states(20 + NODES, batch=2, dtype=torch.bfloat16)
    found = call(split_attention, query, key, value, masks["full_attention"], scaling=0.5, tree_prefix=kept)
    assert_close(found, slow_attention(query, key, value, seen, 0.5))
    for sizes in ({"size": 12}, {"width": 16}, {"size": 264}, {"dtype": torch.float32}):
        query, key, value = states(20 + NODES, **{"dtype": torch.bfloat16} | sizes)
        call(split_attention, query, key, value, masks["full_attention"][:1], scaling=0.5)
    assert package.calls == []


@pytest.mark.parametrize(
    ("capability", "installed", "used"),
    [
        (0, list(PACKAGES), None),  # no CUDA
        (7, list(PACKAGES), None),
        (8, list(PACKAGES), "flash_attn"),
        (8, ["flash_attn_interface"], None),
        (9, list(PACKAGES), "flash_attn_interface"),
        (9, ["flash_attn.cute"], None),
        (9, ["flash_attn", "flash_attn.cute"], "flash_attn"),
        (10, list(PACKAGES), "flash_attn.cute"),
        (10, ["flash_attn_interface", "flash_attn"], "flash_attn"),
        (10, [], None),
    ],
)
def test_the_package_is_chosen_by_the_device(capability, installed, used, install):
    install(capability, *installed)
    found = find_flash(torch.device("cpu"))
    assert (found and found[0]) == used


def test_a_broken_package_is_passed_over_and_said_so(install, monkeypatch, caplog):
    install(9, "flash_attn_interface", "flash_attn")
    load = importlib.import_module

    def broken(name):
        if name == "flash_attn_interface":
            raise OSError("undefined symbol")
        return load(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    with caplog.at_level(logging.WARNING, "eagle_fsd.models.flash"):
        assert find_flash(torch.device("cpu"))[0] == "flash_attn"
    assert "flash_attn_interface is not used: undefined symbol" in caplog.text


def test_a_package_without_what_is_called_is_passed_over(install, caplog):
    install(8, "flash_attn", functions=["flash_attn_func"])
    with caplog.at_level(logging.WARNING, "eagle_fsd.models.flash"):
        assert find_flash(torch.device("cpu")) is None
    assert "flash_attn is not used: it has no flash_attn_with_kvcache" in caplog.text


# Choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    save_pair(tmp_path)
    return tmp_path


def load(folder, **options):
    return eagle_fsd.load(folder / "target", folder / "head", device="cpu", **options)


def chosen(model):
    return model.target.model.config._attn_implementation


@pytest.mark.parametrize("name", [None, *IMPLEMENTATIONS])
def test_load_takes_attention_by_name(name, folder):
    model = load(folder, attn_implementation=name)
    assert chosen(model) == (name or GROUPED)  # keys are shared by two heads
    expected = model.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    found = eagle_fsd.generate(PROMPT, model, max_new_tokens=8, threshold=0.0)
    assert found.token_ids == expected[0, len(PROMPT) :].tolist()


def test_auto_measures_once(folder, monkeypatch):
    model = load(folder, attn_implementation="auto")
    assert chosen(model) in ("sdpa", GROUPED, SPLIT)
    monkeypatch.setattr(machine, "measure_attention", lambda target: pytest.fail("measured again"))
    assert chosen(load(folder, attn_implementation="auto")) == chosen(model)


def test_auto_takes_the_fastest_that_agrees(folder, monkeypatch):
    monkeypatch.setattr(measuring, "fastest", lambda parts, target: {"sdpa": 2.0, GROUPED: 3.0, SPLIT: 1.0})
    assert chosen(load(folder, attn_implementation="auto", tree=None)) == SPLIT


def test_auto_leaves_out_what_does_not_agree(monkeypatch):
    target = TargetModel(tiny_target("stablelm", attention="sdpa"))
    asked = []
    monkeypatch.setattr(measuring, "fastest", lambda parts, target: asked.extend(parts) or dict.fromkeys(parts, 1.0))
    measuring.measure_attention(target)
    assert asked == ["sdpa", GROUPED] and target.config._attn_implementation == "sdpa"


def test_what_a_family_cannot_serve_is_said(folder, caplog):
    save_pair(folder, tiny_pair("stablelm", tokenizer=load(folder).tokenizer))
    with caplog.at_level(logging.WARNING, "eagle_fsd"):
        assert chosen(load(folder, attn_implementation=SPLIT)) == "sdpa"
    assert "StableLmForCausalLM stays with attention sdpa, split fails" in caplog.text


@pytest.mark.parametrize("wrong", ["flash_attention_2", "flex_attention", "", 3, ["split"]], ids=str)
def test_other_names_are_refused(wrong, folder):
    with pytest.raises(ValueError, match="must be None, auto or one of sdpa, eager, grouped, split, got"):
        load(folder, attn_implementation=wrong)


# CUDA --------------------------------------------------------------------------------------------------------

@pytest.mark.cuda
@pytest.mark.parametrize("rows", [[(0, 300)], [(0, 300), (0, 77)], [(0, 300), (50, 300)]], ids=str)
@pytest.mark.parametrize("flash", [False, True])
def test_cuda_kernels_agree(rows, flash, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    if flash and find_flash(device) is None:
        pytest.skip("no flash-attn package is installed")
    if not flash:
        monkeypatch.setattr(flash_module, "find_flash", lambda device: None)
    seen, positions = seen_by(300, rows)
    visible = torch.tensor([[first <= j < end for j in range(300)] for first, end in rows], device=device)
    lengths = torch.tensor([end for _, end in rows], device=device) if all(first == 0 for first, _ in rows) else None
    masks, kept = tree_masks(
        SPLIT, ANCESTORS.expand(len(rows), -1, -1).to(device), positions.to(device), 300, torch.bfloat16,
        ["full_attention"], prefix_visible=None if visible.all() else visible,
        lengths=None if visible.all() else lengths,
    )
    query, key, value = states(300 + NODES, (8, 2), 64, batch=len(rows), dtype=torch.bfloat16)
    found = call(split_attention, query.to(device), key.to(device), value.to(device), masks["full_attention"],
                 scaling=0.2, tree_prefix=kept)
    assert_close(found.cpu(), slow_attention(query, key, value, seen, 0.2))


@pytest.mark.cuda
@pytest.mark.parametrize("nodes", [1, 300])
def test_cuda_prefill_agrees(nodes):
    query, key, value = states(300, (8, 2), 64, nodes=nodes, dtype=torch.bfloat16)
    seen = torch.ones(1, nodes, 300).tril(300 - nodes).bool()
    found = call(split_attention, query.cuda(), key.cuda(), value.cuda(), None)
    assert_close(found.cpu(), slow_attention(query, key, value, seen, 1 / 8))
