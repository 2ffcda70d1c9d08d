"""The comparison of objectives: what a work folder may be continued with."""

import argparse
import json
from pathlib import Path

import pytest

from train import compare


def options(work: Path, **changes) -> argparse.Namespace:
    given = {"target": "t", "data": Path("d"), "eval_data": Path("e"), "device": "cpu", "seconds": 60.0,
             "batch_tokens": 4096, "intermediate_size": 768, "draft_vocab_size": None, "prompts": 32, "tasks": 64}
    return argparse.Namespace(work=work, **given | changes)


def test_a_work_folder_is_not_continued_with_other_settings(tmp_path, monkeypatch):
    work = tmp_path / "new" / "work"
    compare.begin(options(work))
    (work / "results.jsonl").write_text(json.dumps({"objective": "eagle"}) + "\n")
    compare.begin(options(work))
    with pytest.raises(ValueError, match=r"another seconds 60.0 \(now 30.0\), tasks 64 \(now 48\);"):
        compare.begin(options(work, seconds=30.0, tasks=48))
    monkeypatch.setattr(compare, "TREE", (8, 3, 2, 0.5))
    with pytest.raises(ValueError, match="another tree"):
        compare.begin(options(work))


@pytest.mark.parametrize("name", ["results.jsonl", "steps.jsonl"])
def test_records_of_unknown_settings_are_refused(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=f"holds {name} but no about.json"):
        compare.begin(options(tmp_path))
    assert not (tmp_path / "about.json").exists()


def test_the_record_is_written_into_a_new_folder(tmp_path, monkeypatch):
    row = {"objective": "eagle", "lr": 0.01, "seconds_per_step": 0.1, "steps": 20, "sd tau exact": None,
           **{f"{what} {rule}": 1.0 for rule in compare.RULES
              for what in ("tau", "tokens/s", "seconds", "length", "accuracy")}}
    monkeypatch.setattr(compare, "prepare_features", lambda args: None)
    monkeypatch.setattr(compare, "compare", lambda args: [row])
    args = options(tmp_path / "work")
    args.out = tmp_path / "results" / "at-0.5"
    compare.run(args)
    assert json.loads((tmp_path / "results" / "at-0.5.json").read_text())["rows"] == [row]
    assert "| eagle | 0.01 |" in (tmp_path / "results" / "at-0.5.md").read_text()
