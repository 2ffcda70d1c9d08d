"""Features from disk are those of the target's forward; folders that do not fit are refused."""

import json
import logging
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from tiny import tiny_target

from eagle_fsd.data import progress
from eagle_fsd.data.documents import Documents
from eagle_fsd.data.files import only_writer
from eagle_fsd.models.target import TargetModel
from train import features as module
from train.core.teacher import OfflineFeatures, OnlineFeatures, TargetEnds
from train.features import Arguments, run, shard_starts, write_features

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


def made_shards(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("features-*"))


def test_a_run_that_is_stopped_keeps_every_finished_shard(target, tmp_path, monkeypatch):
    forward, seen = OnlineFeatures.__call__, []

    def stopped(self, indices, tokens):
        if seen and 4 in indices:
            raise KeyboardInterrupt
        seen.append(indices)
        return forward(self, indices, tokens)

    with monkeypatch.context() as context:
        context.setattr(OnlineFeatures, "__call__", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(target, tmp_path / "cut")
    assert made_shards(tmp_path / "cut") == ["features-00000.safetensors", "features-00001.safetensors"]
    tokens = torch.zeros(7, 12, dtype=torch.long)
    whole, cut = write(target, tmp_path / "whole"), write(target, tmp_path / "cut")
    assert torch.equal(cut(np.arange(7), tokens), whole(np.arange(7), tokens))


def test_a_folder_keeps_to_the_shards_that_it_was_begun_with(target, tmp_path):
    """Among them those of 1 GiB that older versions wrote: one for all seven documents here."""
    indices, tokens = np.arange(7), torch.zeros(7, 12, dtype=torch.long)
    wanted = write(target, tmp_path / "whole", shard_tokens=15)(indices, tokens)
    for begun, other, starts in ((1 << 24, 15, [0]), (15, 1 << 24, [0, 2, 4, 6])):
        folder = tmp_path / str(begun)
        write(target, folder, shard_tokens=begun)
        before = {path: path.stat().st_mtime_ns for path in folder.glob("features-*")}
        if len(before) > 1:
            (folder / "features-00001.safetensors").unlink()
        again = write(target, folder, shard_tokens=other)
        assert json.loads((folder / "index.json").read_text())["first_documents"] == starts
        assert len(made_shards(folder)) == len(starts)
        torch.testing.assert_close(again(indices, tokens), wanted)  # other batches round otherwise
        kept = [path for path in before if path.name != "features-00001.safetensors"]
        assert all(path.stat().st_mtime_ns == before[path] for path in kept)


def test_a_folder_without_shards_takes_the_new_size(target, tmp_path):
    write(target, tmp_path, shard_tokens=1 << 24)
    (tmp_path / "features-00000.safetensors").unlink()
    write(target, tmp_path, shard_tokens=15)
    assert len(made_shards(tmp_path)) == 4


def test_without_a_terminal_the_log_says_how_far_it_is(target, tmp_path, monkeypatch, caplog):
    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "tokens" in record.getMessage()]
        caplog.clear()
        return [line.partition(" tokens, ")[0] for line in found]

    caplog.set_level(logging.INFO, progress.__name__)
    write(target, tmp_path / "quick")
    assert lines() == []  # not before half a minute is over
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    write(target, tmp_path / "slow")
    assert lines() == [f"features: {done} of 46" for done in (14, 29, 40, 46)]
    (tmp_path / "slow" / "features-00001.safetensors").unlink()
    write(target, tmp_path / "slow")
    assert lines() == ["features: 46 of 46"]  # what was there counts


def test_a_folder_that_another_process_writes_is_left_alone(target, tmp_path):
    with only_writer(tmp_path), pytest.raises(ValueError, match="is being written by process"):
        write(target, tmp_path)
    assert made_shards(tmp_path) == []


def test_the_command_checks_its_options_first(tmp_path):
    for option in ("batch_tokens", "shard_tokens"):
        with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} must be at least 1, got 0"):
            run(Arguments(target="nowhere", data=tmp_path, out=tmp_path / "out", **{option: 0}))


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
    assert not [path for path in (tmp_path / "full").iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize(
    ("per_shard", "starts"), [(100, [0]), (46, [0]), (45, [0, 6]), (15, [0, 2, 4, 6]), (1, list(range(7)))]
)
def test_shards_hold_whole_documents(per_shard, starts):
    assert shard_starts(np.cumsum(LENGTHS), per_shard) == starts
