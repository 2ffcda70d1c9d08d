"""The demo, on a tiny pair: what it shows, and what it says of each answer."""

import re

import pytest
from tiny import save_pair, tiny_chat_pair

from eagle_fsd.cli import main
from eagle_fsd.cli.demo import PROMPTS, remarks
from eagle_fsd.engine.output import Output, Receipt, Stats
from eagle_fsd.measure.methods import Answer


def answer(seconds, tokens, source="exact", logprob=-0.7):
    receipts = [Receipt(source, None, logprob, 0.0) for _ in tokens]
    return Answer(seconds, tokens, "", Output(tokens, "eos", 0, Stats(accepted_lengths=[1, 1]), receipts))


def test_equal_texts_and_gains():
    seen = {"plain": answer(2.0, [5, 6, 7, 8])}
    assert remarks("plain", seen, "float32") == "4 tokens, 2 tokens/s, 2.0 tokens per step"
    seen["exact"] = answer(1.0, [5, 6, 7, 8])
    assert remarks("exact", seen, "float32") == "4 tokens, 4 tokens/s, 2.0 tokens per step; the same text as plain"


def test_what_a_fuzzy_answer_lost():
    seen = {"plain": answer(2.0, [5, 6, 7, 8]), "exact": answer(1.0, [5, 6, 7, 8]),
            "fsd": answer(2.0, [5, 9], "fuzzy")}
    said = remarks("fsd", seen, "float32").split("; ")
    assert said[1:] == ["2 fuzzy tokens", "another text than plain after 1 tokens", "2 tokens shorter",
                        "not faster than plain", "not faster than exact"]


@pytest.mark.parametrize(("logprob", "tied"), [(-0.72, True), (-3.0, False)])
def test_a_tie_is_told_from_an_error(logprob, tied):
    seen = {"plain": answer(2.0, [5, 6, 7]), "exact": answer(1.0, [5, 6, 8], logprob=logprob)}
    said = remarks("exact", seen, "float32")
    assert "after 2 tokens; there plain's token has probability 49.7% and its own" in said
    assert said.endswith(", a tie in float32") == tied


def test_the_demo(tmp_path, capsys):
    save_pair(tmp_path, tiny_chat_pair(max_position_embeddings=1024))
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu"]
    assert main(["demo", *pair, "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    for kind, turns in PROMPTS.items():
        assert all(f"[{kind}] {turn}" in shown for turn in turns)
    figures = r"\[8 tokens, [0-9]+ tokens/s, [0-9.]+ tokens per step"
    for name in ("plain", "exact", "fsd 0.5"):
        assert len(re.findall(rf"^{re.escape(name)}: .*\n{figures}.*\]$", shown, re.MULTILINE)) == 4
    table = [line.split() for line in shown.splitlines()[-4:]]
    assert [row[0] for row in table] == ["model.generate", "plain", "exact", "fsd"]
    assert all(row[-3:] == ["4", "of", "4"] for row in table[:3])  # float32: token for token
