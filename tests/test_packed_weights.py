"""Weights in the layouts of a CPU's kernels: what they compute; and stock models still run.

Plain bfloat16 weights become blocks of oneDNN or of FBGEMM, by the processor: `OWN`.
"""

import copy
import logging
import pickle
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import HIDDEN, PROMPT, save_pair, tiny_chat_pair, tiny_head, tiny_pair, tiny_target
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

import eagle_fsd
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.loading.timing import circumstances
from eagle_fsd.models import kernels
from eagle_fsd.models.digest import weights_digest
from eagle_fsd.models.linear import (
    Half,
    Int8,
    Joined,
    Packed,
    PackedLinear,
    check_quantization,
    choose_form,
    fits_half,
    has_half_kernels,
    pack,
    packed_form,
)
from eagle_fsd.models.loading import cpu_dtype, load_target
from eagle_fsd.models.memory import MappedFiles

OWN = choose_form(torch.zeros(8, 8).bfloat16(), None) if torch.backends.mkldnn.is_available() else None
pytestmark = pytest.mark.skipif(OWN is None, reason="no packed form of bfloat16 weights here")
FORMS = [None, pytest.param("int8", marks=pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI"))]
TREE = TreeConfig(8, 3, 2)


def layers(outputs=(48, 16), inputs=64, bias=(True, False)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inputs, size, bias=has, dtype=torch.bfloat16)
                           for size, has in zip(outputs, bias, strict=True)))


def packed_layers(form) -> tuple[Joined, nn.Sequential, nn.Sequential]:
    module = layers()
    stock, joined = copy.deepcopy(module), Joined((module, "0"), (module, "1"))
    joined.pack(form)
    return joined, module, stock


@pytest.mark.parametrize("shape", [(1, 64), (130, 64), (2, 5, 64), (64,)])
@torch.inference_mode()
def test_packed_results_are_those_of_the_stock_layer(shape):
    """oneDNN's the same bits, FBGEMM's those of float32, rounded where the stock layer is called."""
    joined, module, stock = packed_layers(None)

    def check(found, rows, *layers):
        expected = torch.cat([linear(rows, layer.weight, layer.bias) for layer in layers], -1)
        close = {"rtol": 0, "atol": 0} if OWN is Packed else {"rtol": 0.01, "atol": 0.01}
        torch.testing.assert_close(found.to(rows.dtype), expected, **close)

    rows = torch.randn(shape).bfloat16()
    check(joined(rows), rows, *stock)
    for layer, before in zip(module, stock, strict=True):  # each as the stock model calls it
        assert isinstance(layer, nn.Linear) and layer(rows).dtype == torch.bfloat16
        check(layer(rows), rows, before)


@pytest.mark.parametrize("bias", [(True, True), (False, False), (True, False)])
@torch.inference_mode()
def test_stacked_weights_are_one_product(bias, monkeypatch):
    """On an accelerator; here on the CPU. Weights that are replaced count, and the stock layers stay as they are."""
    module, rows = layers(bias=bias).float(), torch.randn(3, 64)
    stock, joined = copy.deepcopy(module), Joined((module, "0"), (module, "1"))
    joined.stack()
    products = []
    monkeypatch.setattr(nn.functional, "linear", lambda *given: products.append(given) or linear(*given))

    def check(count):
        products.clear()
        found = joined(rows)
        assert len(products) == count
        torch.testing.assert_close(found, torch.cat([layer(rows) for layer in stock], -1))
        for layer, before in zip(module, stock, strict=True):
            torch.testing.assert_close(layer(rows), before(rows))
        assert {name: value.shape for name, value in module.state_dict().items()} == {
            name: value.shape for name, value in stock.state_dict().items()}

    check(2 if bias == (True, False) else 1)
    place, joined = module[0].weight.data_ptr(), Joined((module, "0"), (module, "1"))
    joined.stack()  # once more, for another pair with the same target
    check(2 if bias == (True, False) else 1)
    assert module[0].weight.data_ptr() == place
    for layer in (module[0], stock[0]):
        layer.weight.mul_(2)  # in place: still one product
    check(2 if bias == (True, False) else 1)
    for layer in (module[1], stock[1]):
        layer.weight = nn.Parameter(torch.ones_like(layer.weight), requires_grad=False)
    check(2)
    assert joined.decided[1] is None  # what was replaced is freed


@pytest.mark.skipif(not has_half_kernels(), reason="torch without FBGEMM's kernels")
class TestHalf:
    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    @torch.inference_mode()
    def test_it_computes_in_float32_with_the_stored_numbers(self, stored):
        weight, bias = (torch.randn(48, 64) * 0.02).to(stored).float(), torch.randn(48)
        for rows in (torch.randn(1, 64), torch.randn(64), torch.randn(3, 70, 128)[..., ::2]):
            expected = linear(rows.double(), weight.double(), bias.double()).float()
            torch.testing.assert_close(Half(weight, bias)(rows), expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(Half(weight, bias).dense(), weight)

    def test_which_weights_it_serves(self):
        stored = torch.tensor([[65280.0, 1.0078125, 2.0**-17, -(2.0**-24), 1e-30, 0.0]]).bfloat16()
        assert fits_half(stored) and fits_half(stored.float()) and choose_form(stored.float(), None) is Half
        for other in (70000.0, 1 + 2.0**-11, float("inf"), float("nan")):
            weight = torch.tensor([[1.0, other]])
            assert not fits_half(weight) and choose_form(weight, None) is None

@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
class TestInt8:
    @pytest.mark.parametrize("inputs, block", [(64, 32), (72, 8), (37, 1)])
    @torch.inference_mode()
    def test_it_computes_with_rotated_and_rounded_numbers(self, inputs, block):
        """Against the definition: both sides rotated, then rounded to multiples of their largest number / 127."""
        weight, bias, rows = torch.randn(300, inputs), torch.randn(300), torch.randn(2, 5, inputs)
        before, number = weight.clone(), torch.arange(block)
        # An entry's sign is the parity of the ones that the binary numbers of its row and column have in common.
        ones = torch.tensor([[(row & column).bit_count() for column in number.tolist()] for row in number.tolist()])
        rotation = (-1.0) ** ones / block**0.5
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(block))

        def rotated(values):
            return (values.unflatten(-1, (-1, block)) @ rotation).flatten(-2)

        def rounded(values):
            scale = rotated(values).abs().amax(-1, keepdim=True) / 127
            return (rotated(values) / scale).round() * scale

        expected = linear(rounded(rows), rounded(weight), bias)
        torch.testing.assert_close(Int8(weight, bias)(rows), expected, rtol=1e-4, atol=0.02)
        torch.testing.assert_close(Int8(weight, bias).dense(), rotated(rounded(weight)))
        assert torch.equal(weight, before)

    @torch.inference_mode()
    def test_rotation_helps_where_few_numbers_are_large(self):
        weight, rows = torch.randn(64, 256), torch.randn(8, 256)
        rows[:, [3, 70]] *= 50
        expected, found = linear(rows, weight), Int8(weight, None)(rows)
        scale = rows.abs().amax(-1, keepdim=True) / 127
        plain = linear((rows / scale).round() * scale, weight)
        assert (found - expected).norm() < 0.5 * (plain - expected).norm()

    @pytest.mark.parametrize("inputs", [64, 896, 4864])
    @torch.inference_mode()
    def test_a_row_depends_on_no_other(self, inputs):
        layer, rows = Int8(torch.randn(48, inputs), None), torch.randn(64, inputs)
        alone = torch.cat([layer(row[None]) for row in rows])
        assert all(torch.equal(layer(rows[:count]), alone[:count]) for count in (2, 3, 5, 8, 16, 33, 64))
        rows[3] *= 1000
        assert torch.equal(layer(rows)[:3], alone[:3]) and torch.equal(layer(rows)[4:], alone[4:])

    @torch.inference_mode()
    def test_zeros_and_large_numbers(self):
        layer = Int8(torch.zeros(8, 16), None)
        assert layer(torch.zeros(3, 16)).abs().max() == 0 and layer(torch.full((3, 16), 1e30)).abs().max() == 0

    def test_other_processors_are_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
        with pytest.raises(ValueError, match="needs an x86 processor with VNNI"):
            check_quantization("int8")
        with pytest.raises(ValueError, match="VNNI"):
            eagle_fsd.load(quantization="int8")


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
class TestKernels:
    """oneDNN's and FBGEMM's int8 products: equal to the bit, so that either may be chosen."""

    @pytest.mark.skipif(not kernels.has_fbgemm(), reason="no AVX-512 VNNI, or torch without FBGEMM's product")
    @pytest.mark.parametrize("inputs", [37, 64, 896, 4864])
    @torch.inference_mode()
    def test_both_give_the_same_bits(self, inputs, monkeypatch):
        weight, bias = torch.randn(72, inputs), torch.randn(72)
        weight[3] *= 1e4
        weight[5], weight[6] = 0.0, 1e-30
        ties = torch.randint(-127, 127, (64, inputs)) + 0.5  # with 37 inputs nothing is rotated
        ties[:, 0] = 127.0  # so that a row's scale is 1
        rows = torch.randn(64, inputs)
        spiky = torch.where(torch.rand_like(rows) < 0.01, 1000 * rows, rows)
        extreme = torch.randint(0, 2, rows.shape) * 2e30 - 1e30
        extreme[::5] = 0.0
        extreme[1::5] = 1e-38
        for own in (None, bias):
            both = []
            for kernel in kernels.KERNELS:
                monkeypatch.setattr("eagle_fsd.models.linear.fastest_kernel", lambda *_, kernel=kernel: kernel)
                both.append(Int8(weight, own))
            assert [type(layer.product) for layer in both] == list(kernels.KERNELS)
            assert torch.equal(both[0].dense(), both[1].dense())
            for kind in (rows, rows.bfloat16(), spiky, ties, extreme, torch.full_like(rows, -1.0)):
                for count in range(1, 65):
                    assert torch.equal(*(layer(kind[:count]) for layer in both)), count

    @pytest.mark.parametrize("change, chosen", [
        ({}, kernels.FBGEMM), ({1: 1.04, 16: 1.04}, kernels.FBGEMM), ({1: 1.2}, kernels.OneDNN),
        ({512: 1.2}, kernels.OneDNN), (dict.fromkeys(kernels.CYCLE_ROWS, 1.0), kernels.OneDNN)])
    def test_fbgemm_is_chosen_where_cycles_gain_and_nothing_loses(self, change, chosen):
        assert kernels.faster_kernel(lambda count, _rounds: change.get(count, 0.7)) is chosen

    def test_a_shape_is_measured_once(self, tmp_path, monkeypatch):
        measured = []
        monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
        monkeypatch.setattr(kernels, "shares_of", lambda *shape: measured.append(shape) or (lambda *_: 0.5))
        monkeypatch.setattr(kernels, "has_fbgemm", lambda: True)
        for _ in range(2):
            kernels._fastest.cache_clear()  # as in another process
            assert kernels.fastest_kernel(1000, 1000) is kernels.fastest_kernel(10**6, 1000) is kernels.FBGEMM
            assert measured == [(1000, 1000), (kernels.MOST // 1000, 1000)]  # a part of the larger
        assert kernels.fastest_kernel(8, 8) is kernels.OneDNN and len(measured) == 2
        for damage in ("{", "[]", '"cuBLAS"'):
            measured.clear()
            for path in tmp_path.glob("kernels/*.json"):
                path.write_text(damage)
            kernels._fastest.cache_clear()
            assert kernels.fastest_kernel(1000, 1000) is kernels.FBGEMM and measured == [(1000, 1000)]
        kernels._fastest.cache_clear()

    def test_an_older_torch_does_not_list_the_instructions(self, monkeypatch):
        found = kernels.has_fbgemm()
        for name in ("_is_avx512_supported", "_is_vnni_supported"):  # they have other ways to find out there
            known = getattr(torch.cpu, name)()
            monkeypatch.setattr(torch.cpu, name, lambda known=known: known)
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        assert kernels.has_fbgemm.__wrapped__() == found

    @pytest.mark.parametrize("damage", ["missing", "saturates", "no instructions"])
    def test_elsewhere_it_is_onednn(self, damage, monkeypatch):
        if damage == "missing":
            monkeypatch.delattr(torch, "_make_per_channel_quantized_tensor")
        elif damage == "saturates":
            product = kernels.FBGEMM.__call__
            monkeypatch.setattr(kernels.FBGEMM, "__call__", lambda self, rows: product(self, rows) - 1)
        else:
            monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
        found = kernels.has_fbgemm.__wrapped__()
        assert not found
        monkeypatch.setattr(kernels, "has_fbgemm", lambda: found)
        assert kernels.fastest_kernel(4096, 4096) is kernels.OneDNN

    @pytest.mark.skipif(not kernels.has_fbgemm(), reason="no AVX-512 VNNI, or torch without FBGEMM's product")
    def test_texts_are_the_same_and_latencies_are_not(self, tokenizer, monkeypatch):
        texts, facts = [], []
        for kernel in kernels.KERNELS:
            monkeypatch.setattr("eagle_fsd.models.linear.fastest_kernel", lambda *_, kernel=kernel: kernel)
            pair = tiny_pair(tokenizer=tokenizer)
            pair.prepack("int8")
            texts.append(eagle_fsd.generate(PROMPT, pair, tree=TREE, max_new_tokens=40).token_ids)
            facts.append(circumstances(pair.target, pair.draft))
        assert texts[0] == texts[1] and facts[0]["kernels"] != facts[1]["kernels"]
        assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"kernels", "head_kernels"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["copy", "pickle", "state_dict"])
def test_what_leaves_the_model_is_a_stock_layer(form, way):
    joined, module, stock = packed_layers(form)
    if way == "state_dict":
        assert module.state_dict().keys() == stock.state_dict().keys()
        stock.load_state_dict(module.state_dict())
    else:
        stock = copy.deepcopy(module) if way == "copy" else pickle.loads(pickle.dumps(module))
        assert all(type(layer) is nn.Linear for layer in stock)
    rows = torch.randn(4, 64).bfloat16()
    expected = torch.cat([linear(rows, layer.weight, layer.bias) for layer in stock], -1)
    with torch.inference_mode():
        torch.testing.assert_close(joined(rows).bfloat16(), expected, rtol=0.05, atol=0.05)
        if way != "state_dict":
            copied = copy.deepcopy(joined) if way == "copy" else pickle.loads(pickle.dumps(joined))
            assert copied.form is None and torch.equal(copied(rows), expected)
    assert weights_digest(stock) != "0"


def test_other_layers_stay_as_they_are():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 8), Own(8, 8, dtype=torch.bfloat16), nn.Embedding(4, 4, dtype=torch.bfloat16))
    pack(module, None)
    assert packed_form(module) is None


def test_packed_weights_do_not_move():
    module = packed_layers(None)[1]
    assert module.to("cpu") is module and module.bfloat16() is module
    with pytest.raises(ValueError, match="load the model with prepack=False to use torch.float32"):
        module.float()


def test_gradients_pass_through():
    module = packed_layers(None)[1]
    rows = torch.randn(2, 64).bfloat16().requires_grad_()
    module[0](rows).float().sum().backward()
    assert rows.grad is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "mixtral"])  # fused, and by the stock decoder
def test_a_pair_decodes_in_packed_weights(family, tied, form, tmp_path):
    target = tiny_target(family, tie_word_embeddings=tied).to(torch.bfloat16)
    head = tiny_head(target)
    head.limit_vocabulary(torch.arange(24))
    pair, names, digest = EagleModel.from_parts(target, head), target.state_dict().keys(), weights_digest(target)
    options = {"max_new_tokens": 12, "acceptance": "exact", "tree": TREE}
    before = eagle_fsd.generate(PROMPT, pair, **options)
    pair.prepack(form)
    assert packed_form(target) == (Int8 if form else OWN).NAME and packed_form(head)
    assert all(isinstance(layer, PackedLinear) for layer in (pair.target.lm_head, head.output_rows.layer, head.fc))
    after = eagle_fsd.generate(PROMPT, pair, **options)
    if form is None and OWN is Packed:
        assert after.token_ids == before.token_ids and after.stats.accepted_lengths == before.stats.accepted_lengths
    else:
        plain = eagle_fsd.generate(PROMPT, EagleModel.from_parts(target, None), **options)
        assert after.token_ids == plain.token_ids
    assert (tied or sum(after.stats.accepted_lengths) > 0) and weights_digest(target) == digest
    again = EagleModel.from_parts(target, head)  # packed already
    assert again.draft.output_rows is head.output_rows
    assert eagle_fsd.generate(PROMPT, again, **options).token_ids == after.token_ids
    stock = target.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)  # its own forward still runs
    assert stock.shape == (1, len(PROMPT) + 4) and target.state_dict().keys() == names
    target.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.testing.assert_close(saved(torch.tensor([PROMPT])).logits, target(torch.tensor([PROMPT])).logits,
                               rtol=0.1, atol=1.0 if form else 0.1)


def test_no_plain_weight_is_kept():
    """Of what is packed; the embeddings are looked up in their plain form."""
    pair = tiny_pair()
    pair.target.model.bfloat16()
    pair = EagleModel.from_parts(pair.target.model, pair.draft)
    pair.prepack()
    kept = {name for name, weight in pair.target.model.named_parameters() if weight.dim() > 1}
    assert kept == {"model.embed_tokens.weight"}
    assert {name for name, weight in pair.draft.named_parameters() if weight.dim() > 1} == {"embed_tokens.weight"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_files_are_left_and_what_was_changed_in_them_stays(tmp_path):
    """A page that is given back would be read from the file again."""
    tiny_target(tie_word_embeddings=True, hidden_size=64, vocab_size=512).bfloat16().save_pretrained(tmp_path)
    others = {low for low, _ in MappedFiles().ranges}  # of models that earlier tests have left
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    held = {low for low, _ in MappedFiles().ranges} - others
    embedding, gate = model.model.embed_tokens, model.model.layers[0].mlp
    mapped = [MappedFiles().contains(layer.weight) for layer in (embedding, gate.gate_proj)]
    assert mapped == [True, True]
    with torch.no_grad():
        for layer in (embedding, gate.gate_proj, model.model.norm):
            layer.weight.mul_(2)
    expected = [layer.weight.detach().clone() for layer in (embedding, gate.gate_proj, model.model.norm)]
    EagleModel.from_parts(model, None).prepack()
    found = [layer.weight for layer in (embedding, gate.gate_proj, model.model.norm)]
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert torch.equal(model.lm_head.weight, expected[0])
    assert held and not held & {low for low, _ in MappedFiles().ranges}


def test_the_stock_target_is_loaded_once_more_to_measure_against(tmp_path):
    save_pair(tmp_path)
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", dtype="bfloat16", tree=None)
    assert packed_form(pair.target.model) and packed_form(pair.stock) is None and pair.stock is pair.stock
    assert pair.stock.dtype == torch.bfloat16 and pair.stock.config.hidden_size == HIDDEN
    plain = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", tree=None, prepack=False)
    assert plain.stock is plain.target.model
    parts = EagleModel.from_parts(pair.target.model, pair.draft)
    with pytest.raises(ValueError, match=r"load\(\) did not make this model"):
        _ = parts.stock


def test_int8_is_for_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    with pytest.raises(ValueError, match="needs a target on the CPU"):
        eagle_fsd.load(tmp_path, tmp_path, quantization="int8", device_map="auto")


def test_a_packed_layer_joins_only_with_its_own():
    module = layers((8, 8, 8), 16, (False,) * 3)
    Joined((module, "0"), (module, "1")).pack(None)
    rows = torch.randn(2, 16).bfloat16()
    with torch.inference_mode():
        expected = torch.cat([layer(rows) for layer in module], -1)
        assert torch.equal(Joined((module, "0"), (module, "1"), (module, "2"))(rows), expected)
        assert torch.equal(Joined((module, "1"))(rows), module[1](rows))
        pair = Joined((module, "0"), (module, "1"))
        module[1] = nn.Linear(16, 8, dtype=torch.bfloat16)  # an adapter, say, that was put in its place since
        assert torch.equal(pair(rows), torch.cat([module[0](rows), module[1](rows)], -1))
    assert OWN(torch.zeros(3, 5).bfloat16(), None).dense().shape == (3, 5)


@pytest.mark.skipif(not has_half_kernels(), reason="torch without FBGEMM's kernels")
class TestFloat32OverWeightsOf16Bits:
    """What "auto" is on a CPU."""

    @staticmethod
    def saved(folder, stored, family="llama", **options):
        pair = tiny_chat_pair(family, **options)
        pair.draft.limit_vocabulary(torch.arange(24))
        pair.target.model.to(stored)
        save_pair(folder, pair)
        return folder / "target", folder / "head"

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("family", "tied"), [
        ("llama", False), ("qwen2", True), ("gemma2", True), ("gemma4_text", False)])  # that one has buffers in 16 bits
    def test_texts_are_those_of_generate_in_float32(self, family, tied, stored, tmp_path, caplog):
        target, head = self.saved(tmp_path, stored, family, tie_word_embeddings=tied)
        with caplog.at_level(logging.WARNING):
            pair = eagle_fsd.load(target, head, device="cpu", tree=None)
        model, kinds = pair.target.model, [type(part) for part in pair.target.model.modules()]
        assert pair.target.dtype == model.dtype == model.config.dtype == pair.draft.dtype == torch.float32
        assert packed_form(model) == "float16" and nn.Linear not in kinds and not caplog.text
        assert pair.stock.dtype == stored and pair.stock_in(torch.float32).dtype == torch.float32
        wide = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        expected = wide.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24)[0, len(PROMPT):].tolist()
        assert eagle_fsd.generate(PROMPT, pair, tree=TREE, max_new_tokens=24).token_ids == expected
        wide.set_attn_implementation(model.config._attn_implementation)  # Gemma-2's softcap: not in every one of 5.17
        torch.testing.assert_close(model(torch.tensor([PROMPT])).logits, wide(torch.tensor([PROMPT])).logits)
        buffers = zip(model.named_buffers(), wide.named_buffers(), strict=True)
        assert all(ours == theirs and torch.equal(mine, its) for (ours, mine), (theirs, its) in buffers)

    def test_layers_that_do_not_fit_are_kept_in_float32(self, tmp_path, caplog):
        target, head = self.saved(tmp_path, torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(target)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[0, 0] = 1e5
        model.save_pretrained(target)
        pair = eagle_fsd.load(target, head, device="cpu", tree=None)
        assert "1 linear layers have weights that float16 cannot represent" in caplog.text
        wide = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        torch.testing.assert_close(pair.target.model(torch.tensor([PROMPT])).logits,
                                   wide(torch.tensor([PROMPT])).logits)
        names = [name for name, part in pair.target.model.named_modules() if type(part) is nn.Linear]
        assert names == ["model.layers.0.self_attn.k_proj"] and pair.target.fused

    @pytest.mark.parametrize(("family", "stored", "said"), [
        ("mixtral", torch.bfloat16, "of its weights are neither in linear layers nor in embeddings"),
        ("llama", None, "its files have weights of BF16, F32"),
    ])
    @pytest.mark.parametrize("dtype", ["auto", "float32"])
    def test_it_is_said_what_is_done_instead(self, family, stored, said, dtype, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr("eagle_fsd.models.loading.bfloat16_is_faster", lambda: True)
        target, head = self.saved(tmp_path, torch.bfloat16, family)
        if stored is None:  # in two dtypes
            file = target / "model.safetensors"
            state = load_file(file)
            state["model.norm.weight"] = state["model.norm.weight"].float()
            save_file(state, file, {"format": "pt"})
        with caplog.at_level(logging.INFO):
            pair = eagle_fsd.load(target, head, device="cpu", tree=None, dtype=dtype)
        found = [each.levelno for each in caplog.records if said in each.getMessage()]
        # to float32, weights of one dtype are converted one after the other
        assert found == ([logging.WARNING] if dtype == "auto" else [logging.INFO] if stored is None else [])
        assert pair.target.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)

    @pytest.mark.parametrize("options", [
        {"prepack": False},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.skipif(
            not torch.cpu._is_vnni_supported(), reason="no VNNI")),
    ])
    def test_without_such_packing_the_processor_decides(self, options, tmp_path, monkeypatch):
        target, head = self.saved(tmp_path, torch.bfloat16)
        for pays in (True, False):
            monkeypatch.setattr("eagle_fsd.models.loading.bfloat16_is_faster", lambda pays=pays: pays)
            pair = eagle_fsd.load(target, head, device="cpu", tree=None, **options)
            assert pair.target.dtype == (torch.bfloat16 if pays else torch.float32)
            assert packed_form(pair.target.model) == (Int8.NAME if "quantization" in options else None)

    def test_the_processors_instructions_decide_not_its_load(self, monkeypatch):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        for known in ({"avx512_f": True}, {"avx512_bf16": True}, {"amx_bf16": True}, {"bf16": True}):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
            assert cpu_dtype(torch.bfloat16) == (torch.float32 if "avx512_f" in known else torch.bfloat16)
            assert cpu_dtype(torch.float16) == torch.float32
        monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older version of torch
        for supported in (True, False):
            monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=supported: supported)
            assert (cpu_dtype(torch.bfloat16) == torch.bfloat16) == supported

    @pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
    @pytest.mark.parametrize("family", ["llama", "gemma2"])  # fused, and by the stock decoder
    def test_int8_is_packed_from_16_bits_and_checked_at_the_first_load(self, family, tmp_path, monkeypatch):
        monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
        target, head = self.saved(tmp_path, torch.bfloat16, family)
        options = {"device": "cpu", "tree": None, "dtype": "float32", "quantization": "int8"}
        stored, load = [], load_target
        monkeypatch.setattr("eagle_fsd.models.loading.load_target",
                            lambda *names, dtype, **rest: stored.append(dtype) or load(*names, dtype=dtype, **rest))
        first = eagle_fsd.load(target, head, **options)
        (file,) = (tmp_path / "cache" / "checked").iterdir()
        with monkeypatch.context() as context:
            context.setattr("eagle_fsd.models.target.TreeCheck", lambda *_, **__: pytest.fail("checked again"))
            pair = eagle_fsd.load(target, head, **options)
        assert stored == [torch.bfloat16] * 2 and pair.target.dtype == pair.target.model.dtype == torch.float32
        assert {weight.dtype for weight in pair.target.model.parameters()} == {torch.float32}
        assert (pair.target.fused is None, pair.target.stock_reason) == (first.target.fused is None,
                                                                         first.target.stock_reason)
        texts = [eagle_fsd.generate(PROMPT, each, tree=TREE, max_new_tokens=24).token_ids for each in (first, pair)]
        plain = eagle_fsd.generate(PROMPT, pair, speculative=False, max_new_tokens=24).token_ids
        assert texts == [plain] * 2
        file.write_text("damaged")
        eagle_fsd.load(target, head, **options)
        assert file.read_text() != "damaged"

    def test_a_head_that_does_not_fit_is_refused_before_the_work(self, tmp_path, monkeypatch):
        target, head = self.saved(tmp_path, torch.bfloat16)
        eagle_fsd.save_head(tiny_head(tiny_target(vocab_size=40)), tmp_path / "other")
        monkeypatch.setattr("eagle_fsd.models.target.pack", lambda *_: pytest.fail("packed"))
        with pytest.raises(ValueError, match="does not fit the target: its vocabulary size is 40"):
            eagle_fsd.load(target, tmp_path / "other", device="cpu", tree=None)
