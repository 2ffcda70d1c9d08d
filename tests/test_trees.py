"""The comparison of the chosen tree with a grid of fixed ones, and of useless heads with none, on a tiny pair."""

import json
import math

import pytest
import torch
from tiny import save_pair

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.drafting.largest import BLOCK, WORTH_IT, first_largest, largest
from eagle_fsd.drafting.latency import Latency
from eagle_fsd.drafting.logs import store_log
from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.measure.cycles import log_cycles
from eval import trees, useless_head
from eval.trees import PROMPT_KINDS, TreesArguments, main, prompts_of, run


def test_the_grid_and_its_winner(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    for name, values in (("GRID_NODES", (4, 8)), ("GRID_DEPTHS", (2, 4)), ("GRID_TOP_KS", (1, 2))):
        monkeypatch.setattr(trees, name, values)
    monkeypatch.setattr(trees, "prompts_of", lambda kind, count, seed: [
        [seed % 30, number % 30, len(kind)] for number in range(count)])
    save_pair(tmp_path)
    places = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu"]
    assert main(places) == 2 and "eagle-fsd tune" in capsys.readouterr().err
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    store_log(tmp_path / "head", log_cycles(pair, [[3, 4, 5], [6, 7]], make_rule("exact"), max_new_tokens=40))
    run(parse_options(TreesArguments, [*places, "--grid-prompts", "2", "--prompts", "3", "--max-new-tokens", "8",
                                       "--kinds", "tasks", "python", "--out", str(tmp_path / "out")]))
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    names = [row["method"] for row in found["tasks"]["grid"]]
    assert names == ["auto", "3,2,1", "4,2,2", "4,4,1", "4,4,2", "7,2,2", "5,4,1", "8,4,2"]  # as they can be filled
    assert found["tasks"]["best"] in names[1:]
    fresh = {row["method"]: row for row in found["tasks"]["confirmed"]}
    assert list(fresh) == ["auto", found["tasks"]["best"], "plain"] and fresh["auto"]["time"] == 1
    assert fresh["plain"]["tau"] == fresh["plain"]["undrafted"] == 1
    assert set(found) == {"tasks", "python"}
    assert found["tasks"]["best_is_faster_by"] == pytest.approx(1 / fresh[found["tasks"]["best"]]["time"] - 1)
    assert "## tasks: the grid" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_prompts_of_two_seeds_differ(kind):
    first, second = (prompts_of(kind, 20, seed) for seed in (5, 6))
    assert len(first) == len(second) == 20
    assert not [prompt for prompt in first if prompt in second]


def test_there_are_so_many_python_prompts_and_no_more():
    assert len(set(prompts_of("python", 50, 5) + prompts_of("python", 50, 6))) == 100
    with pytest.raises(ValueError, match="51 were asked for"):
        prompts_of("python", 51, 5)


def test_heads_that_know_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(useless_head, "prompts_of", lambda kind, count, seed: [[seed, n] for n in range(count)])
    latency = Latency({1: 1e-3, 64: 4e-3}, {1: 1e-3, 4: 2e-3}, 1e-3)
    monkeypatch.setattr("eagle_fsd.drafting.machine.measure", lambda *_: latency)
    save_pair(tmp_path)
    options = parse_options(useless_head.UselessHeadArguments, [
        "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu", "--prompts", "2",
        "--logged", "2", "--max-new-tokens", "24", "--repeats", "1", "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="eagle-fsd tune"):
        useless_head.run(options)
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    store_log(tmp_path / "head", log_cycles(pair, [[3, 4, 5], [6, 7]], make_rule("exact"), max_new_tokens=40))
    useless_head.run(options)
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(found) == ["random tokens", *(f"random head, {log}" for log in useless_head.LOGS)]
    for result in found.values():
        auto, plain = result["rows"]
        assert (auto["method"], plain["method"], plain["time"], plain["undrafted"]) == ("auto", "plain", 1, 1)
    assert "auto" in found["random head, a log of its own"]["tree"]
    assert found["random head, no log"]["tree"].startswith("auto: 16 nodes")


def test_a_randomised_head_keeps_its_shape(tmp_path):
    save_pair(tmp_path)
    (tmp_path / "random").mkdir()
    useless_head.randomise(tmp_path / "random", tmp_path / "head")
    real, made = (load_head(tmp_path / name) for name in ("head", "random"))
    assert {n: p.shape for n, p in real.named_parameters()} == {n: p.shape for n, p in made.named_parameters()}
    assert not torch.equal(real.fc.weight, made.fc.weight)


# The largest of long rows -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [BLOCK, WORTH_IT // 10 + 57, 49_152])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_the_largest_of_long_rows(size, coarse, count):
    rows = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size))
    if coarse:  # with ties
        rows = rows.bfloat16().float()
    rows[0, 0, -2:] = 9.0  # what is no whole block
    rows[0, 1, :] = -math.inf
    rows[0, 2, 7:] = -math.inf
    found = rows.gather(-1, largest(rows, count))
    assert torch.equal(found, rows.topk(count).values)
    assert largest(rows, count).sort().values.diff().ne(0).all()
    assert torch.equal(first_largest(rows), rows.argmax(-1))
    rows[1, 3, [5, size - 1]] = math.nan
    assert torch.equal(first_largest(rows), rows.argmax(-1)) and first_largest(rows)[1, 3] == 5
    assert largest(rows, count)[1, 3, 0] in (5, size - 1)
    assert torch.equal(first_largest(rows[:, ::2]), rows[:, ::2].argmax(-1))
    assert torch.equal(first_largest(rows[0, 0].expand(3, -1)), rows[0, 0].argmax().expand(3))
