"""Heads written for other programs: their files, and what is said about a head."""

import errno
import json
import os
import pathlib
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import tiny_pair, tiny_target

from eagle_fsd.heads import checkpoint
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.export import LAYOUTS, export_head
from eagle_fsd.heads.inspection import inspect_head

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
    with pytest.raises(ValueError, match="trained fc.bias, which vllm would drop"):
        export_head(tmp_path / "biased", "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_head(tmp_path / "biased", "sglang", tmp_path / "sglang")
    assert load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"].eq(1).all()
    found = inspect_head(tmp_path / "biased")
    assert found.facts["fc bias"] == "trained"
    assert any("dropped" in problem for problem in found.server_problems["vllm"])


def test_embeddings_have_to_come_from_somewhere_that_fits(place, tmp_path):
    with pytest.raises(ValueError, match="give the target"):
        export_head(place / "head", "eagle", tmp_path / "out")
    tiny_target(vocab_size=40).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"\(40, 16\), the head needs \(32, 16\)"):
        export_head(place / "head", "eagle", tmp_path / "out", target=tmp_path / "other")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_is_replaced(place, tmp_path):
    """The folder may be anybody's model."""
    for which in ("target", "head"):
        before = files(place / which)
        for to in LAYOUTS:
            with pytest.raises(ValueError, match="holds config.json, and nothing is replaced: choose another folder"):
                export_head(place / "head", to, place / which, target=place / "target")
        assert files(place / which) == before
    (tmp_path / "empty").mkdir()
    export_head(place / "head", "vllm", tmp_path / "empty")
    with pytest.raises(ValueError, match="has no name"):
        export_head(place / "head", "vllm", "")


def test_embeddings_are_not_drawn_at_random(place, tmp_path):
    target = shutil.copytree(place / "target", tmp_path / "target")
    state = load_file(target / "model.safetensors")
    del state["model.embed_tokens.weight"]
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    for source in (target, place / "head"):
        with pytest.raises(ValueError, match="has no token embeddings: its files lack .*embed_tokens.weight"):
            export_head(place / "head", "eagle", tmp_path / "out", target=source)
    (target / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be loaded as a causal LM"):
        export_head(place / "head", "eagle", tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk(function):
    """Writes half of what it should."""
    def write(state, path, **options):
        function(state, path, **options)
        os.truncate(path, os.path.getsize(path) // 2)
        raise RuntimeError("unexpected pos 576 vs 534") if function is torch.save else SafetensorError("os error 28")

    return write


@pytest.mark.parametrize("to", ["eagle", "vllm"])
def test_a_full_disk_leaves_nothing(place, tmp_path, to, monkeypatch):
    for broken in ((checkpoint, "save_file", full_disk(save_file)), (torch, "save", full_disk(torch.save)),
                   (pathlib.Path, "mkdir", no_space)):
        if broken[1] == ("save" if to == "vllm" else "save_file"):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(*broken)
            for out in ("new", "deep/new"):
                with pytest.raises(OSError, match=f"{tmp_path / out} cannot be written"):
                    export_head(place / "head", to, tmp_path / out, target=place / "target")
    assert not list(tmp_path.iterdir())


def test_a_head_can_be_read_by_all_who_can_read_other_new_files(place, tmp_path):
    (tmp_path / "other").touch()
    for to in LAYOUTS:
        export_head(place / "head", to, tmp_path / to, target=place / "target")
        modes = {path.stat().st_mode for path in (tmp_path / to).iterdir()}
        assert modes == {(tmp_path / "other").stat().st_mode}


def test_inspection_says_what_a_head_fits(place, tmp_path):
    tiny_target(vocab_size=40).save_pretrained(tmp_path / "other")
    found = inspect_head(place / "head", place / "target")
    assert found.facts["kind"].startswith("EAGLE-1/2") and found.target_problems == []
    assert found.server_problems["sglang"] and "no fc.bias" in found.server_problems["sglang"][1]
    assert inspect_head(place / "head", tmp_path / "other").target_problems == ["vocabulary: head 32, target 40"]
