"""The benchmark by batch size and prompt length, on a tiny random pair."""

import json
import re
import sys

import pytest
from tiny import PROMPT

import eagle_fsd
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.measure.methods import hf_generate
from eval import batches, benchmark
from eval.batches import batch_engine, padded_generate, until_end

RAGGED = [PROMPT, PROMPT[:3], PROMPT[2:9]]
TREE = eagle_fsd.TreeConfig(8, 3, 2)


def test_padded_rows_are_those_alone(model):
    answered = padded_generate(model)(RAGGED, 12)
    assert answered.rows == [hf_generate(model)(prompt, 12).token_ids for prompt in RAGGED]
    assert answered.outputs is None


def test_a_row_counts_up_to_its_end():
    assert until_end([5, 2, 7, 2], frozenset([2])) == [5, 2]
    assert until_end([5, 7], frozenset([2])) == [5, 7] and until_end([], frozenset()) == []


def test_our_engine_gives_the_same_rows(model):
    wanted = padded_generate(model)(RAGGED, 12).rows
    assert batch_engine(model, plain=True, acceptance="exact")(RAGGED, 12).rows == wanted
    assert batch_engine(model, acceptance="exact", tree=TREE)(RAGGED, 12).rows == wanted


def test_table_by_size(model, monkeypatch):
    monkeypatch.setattr(batches, "prompts_of_length",
                        lambda model, length, count, seed: [PROMPT[: 3 + n] for n in range(count)])
    rows = batches.by_size(model, batches.batch_methods(model, TREE, [0.3]), [1, 2], [None, 8], prompts=4,
                           max_new_tokens=8, repeats=1, seed=0)
    assert [(row["prompt_length"], row["batch_size"]) for row in rows[::4]] == [(None, 1), (None, 2), (8, 1), (8, 2)]
    by_method = {row["method"]: row for row in rows[4:8]}
    assert list(by_method) == ["model.generate", "plain", "exact", "fsd 0.3"]
    assert by_method["model.generate"]["speedup"] == by_method["plain"]["speedup_over_plain"] == 1
    assert by_method["exact"]["tau"] > 1 and by_method["plain"]["tau"] == 1
    assert by_method["exact"]["same_as_plain"] == by_method["model.generate"]["same_as_plain"] == 1
    assert batches.batch_table(rows).count("\n") == 1 + len(rows)
    with pytest.raises(ValueError, match="3 does not"):
        batches.by_size(model, {}, [3], [None], prompts=4, max_new_tokens=8, repeats=1, seed=0)


def test_prompts_have_the_asked_length(model, monkeypatch):
    monkeypatch.setattr(batches, "python_texts", lambda: iter(["abcdef", "ghijklmnopqrs"]))
    pieces = batches.prompts_of_length(model, 5, 4, 0)
    assert [len(piece) for piece in pieces] == [5] * 4
    assert sum(pieces, [])[:7] == model.tokenizer("abcdef")["input_ids"]
    with pytest.raises(ValueError, match="4 pieces of 5 tokens, 5 were asked for"):
        batches.prompts_of_length(model, 5, 5, 0)
    assert len(batches.prompts_of_length(model, None, 3, 0)) == 3


def test_command(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: model)
    monkeypatch.setattr(sys, "argv", [
        "eval/benchmark.py", "--batch-sizes", "1", "2", "--batch-prompts", "2", "--max-new-tokens", "4", "--repeats",
        "1", "--threads", "1", "--fsd", "--out", str(tmp_path / "batches.json")])
    assert benchmark.main() == 0
    record = json.loads((tmp_path / "batches.json").read_text())
    assert len(record["rows"]) == 6 and record["environment"]["torch"]
    page = (tmp_path / "batches.md").read_text()
    assert re.search(r"\| tasks +\| 2 +\| exact +\|", page) and page in capsys.readouterr().out
