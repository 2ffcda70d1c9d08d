"""The comparison of the chosen tree with a grid of fixed ones, on a tiny pair."""

import json

import pytest
from tiny import save_pair

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.autotree import store_log
from eagle_fsd.tune import log_cycles
from eval import trees
from eval.trees import KINDS, build_parser, main, prompts_of, run
from train.corpus import python_prefixes


def test_the_grid_its_winner_and_random_tokens(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    for name, values in (("NODES", (4, 8)), ("DEPTHS", (2, 4)), ("TOP_KS", (1, 2))):
        monkeypatch.setattr(trees, name, values)
    monkeypatch.setattr(trees, "prompts_of", lambda kind, count, seed, vocabulary: [
        [seed % 30, number % 30, len(kind)] for number in range(count)])
    save_pair(tmp_path)
    places = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["eval.trees", *places])
    assert main() == 2 and "eagle-fsd tune" in capsys.readouterr().err
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    store_log(tmp_path / "head", log_cycles(pair, [[3, 4, 5], [6, 7]], make_rule("exact"), max_new_tokens=40))
    run(build_parser().parse_args([*places, "--grid-prompts", "2", "--prompts", "3", "--max-new-tokens", "8",
                                   "--kinds", "tasks", "random", "--out", str(tmp_path / "out")]))
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    names = [row["method"] for row in found["tasks"]["grid"]]
    assert names == ["auto", "4,2,2", "4,4,1", "4,4,2", "8,4,2"]  # those that can be filled
    assert found["tasks"]["best"] in names[1:]
    fresh = {row["method"]: row for row in found["tasks"]["confirmed"]}
    assert list(fresh) == ["auto", found["tasks"]["best"], "plain"] and fresh["auto"]["time"] == 1
    assert fresh["plain"]["tau"] == fresh["plain"]["undrafted"] == 1
    assert [row["method"] for row in found["random"]["confirmed"]] == ["auto", "plain"]
    assert found["random"]["confirmed"][1]["time"] == pytest.approx(1)
    assert "## tasks: the grid" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_two_seeds_differ(kind):
    first, second = (prompts_of(kind, 20, seed, 50) for seed in (5, 6))
    assert len(first) == len(second) == 20
    assert not [prompt for prompt in first if prompt in second]


def test_python_prompts_are_not_those_of_the_log():
    logged = python_prefixes(300)[-6:]
    prompts = prompts_of("python", 50, 5, 50) + prompts_of("python", 50, 6, 50)
    assert len(prompts) == 100 and not set(prompts) & set(logged)
    with pytest.raises(ValueError, match="51 were asked for"):
        prompts_of("python", 51, 5, 50)
