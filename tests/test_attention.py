"""Attention implementations against a slow one, by hand, and against the stock ones in every family.

B batch, H query heads, K key heads, L prefix, N nodes, D head size, W head size of the values.
"""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import FAMILIES, PROMPT, save_pair, tiny_pair, tiny_target
from transformers import CONFIG_MAPPING, GPTJForCausalLM

import eagle_fsd
from eagle_fsd.captured.cycle import CapturedCycles
from eagle_fsd.drafting.tree import ancestors_of
from eagle_fsd.models import GROUPED, SPLIT
from eagle_fsd.models import attention as attention_module
from eagle_fsd.models.attention import (
    find_flash,
    flash_works,
    grouped_attention,
    split_attention,
    stock_attention,
    tree_attention,
)
from eagle_fsd.models.masks import MaskedLayers
from eagle_fsd.models.target import TargetModel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # twice the precision of bfloat16
FUNCTIONS = {"sdpa": stock_attention, GROUPED: grouped_attention, SPLIT: split_attention}
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


def layers_of(way):
    """Of a model of two layers, the second of which sees a window or chunk, if any."""
    kind = {"window": "sliding_attention", "chunk": "chunked_attention"}[next(iter(way))] if way else "full_attention"
    return MaskedLayers(["full_attention", kind], True, way.get("window"), way.get("chunk")), kind


def options_of(name, prefix, lengths, way=None, dtype=torch.float32):
    """Mask and further keywords of the drawn tree, after so many tokens of each row."""
    layers, kind = layers_of(way or {})
    start = prefix if min(lengths) == prefix else torch.tensor(lengths)
    options = layers.forward_options(name, ANCESTORS.expand(len(lengths), -1, -1), start, prefix + NODES, dtype)
    return options.pop("attention_mask")[kind], options


def seen_by(prefix, lengths, window=None, chunk=None):
    """[B, N, L + N] bool: what each node sees, from first principles; row b has lengths[b] keys, then the tree's."""
    grid = torch.zeros(len(lengths), NODES, prefix + NODES, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for node in range(NODES):
            at = length + DEPTHS[0, node].item()
            places = list(range(length))
            places += [length + DEPTHS[0, m].item() if ANCESTORS[0, node, m] else None for m in range(NODES)]
            for key, place in enumerate(places):
                seen = place is not None and (window is None or at - place < window)
                grid[row, node, key] = seen and (chunk is None or at // chunk == place // chunk)
    return grid


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


class Package(ModuleType):
    """A slow and exact flash-attn (flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py); keeps calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, *, cache_seqlens=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, num_splits=0, return_softmax_lse=False,
    ):
        assert return_softmax_lse and q.dtype == k_cache.dtype == v_cache.dtype == torch.bfloat16
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1 and not causal
        assert cache_seqlens is None or cache_seqlens.dtype == torch.int32
        (batch, nodes, heads, _), keys = q.shape, k_cache.shape[1]
        lengths = torch.full((batch,), keys) if cache_seqlens is None else cache_seqlens
        self.calls.append((lengths.tolist(), keys))
        seen = torch.arange(keys).expand(batch, nodes, keys) < lengths[:, None, None]
        k, v = (each.double().repeat_interleave(heads // each.shape[2], 2) for each in (k_cache, v_cache))
        scores = torch.einsum("bnhd,bkhd->bhnk", q.double(), k) * softmax_scale
        scores = (scores / softcap).tanh() * softcap if softcap else scores
        scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
        out = torch.einsum("bhnk,bkhd->bnhd", scores.softmax(-1), v)
        return out.to(q.dtype), scores.logsumexp(-1).float(), None, None


@pytest.fixture
def install(monkeypatch):
    """Installs such packages on a device of a given compute capability, and no others."""

    def install(capability, *names):
        monkeypatch.setattr(attention_module, "_capability", lambda device: capability)
        find_flash.cache_clear()
        packages = {name: Package(name) for name in names}
        for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, packages.get(name))  # None: an import of it fails
        return packages

    yield install
    find_flash.cache_clear()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("way", [{}, {"window": 8}, {"window": 60}, {"chunk": 16}], ids=str)
def test_all_implementations_see_what_they_should(way, dtype, install):
    install(8, "flash_attn")
    for lengths in ([0], [1], [15, 15], [40, 20, 1]):
        prefix = max(lengths)
        query, key, value = states(prefix + NODES, batch=len(lengths), dtype=dtype)
        expected = slow_attention(query, key, value, seen_by(prefix, lengths, **way), 0.4)
        for name, function in FUNCTIONS.items():
            if name == SPLIT and dtype == torch.float32:
                continue  # which flash-attn does not serve
            mask, options = options_of(name, prefix, lengths, way, dtype)
            small = name == SPLIT and (not way or prefix + NODES <= max(way.values()))
            assert mask.shape[-1] == NODES + (0 if small else prefix)
            assert_close(call(function, query, key, value, mask, scaling=0.4, **options), expected)


# Five keys, then a tree 0 - 1, 0 - 2 - 3, after a window of 4. Key 0 and 1 are out of everybody's reach; 2 to 4 are
# seen by the root, fewer by those below it.
def test_masks_of_a_window_drawn():
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]).bool()
    layers, _ = layers_of({"window": 4})
    drawn = [[0, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 1, 0],
             [0, 0, 0, 0, 1, 1, 0, 1, 1]]
    for name in ("sdpa", SPLIT):
        options = layers.forward_options(name, ancestors, 5, 9, torch.float32)
        masks = options["attention_mask"]
        assert (masks["sliding_attention"][0, 0] == 0).equal(torch.tensor(drawn).bool())
        assert (masks["full_attention"][0, 0, :, -4:] == 0).equal(ancestors[0])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"width": 16}], ids=str)
def test_softcaps_sinks_and_values_of_another_size(options, heads):
    query, key, value = states(20 + NODES, heads, width=options.get("width"))
    sinks = torch.randn(heads[0]) if "sinks" in options else None
    own = {"scaling": 0.5, "softcap": options.get("softcap"), "s_aux": sinks}
    expected = slow_attention(query, key, value, seen_by(20, [20]), *own.values())
    assert_close(call(grouped_attention, query, key, value, options_of(GROUPED, 20, [20])[0], **own), expected)
    query, key, value = states(NODES, heads, width=options.get("width"))
    causal = slow_attention(query, key, value, torch.ones(1, NODES, NODES).tril().bool(), *own.values())
    assert_close(call(grouped_attention, query, key, value, None, **own), causal)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_is_stock_sdpa(dtype, nodes, heads):
    """Bit by bit; but for rounding where heads stand side by side as positions: single tokens of a batch in half
    precision."""
    torch.manual_seed(nodes)
    query = torch.randn(3, heads[0], nodes, 16).to(dtype)
    key, value = (torch.randn(3, heads[1], 300, 16).to(dtype) for _ in range(2))
    seen = torch.rand(3, 1, nodes, 300) < 0.6
    seen[..., 0] = True
    each_head = seen.expand(-1, heads[0], -1, -1).contiguous()
    for mask in (seen, torch.where(seen, 0.0, -torch.inf).to(dtype), each_head, *([None] if nodes == 1 else [])):
        ours, stock = (call(function, query, key, value, mask, scaling=0.3)
                       for function in (grouped_attention, stock_attention))
        if dtype == torch.float32 or nodes > 1:
            assert torch.equal(ours, stock)
        else:
            assert_close(ours, stock.double())


# flash-attn, of which only the signature is here -------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=str)
def test_flash_takes_the_text_before_a_tree(options, install):
    package = install(8, "flash_attn")["flash_attn"]
    own = {"scaling": 0.5, "softcap": options.get("softcap"),
           "s_aux": torch.randn(4).bfloat16() if "sinks" in options else None}
    for lengths in ([20], [20, 7]):
        query, key, value = states(20 + NODES, batch=len(lengths), dtype=torch.bfloat16)
        mask, more = options_of(SPLIT, 20, lengths, dtype=torch.bfloat16)
        found = call(split_attention, query, key, value, mask, **own, **more)
        assert_close(found, slow_attention(query, key, value, seen_by(20, lengths), *own.values()))
    assert package.calls == [([20], 20 + NODES), ([20, 7], 20 + NODES)]
    for nodes, keys in ((1, 5), (NODES, NODES)):  # a prompt, and a single token
        query, key, value = states(keys, nodes=nodes, dtype=torch.bfloat16)
        seen = torch.ones(1, nodes, keys).tril(keys - nodes).bool()
        found = call(split_attention, query, key, value, None, **own)
        assert_close(found, slow_attention(query, key, value, seen, *own.values()))
    mask, more = options_of(SPLIT, 20, [20], dtype=torch.bfloat16)
    for sizes in ({"size": 12}, {"width": 16}, {"size": 264}, {"dtype": torch.float32}):
        with pytest.raises(ValueError, match="no installed flash-attn supports"):
            call(split_attention, *states(20 + NODES, **{"dtype": torch.bfloat16} | sizes), mask, **more)


@pytest.mark.parametrize(("capability", "installed", "used"), [
    (0, ["flash_attn", "flash_attn_interface"], None),  # no CUDA
    (8, ["flash_attn", "flash_attn_interface"], "flash_attn"),
    (9, ["flash_attn", "flash_attn_interface"], "flash_attn_interface"),
    (9, ["flash_attn"], "flash_attn"),
    (10, [], None),
])
def test_the_package_is_chosen_by_the_device(capability, installed, used, install):
    packages = install(capability, *installed)
    expected = packages[used].flash_attn_with_kvcache if used else None
    assert find_flash(torch.device("cpu")) == expected


@pytest.mark.parametrize(("capability", "splits"), [(9, 1), (10, 0)])
def test_version_4_is_called_by_its_own_names(capability, splits, install):
    """On Hopper without splits of the keys, which it does not support there."""
    package = install(capability, "flash_attn.cute")["flash_attn.cute"]

    def cute(q, k, v, *, softmax_scale, softcap, num_splits, return_lse, seqused_k=None):
        assert num_splits == splits
        return package.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqused_k, softmax_scale=softmax_scale,
                                               softcap=softcap, return_softmax_lse=return_lse)

    package.flash_attn_varlen_func = cute
    for lengths in ([20], [20, 7]):
        query, key, value = states(20 + NODES, batch=len(lengths), dtype=torch.bfloat16)
        mask, more = options_of(SPLIT, 20, lengths, dtype=torch.bfloat16)
        found = call(split_attention, query, key, value, mask, scaling=0.5, **more)
        assert_close(found, slow_attention(query, key, value, seen_by(20, lengths), 0.5))


def test_flash_of_texts_whose_lengths_are_a_tensor(install):
    """In a bucket of 40 slots: the tree's keys are after those of each row's text, and stale ones are large."""
    package = install(8, "flash_attn")["flash_attn"]
    lengths = torch.tensor([20, 7])
    query, key, value = states(20 + NODES, batch=2, dtype=torch.bfloat16)
    bucket = torch.full((2, *key.shape[:2], 40, key.shape[3]), 1e4, dtype=torch.bfloat16)
    for place, part in zip(bucket, (key, value), strict=True):
        for row, length in enumerate(lengths):
            place[row, :, : length + NODES] = part[row, :, : length + NODES]
    attend = tree_attention(lengths, ANCESTORS.expand(2, -1, -1), torch.bfloat16)
    found = attend(query.transpose(1, 2), *bucket, 0.5).unflatten(2, (query.shape[1], -1))
    assert_close(found, slow_attention(query, key, value, seen_by(20, lengths.tolist()), 0.5))
    assert package.calls == [([20, 7], 40)]


def test_captured_cycles_decode_with_it(install):
    package = install(8, "flash_attn")["flash_attn"]
    pair = tiny_pair("qwen3")
    pair = eagle_fsd.EagleModel.from_parts(pair.target.model.bfloat16(), pair.draft)
    pair.captured = CapturedCycles(pair.target, pair.draft)
    found = eagle_fsd.generate([PROMPT, PROMPT[:2]], pair, max_new_tokens=8, tree=eagle_fsd.TreeConfig(12, 4, 3))
    assert package.calls and all(len(output.token_ids) == 8 for output in found)


@pytest.mark.parametrize("changed", [
    {}, {"cache_seqlens": None}, {"cache_seqlens": torch.tensor([3], dtype=torch.int32)}, {"softmax_scale": 0.06},
], ids=str)
def test_captured_cycles_use_no_package_that_computes_something_else(install, monkeypatch, changed):
    package = install(8, "flash_attn")["flash_attn"]
    exact = package.flash_attn_with_kvcache
    monkeypatch.setattr(
        package, "flash_attn_with_kvcache", lambda *states, **options: exact(*states, **options | changed))
    works = flash_works.__wrapped__(32, 8, 128, torch.bfloat16, torch.device("cpu"))
    assert works == (not changed) and package.calls


def test_captured_cycles_use_no_package_that_fails_after_a_long_text(install, monkeypatch, caplog):
    package = install(8, "flash_attn")["flash_attn"]
    exact = package.flash_attn_with_kvcache

    def short_only(query, key, value, **options):
        assert key.shape[1] < 1000, "no splits"
        return exact(query, key, value, **options)

    monkeypatch.setattr(package, "flash_attn_with_kvcache", short_only)
    assert not flash_works.__wrapped__(32, 8, 128, torch.bfloat16, torch.device("cpu"))
    assert "flash-attn fails: AssertionError('no splits" in caplog.text


def test_a_broken_package_is_passed_over_and_said_so(install, monkeypatch, caplog):
    install(9, "flash_attn_interface")
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(OSError("undefined symbol")))
    assert find_flash(torch.device("cpu")) is None and "flash_attn cannot be imported: undefined symbol" in caplog.text


def test_a_pair_decodes_with_it(install):
    """In bfloat16, of a target with heads of 8: `use_attention` has compared the features of a tree of two rows."""
    package = install(8, "flash_attn")["flash_attn"]
    target = TargetModel(tiny_target("qwen3", attention="sdpa").bfloat16())
    target.use_attention(SPLIT)
    assert package.calls
    package.calls.clear()
    pair = tiny_pair("qwen3", attention="sdpa")
    pair = eagle_fsd.EagleModel.from_parts(target.model, pair.draft)
    found = eagle_fsd.generate([PROMPT, PROMPT[:2]], pair, max_new_tokens=8, tree=eagle_fsd.TreeConfig(12, 4, 3))
    assert package.calls and all(len(output.token_ids) == 8 for output in found)


# Families ----------------------------------------------------------------------------------------------------

OWN_CLASS = {"falcon"} if GPTJForCausalLM._supports_sdpa else {"falcon", "gptj"}  # choose it in their own way
NOT_SDPA = {"gemma2", "gpt_oss", "gptj"}


@pytest.mark.parametrize("family", [
    name for name, options in FAMILIES.items() if options.get("model_type", name) in CONFIG_MAPPING])
def test_every_family_has_the_features_of_stock_attention(family):
    """Of a tree of two rows of different lengths, windows and chunks being shorter; `use_attention` compares."""
    reference = "eager" if family in NOT_SDPA else "sdpa"
    target = TargetModel(tiny_target(family, attention=reference), check=False)
    if family in OWN_CLASS:
        with pytest.raises(ValueError, match=f"keeps attention {reference}, because {GROUPED} fails: "):
            target.use_attention(GROUPED)
        assert target.config._attn_implementation == reference
    else:
        target.use_attention(GROUPED)


# Choice ------------------------------------------------------------------------------------------------------


def test_load_takes_attention_by_name(tmp_path, caplog):
    save_pair(tmp_path)
    places = tmp_path / "target", tmp_path / "head"
    for name in (None, "eager", "sdpa", GROUPED):
        model = eagle_fsd.load(*places, device="cpu", tree=None, attn_implementation=name)
        why = "grouped was requested" if name == GROUPED else "it was not requested"
        assert model.target.computed_by == ("fused" if name is None else f"{name} ({why})")
        expected = model.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
        found = eagle_fsd.generate(PROMPT, model, max_new_tokens=8, acceptance="exact")
        assert found.token_ids == expected[0, len(PROMPT) :].tolist()
    with caplog.at_level(logging.WARNING, "eagle_fsd"):
        model = eagle_fsd.load(*places, device="cpu", tree=None, attn_implementation=SPLIT)
    assert model.target.computed_by == "sdpa (it was not requested)"
    assert ("LlamaForCausalLM keeps attention sdpa, because split fails: it cannot verify a tree (no installed "
            "flash-attn supports") in caplog.text
    for wrong in ("flash_attention_2", "auto", 3):
        with pytest.raises(ValueError, match="must be one of sdpa, eager, grouped, split, or None .*, got"):
            eagle_fsd.load(*places, attn_implementation=wrong)


@pytest.mark.cuda
def test_cuda_kernels_agree():
    device = torch.device("cuda", torch.cuda.current_device())
    if find_flash(device) is None:
        pytest.skip("no flash-attn package is installed")
    for lengths in ([300], [300, 77]):
        query, key, value = states(300 + NODES, (8, 2), 64, batch=len(lengths), dtype=torch.bfloat16)
        mask, more = options_of(SPLIT, 300, lengths, dtype=torch.bfloat16)
        found = call(split_attention, query.to(device), key.to(device), value.to(device), mask.to(device), scaling=0.2,
                     **{name: given.to(device) for name, given in more.items()})
        assert_close(found.cpu(), slow_attention(query, key, value, seen_by(300, lengths), 0.2))
