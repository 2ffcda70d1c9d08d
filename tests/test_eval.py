"""The benchmark's bookkeeping, on a tiny random pair."""

import json
import sys

import pytest
import torch
from tiny import PROMPT

import eagle_fsd
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.experiments.methods import Answer, engine, hf_generate, interleaved
from eagle_fsd.experiments.records import environment, record_path, shown, write_record
from eval import benchmark, profile
from eval.profile import FORWARDS, Clock, profile_cycles
from eval.report import results as report

TREE = eagle_fsd.TreeConfig(8, 3, 2)


def test_methods_give_the_same_greedy_answer(model):
    baseline = hf_generate(model)(PROMPT, 20)
    for method in (engine(model, plain=True, acceptance="exact"), engine(model, acceptance="exact", tree=TREE)):
        assert method(PROMPT, 20).token_ids == baseline.token_ids
        assert method(PROMPT, 20).text == baseline.text


def test_the_baseline_leaves_out_what_our_engine_does_not_read(model, monkeypatch):
    """Many checkpoints have a repetition penalty."""
    expected = hf_generate(model)(PROMPT, 20).token_ids
    stock = model.target.model
    monkeypatch.setattr(stock.generation_config, "repetition_penalty", 1.5)
    penalised = stock.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)[0, len(PROMPT) :].tolist()
    assert hf_generate(model)(PROMPT, 20).token_ids == expected != penalised
    assert stock.generation_config.repetition_penalty == 1.5


def test_plain_decoding_emits_one_token_per_forward(model):
    output = engine(model, plain=True, acceptance="exact")(PROMPT, 20).output
    assert output.stats.mean_accepted_length == 1
    assert output.stats.target_forwards == output.stats.new_tokens - 1


def test_summary_adds_up(model):
    methods = benchmark.methods_of(model, TREE, [0.3], [])
    answers = interleaved(methods, [PROMPT, PROMPT[:5]], 16, repeats=2)
    rows = benchmark.method_rows(answers, {name: [True, False] for name in methods})
    by_name = {row["method"]: row for row in rows}
    assert list(by_name) == ["model.generate", "prompt lookup", "plain", "exact", "fsd 0.3"]
    assert by_name["model.generate"]["speedup"] == 1 and by_name["plain"]["speedup_over_plain"] == 1
    assert by_name["exact"]["same_as_greedy"] == 1 and by_name["exact"]["fuzzy_share"] == 0
    assert by_name["exact"]["tau"] > 1 and by_name["plain"]["tau"] == by_name["model.generate"]["tau"] == 1
    assert by_name["prompt lookup"]["tau"] is None and by_name["prompt lookup"]["same_as_greedy"] == 1
    assert all(row["accuracy"] == 0.5 for row in rows)
    assert benchmark.method_table(rows).count("\n") == 1 + len(rows)


def test_median_time_and_first_answer_are_kept():
    times = iter([9.0, 9.0, 3.0, 1.0, 2.0])  # two warm-up runs come first

    def method(prompt, max_new_tokens):
        return Answer(next(times, 5.0), [1], "x")

    answers = interleaved({"m": method}, ["p"], 4, repeats=3)
    assert answers["m"][0].seconds in (2.0, 3.0)


def test_clock_counts_nested_time_once(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr("eval.profile.now", lambda device: next(ticks))
    clock = Clock(torch.device("cpu"))
    inner = clock.wrap("inner", lambda: None)
    outer = clock.wrap("other", inner)
    outer()
    assert clock.seconds == {"inner": 2.0, "other": 8.0}


def test_profile_splits_a_cycle(model):
    result = profile_cycles(model, [PROMPT], 16, acceptance="fsd", threshold=0.3, tree=TREE)
    parts = result["ms_per_cycle"]
    assert set(parts) == {*FORWARDS, "tree_building", "verify_inputs", "accept", "commit", "other"}
    assert result["total_ms"] == pytest.approx(sum(parts.values()))
    assert 0 < result["outside_forwards_share"] < 1


def test_forwards_within_forwards_are_the_outer_ones(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 10.0])  # the cycle, the draft's logits; the target's layer within them is not timed
    monkeypatch.setattr("eval.profile.now", lambda device: next(ticks))
    clock = Clock(torch.device("cpu"))
    layer = clock.wrap("target_output", lambda: None)
    clock.wrap("other", clock.wrap("draft_output", layer))()
    assert clock.seconds == {"draft_output": 2.0, "other": 8.0}


def test_profile_command_prints_and_stores_the_shares(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: model)
    out = tmp_path / "shares.json"
    assert profile.main(["--limit", "2", "--max-new-tokens", "12", "--tree", "8,3,2", "--rules", "exact", "fsd",
                         "--threads", str(torch.get_num_threads()), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    for found in record["rules"].values():
        assert 0 < found["outside_forwards_share"] < 1 and found["tau"] >= 1
        assert all(found["ms_per_cycle"][part] > 0 for part in FORWARDS)
    page = (tmp_path / "shares.md").read_text()
    assert page == capsys.readouterr().out.removesuffix("\n")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    assert rows[0] == "ms of a cycle"
    assert rows[2:] == [*profile.ROWS, "both output layers", "outside the forwards", "whole"]


def test_command_writes_a_result_that_says_how_it_was_made(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: model)
    out = tmp_path / "results" / "run.json"
    monkeypatch.setattr(sys, "argv", [
        "eval/benchmark.py", "--tasks", "0", "--python", "0", "--accuracy-tasks", "8", "--unseen-tasks", "8",
        "--max-new-tokens", "4", "--repeats", "1", "--threads", "1", "--fsd", "--tilt", "--out", str(out),
    ])
    assert benchmark.main() == 2  # no task, nothing to compare
    assert not out.exists()
    assert "--tasks" in capsys.readouterr().err


def test_result_file(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: model)
    monkeypatch.setattr(benchmark, "python_prefixes", lambda count: ["abc"] * count)
    out = tmp_path / "results" / "run.json"
    monkeypatch.setattr(sys, "argv", [
        "eval/benchmark.py", "--tasks", "2", "--python", "1", "--accuracy-tasks", "8", "--unseen-tasks", "0",
        "--max-new-tokens", "6", "--python-tokens", "6", "--repeats", "1",
        "--threads", "1", "--fsd", "0.3", "--tilt", "--out", str(out),
    ])
    assert benchmark.main() == 0
    record = json.loads(out.read_text())
    assert record["environment"]["torch"] and record["environment"]["command"].startswith("python -m eval.benchmark")
    assert record["accuracy"]["all"] == 0  # a random model solves nothing
    assert [row["method"] for row in record["tasks"]] == [
        "model.generate", "prompt lookup", "plain", "exact", "fsd 0.3"]
    assert "| exact " in out.with_suffix(".md").read_text()


def test_the_page_shows_the_stored_results():
    page = report.PAGE.read_text(encoding="utf-8")
    assert page.count("\n|") > 40 and report.insert(page, report.results()) == page, "run python -m eval.report"


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="once each"):
        report.insert("# eagle_fsd", "text")


def test_records_name_no_folder_of_a_machine(monkeypatch):
    assert shown(report.ROOT / "runs" / "x") == "runs/x" and shown("a/b") == "a/b" and shown(3) == "3"
    assert shown(report.ROOT.parent / "shared") == "../shared"
    monkeypatch.setattr("sys.argv", [str(report.ROOT / "eval" / "x.py"), "--out", str(report.ROOT / "runs")])
    assert environment()["command"] == "python -m eval.x --out runs"


def test_a_dot_in_the_name_of_a_record_is_kept(tmp_path):
    for name in ("sweep-t0.7", "sweep-t0.8.json"):
        assert write_record(tmp_path / "new" / name, {"rows": []}, "text").startswith("# sweep-t0.")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "sweep-t0.7.json", "sweep-t0.7.md", "sweep-t0.8.json", "sweep-t0.8.md"]
    assert record_path(tmp_path / "fsd-0.2", ".meta.json").name == "fsd-0.2.meta.json"
    assert record_path(tmp_path / "fsd-0.2.jsonl", ".meta.json").name == "fsd-0.2.meta.json"
