"""Targets that accelerate places or keeps elsewhere, and quantised ones."""


import pytest
import torch
from tiny import PROMPT, SIZES, save_pair, tiny_chat_pair, tiny_target
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

import eagle_fsd
from eagle_fsd import DraftHead, EagleModel, TreeConfig
from eagle_fsd.models.target import TargetModel

TREE = TreeConfig(16, 5, 4)
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}  # blocks that kernels can take


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder, tiny_chat_pair(attention="sdpa"))
    return folder


def answer(model, **options):
    options = {"tree": TREE, "acceptance": "exact", "max_new_tokens": 30, "ignore_eos": True} | options
    return eagle_fsd.generate(PROMPT, model, **options)


# Placed by accelerate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("away", "shares"), [
    (("model.layers.1",), False), (("model.embed_tokens",), True), (PARTS[1:3] + PARTS[5:], True)])
def test_parts_that_are_kept_on_disk(folder, away, shares):
    places = {part: "disk" if part in away else "cpu" for part in PARTS}
    here = eagle_fsd.load(folder / "target", folder / "head", tree=None)
    model = eagle_fsd.load(folder / "target", folder / "head", tree=None, device_map=places)
    if shares:
        model.draft.share_embeddings(model.target.embeddings_on(model.target.output_device))
    meta = {name for name, weight in model.target.model.named_parameters() if weight.is_meta}
    assert meta and all(name.startswith(away) for name in meta)
    assert model.target.input_device == model.target.output_device == model.draft.device == torch.device("cpu")
    assert answer(model).token_ids == answer(here).token_ids
    sampled = {"temperature": 1.0, "seed": 3}
    assert answer(model, **sampled).token_ids == answer(here, **sampled).token_ids


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_target_on_two_devices(folder):
    places = {part: 0 if part in PARTS[:2] else 1 for part in PARTS}
    here = eagle_fsd.load(folder / "target", folder / "head", tree=None, device="cuda:0", dtype="float32")
    model = eagle_fsd.load(folder / "target", folder / "head", tree=None, device_map=places, dtype="float32")
    assert model.target.input_device.index == 0 and model.draft.device.index == model.target.output_device.index == 1
    assert answer(model).token_ids == answer(here).token_ids


# Quantised ---------------------------------------------------------------------------------------------------


def torchao(name: str):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)())


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return BitsAndBytesConfig(**options)


WEIGHTS_ONLY = {
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "bitsandbytes 4": lambda: bitsandbytes(load_in_4bit=True),
    "bitsandbytes nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
ACTIVATIONS_TOO = {
    "torchao dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes 8": lambda: bitsandbytes(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder with a pair of sizes that kernels can take."""
    folder = tmp_path_factory.mktemp("wide")
    target = tiny_target(attention="sdpa", **WIDE)
    with torch.no_grad():  # so that a head can follow it
        for layer in target.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(0.05)
    target.save_pretrained(folder / "target")
    head = DraftHead(LlamaConfig(**SIZES | WIDE | {"num_hidden_layers": 1}))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        head.fc.weight[:, : WIDE["hidden_size"]] += torch.eye(WIDE["hidden_size"]) / 2
    eagle_fsd.save_head(head, folder / "head")
    return folder


@pytest.mark.parametrize("method", WEIGHTS_ONLY)
def test_quantised_weights_are_lossless(wide, tmp_path, method):
    config = WEIGHTS_ONLY[method]()
    model = eagle_fsd.load(wide / "target", wide / "head", tree=None, quantization_config=config)
    target = model.target
    assert type(target.decoder_layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert target.dtype == model.draft.dtype == torch.float32 and target.vocab_size == SIZES["vocab_size"]
    expected = target.model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=30)[0, len(PROMPT) :]
    found = answer(model)
    assert found.token_ids == expected.tolist() and found.stats.mean_accepted_length > 2
    plain = answer(EagleModel(target, None), temperature=1.0, seed=3)
    assert answer(model, temperature=1.0, seed=3).token_ids == plain.token_ids
    full = eagle_fsd.load(wide / "target", wide / "head", tree=None)
    assert target.digest() != full.target.digest()

    # Before it has run: bitsandbytes repacks 4-bit weights for the CPU then, and saves what cannot be loaded.
    stock = AutoModelForCausalLM.from_pretrained(wide / "target", dtype=torch.float32, quantization_config=config)
    stock.save_pretrained(tmp_path)
    again = eagle_fsd.load(tmp_path, wide / "head", tree=None)
    assert type(again.target.decoder_layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert answer(again).token_ids == found.token_ids


@pytest.mark.parametrize("method", WEIGHTS_ONLY | ACTIVATIONS_TOO)
def test_quantised_targets_run_in_bfloat16(wide, method):
    """Without a comparison: in bfloat16 ties are common, and rounded activations depend on the tokens beside them."""
    config = (WEIGHTS_ONLY | ACTIVATIONS_TOO)[method]()
    model = eagle_fsd.load(wide / "target", wide / "head", tree=None, dtype="bfloat16", quantization_config=config)
    assert model.target.dtype == model.draft.dtype == torch.bfloat16
    found = answer(model)
    assert len(found.token_ids) == 30 and found.stats.mean_accepted_length > 2


def test_only_quantised_targets_may_differ(monkeypatch, caplog):
    target, other = tiny_target(attention="sdpa"), tiny_target(attention="sdpa")
    stock = TargetModel.logits
    monkeypatch.setattr(TargetModel, "logits", lambda self, features: stock(self, features) * 1.01)
    with pytest.raises(ValueError, match="is not supported: its logits"):
        TargetModel(target)
    assert not caplog.text
    target.is_quantized = other.is_quantized = True
    TargetModel(target)
    assert "its logits depend on the other tokens of a forward, by up to 1.0% of the largest" in caplog.text
    monkeypatch.setattr(TargetModel, "logits", lambda self, features: stock(self, features) * 1.1)
    with pytest.raises(ValueError, match="is not supported: its logits"):
        TargetModel(other)
