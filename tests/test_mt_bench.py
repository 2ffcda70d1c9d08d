"""The MT-Bench command and its speeds: formats, both turns, resuming, FastChat's file, intervals."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import save_pair, tiny_chat_pair

from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.questions import PUBLIC, Question, read_questions
from eagle_fsd.measure.answers import read_answers
from eval import mt_bench
from eval.mt_bench import MtBenchArguments, run, temperature_of
from eval.speed import speed, speed_rows

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["hi", "and"]},
    {"question_id": 82, "category": "math", "turns": ["b"]},
    {"question_id": 83, "category": "math", "turns": ["c", "d"]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair with a chat template, and three questions."""
    folder = tmp_path_factory.mktemp("mt_bench")
    save_pair(folder)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    return folder


def options(place, answers: str, *more: str):
    return parse_options(MtBenchArguments, [
        "--target", str(place / "target"), "--draft", str(place / "head"), "--questions",
        str(place / "questions.jsonl"), "--max-new-tokens", "10", "--warm-up", "0", "--device", "cpu", "--answers",
        str(place / answers), *more,
    ])


def parse_as_fastchat(path) -> dict:
    """The fields that FastChat's answer files have, read as its judge and the published speed script read them."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert isinstance(record["answer_id"], str) and isinstance(record["model_id"], str)
        assert isinstance(record["tstamp"], float)
        for choice in record["choices"]:
            assert isinstance(choice["index"], int)
            counts = {len(choice[name]) for name in ("turns", "idxs", "new_tokens", "wall_time")}
            assert len(counts) == 1 and all(isinstance(turn, str) for turn in choice["turns"])
        found[record["question_id"]] = record
    return found


def test_both_turns_are_answered_in_fastchats_format(place, capsys):
    run(options(place, "plain.jsonl", "--baseline"))
    run(options(place, "exact.jsonl", str(place / "plain.jsonl"), "--setting", "exact"))
    assert "exact.jsonl | " in capsys.readouterr().out  # the speed beside the other file
    exact, plain = (parse_as_fastchat(place / name) for name in ("exact.jsonl", "plain.jsonl"))
    assert list(exact) == list(plain) == [81, 82, 83]
    for number, record in exact.items():
        (choice,) = record["choices"]
        assert len(choice["turns"]) == len(next(q for q in QUESTIONS if q["question_id"] == number)["turns"])
        assert choice["turns"] == plain[number]["choices"][0]["turns"]  # lossless, second turns included
        assert choice["new_tokens"] == plain[number]["choices"][0]["new_tokens"]
        assert len(choice["accept_lengths"]) == sum(choice["idxs"])
    assert json.loads((place / "exact.meta.json").read_text())["settings"]["setting"] == "exact"


def test_a_stopped_run_answers_only_what_is_missing(place, monkeypatch):
    run(options(place, "cut.jsonl", "--setting", "exact"))
    path = place / "cut.jsonl"
    whole = parse_as_fastchat(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2] + lines[1][:30])  # question 82 was being written
    asked = []
    answer = mt_bench.answer_question
    monkeypatch.setattr(mt_bench, "answer_question", lambda m, q, a: asked.append(q.id) or answer(m, q, a))
    run(options(place, "cut.jsonl", "--setting", "exact"))
    again = parse_as_fastchat(path)
    assert asked == [82] and list(again) == [81, 82, 83]
    assert [again[i]["choices"][0]["turns"] for i in again] == [whole[i]["choices"][0]["turns"] for i in again]


def test_other_settings_do_not_continue_a_file(place):
    run(options(place, "fsd.jsonl", "--setting", "fsd 0.2", "--limit", "1"))
    for more, name in ((("--setting", "fsd 0.3"), "setting"), (("--baseline",), "setting"),
                       (("--setting", "fsd 0.2", "--attn-implementation", "eager"), "attn_implementation"),
                       (("--setting", "fsd 0.2", "--tree", "8,3,2"), "tree")):
        with pytest.raises(ValueError, match=rf"fsd.jsonl was made with another {name} \("):
            run(options(place, "fsd.jsonl", *more))
    run(options(place, "fsd.jsonl", "--setting", "fsd 0.2", "--limit", "2"))
    run(options(place, "fsd.jsonl", "--setting", "fsd 0.2", "--limit", "1"))
    assert list(parse_as_fastchat(place / "fsd.jsonl")) == [82, 81]  # what is not asked now is kept


def test_another_pair_or_question_of_the_same_name_does_not_continue_a_file(place, tmp_path):
    for name in ("target", "head"):
        shutil.copytree(place / name, tmp_path / name)
    questions = tmp_path / "questions.jsonl"
    shutil.copy(place / "questions.jsonl", questions)
    run(options(tmp_path, "a.jsonl"))
    edited = [*QUESTIONS[:2], {**QUESTIONS[2], "turns": ["another"]}]
    for records in (edited, [{**each, "category": "x"} for each in QUESTIONS]):  # or another file with the same ids
        questions.write_text("\n".join(map(json.dumps, records)))
        run(options(tmp_path, "a.jsonl"))
    assert [record["question_id"] for record in read_answers(tmp_path / "a.jsonl")] == [83, 81, 82, 83, 81, 82, 83]
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert speed([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]).startswith("7 questions")
    foreign = [{key: value for key, value in record.items() if key != "asked"}
               for record in read_answers(tmp_path / "a.jsonl")]
    (tmp_path / "foreign.jsonl").write_text("\n".join(map(json.dumps, foreign)) + "\n")
    with pytest.raises(ValueError, match="has two answers to question 83"):
        speed([tmp_path / "a.jsonl", tmp_path / "foreign.jsonl"])
    save_pair(tmp_path, tiny_chat_pair(seed=5))
    with pytest.raises(ValueError, match=r"a.jsonl was made with another target \("):
        run(options(tmp_path, "a.jsonl"))


@pytest.mark.parametrize("note", [None, '{"settings": 3}'])
def test_answers_of_unknown_settings_are_not_continued(place, note):
    run(options(place, "unknown.jsonl", "--limit", "1"))
    path, about = place / "unknown.jsonl", place / "unknown.meta.json"
    before = path.read_bytes()
    about.unlink() if note is None else about.write_text(note)
    with pytest.raises(ValueError, match=f"{about}.*(is missing: choose another file|is damaged)"):
        run(options(place, "unknown.jsonl"))
    assert path.read_bytes() == before
    path.unlink()
    about.unlink(missing_ok=True)


def test_sampling_follows_the_category_and_the_seed(place):
    for name in ("a.jsonl", "b.jsonl"):
        run(options(place, name, "--setting", "exact", "--temperature", "category"))
    texts = [[r["choices"][0]["turns"] for r in read_answers(place / n)] for n in ("a.jsonl", "b.jsonl")]
    greedy = [r["choices"][0]["turns"] for r in read_answers(place / "exact.jsonl")]
    assert texts[0] == texts[1] and texts[0][1:] == greedy[1:]  # only writing is sampled
    assert temperature_of(Question(1, "roleplay", ("x",)), "category") == 0.7
    assert temperature_of(Question(1, "humanities", ("x",)), "category") == 0.1
    assert temperature_of(Question(1, "coding", ("x",)), "0.3") == 0.3


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--temperature", "hot"], "--temperature.*'hot'"),
        (["--temperature", "-1"], "--temperature.*'-1'"),
        (["--max-new-tokens", "0"], "--max-new-tokens.*0"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--setting", "fsd -0.1"], "threshold"),
        (["--assisted", "1.5"], r"--assisted must be a weight in \(0, 1\], without --baseline, got 1.5"),
        (["--questions"], "--answers takes one file with --questions, or several files with different names"),
        (["--out", "x"], "--out needs a comparison"),
        (["--answers", "x.jsonl", "no.jsonl"], "no.jsonl does not exist"),
    ],
)
def test_bad_options_are_refused_before_loading(place, more, match):
    with pytest.raises(ValueError, match=match):
        mt_bench.check(options(place, "x.jsonl", *more))


FORMATS = {
    "mt_bench": ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, Question(81, "writing", ("a", "b"))),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f", "canonical_solution": "x", "test": "t",
                   "entry_point": "f"}, Question("HumanEval/0", "humaneval", ("def f",), "x", "t\ncheck(f)\n")),
    "mbpp": ({"text": "Add.", "code": "x", "task_id": 511, "test_setup_code": "import math",
              "test_list": ["assert f(1) == 2", "assert f(2) == 3"]},
             Question(511, "mbpp", (
                 "Add.\nYour code should pass these tests:\n\nassert f(1) == 2\nassert f(2) == 3\n",), "x",
                       "import math\nassert f(1) == 2\nassert f(2) == 3\n")),
    "mbpp, sanitised": ({"prompt": "Add.", "code": "x", "task_id": 2, "test_imports": [], "test_list": ["assert f(1)"]},
                        Question(2, "mbpp", ("Add.\nYour code should pass these tests:\n\nassert f(1)\n",), "x",
                                 "assert f(1)\n")),
    "ifeval": ({"key": 7, "prompt": "Say.", "instruction_id_list": ["a:b"], "kwargs": [{}]}, Question(
        7, "ifeval", ("Say.",), tests='{"instruction_id_list": ["a:b"], "kwargs": [{}]}')),
    "gsm8k": ({"question": "a", "answer": "b\n#### 3"}, Question(1, "gsm8k", ("a",), "b\n#### 3")),
    "prompts": ({"prompt": "a", "answer": 4}, Question(1, "prompts", ("a",), "4")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_recognised(tmp_path, name):
    record, expected = FORMATS[name]
    (tmp_path / "q.jsonl").write_text(json.dumps(record) + "\n\n")
    assert read_questions(tmp_path / "q.jsonl") == [expected]


# Columns of the public sets on the hub; Spec-Bench is a file like MT-Bench's.
PUBLIC_ROWS = {
    "mt_bench": ({"category": "math", "prompt": ["a", "b"], "reference": [], "prompt_id": 12},
                 Question(12, "math", ("a", "b"))),
    "spec_bench": ({"question_id": 3, "category": "rag", "turns": ["a"]}, Question(3, "rag", ("a",))),
    "humaneval": FORMATS["humaneval"],
    "mbpp": ({**FORMATS["mbpp"][0], "challenge_test_list": []}, FORMATS["mbpp"][1]),
    "gsm8k": FORMATS["gsm8k"],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_sets_are_loaded_by_name(tmp_path, monkeypatch, name):
    """Unless there is a file of that name. The hub and the network are replaced."""
    monkeypatch.chdir(tmp_path)
    (row, question), asked = PUBLIC_ROWS[name], []
    datasets = SimpleNamespace(load_dataset=lambda **source: asked.append(source) or [row])
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url) or io.BytesIO(
        json.dumps(row).encode() + b"\n\n"))
    assert read_questions(Path(name)) == [question] and asked == [PUBLIC[name]]
    (tmp_path / name).write_text('{"prompt": "mine"}')
    assert read_questions(Path(name)) == [Question(1, "prompts", ("mine",))] and len(asked) == 1


def test_public_sets_that_cannot_be_loaded_say_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="gsm8k is no file here; .* install the package `datasets`"):
        read_questions(Path("gsm8k"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda **_: 1 / 0))
    with pytest.raises(OSError, match="gsm8k is no file here, and openai/gsm8k cannot be loaded .*give a file"):
        read_questions(Path("gsm8k"))
    with pytest.raises(ValueError, match="got gsm9k, which is no file and none of the public sets mt_bench, "):
        read_questions(Path("gsm9k"))


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "no question"), ("[1]", "line 1: not a JSON object"), ('{"x": 1}', "line 1: no known format"),
     ('{"turns": [1]}', "list of strings"),
     ('{"test_list": "x", "text": "a"}', "test_list.*list of strings"), ("{", "line 1"),
     ('{"prompt": "a", "instruction_id_list": ["a:b"], "kwargs": []}', "the same length"),
     ('{"turns": ["a"], "question_id": 3}\n{"turns": ["b"], "question_id": 3}', "3 occurs twice")],
)
def test_bad_question_files_say_where(tmp_path, text, match):
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_questions(tmp_path / "q.jsonl")


def answers(speeds: list[float], category=lambda number: "odd" if number % 2 else "even") -> list[dict]:
    """Answers of 100 tokens in 25 forwards, at the given speeds."""
    return [{"question_id": i, "category": category(i), "choices": [
        {"turns": ["a", "b"], "new_tokens": [60, 41], "wall_time": [60 / s, 41 / s], "accept_lengths": [4] * 25}]}
        for i, s in enumerate(speeds)]


def test_speeds_are_totals_and_intervals_cover_them():
    rng = np.random.default_rng(0)
    rows = speed_rows({"a": answers(list(rng.uniform(150, 250, 40))), "b": answers([200.0] * 50),
                       "plain": answers([100.0] * 41)})
    assert {category: [(row["method"], row["answers"]) for row in each] for category, each in rows.items()} == {
        category: [(name, count) for name in ("a", "b", "plain")]
        for category, count in (("all", 40), ("even", 20), ("odd", 20))}
    for row, *_ in rows.values():
        assert row["speedup_interval"][0] < row["speedup"] < row["speedup_interval"][1] and row["tau"] == 4
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / 100)
    without = [answers([rate], category=lambda number: "all") for rate in (200.0, 100.0)]  # questions of no category
    assert list(speed_rows(dict(zip("ab", without, strict=True)))) == ["all"]
    with pytest.raises(ValueError, match="no question in common"):
        speed_rows({"a": without[0], "b": []})
    for record in without[0]:  # as other code writes answers
        del record["choices"][0]["accept_lengths"]
    assert speed_rows(dict(zip("ab", without, strict=True)))["all"][0]["tau"] is None


def stored_answers(folder, method=None, baseline=None):
    """Two files of answers with such settings in their notes; None: without a note."""
    for name, rate, settings in (("fast", 200.0, method), ("plain", 100.0, baseline)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, answers([rate] * 4))) + "\n")
        about = {"environment": {"command": f"made {name}", "commit": "abc"}, "settings": settings}
        if settings is not None:
            (folder / f"{name}.meta.json").write_text(json.dumps(about))
    return [folder / "fast.jsonl", folder / "plain.jsonl"]


def test_speeds_are_stored_with_how_the_answers_were_made(tmp_path, monkeypatch, caplog, capsys, plots):
    paths = stored_answers(tmp_path, {}, {})
    monkeypatch.chdir(tmp_path)
    words = ["--answers", *(path.name for path in paths), "--out", "out"]
    assert mt_bench.main(words) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["rows"] == speed_rows({path.name: read_answers(path) for path in paths})
    assert record["answers"]["fast.jsonl"]["environment"]["command"] == "made fast"
    fast = record["rows"]["all"][0]
    assert fast["speedup"] == fast["mean_speedup"] == pytest.approx(2) and fast["same_answers"] == 1
    page = (tmp_path / "out.md").read_text()
    assert "- plain.jsonl: `made plain` by commit abc\n" in page and not caplog.text  # older notes do not name the pair
    row = "| fast.jsonl | 200.0 | 2.00x | 0.50 | 200.0 | 0.51 | 101 | 4.00 | 100% |\n"
    assert row in page and row in capsys.readouterr().out and "- **tau**: tokens emitted per verify forward" in page
    assert plots["out.png"]
    note = tmp_path / "fast.meta.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "names": {"target": "T (1 B)", "head": "H (1 M)"}}))
    assert mt_bench.main(words) == 0
    assert "`made fast` by commit abc; target T (1 B), head H (1 M)\n" in (tmp_path / "out.md").read_text()


def test_runs_with_other_limits_are_not_compared(tmp_path, caplog):
    for setting in ("max_new_tokens", "num_choices"):
        with pytest.raises(ValueError, match=f"{setting} 3 and .*plain.jsonl has 4: their speeds are not comparable"):
            speed(stored_answers(tmp_path, {setting: 3}, {setting: 4}), tmp_path / "out")
    assert not (tmp_path / "out.json").exists()
    speed(stored_answers(tmp_path, {"temperature": "0"}, {"temperature": "category"}))
    assert "plain.jsonl differ in temperature: 0 and category" in caplog.text
    (tmp_path / "plain.meta.json").unlink()
    speed(stored_answers(tmp_path, {}, None))
    assert "plain.jsonl has no .meta.json" in caplog.text
