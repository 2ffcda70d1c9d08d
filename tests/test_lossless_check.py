"""The lossless check passes a lossless pair, and sees what is not."""

import json
import random
import shutil

import pytest
import torch
from tiny import save_pair, tiny_pair
from transformers import AutoModelForCausalLM

from eval.lossless_check import Difference, explain, homogeneity, main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    save_pair(folder)
    lines = (json.dumps({"prompt": a + b}) for a in "abc" for b in "fg")
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def check(place, *more: str) -> int:
    return main([
        "--target", str(place / "target"), "--draft", str(place / "head"), "--questions",
        str(place / "prompts.jsonl"), "--max-new-tokens", "12", "--tree", "8,3,3", "--device", "cpu",
        "--out", str(place / "found.json"), "--sampled-tokens", "3", *more,
    ])


def test_exact_passes_and_its_samples_are_not_told_apart(place, capsys):
    assert check(place, "--samples", "60", "--sampled-prompts", "1") == 0
    assert "6 of 6 answers equal those of plain decoding" in capsys.readouterr().out
    record = json.loads((place / "found.json").read_text())
    assert record["identical"] == {"exact": 6} and len(record["sampling"]["tests"]) == 3


def test_near_ties_are_counted(place):
    """In float32 rounding moves the logits of a tiny model by far less than their gaps."""
    assert check(place, "--samples", "0", "--ties") == 0
    found = json.loads((place / "found.json").read_text())["near-ties"]
    assert found["tokens"] == 6 * 12 and found["gaps within their change"] == 0
    assert 0 < found["largest change"] < 1e-4 and found["expected other tokens in a million"] < 100
    assert list(found["gaps"].values()) == sorted(found["gaps"].values(), reverse=True)


def test_questions_of_two_files_with_the_same_ids_are_all_tried(place, tmp_path, capsys):
    (tmp_path / "more.jsonl").write_text((place / "prompts.jsonl").read_text().replace('"prompt": "', '"prompt": "h'))
    both = ("--questions", str(place / "prompts.jsonl"), str(tmp_path / "more.jsonl"))
    assert check(place, *both, "--samples", "0") == 0
    assert "12 of 12 answers equal" in capsys.readouterr().out


def test_a_checkpoint_in_16_bits_is_compared_in_float32(place, capsys):
    """As the pair computes it, by default on a CPU. In bfloat16 `model.generate` writes other tokens."""
    half = shutil.copytree(place / "target", place / "half")
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    assert check(place, "--samples", "0", "--target", str(half), "--max-new-tokens", "60") == 0
    assert "6 of 6 answers equal" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
def test_int8_is_compared_with_its_own_plain_decoding(place, monkeypatch, capsys):
    """In every way to decode, to the token: in int8 no tie is an excuse."""
    ways = ("--quantization", "int8", "--samples", "0", "--ways", "tree", "no-copies", "session", "--rows", "4")
    assert check(place, *ways) == 0
    same = json.loads((place / "found.json").read_text())["identical"]
    assert same == dict.fromkeys(("exact", "tree", "no-copies", "session", "batch of 4"), 6)
    tie = Difference("q", 0, 1, 2, gap=0.0, noise=1.0, tie=True)
    monkeypatch.setattr("eval.lossless_check.check_greedy", lambda *given: ({"exact": [tie]}, 1))
    assert check(place, *ways) == 1 and check(place, "--quantization", "int8-fast", "--samples", "0") == 0


def test_a_lossy_rule_is_found_out(place, capsys):
    assert check(place, "--settings", "fsd 0.6 head_guard=none", "--samples", "0") == 1
    assert "NOT a tie" in capsys.readouterr().out
    # Rules that only sampling tells apart: greedy lenience is exact.
    sampled = ("--settings", "lenience 3", "--samples", "90", "--sampled-prompts", "1", "--limit", "1")
    assert check(place, *sampled) == 1
    assert "1 of 1" in (said := capsys.readouterr().out) and "DIFFER significantly" in said


def test_ties_are_known_as_such():
    pair = tiny_pair()
    weights = pair.target.lm_head.weight
    prompt = [3, 1, 4, 1, 5]
    best = pair.target.model(torch.tensor([prompt])).logits[0, -1].topk(3).indices.tolist()
    found = explain(pair, prompt, [best[0], 9], [best[1], 9], "q")
    assert (found.position, found.theirs, found.ours, found.tie) == (0, best[0], best[1], False) and found.gap > 0
    with torch.no_grad():
        weights[best[2]] = weights[best[0]] * (1 + 1e-7)
    assert explain(pair, prompt, [best[0]], [best[2]], "q").tie
    half = tiny_pair()
    half.target.model.to(torch.bfloat16)
    assert not explain(half, prompt, [best[0]], [best[1]], "q").tie  # half a nat is no rounding
    shorter = explain(pair, prompt, [best[0], 7], [best[0]], "q")
    assert (shorter.position, shorter.ours, shorter.tie) == (1, None, False)


def test_homogeneity_is_calibrated_and_has_power():
    rng = random.Random(1)

    def sample(weights, count=300):
        return rng.choices(range(len(weights)), weights, k=count)

    even, other = [5, 3, 2, 1, 0.1, 0.1], [4, 4, 2, 1, 0.1, 0.1]
    same = [homogeneity(sample(even), sample(even)) for _ in range(200)]
    assert 0.02 < sum(p < 0.05 for p in same) / 200 < 0.09
    assert sum(homogeneity(sample(even), sample(other)) < 0.05 for _ in range(50)) > 20
    assert homogeneity([1] * 50, [1] * 50) == 1.0
    assert homogeneity([1] * 50, [2] * 50) < 1e-6
