"""The comparison of objectives: what a work folder may be continued with."""

import json
from pathlib import Path

import pytest

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.files import only_writer
from train import compare
from train.core.objectives import OBJECTIVES


def options(work: Path, **changes) -> compare.Arguments:
    given = {"target": "t", "data": Path("d"), "eval_data": Path("e"), "device": "cpu"}
    return compare.Arguments(work=work, **given | changes)


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
    (tmp_path / "work").mkdir()
    with only_writer(tmp_path / "work"), pytest.raises(ValueError, match="is being written by process"):
        compare.run(options(tmp_path / "work"))
    compare.run(options(tmp_path / "work", out=tmp_path / "results" / "at-0.5"))
    assert json.loads((tmp_path / "results" / "at-0.5.json").read_text())["rows"] == [row]
    assert "| eagle | 0.01 |" in (tmp_path / "results" / "at-0.5.md").read_text()


@pytest.mark.parametrize("name", ["batch_tokens", "seeds", "prompts", "tasks"])
def test_bad_options_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be at least 1, got 0"):
        compare.run(options(tmp_path / "work", **{name: 0}))
    assert not (tmp_path / "work").exists()


def test_the_command_line(capsys):
    needed = ["--data", "d", "--eval-data", "e"]
    given = parse_options(compare.Arguments, [*needed, "--objectives", "sparse", "eagle3", "--rates", "1e-3", "2e-3"])
    assert given.objectives == ("sparse", "eagle3") and given.rates == (1e-3, 2e-3)
    assert parse_options(compare.Arguments, needed).objectives == tuple(
        name for name in OBJECTIVES if not name.startswith("eagle3"))
    with pytest.raises(SystemExit) as stopped:
        parse_options(compare.Arguments, ["--objectives", "unheard"])
    assert stopped.value.code == 2 and "unheard" in capsys.readouterr().err
