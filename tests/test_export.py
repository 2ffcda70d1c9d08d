"""Heads written for other programs: their files, and what is said about a head."""

import json
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import tiny_head, tiny_pair, tiny_target

from eagle_fsd.export.inspection import inspect_head
from eagle_fsd.export.servers import LAYOUTS, export_head
from eagle_fsd.heads import checkpoint
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.heads.eagle import DraftHead

TENSORS = {
    "fc.weight": (16, 32),
    "layers.0.self_attn.q_proj.weight": (16, 16),
    "layers.0.self_attn.k_proj.weight": (8, 16),
    "layers.0.self_attn.v_proj.weight": (8, 16),
    "layers.0.self_attn.o_proj.weight": (16, 16),
    "layers.0.mlp.gate_proj.weight": (24, 16),
    "layers.0.mlp.up_proj.weight": (24, 16),
    "layers.0.mlp.down_proj.weight": (16, 24),
    "layers.0.post_attention_layernorm.weight": (16,),
}
# What each consumer gets beyond TENSORS, its file, architecture and `bias` (DESIGN section 5).
EXPECTED = {
    "eagle": ("pytorch_model.bin", "LlamaForCausalLM", False, {"embed_tokens.weight": (32, 16)}),
    "sglang": ("model.safetensors", "LlamaForCausalLMEagle", True, {"fc.bias": (16,)}),
    "vllm": ("model.safetensors", "LlamaForCausalLM", False, {}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target and its head without own embeddings, saved."""
    folder = tmp_path_factory.mktemp("export")
    model = tiny_pair()
    model.draft.share_embeddings(model.target.embed_tokens)
    model.target.model.save_pretrained(folder / "target")
    save_head(model.draft, folder / "head")
    return folder


def outputs(head: DraftHead, embeddings) -> torch.Tensor:
    if head.shares_embeddings:
        head.share_embeddings(embeddings)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 5, 16, generator=generator)
    return head.float()(features, torch.arange(5)[None], torch.arange(5)[None])


@pytest.mark.parametrize("to", LAYOUTS)
def test_each_consumer_gets_its_keys_shapes_and_config_and_we_read_it_back(place, tmp_path, to):
    file, architecture, bias, extra = EXPECTED[to]
    path = export_head(place / "head", to, tmp_path / to, target=place / "target", dtype=torch.float32)
    assert path == tmp_path / to / file
    assert sorted(p.name for p in (tmp_path / to).iterdir()) == ["config.json", file]
    state = torch.load(path, weights_only=True) if file.endswith(".bin") else load_file(path)
    assert {name: tuple(value.shape) for name, value in state.items()} == TENSORS | extra
    config = json.loads((tmp_path / to / "config.json").read_text())
    assert config["architectures"] == [architecture] and config["bias"] is bias
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1 and config["rope_theta"] == 10000.0
    assert {"hidden_size": 16, "vocab_size": 32, "num_key_value_heads": 2}.items() <= config.items()

    embeddings = tiny_target().get_input_embeddings()
    ours, back = outputs(load_head(place / "head"), embeddings), outputs(load_head(tmp_path / to), embeddings)
    torch.testing.assert_close(back, ours, rtol=0, atol=0)
    assert not inspect_head(tmp_path / to).server_problems[to]


def test_a_trained_bias_is_not_dropped_silently(place, tmp_path):
    head = load_head(place / "head")
    head.fc.bias = torch.nn.Parameter(torch.ones(16))
    save_head(head, tmp_path / "biased")
    with pytest.raises(ValueError, match="has a trained fc.bias: vllm does not compute such heads"):
        export_head(tmp_path / "biased", "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_head(tmp_path / "biased", "sglang", tmp_path / "sglang")
    assert load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"].eq(1).all()
    found = inspect_head(tmp_path / "biased")
    assert found.facts["fc bias"] == "trained"
    assert "it would not compute a trained fc.bias" in found.server_problems["vllm"]
    tiny_target(vocab_size=40).save_pretrained(tmp_path / "other")
    found = inspect_head(place / "head", tmp_path / "other")
    assert found.target_problems == ["vocabulary: head 32, target 40"]
    assert "no fc.bias" in found.server_problems["sglang"][1]


def test_what_vllm_cannot_compute_is_refused_or_said(tmp_path):
    """vLLM gives o a bias wherever attention_bias is true, and computes silu."""
    target = tiny_target()
    save_head(tiny_head(target, qkv_bias=True), tmp_path / "biased")
    export_head(tmp_path / "biased", "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["qkv_bias"] is True and config["attention_bias"] is False
    assert load_head(tmp_path / "out").layers[0].self_attn.q_proj.bias is not None
    save_head(tiny_head(target, hidden_act="gelu"), tmp_path / "gelu")
    wrong = "the activation 'gelu' in place of silu"
    with pytest.raises(ValueError, match=f"has {wrong}: vllm does not compute such heads"):
        export_head(tmp_path / "gelu", "vllm", tmp_path / "other")
    assert f"it would not compute {wrong}" in inspect_head(tmp_path / "gelu").server_problems["vllm"]


def test_embeddings_have_to_come_from_somewhere_that_fits(place, tmp_path):
    with pytest.raises(ValueError, match="pass the target"):
        export_head(place / "head", "eagle", tmp_path / "out")
    tiny_target(vocab_size=40).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"\(40, 16\), the head needs \(32, 16\)"):
        export_head(place / "head", "eagle", tmp_path / "out", target=tmp_path / "other")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_is_replaced(place, tmp_path):
    """The folder may be anybody's model."""
    before = files(place / "target")
    with pytest.raises(ValueError, match="contains config.json, and nothing is overwritten: choose another folder"):
        export_head(place / "head", "vllm", place / "target")
    assert files(place / "target") == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").touch()
    path = export_head(place / "head", "vllm", tmp_path / "empty")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # safetensors writes for the owner only


def test_embeddings_are_not_drawn_at_random(place, tmp_path):
    target = shutil.copytree(place / "target", tmp_path / "target")
    state = load_file(target / "model.safetensors")
    del state["model.embed_tokens.weight"]
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights: model.embed_tokens.weight"):
        export_head(place / "head", "eagle", tmp_path / "out", target=target)


def test_a_full_disk_is_said_and_leaves_no_half_file(place, tmp_path, monkeypatch):
    def full(state, path, **options):
        save_file(state, path, **options)
        os.truncate(path, os.path.getsize(path) // 2)
        raise SafetensorError("os error 28")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="model.safetensors cannot be written: os error 28"):
        export_head(place / "head", "vllm", tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
