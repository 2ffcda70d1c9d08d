"""The fused decoder: features of the stock one, in trees, batches, parts and layers, and what it refuses."""

import pytest
import torch
from tiny import FAMILIES, PROMPT, tiny_config, tiny_head, tiny_pair, tiny_target
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.attention import InvariantAttention, attention_over, masked_products
from eagle_fsd.models.check import TreeCheck
from eagle_fsd.models.fused import FusedDecoder, Unsupported, silu_by_rows
from eagle_fsd.models.masks import additive
from eagle_fsd.models.target import TargetModel

SERVED = {"llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "smollm3": {}, "seed_oss": {}, "granite": {},
          "llama yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                             "original_max_position_embeddings": 32}},
          "llama biased": {"attention_bias": True}, "llama alone": {"num_key_value_heads": 4},
          "llama wide": {"head_dim": 8}}
ANCESTORS = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]).bool()


def two_of(family: str, **options) -> tuple[TargetModel, TargetModel]:
    """The stock and the fused forward of one model, whose norms are not all one."""
    model = tiny_target(family.split()[0], **{**SERVED.get(family, {}), **options})
    torch.manual_seed(1)
    with torch.no_grad():
        for _name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    stock, fused = TargetModel(model), TargetModel(model, fused=True)
    assert fused.computed_by == "fused", fused.stock_reason
    return stock, fused


def of_trees(target: TargetModel, lengths: list[int]) -> torch.Tensor:
    """[B, 5, F]: a tree after texts of these lengths, whose last 3 tokens were read after the others."""
    batch, longest = len(lengths), max(lengths)
    tokens = (torch.arange(batch * 60).view(batch, 60) * 7 + 3) % target.vocab_size
    cache = target.new_cache(longest + 5, batch)
    for row, length in enumerate(lengths):
        with cache.one_row(row):
            target.prefill(tokens[row : row + 1, : length - 3], cache)
            target.prefill(tokens[row : row + 1, length - 3 : length], cache)
    positions = torch.tensor(lengths)[:, None] + ANCESTORS.sum(-1) - 1
    return target.verify(tokens[:, -5:], positions, ANCESTORS.expand(batch, -1, -1), cache)


@pytest.mark.parametrize("lengths", [[9], [40], [9, 9], [9, 5, 30]], ids=str)
@pytest.mark.parametrize("family", SERVED)
@torch.inference_mode()
def test_features_are_those_of_the_stock_decoder(family, lengths):
    stock, fused = two_of(family)
    stock.feature_layers = fused.feature_layers = (0, 1)  # what enters them comes first
    assert_close(of_trees(fused, lengths), of_trees(stock, lengths), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_in_half_precision_it_is_nearer_to_full_precision_than_the_stock_decoder():
    model = tiny_target("llama", num_hidden_layers=8)
    exact = of_trees(TargetModel(model), [30])
    stock, fused = TargetModel(model.bfloat16()), TargetModel(model, fused=True)
    errors = [(of_trees(target, [30]).float() - exact).norm().item() for target in (stock, fused)]
    assert errors[1] < 1.1 * errors[0] < 0.1 * exact.norm().item()


def test_products_and_a_softmax_are_attention():
    """Computed on CUDA where PyTorch's kernel would have few blocks; here without one."""
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(3, 2, count, 16) for count in (7, 40, 40))
    mask = additive(torch.rand(3, 7, 40) < 0.5, torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=0.3)
    assert_close(masked_products(queries, keys, values, mask, 0.3), expected)


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (1, 60), (8, 60)])  # the last has too many blocks for products
def test_attention_on_cuda_is_that_of_the_cpu(batch, count):
    torch.manual_seed(0)
    given = torch.randn(batch, count, 32, 64), *torch.randn(2, batch, 8, 300, 64)
    mask = additive(torch.rand(batch, count, 300) < 0.5, torch.float32)
    expected = attention_over(mask, False, 4)(*given, 0.1)
    found = attention_over(mask.cuda(), False, 4)(*(each.cuda() for each in given), 0.1)
    assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_single_tokens_of_a_ragged_batch(family):
    stock, fused = two_of(family)
    found = []
    for target in (stock, fused):
        cache = target.new_cache(20, 2)
        for row, length in enumerate((9, 4)):
            with cache.one_row(row):
                target.prefill(torch.tensor([PROMPT[:length]]), cache)
        one = torch.ones(2, 1, 1, dtype=torch.bool)
        found.append(target.verify(torch.tensor([[3], [7]]), torch.tensor([[9], [4]]), one, cache))
    assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "why"), [
    ("gemma", "GemmaModel is not one of"), ("mixtral", "MixtralModel is not one of"),
    ("mistral-window", "full attention"),
    ("ministral3", "Ministral3Model is not one of"), ("qwen2-window", "full attention"),
])
def test_other_families_are_computed_by_the_stock_decoder(family, why):
    pair = tiny_pair(family)
    assert pair.target.fused is None and why in pair.target.stock_reason and why in pair.target.computed_by


@pytest.mark.parametrize(("change", "why"), [
    (lambda model: setattr(model.config, "hidden_act", "gelu"), "the activation gelu"),
    (lambda model: model.model.layers[1].mlp.register_module("more", torch.nn.Linear(2, 2)), "parts"),
    (lambda model: model.model.layers[1].register_forward_hook(lambda *_: None), "hooks"),
    (lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(16)), "norm is a LayerNorm"),
    (lambda model: model.config.rope_parameters.update(rope_type="dynamic"), "of type dynamic"),
])
def test_a_decoder_of_another_shape_is_refused(change, why):
    model = tiny_target()
    change(model)
    with pytest.raises(Unsupported, match=why):
        FusedDecoder(model.model, model.config)


def test_one_that_computes_something_else_is_found_out(monkeypatch):
    """A subclass of a known family, say: the logits of a tree are compared."""
    model = tiny_target()
    monkeypatch.setattr(model.model.layers[0].self_attn, "scaling", 0.4)
    stock = model.model.layers[0].self_attn.forward
    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", lambda *args, **options: (
        2 * stock(*args, **options)[0], None))
    target = EagleModel.from_parts(model, None).target
    assert target.fused is None and "its logits of a tree are not those of its own forward" in target.stock_reason


def test_what_came_of_the_comparison_is_known_the_next_time(monkeypatch):
    compared, compare = [], TreeCheck.compare
    monkeypatch.setattr(TreeCheck, "compare", lambda self, *forward: compared.append(self) or compare(self, *forward))
    model, other = tiny_target(), tiny_target("gemma")
    for fused, count in ((False, 1), (True, 2), (True, 2), (False, 2)):
        target = EagleModel.from_parts(model, None, fused=fused).target
        assert (target.fused is not None) == fused and len(compared) == count
    for _ in range(2):
        assert "GemmaModel is not one of" in EagleModel.from_parts(other, None).target.stock_reason


def test_another_attention_is_that_of_the_stock_decoder():
    target = tiny_pair().target
    target.use_attention("sdpa")
    assert target.fused is None and target.computed_by == "sdpa (sdpa was requested)"
    target = tiny_pair().target
    with pytest.raises(ValueError, match="no installed flash-attn"):
        target.use_attention("split")
    assert target.computed_by == "fused"


def test_weights_are_read_where_they_lie():
    """A model that is trained on between two answers."""
    model = tiny_target()
    pair = EagleModel.from_parts(model, tiny_head(model))
    eagle_fsd.generate(PROMPT, pair, max_new_tokens=4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
    found = eagle_fsd.generate(PROMPT, pair, max_new_tokens=12, tree=TreeConfig(8, 3, 2), acceptance="exact")
    assert found.token_ids == expected


@torch.inference_mode()
def test_positions_beyond_the_rotary_table_extend_it():
    stock, fused = two_of("llama", max_position_embeddings=256)
    of_trees(fused, [9])
    assert_close(of_trees(fused, [55]), of_trees(stock, [55]), rtol=1e-4, atol=1e-4)


def test_families_that_are_named_are_known():
    names = {type(AutoModelForCausalLM.from_config(tiny_config(family)).model).__name__
             for family in {name.split()[0] for name in SERVED} if family in FAMILIES}
    from eagle_fsd.models import fused

    assert names == fused.FAMILIES


# What a token's numbers depend on in int8 ------------------------------------------------------------------------

needs_int8 = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")


def int8_target(dtype: torch.dtype) -> TargetModel:
    torch.manual_seed(0)
    model = tiny_target("qwen2", hidden_size=64, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2,
                        head_dim=32, max_position_embeddings=1024).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3 if weight.dim() == 2 else 1)
    target = TargetModel(model, fused=True, check=False)
    target.pack("int8")
    return target


def one_by_one(target: TargetModel, text: torch.Tensor) -> torch.Tensor:
    """Features [M, F] of a text, read token by token."""
    cache = target.new_cache(text.shape[1])
    return torch.cat([target.verify(text[:, place : place + 1], torch.tensor([[place]]), None, cache)[0]
                      for place in range(text.shape[1])])


def ways_to_read(target: TargetModel, text: torch.Tensor):
    """Features of the last tokens of a text, read in a tree of other nodes; alone, and in a batch of other lengths."""
    ends = (60, 130, 290, text.shape[1] - 1)
    for rows in ([end] for end in ends), [ends]:
        for lengths in rows:
            cache = target.new_cache(max(lengths) + 9, len(lengths))
            for row, length in enumerate(lengths):
                with cache.one_row(row):  # in two parts
                    target.prefill(text[:, : length // 3], cache)
                    target.prefill(text[:, length // 3 : length - 3], cache)
            starts = torch.tensor(lengths)[:, None] - 3
            # the path 0, 1, 4, 7 of the tree has the text's next tokens, the other nodes have others
            parents = [-1, 0, 0, 0, 1, 1, 3, 4]
            ancestors = torch.eye(8, dtype=torch.bool)
            for node, parent in enumerate(parents[1:], 1):
                ancestors[node] |= ancestors[parent]
            tokens = torch.randint(target.vocab_size, (len(lengths), 8))
            tokens[:, [0, 1, 4, 7]] = text[0, starts + torch.arange(4)]
            positions = starts + ancestors.sum(-1) - 1
            features = target.verify(tokens, positions, ancestors.expand(len(lengths), -1, -1), cache)
            for row, length in enumerate(lengths):
                yield slice(length - 3, length + 1), features[row, [0, 1, 4, 7]]


@needs_int8
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_in_int8_a_token_has_the_same_numbers_in_any_company(dtype, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target = int8_target(dtype)
        text = torch.randint(target.vocab_size, (1, 350))
        alone = one_by_one(target, text)
        for part, found in ways_to_read(target, text):
            assert torch.equal(found, alone[part])
        assert torch.equal(target.prefill(text, target.new_cache(350))[0], alone)
        monkeypatch.setattr("eagle_fsd.models.fused.Int8", None)  # without `InvariantAttention`
        alone = one_by_one(target, text)
        assert not all(torch.equal(found, alone[part]) for part, found in ways_to_read(target, text))
    finally:
        torch.set_num_threads(before)


@needs_int8
@pytest.mark.parametrize("stable", [True, False])
@torch.inference_mode()
def test_invariant_attention_is_attention(stable):
    """In float64, and with the first blocks by PyTorch's kernel; of rows of several lengths."""
    visible = torch.arange(300) <= torch.tensor([[[290], [291], [40]], [[299], [200], [298]]])
    positions = visible.sum(-1) - 1
    queries, keys, values = (torch.randn(2, *shape) for shape in ((3, 6, 32), (2, 300, 32), (2, 300, 32)))
    attend = InvariantAttention(visible, positions, 3, stable)
    assert [end for _rows, _nodes, end in attend.first] == ([224, 224] if stable else [])
    expected = attention_over(additive(visible, torch.float32), False, 3)(queries, keys, values, 0.2)
    assert_close(attend(queries, keys, values, 0.2), expected, rtol=1e-5, atol=1e-5)


@needs_int8
@torch.inference_mode()
def test_invariant_attention_of_a_deep_tree_reads_no_other_branch():
    """Ten nodes of another branch come before a chain deeper than NEAR, at whose end the first blocks could reach
    them."""
    text, other, chain = 290, 10, 120
    visible = torch.zeros(1, chain, text + other + chain, dtype=torch.bool)
    visible[..., :text], visible[..., text + other :] = True, torch.ones(chain, chain, dtype=torch.bool).tril()
    queries, keys, values = (torch.randn(1, *shape) for shape in ((chain, 6, 32), (2, 420, 32), (2, 420, 32)))
    attend = InvariantAttention(visible, text + torch.arange(chain)[None], 3, True)
    expected = attention_over(additive(visible, torch.float32), False, 3)(queries, keys, values, 0.2)
    assert_close(attend(queries, keys, values, 0.2), expected, rtol=1e-5, atol=1e-5)


@needs_int8
@torch.inference_mode()
def test_in_int8_a_batch_of_prompts_is_read_as_each_alone():
    target = int8_target(torch.float32)
    texts = torch.randint(target.vocab_size, (2, 350))
    together = target.prefill(texts, target.new_cache(350, 2))
    alone = [target.prefill(text[None], target.new_cache(350)) for text in texts]
    assert torch.equal(together, torch.cat(alone))


def test_silu_of_a_row_depends_on_no_other():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rows = torch.randn(2, 16, 2 * 4864)[..., :4864]
        alone = torch.stack([torch.cat([silu_by_rows(row[None, None]) for row in part], 1)[0] for part in rows])
        assert torch.equal(silu_by_rows(rows), alone)
        assert_close(alone, torch.nn.functional.silu(rows))
    finally:
        torch.set_num_threads(before)
