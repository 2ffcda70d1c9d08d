"""Features from disk are those of the target's forward; folders that do not fit are refused."""

import shutil
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
from tiny import tiny_target

from eagle_fsd.data.documents import Documents
from eagle_fsd.models.target import TargetModel
from eagle_fsd.utils.files import only_writer
from train.features import main, write_features
from train.teacher import OfflineFeatures, OnlineFeatures, TargetEnds

LENGTHS = [5, 9, 3, 12, 4, 7, 6]


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_target("llama", attention="sdpa"))


def documents(seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of([(rng.integers(3, 32, n).tolist(), [True] * n) for n in LENGTHS])


def write(target, directory, data=None, shard_tokens=15):
    data = data or documents()
    write_features(target, data, directory, batch_tokens=30, shard_tokens=shard_tokens)
    return OfflineFeatures(directory, data)


def test_features_from_disk_are_the_targets(target, tmp_path):
    offline, online = write(target, tmp_path), OnlineFeatures(target, documents(), batch_tokens=20)
    assert len(list(tmp_path.glob("features-*"))) == 4
    for indices in (np.array([3]), np.array([6, 0, 4]), np.arange(7)):
        texts = [torch.from_numpy(documents().document(i)[0].astype(np.int64)) for i in indices]
        expected = torch.cat([target.features(text[None], use_cache=False)[0].detach() for text in texts])
        torch.testing.assert_close(online(indices), expected)
        torch.testing.assert_close(offline(indices), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_the_targets_ends_come_along_where_they_scale_cap_or_shift(family, tmp_path):
    target = TargetModel(tiny_target(family, attention="eager"))
    if target.lm_head.bias is not None:
        torch.nn.init.normal_(target.lm_head.bias)
    ends, features, tokens = write(target, tmp_path).ends(), 40 * torch.randn(3, 16), torch.arange(32)
    torch.testing.assert_close(ends.logits(features), target.logits(features))
    torch.testing.assert_close(ends.embed_tokens(tokens), target.embed_tokens(tokens))
    torch.testing.assert_close(TargetEnds.of(target, torch.device("cpu")).logits(features), target.logits(features))


def test_a_run_that_is_stopped_keeps_every_finished_shard(target, tmp_path, monkeypatch):
    forward, seen = OnlineFeatures.__call__, []

    def stopped(self, indices, advance):
        if seen and 4 in indices:
            raise KeyboardInterrupt
        seen.append(indices)
        return forward(self, indices, advance)

    with monkeypatch.context() as context:
        context.setattr(OnlineFeatures, "__call__", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(target, tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("features-*")}
    assert sorted(made) == ["features-00000.safetensors", "features-00001.safetensors"]
    with pytest.raises(ValueError, match="2 of 4 shards are missing"):
        OfflineFeatures(tmp_path, documents())
    write(target, tmp_path)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in made.items())
    with only_writer(tmp_path), pytest.raises(ValueError, match="is being written by process"):
        write(target, tmp_path)


def test_other_data_or_another_target_is_refused(target, tmp_path):
    write(target, tmp_path)
    with pytest.raises(ValueError, match="another dataset"):
        OfflineFeatures(tmp_path, documents(seed=1))
    with pytest.raises(ValueError, match=r"another target \(was Llama"):
        write(TargetModel(tiny_target("llama", seed=5, attention="sdpa")), tmp_path)
    scaled = tiny_target("llama", attention="sdpa", rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"another target \(was Llama"):  # the same weights
        write(TargetModel(scaled), tmp_path)
    with pytest.raises(ValueError, match=r"another dtype \(was torch.float32, now torch.bfloat16\)"):
        write(TargetModel(tiny_target("llama", attention="sdpa").bfloat16()), tmp_path)
    other = TargetModel(tiny_target("llama", attention="sdpa"))
    other.feature_layers = (1,)
    with pytest.raises(ValueError, match=r"another feature_size \(was 16, now 32\), layers"):
        write(other, tmp_path)
    with pytest.raises(ValueError, match=r"another dataset \(was "):
        write(target, tmp_path, documents(seed=1))
    write(target, tmp_path, shard_tokens=30)  # the shards that exist are kept
    with pytest.raises(ValueError, match="has no features"):
        OfflineFeatures(tmp_path / "nothing", documents())


def test_a_full_disk_is_noticed_before_anything_is_written(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 100))
    with pytest.raises(ValueError, match="0.00 GB free"):
        write(target, tmp_path / "full")
    assert not [path for path in (tmp_path / "full").iterdir() if not path.name.startswith(".")]


def test_the_command_writes_them(target, tmp_path, monkeypatch):
    target.model.save_pretrained(tmp_path / "target")
    documents().save(tmp_path / "data")
    monkeypatch.setattr(sys, "argv", ["x", "--target", f"{tmp_path}/target", "--data", f"{tmp_path}/data", "--out",
                                      f"{tmp_path}/out", "--layers", "1", "--dtype", "float32", "--device", "cpu"])
    assert main() == 0
    assert OfflineFeatures(tmp_path / "out", documents())(np.array([0])).shape == (5, 32)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # fused, and by the stock decoder
def test_features_in_int8_are_near_and_not_mixed_with_others(family, tmp_path, monkeypatch, capsys):
    tiny_target(family).save_pretrained(tmp_path / "target")
    documents().save(tmp_path / "data")
    words = ["x", "--target", f"{tmp_path}/target", "--data", f"{tmp_path}/data", "--dtype", "float32", "--out"]
    found = []
    for name, more in (("plain", ["--device", "cpu"]), ("int8", ["--quantization", "int8"])):
        monkeypatch.setattr(sys, "argv", [*words, f"{tmp_path}/{name}", *more])
        assert main() == 0
        offline = OfflineFeatures(tmp_path / name, documents())
        found.append(offline(np.array([1])))
        assert offline.ends().lm_head.weight.shape == (32, 16)
    near = torch.nn.functional.cosine_similarity(*found, dim=-1)
    assert near.min() > 0.95 and not torch.equal(*found)
    monkeypatch.setattr(sys, "argv", [*words, f"{tmp_path}/plain", "--quantization", "int8"])
    assert main() == 2 and "another weights (was None, now int8, rotated)" in capsys.readouterr().err
