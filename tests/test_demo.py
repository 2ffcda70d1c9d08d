"""The demo, on a tiny pair: what it shows, and what it says of each answer."""

import re

import pytest
import torch
from tiny import save_pair, tiny_chat_pair

from eagle_fsd.cli import main
from eagle_fsd.cli.demo import PROMPTS, summarise
from eagle_fsd.decoding.output import Output, Receipt, Stats
from eagle_fsd.measure.methods import Answer


def answer(seconds, tokens, source="exact"):
    receipts = [Receipt(token, source, None, -0.7, 0.0) for token in tokens]
    return Answer(seconds, tokens, "", Output(tokens, "eos", 0, Stats(accepted_lengths=[1, 1]), receipts))


@pytest.mark.parametrize(("given", "numbers", "same", "tie"), [
    (answer(1.0, [5, 6, 7, 8]), ["4", "4", "2.0"], True, False),  # tokens, tokens/s, tokens per step
    (answer(2.0, [5, 9], "fuzzy"), ["2", "1", "2.0", "1", "2", "2"], False, False),  # where it differs, fuzzy, shorter
    (answer(1.0, [5, 6, 7, 9]), ["4", "4", "2.0", "3"], False, True),
    (Answer(2.0, [5, 6], ""), ["2", "1"], False, False),  # of the model itself
])
def test_what_is_said_of_an_answer(given, numbers, same, tie):
    baseline = Answer(2.0, [5, 6, 7, 8], "")
    said = summarise(given, baseline)
    assert re.findall(r"[\d.]+", said) == numbers and ("same text" in said) == same
    tied = summarise(given, baseline, half_precision=True)
    assert ("tie" in tied, tied.startswith(said)) == (tie, True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_demo(stored, tmp_path, capsys):
    pair = tiny_chat_pair(max_position_embeddings=1024)
    pair.target.model.to(stored)
    save_pair(tmp_path, pair)
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--device", "cpu"]
    assert main(["demo", *pair, "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    for kind, turns in PROMPTS.items():
        assert all(f"[{kind}] {turn}" in shown for turn in turns)
    written = [re.findall(rf"^{re.escape(name)}: (.*)\n\[8 tokens, [0-9]+ tokens/s.*\]$", shown, re.MULTILINE)
               for name in ("model.generate", "exact", "fsd 0.5")]
    assert [len(texts) for texts in written] == [4, 4, 4] and written[0] == written[1]
    table = [line.split() for line in shown.splitlines()[-3:]]
    assert [row[0] for row in table] == ["model.generate", "exact", "fsd"]
    assert all(row[-3:] == ["4", "of", "4"] for row in table[:2])  # token for token
    assert "computed in float32" in shown
