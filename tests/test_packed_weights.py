"""Weights kept a second time in the layout of a CPU's kernels: the same bits, and never stale ones."""

import copy
import pickle

import pytest
import torch
from tiny import PROMPT, tiny_head, tiny_target
from torch import nn

import eagle_fsd
from eagle_fsd.models.placement import PackedLinear, is_packed, pack_linears, stock_layout
from eagle_fsd.pair import EagleModel

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def packed_layer(inputs=64, outputs=48, bias=True, dtype=torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
    pack_linears(module)
    return module


def spoil(layer: PackedLinear) -> None:
    """Make its copy that of other weights."""
    layer.packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros_like(layer.weight), layer.ROWS)


@pytest.mark.parametrize("shape", [(1, 64), (130, 64), (2, 5, 64), (64,), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_the_same_bits(shape, bias):
    module, rows = packed_layer(bias=bias), torch.randn(shape).bfloat16()
    expected = nn.functional.linear(rows, module[0].weight, module[0].bias)
    with torch.inference_mode():
        found = module(rows)
    assert type(module[0]) is PackedLinear and found.shape == expected.shape and torch.equal(found, expected)


def test_the_packed_copy_is_what_is_computed_with():
    module, rows = packed_layer(), torch.ones(4, 64).bfloat16()
    spoil(module[0])
    with torch.no_grad():
        assert module(rows).sub(module[0].bias).abs().max() == 0
        with stock_layout():
            assert module(rows).sub(module[0].bias).abs().max() > 0


@pytest.mark.parametrize("change", ["in place", "data", "gradients", "copy", "pickle", "dtype"])
def test_it_is_the_stock_layer_where_the_copy_does_not_serve(change):
    module, rows = packed_layer(), torch.ones(4, 64).bfloat16()
    spoil(module[0])  # whoever reads the copy is found out
    with torch.no_grad():
        if change == "in place":
            module[0].weight.mul_(2)
        elif change == "data":
            module[0].weight.data = module[0].weight.data * 3
        elif change == "copy":
            module = copy.deepcopy(module)
        elif change == "pickle":
            module = pickle.loads(pickle.dumps(module))
        elif change == "dtype":
            module, rows = module.float(), rows.float()
    with torch.set_grad_enabled(change == "gradients"):
        found = module(rows)
    assert torch.equal(found, nn.functional.linear(rows, module[0].weight, module[0].bias))


def test_other_layers_stay_as_they_are():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 8), Own(8, 8, dtype=torch.bfloat16), nn.Embedding(4, 4, dtype=torch.bfloat16))
    pack_linears(module)
    assert not is_packed(module)


def test_a_layer_alone_is_packed_as_well():
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    packed = pack_linears(layer)
    assert type(packed) is PackedLinear and packed.weight is layer.weight and packed.bias is layer.bias


@pytest.mark.parametrize("tied", [False, True])
def test_a_pair_decodes_the_same(tied):
    target = tiny_target(tie_word_embeddings=tied).to(torch.bfloat16)
    head = tiny_head(target)
    head.limit_vocabulary(torch.arange(24))
    pair, names = EagleModel.from_parts(target, head), target.state_dict().keys()
    before = eagle_fsd.generate(PROMPT, pair, max_new_tokens=12, acceptance="exact")
    pair.prepack()
    assert is_packed(target) and is_packed(head) and type(pair.target.lm_head) is PackedLinear
    assert type(head.output_rows.layer) is PackedLinear
    after = eagle_fsd.generate(PROMPT, pair, max_new_tokens=12, acceptance="exact")
    assert after.token_ids == before.token_ids and after.stats.accepted_lengths == before.stats.accepted_lengths
    assert target.state_dict().keys() == names
    assert EagleModel.from_parts(target, head).draft.output_rows is head.output_rows
