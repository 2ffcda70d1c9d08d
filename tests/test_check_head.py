"""What `train.check_head` says of heads and datasets: each fault is found, and named."""

import re

import pytest
import torch
from test_prepare_data import chat, rows
from tiny import tiny_trainable_pair

import eagle_fsd
from eagle_fsd.heads.checkpoint import save_head
from train.check_head import GOOD, Findings, examine, main, verdicts
from train.encoding import encode_dataset


def findings(**changes):
    agreed = 100 * torch.tensor(GOOD)
    fine = {"tokens": 100, "own": 98, "surprise": 40.0, "entropy": 90.0, "covered": 99, "agreed": agreed,
            "unshifted": 20, "lengths": 97.0, "documents": 9, "headed": 9}
    return Findings(**fine | changes)


@pytest.mark.parametrize(("changes", "said"), [
    ({"headed": 7}, "2 of 9 documents do not show the target's chat template"),
    ({"surprise": 120.0}, r"did not write these answers \(it gives their tokens 1.20 nats"),
    ({"unshifted": 80}, "off by one"),
    ({"lengths": 300.0}, "3.00 times as long"),
    ({"covered": 80}, "can name 80.0% of the tokens"),
    ({"agreed": 60 * torch.tensor(GOOD)}, r"places \[1, 2, 3, 4, 5\]: more own text"),
    ({"agreed": torch.tensor([68.0, 59, 54, 30, 30])}, r"places \[4, 5\]: aligned steps"),
])
def test_each_fault_is_named(changes, said):
    assert verdicts(findings(), False) == []
    (verdict,) = verdicts(findings(**changes), False)
    assert re.search(said, verdict)


@pytest.fixture(scope="module")
def model():
    return tiny_trainable_pair()


def test_what_is_counted(model):
    """Its own greedy text is its most likely, another's is not; agreement is that of drafts that `generate` accepts."""
    words, header = ("ab", "cd", "ef"), model.tokenizer("<bot>", add_special_tokens=False)["input_ids"]
    own = [eagle_fsd.generate(chat(word), model, max_new_tokens=24, stop_token_ids=[]).text for word in words]
    for texts, share in ((own, 1.0), (["zyx wvu"] * 3, 0.0)):
        chats = [chat(word, text) for word, text in zip(words, texts, strict=True)]
        documents, _ = encode_dataset(rows(*chats), model.tokenizer, max_length=64)
        found = examine(model.draft, model.target, documents, range(3), header)
        assert (found.documents, found.headed, found.covered) == (3, 3, found.tokens)
        assert abs(found.own / found.tokens - share) < 0.2
        assert (found.surprise > found.entropy) == (share == 0.0)
        assert found.agreed.shape == (5,) and 0 <= found.agreed.min() and found.agreed.max() <= found.tokens


def test_the_command(model, tmp_path, capsys):
    model.target.model.save_pretrained(tmp_path / "target")
    model.tokenizer.save_pretrained(tmp_path / "target")
    save_head(model.draft, tmp_path / "head")
    documents, _ = encode_dataset(rows(chat("hi", "yes")), model.tokenizer, max_length=24)
    documents.save(tmp_path / "data")
    command = [word for flag, folder in (("--target", "target"), ("--draft", "head"), ("--data", "data"))
               for word in (flag, str(tmp_path / folder))]
    assert main(command) == 0
    assert "4 in 1 documents" in (said := capsys.readouterr().out) and "\n- " in said
    assert main([*command, "--documents", "0"]) == 2
    assert "documents must be at least 1, got 0" in capsys.readouterr().err
