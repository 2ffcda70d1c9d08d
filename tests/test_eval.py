"""The benchmark's bookkeeping, on a tiny random pair."""

import json

import pytest
import torch
from tiny import PROMPT, tiny_chat_pair

import eagle_fsd
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.data.questions import Question
from eagle_fsd.measure.methods import Answer, engine, hf_generate, interleaved
from eagle_fsd.measure.records import environment, record_path, shown, write_record
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


QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["ab", "cd"]},
    {"question_id": 82, "category": "writing", "turns": ["ef"]},
    {"question_id": 83, "category": "maths", "turns": ["gh"]},
]


def arguments(folder, out, *more) -> list[str]:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return ["--questions", str(path), "--max-new-tokens", "6", "--warm-up", "0", "--fsd", "0.3", "--profile", "1",
            "--out", str(out), *more]


@pytest.fixture
def chat_model(monkeypatch):
    pair = tiny_chat_pair()
    monkeypatch.setattr(Loading, "load", lambda self: pair)
    return pair


def test_a_benchmark_says_per_category_and_in_all_what_the_methods_did(chat_model, tmp_path, capsys):
    out = tmp_path / "results" / "run"
    assert benchmark.main(arguments(tmp_path, out, "--tree", "8,3,2")) == 0
    record = json.loads((tmp_path / "results" / "run.json").read_text())
    assert record["environment"]["torch"] and record["counts"] == {"writing": 2, "maths": 1, "all": 3}
    for rows in record["rows"].values():
        by_name = {row["method"]: row for row in rows}
        assert list(by_name) == ["model.generate", "prompt lookup", "plain", "exact", "fsd 0.3"]
        stock, plain, exact = by_name["model.generate"], by_name["plain"], by_name["exact"]
        assert stock["speedup"] == 1 and plain["speedup_over_plain"] == 1 and stock["tau"] == plain["tau"] == 1
        assert exact["same_as_generate"] == exact["same_as_plain"] == plain["same_as_generate"] == 1
        assert exact["tau"] > 1 and exact["fuzzy_share"] == 0 and by_name["prompt lookup"]["tau"] is None
        assert exact["speedup"] == pytest.approx(exact["tokens_per_second"] / stock["tokens_per_second"])
        assert exact["speedup_interval"][0] <= exact["speedup"] <= exact["speedup_interval"][1]
    assert record["rows"]["all"][0]["tokens_per_answer"] == pytest.approx(
        (2 * record["rows"]["writing"][0]["tokens_per_answer"] + record["rows"]["maths"][0]["tokens_per_answer"]) / 3)
    page = (tmp_path / "results" / "run.md").read_text()
    assert "| exact " in page and "| maths " in page and page.strip() in capsys.readouterr().out
    assert (tmp_path / "results" / "run.png").stat().st_size > 10_000
    assert record["profile_exact"]["cycles"] > 0 < record["profile_fsd"]["outside_forwards_share"]


def test_a_stopped_benchmark_goes_on_where_it_was(chat_model, tmp_path, monkeypatch, capsys):
    out, asked, converse = tmp_path / "run", [], benchmark.converse

    def counting(answer, turns):
        asked.append(turns)
        if len(asked) > 7:
            raise KeyboardInterrupt
        return converse(answer, turns)

    monkeypatch.setattr(benchmark, "converse", counting)
    assert benchmark.main(arguments(tmp_path, out)) == 130
    assert "the same command continues" in capsys.readouterr().err
    monkeypatch.setattr(benchmark, "converse", lambda answer, turns: asked.append(turns) or converse(answer, turns))
    assert benchmark.main(arguments(tmp_path, out)) == 0
    assert [turns for turns in asked[8:]] == 5 * [("ef",)] + 5 * [("gh",)]
    assert benchmark.main(arguments(tmp_path, out, "--seed", "2")) == 2
    assert "begun for something else" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "said"), [
    ((), "give --questions"),
    (("--questions", "{}", "--per-category", "0"), "--per-category"),
    (("--questions", "{}"), "--out is missing"),
    (("--questions", "{}.none", "--out", "x"), "{}.none"),
])
def test_a_benchmark_of_nothing_is_refused_before_loading(more, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self: pytest.fail("loaded"))
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]))
    assert benchmark.main([word.format(path) for word in more]) == 2
    assert said.format(path) in capsys.readouterr().err


@pytest.mark.parametrize("leave", [False, True])
def test_programs_are_run_only_by_leave(leave, monkeypatch):
    ran = []
    monkeypatch.setattr("eagle_fsd.measure.grading.passes", lambda *_: ran.append(1) or True)
    question = Question("H/0", "humaneval", ("def f():\n",), tests="def check(f): pass")
    answer = Answer(0.5, [1, 2], "text")
    assert benchmark.record_of([answer], question, leave)["right"] is (True if leave else None)
    assert bool(ran) == leave


def test_the_first_questions_of_each_category_are_chosen(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    assert [question.id for question in benchmark.chosen_questions([path], 1)] == [81, 83]
    assert [question.id for question in benchmark.chosen_questions([path, path], None)] == 2 * [81, 82, 83]


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


def test_the_page_shows_the_stored_results():
    page = report.PAGE.read_text(encoding="utf-8")
    assert page.count("\n|") > 20 and report.insert(page, report.results()) == page, "run python -m eval.report"


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
