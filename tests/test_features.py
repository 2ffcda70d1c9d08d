"""Features from disk are those of the target's forward; folders that do not fit are refused."""

import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from tiny import tiny_target

from eagle_fsd.data.documents import Documents
from eagle_fsd.models.target import TargetModel
from train import features as module
from train.features import OfflineFeatures, OnlineFeatures, TargetEnds, shard_starts, write_features

LENGTHS = [5, 9, 3, 12, 4, 7, 6]


@pytest.fixture(scope="module")
def target():
    return TargetModel(tiny_target("llama", attention="sdpa"))


def documents(seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of([(rng.integers(3, 32, n).tolist(), [True] * n) for n in LENGTHS])


def write(target, directory, data=None, shard_tokens=15):
    data = data or documents()
    write_features(target, data, directory, batch_tokens=30, shard_bytes=shard_tokens * 16 * 4)
    return OfflineFeatures(directory, data)


def test_features_from_disk_are_the_targets(target, tmp_path):
    offline, online = write(target, tmp_path), OnlineFeatures(target)
    assert len(list(tmp_path.glob("features-*"))) == 4
    for indices in (np.array([3]), np.array([6, 0, 4]), np.arange(7)):
        tokens, _ = (torch.from_numpy(a) for a in documents().collate(indices))
        inside = torch.arange(tokens.shape[1]) < torch.tensor([LENGTHS[i] for i in indices])[:, None]
        torch.testing.assert_close(offline(indices, tokens)[inside], online(indices, tokens)[inside])


def test_the_targets_ends_come_along(target, tmp_path):
    ends, own = write(target, tmp_path).ends(), TargetEnds.of(target, torch.device("cpu"))
    features = torch.randn(3, 16)
    torch.testing.assert_close(ends.logits(features), target.logits(features))
    torch.testing.assert_close(own.logits(features), target.logits(features))
    torch.testing.assert_close(ends.embed_tokens(torch.arange(32)), target.embed_tokens(torch.arange(32)))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "phi"])
def test_the_ends_of_targets_that_scale_cap_or_shift(family, tmp_path):
    target = TargetModel(tiny_target(family, attention="eager"))
    if target.lm_head.bias is not None:
        torch.nn.init.normal_(target.lm_head.bias)
    ends, features, tokens = write(target, tmp_path).ends(), 40 * torch.randn(3, 16), torch.arange(32)
    torch.testing.assert_close(ends.logits(features), target.logits(features))
    torch.testing.assert_close(ends.embed_tokens(tokens), target.embed_tokens(tokens))


def test_an_interrupted_run_continues_with_the_missing_shards(target, tmp_path, monkeypatch):
    whole = write(target, tmp_path / "whole")
    write(target, tmp_path / "cut")
    (tmp_path / "cut" / "features-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="1 of 4 shards are missing"):
        OfflineFeatures(tmp_path / "cut", documents())
    made = []
    shard_features = module.shard_features
    monkeypatch.setattr(module, "shard_features", lambda *args: made.append(args[2].tolist()) or shard_features(*args))
    cut = write(target, tmp_path / "cut")
    assert made == [[4, 5]]
    tokens = torch.zeros(7, 12, dtype=torch.long)
    assert torch.equal(cut(np.arange(7), tokens), whole(np.arange(7), tokens))


def test_other_data_or_another_target_is_refused(target, tmp_path):
    write(target, tmp_path)
    with pytest.raises(ValueError, match="another dataset"):
        OfflineFeatures(tmp_path, documents(seed=1))
    with pytest.raises(ValueError, match="another dataset, target or dtype"):
        write(TargetModel(tiny_target("llama", seed=5, attention="sdpa")), tmp_path)
    with pytest.raises(ValueError, match="has no features"):
        OfflineFeatures(tmp_path / "nothing", documents())


def test_a_full_disk_is_noticed_before_anything_is_written(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 100))
    with pytest.raises(ValueError, match="0.00 GB free"):
        write(target, tmp_path / "full")
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize(
    ("per_shard", "starts"), [(100, [0]), (46, [0]), (45, [0, 6]), (15, [0, 2, 4, 6]), (1, list(range(7)))]
)
def test_shards_hold_whole_documents(per_shard, starts):
    assert shard_starts(np.cumsum(LENGTHS), per_shard) == starts
