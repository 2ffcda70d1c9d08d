"""The demo, on a tiny pair: what it shows, the table, and the sentence at its end."""

import json
import re

import pytest
import torch
from tiny import save_pair, tiny_chat_pair

from eagle_fsd.cli import main
from eagle_fsd.cli.demo import BASELINE, DEMO_PROMPTS, conclusion, is_tie, print_table
from eagle_fsd.data.bundled import small_pair
from eagle_fsd.engine.receipts import Output, Stats
from eagle_fsd.measure.methods import Answer


def answer(seconds, tokens, lengths=()):
    output = Output(tokens, "eos", 0, Stats(accepted_lengths=list(lengths)), []) if lengths else None
    return Answer(seconds, tokens, "", output)


@pytest.fixture
def answers():
    """Two prompts of four tokens, of which fsd answers one otherwise."""
    return {BASELINE: [answer(2.0, [1, 2, 3, 4]), answer(2.0, [5, 6, 7, 8])],
            "exact": [answer(1.0, [1, 2, 3, 4], [1, 1]), answer(1.0, [5, 6, 7, 8], [1, 1])],
            "fsd 0.3": [answer(0.5, [1, 2, 3, 4], [3]), answer(0.5, [5, 6, 7, 9], [3])]}


def test_the_table_and_the_sentence(answers, capsys):
    print_table(answers)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[BASELINE, "2.0", "1.00x", "1.00", "2.00", "2", "of", "2"],
                    ["exact", "4.0", "2.00x", "2.00", "1.00", "2", "of", "2"],
                    ["fsd", "0.3", "8.0", "4.00x", "4.00", "0.50", "1", "of", "2"]]
    assert conclusion(answers, "fsd 0.3") == (
        "Seen here: exact wrote the same text as model.generate, 2.0 times as fast, with 2.0 tokens per step; fsd 0.3 "
        "was 4.0 times as fast and wrote another text in 1 of 2 answers.")


def test_the_sentence_says_what_did_not_come_true(answers):
    slow = {**answers, "exact": [answer(4.0, [1, 2, 3, 9], [1, 1]), answer(4.0, [5, 6, 7, 8], [1, 1])]}
    text = conclusion(slow, "fsd 0.3")
    assert "0.5 times as fast, so that drafting does not pay here" in text
    assert "the same text as model.generate in 1 of 2 answers, 0.5 times" in text
    assert "in 1 of 2 answers (and in 1 more up to a tie" in conclusion(slow, "fsd 0.3", ties=1)


def test_a_tie_is_told_from_an_error():
    """Logits of two tokens are made equal, then far apart."""
    model = tiny_chat_pair()
    ours, theirs = answer(1.0, [5, 6, 7]), answer(1.0, [5, 6, 8])
    with torch.no_grad():
        model.target.lm_head.weight[8] = model.target.lm_head.weight[7]
    assert is_tie(model, [9, 10], ours, theirs) and not is_tie(model, [9, 10], ours, ours)
    with torch.no_grad():
        model.target.lm_head.weight[8] = -model.target.lm_head.weight[7]
    assert not is_tie(model, [9, 10], ours, theirs)


def test_the_demo(tmp_path, capsys):
    save_pair(tmp_path, tiny_chat_pair(max_position_embeddings=1024))
    assert main(["demo", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu",
                 "--max-new-tokens", "8", "--timed-tokens", "6", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    entries = json.loads(DEMO_PROMPTS.read_text())["usual"]
    assert [entry["kind"] for entry in entries] == ["question", "rewrite", "function", "follow-up"]
    for entry in entries:
        for turn in entry["prompt"]:
            assert f"[{entry['kind']}] {turn['content']}" in shown
    figures = r"\[8 tokens, [0-9]+ tokens/s, [0-9.]+ tokens per step\]"
    for name in ("plain", "exact", "fsd 0.3"):
        assert len(re.findall(rf"^{re.escape(name)}: .*\n{figures}$", shown, re.MULTILINE)) == 4
    assert len(re.findall(r"of 4$", shown, re.MULTILINE)) == 3 and "tau" not in shown
    assert shown.splitlines()[-1].startswith("Seen here: exact wrote the same text as model.generate, ")


def test_the_small_pair_is_asked_what_it_can_do(capsys, monkeypatch):
    asked = json.loads(DEMO_PROMPTS.read_text())["small"]
    target, head = small_pair()
    assert main(["demo", "--target", target, "--draft", head, "--max-new-tokens", "4", "--timed-tokens", "2",
                 "--repeats", "1", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert all(f"[{entry['kind']}]" in shown for entry in asked) and "small-target" in shown
