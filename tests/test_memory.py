"""Peak memory of a long run, and prompts that are read in parts."""

import json

import pytest
import torch
from tiny import FAMILIES, PROMPT, save_pair, tiny_head, tiny_pair, tiny_target

import eagle_fsd
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.drafting.growth import extend_draft
from eagle_fsd.models import target as target_module
from eagle_fsd.models.target import TargetModel
from eval import memory
from eval.memory import ALLOWED, Peak, bytes_of, peak_of
from eval.shapes import SHAPES, build_pair

CPU = torch.device("cpu")
TREE = TreeConfig(8, 3, 2)


@pytest.fixture
def parts_of_five(monkeypatch):
    monkeypatch.setitem(target_module.PREFILL, "cpu", 5)


def test_peak_by_hand():
    def work():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        return second.clone()

    peak, allocated = peak_of(work, CPU)
    assert peak == 4 * 1500 and allocated == (4000, 2000, 2000)
    assert Peak(60, (30, 10), 110, (30, 10, 10, 5)).over == pytest.approx(0.1)
    assert Peak(60, (30, 10), 110, (30, 10, 10, 5)).cache_allocations == [1, 2]


def test_shared_weights_count_once():
    pair = tiny_pair()
    target, head = pair.target.model, pair.draft
    assert bytes_of([target, target]) == bytes_of([target])
    assert bytes_of([target, head]) == bytes_of([target]) + bytes_of([head])
    head.embed_tokens = target.get_input_embeddings()
    assert bytes_of([target, head]) == bytes_of([target]) + bytes_of([head]) - head.embed_tokens.weight.nbytes


def test_a_long_run_needs_little_more_than_weights_and_caches(monkeypatch):
    """An eighth of 4,096 tokens, read in an eighth of the usual parts."""
    monkeypatch.setitem(target_module.PREFILL, "cpu", 32)
    found = memory.measure_peak(build_pair(SHAPES["demo"], torch.float32, CPU), 512, 8, TreeConfig(16, 6, 3))
    assert 0 < found.over < ALLOWED
    assert found.cache_allocations == [1, 1]
    room = 512 + 16  # positions of the target's cache: prompt, new tokens and a tree
    assert found.caches[0] == 24 * 2 * 2 * 32 * room * 4


def test_command(tmp_path, capsys):
    save_pair(tmp_path)
    status = memory.main([
        "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu",
        "--context", "64", "--new-tokens", "4", "--tree", "4,2,2", "--out", str(tmp_path / "out")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert status == (2 if record["over"] > ALLOWED else 0)
    assert record["bytes"]["peak"] > record["bytes"]["weights"] and "| peak " in (tmp_path / "out.md").read_text()
    with pytest.raises(ValueError, match="no room for a prompt"):
        memory.measure_peak(tiny_pair(), 5, 4, TREE)


@pytest.mark.cuda
def test_on_cuda():
    found = memory.measure_peak(build_pair(SHAPES["tiny"], torch.bfloat16, torch.device("cuda")), 512, 8, TREE)
    assert found.peak > found.weights and found.cache_allocations is None


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prompt_in_parts_gives_the_same_features(family, monkeypatch):
    target = TargetModel(tiny_target(family), check=False)
    tokens = torch.tensor([PROMPT * 2])
    whole = target.prefill(tokens, target.new_cache(30))
    monkeypatch.setitem(target_module.PREFILL, "cpu", 5)
    cache = target.new_cache(30)
    torch.testing.assert_close(target.prefill(tokens, cache), whole, rtol=1e-4, atol=1e-4)
    assert cache.length == 24


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 11, 24])
@torch.inference_mode()
def test_the_draft_reads_in_parts(length, parts_of_five):
    head = tiny_head(tiny_target())
    features, tokens = torch.randn(1, length, 16), torch.tensor([(PROMPT * 2)[:length]])
    cache = head.new_cache(30)
    got = extend_draft(head, list(features), list(tokens), cache)
    whole = head(features, tokens, torch.arange(length)[None])[:, -1:]
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)
    assert cache.length == length


@torch.inference_mode()
def test_ragged_rows_are_read_in_parts(parts_of_five):
    head = tiny_head(tiny_target())
    lengths = (1, 13, 6)
    features = [torch.randn(length, 16) for length in lengths]
    tokens = [torch.tensor((PROMPT * 2)[:length]) for length in lengths]
    cache = head.new_cache(30, 3)
    got = extend_draft(head, features, tokens, cache)
    for row, length in enumerate(lengths):
        alone = head(features[row][None], tokens[row][None], torch.arange(length)[None])[0, -1:]
        torch.testing.assert_close(got[row], alone, rtol=1e-4, atol=1e-5)
    assert cache.lengths == list(lengths)


def test_parts_do_not_change_the_text(parts_of_five):
    model = tiny_pair()
    wanted = model.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)[0, 12:].tolist()
    assert eagle_fsd.generate(PROMPT, model, max_new_tokens=20, tree=TREE, acceptance="exact").token_ids == wanted


def test_keys_that_depend_on_the_length_are_made_at_once():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not TargetModel(tiny_target(rope_parameters=rope), check=False).reads_in_parts
    assert TargetModel(tiny_target(), check=False).reads_in_parts
