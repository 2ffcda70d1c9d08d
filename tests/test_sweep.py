"""The sweep on a tiny pair: stages, resumption, the table, the front and the pictures."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import save_pair

import eagle_fsd
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.files import only_writer
from eagle_fsd.drafting.config import Confidence, TreeConfig
from eagle_fsd.measure.search import family_confidence
from eagle_fsd.measure.statistics import drop_bound
from eval import splits, sweep, sweep_report, sweep_times
from eval.report import sweeps
from eval.report.predictions import prediction_errors
from eval.report.results import sweep_section
from eval.sweep import SweepArguments, checked, run

PROMPTS = [a + b for a in "abcdef" for b in "gh"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny pair, and questions of which all but one have the lossless answer as their reference."""
    folder = tmp_path_factory.mktemp("sweep")
    save_pair(folder)
    model = eagle_fsd.load(folder / "target", folder / "head", device="cpu")
    tasks = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        text = eagle_fsd.generate(chat, model, acceptance="exact", max_new_tokens=8).text
        tasks.append({"prompt": prompt, "answer": text if prompt != "ag" else "x"})
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return folder


def options(place, name: str, *more: str, arguments: type = SweepArguments):
    return checked(parse_options(arguments, [
        "--target", str(place / "target"), "--draft", str(place / "head"), "--questions", str(place / "tasks.jsonl"),
        "--work", str(place / name), "--out", str(place / name / "out"), "--tree", "8,3,3", "--timed", "2",
        "--max-new-tokens", "8", "--device", "cpu", *more,
    ]))


def test_a_greedy_sweep_writes_table_and_pictures(place):
    run(options(place, "greedy", "--settings", "fsd 0.05", "fsd 0.3", "tilt 0.5", "fsd+fly 0.3 0.9"))
    record = json.loads((place / "greedy" / "out.json").read_text())
    rows = {row["setting"]: row for row in record["rows"]}
    assert list(rows) == ["exact", "fsd 0.05", "fsd 0.3", "tilt 0.5", "fsd+fly 0.3 0.9"]
    assert rows["fsd+fly 0.3 0.9"]["threshold"] == 0.3 and rows["fsd+fly 0.3 0.9"]["tau"] < rows["fsd 0.3"]["tau"]
    assert list(sweeps.by_rule(record["rows"])) == ["fsd", "tilt", "fsd+fly 0.9"]
    assert [row["setting"] for row in record["baselines"]] == [
        "model.generate", "prompt lookup", "model.generate, bare call", "prompt lookup, bare call", "plain"]
    assert record["baselines_over_bare_calls"].keys() == {"model.generate", "prompt lookup"}
    exact = rows["exact"]
    assert (exact["differing"], exact["drop"], exact["time_of_exact"], exact["fuzzy_share"]) == (0, 0, 1, 0)
    for row in rows.values():
        assert row["answers"] == 12 and row["timed"] == 2 and row["kl_per_token"] is None
        assert row["time_of_exact_interval"][0] <= row["time_of_exact"] <= row["time_of_exact_interval"][1]
        assert row["logprob_per_token"] <= exact["logprob_per_token"] + 1e-6 or row["setting"] == "exact"
    assert exact["accuracy"] == pytest.approx(11 / 12)
    fuzzy = rows["fsd 0.3"]
    assert fuzzy["lost"] > 0 and fuzzy["drop"] == pytest.approx((fuzzy["lost"] - fuzzy["gained"]) / 12)
    assert fuzzy["family_bound"] > fuzzy["drop_bound"] > fuzzy["drop"]
    assert fuzzy["predicted"]["diverging"] >= fuzzy["differing"]
    assert rows["fsd 0.3"]["tau"] > exact["tau"] and rows["fsd 0.3"]["regret_per_token"] > 0
    harmful = [row for row in record["harm"] if row["setting"] == "fsd 0.3"]
    assert [row["kind"] for row in harmful] == ["digit", "word", "other"]
    right = round(fuzzy["fuzzy_share"] * 12 * fuzzy["tokens_per_answer"])  # of all answers, the wrong one's included
    assert 0 < sum(row["tokens"] for row in harmful) <= right
    assert max(row["lost"] for row in harmful) <= fuzzy["lost"] <= sum(row["lost"] for row in harmful)
    assert all(row["alone_lost"] <= row["alone"] <= row["answers"] for row in harmful)
    section = sweep_section("out", "Letters", record)
    assert record["headline"] in section and "| exact " in section and "| prompt lookup " in section
    for name in ("out-frontier.png", "out-dials.png"):
        assert (place / "greedy" / name).read_bytes().startswith(b"\x89PNG")
    assert record["headline"] in (place / "greedy" / "out.md").read_text()


def test_one_folder_takes_one_sweep_at_a_time(place):
    given = options(place, "taken", "--settings", "fsd 0.3")
    given.work.mkdir()
    with only_writer(given.work), pytest.raises(ValueError, match="taken is being written by .* another folder"):
        run(given)
    assert not [path for path in given.work.iterdir() if not path.name.startswith(".")]


def test_stages_go_on_where_they_were(place, monkeypatch):
    settings = ("--settings", "fsd 0.3")
    run(options(place, "stages", *settings, "--stage", "answers"))
    run(options(place, "stages", *settings, "--stage", "times"))
    assert not (place / "stages" / "out.json").exists()
    files = {path.name: path.read_bytes() for path in (place / "stages").iterdir()}
    run(options(place, "stages", *settings, "--stage", "answers", "times"))
    assert files == {path.name: path.read_bytes() for path in (place / "stages").iterdir()}
    with pytest.raises(ValueError, match="answers of fsd 0.5 are missing"):
        run(options(place, "stages", "--settings", "fsd 0.5", "--stage", "report"))
    with pytest.raises(ValueError, match="begun with other repeats"):
        run(options(place, "stages", *settings, "--stage", "times", "--repeats", "2"))
    monkeypatch.setattr(sweep, "answer_all", lambda runs: pytest.fail("answered again"))
    run(options(place, "stages", *settings, "--stage", "report"))
    assert (place / "stages" / "out.json").exists()


def test_a_sweep_in_batches_goes_on_with_more_questions_and_times_no_baselines(place, monkeypatch):
    given = ("--settings", "fsd 0.3", "--batch", "3", "--no-baselines", "--max-new-tokens", "8")
    run(options(place, "grown", *given, "--tasks", "5"))
    log, times = (place / "grown" / name for name in ("answers-0-0.jsonl", "times-answers-0-0.jsonl"))
    first = log.read_text().splitlines(), times.read_text().splitlines()
    run(options(place, "grown", *given, "--tasks", "12"))
    assert log.read_text().splitlines()[: len(first[0])] == first[0]
    answered = [(each["setting"], each["question"]) for each in map(json.loads, log.read_text().splitlines()[1:])]
    assert len(set(answered)) == len(answered) and sum(setting == "exact" for setting, _ in answered) == 12
    record = json.loads((place / "grown" / "out.json").read_text())
    assert record["baselines"] == [] and [row["setting"] for row in record["rows"]] == ["exact", "fsd 0.3"]
    alone = json.loads((place / "greedy" / "out.json").read_text())["rows"]
    for row in record["rows"]:
        (same,) = (each for each in alone if each["setting"] == row["setting"])
        assert row["answers"] == 12 and row["accuracy"] == same["accuracy"] and row["tau"] == same["tau"]
    # Another setting takes no new lossless pass, and has no prediction.
    run(options(place, "grown", *given[2:], "--tasks", "12", "--settings", "fsd 0.3", "fsd 0.05", "--stage", "answers",
                "report"))
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert sum(each["setting"] == "exact" for each in lines) == 12
    added = {row["setting"]: row for row in json.loads((place / "grown" / "out.json").read_text())["rows"]}
    (same,) = (each for each in alone if each["setting"] == "fsd 0.05")
    assert added["fsd 0.05"]["tau"] == same["tau"] and added["fsd 0.05"]["predicted"] is None
    # Other questions of the same numbers are answered and timed anew.
    tasks = (place / "tasks.jsonl").read_text().splitlines()
    (place / "other.jsonl").write_text("\n".join(tasks[::-1]))
    run(options(place, "grown", *given, "--tasks", "5", "--questions", str(place / "other.jsonl")))
    assert len(times.read_text().splitlines()) == len(first[1]) + 1 + 2  # of 12 the first was timed among the 5


def test_a_screening_predicts_from_the_lossless_pass_alone(place):
    run(options(place, "screened", "--settings", "fsd 0.05", "fsd 0.3", "--stage", "screen"))
    record = json.loads((place / "screened" / "out-screen.json").read_text())
    rows = {row["setting"]: row for row in record["rows"]}
    assert 1 <= rows["fsd 0.05"]["tau_of_exact"] <= rows["fsd 0.3"]["tau_of_exact"] and rows["fsd 0.3"]["diverging"] > 0
    log = (place / "screened" / "answers-0-0.jsonl").read_text().splitlines()
    assert len(log) == 1 + len(PROMPTS) and all(json.loads(line)["setting"] == "exact" for line in log[1:])
    assert "| fsd 0.3 " in (place / "screened" / "out-screen.md").read_text()
    assert not (place / "screened" / "out.json").exists()


def test_sampling_with_seeds_and_lower_temperatures(place):
    run(options(place, "sampled", "--settings", "fsd 0.3", "tilt 0.5", "--temperature", "0.9", "--seeds", "0", "1",
                "--cooler", "0.5", "0", "--top-p", "0.5"))
    rows = {row["setting"]: row for row in json.loads((place / "sampled" / "out.json").read_text())["rows"]}
    assert list(rows) == ["exact", "fsd 0.3", "tilt 0.5", "exact at temperature 0.5", "exact at temperature 0",
                          "exact at top-p 0.5"]
    assert all(row["answers"] == 24 for row in rows.values())
    assert rows["exact"]["kl_per_token"] == 0 < rows["tilt 0.5"]["kl_per_token"] < rows["fsd 0.3"]["kl_per_token"]
    assert rows["fsd 0.3"]["matched"].keys() == {"temperature", "accuracy", "time_of_exact"}
    assert 0 <= rows["fsd 0.3"]["matched"]["temperature"] <= 0.9
    assert rows["fsd 0.3"]["matched_top_p"].keys() == {"top_p", "accuracy", "time_of_exact"}
    for less in ("temperature 0", "top-p 0.5"):
        assert rows[f"exact at {less}"]["logprob_per_token"] > rows["exact"]["logprob_per_token"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "0"), "--tasks must be at least 1, got 0"),
        (("--seeds", "0", "1"), "greedy decoding has no seeds"),
        (("--cooler", "0.5"), "--cooler below it"),
        (("--settings", "fsd"), "a rule and a threshold"),
        (("--settings", "fsd e"), "got 'fsd e'"),
        (("--settings", "fsd+fly 0.3"), "one for each gate, such as"),
        (("--settings", "fsd 0.3 0.1"), "one for each gate, such as"),
        (("--top-p", "0.5"), "takes a --temperature"),
        (("--settings", "fsd -1"), "threshold"),
        (("--settings", "warp 1"), "unknown rule 'warp'"),
    ],
)
def test_bad_options_are_refused(place, more, message):
    with pytest.raises(ValueError, match=message):
        options(place, "bad", *more)


def test_the_order_of_the_timed_methods_rotates(place, monkeypatch):
    orders = []
    interleaved = sweep_times.interleaved

    def watch(methods, prompts, *args, warm_up, start):
        timed = {name: lambda *a, name=name, m=m: orders[-1].append(name) or m(*a) for name, m in methods.items()}
        orders.append([])
        return interleaved(timed, prompts, *args, warm_up=0, start=start)

    monkeypatch.setattr(sweep_times, "interleaved", watch)
    run(options(place, "order", "--settings", "fsd 0.3", "--stage", "answers", "times"))
    assert len(orders) == 2 and orders[1] == orders[0][1:] + orders[0][:1]


def test_a_rule_that_is_exact_when_greedy_is_left_out(place):
    assert {s["rule"] for s in sweep.chosen_settings(options(place, "x")).values()} == {
        "fsd", "tilt", "relaxed", "typical", "fsd_paper", "fly", "regret", "prose", "afterword"}
    sampled = options(place, "x", "--temperature", "0.8")
    gated = sweep.chosen_settings(options(place, "x", "--settings", "fsd+fly+regret 0.3 0.9 2"))
    assert gated == {"fsd+fly+regret 0.3 0.9 2": {
        "rule": "fsd+fly+regret", "threshold": 0.3, "gate_threshold": [0.9, 2.0]}}
    assert "lenience 1" in sweep.chosen_settings(sampled) and sampled.cooler == pytest.approx([0.6, 0.4, 0.2, 0])


def test_splits_of_a_sweeps_answers(place, monkeypatch, capsys):
    given = ("--settings", "fsd 0.05", "fsd 0.3", "--timed", "12")
    run(options(place, "splits", *given, "--stage", "answers", "times"))
    args = options(place, "splits", *given, "--promise", "accuracy_drop<=10%", "--out", str(place / "splits.json"),
                   arguments=splits.SplitsArguments)
    splits.run(args)
    assert "splits of 12 answers" in capsys.readouterr().out
    record = json.loads(args.out.read_text())
    assert len(record["exact"]) == len(record["timed"]) == 12 and sum(record["exact"]) == 11
    assert {row["setting"] for row in record["splits"]} == {"exact"}  # six answers show nothing
    assert record["splits"] == splits.try_splits(record, 0.1)


def test_baselines_are_matched_along_one_axis_each():
    """Log p of -0.3 lies half way from temperature 1 to 0.5, and two thirds from top-p 1 to 0.7."""
    rows = [{"setting": "exact", "temperature": 1.0, "top_p": 1.0, "logprob_per_token": -0.5, "accuracy": 0.2},
            {"setting": "exact at temperature 0.5", "temperature": 0.5, "top_p": 1.0, "logprob_per_token": -0.1,
             "accuracy": 0.6},
            {"setting": "exact at top-p 0.7", "temperature": 1.0, "top_p": 0.7, "logprob_per_token": -0.2,
             "accuracy": 0.5},
            {"setting": "fsd 0.3", "threshold": 0.3, "logprob_per_token": -0.3, "accuracy": 0.3}]
    sweep_report.match_baselines(rows)
    assert rows[-1]["matched"] == pytest.approx({"temperature": 0.75, "accuracy": 0.4})
    assert rows[-1]["matched_top_p"] == pytest.approx({"top_p": 0.8, "accuracy": 0.4})


def test_another_guard_is_another_setting(place):
    """Its times are not those of the name, and the guarded thresholds are a sequence of tests of their own."""
    def sweep_of(*more: str):
        args = options(place, "guard", "--rules", "fsd", "--timed", "1", "--stage", "answers", "times", "report", *more)
        run(args)
        found = json.loads((place / "guard" / "out.json").read_text())["rows"]
        return found, (place / "guard" / "times-answers-0-0.jsonl").read_text().splitlines()

    rows, lines = sweep_of("--head-guard", "0.5")
    assert len(lines) == 2 and sweep_of("--head-guard", "0.5")[1] == lines
    exact = next(row for row in rows if row["setting"] == "exact")
    assert exact["family_bound"] == drop_bound(0, 0, 12, family_confidence(2)) > drop_bound(0, 0, 12)
    other, lines = sweep_of("--head-guard", "0.9")
    assert len(lines) == 3 and all("guard" not in row["setting"] or row["timed"] == 1 for row in other)


def row(setting, accuracy, time, bound=0.05, **more):
    return {"setting": setting, "accuracy": accuracy, "time_of_exact": time, "time_of_exact_interval": [time, time],
            "drop": 0.9 - accuracy, "family_bound": bound, "cycles_per_answer": 10 * accuracy, **more}


def test_the_front_and_the_headline():
    rows = [row("exact", 0.9, 1.0), row("fsd 0.1", 0.9, 0.95, 0.009, threshold=0.1),
            row("fsd 0.3", 0.8, 0.7, threshold=0.3), row("tilt 1", 0.8, 0.8, threshold=1.0)]
    assert sweeps.pareto(rows) == ["fsd 0.1", "fsd 0.3"]
    assert "`fsd 0.1` takes 0.95 of `exact`'s time" in sweeps.headline(rows)
    assert sweeps.headline(rows).startswith("At equal accuracy")
    assert "it takes 1.000 of `exact`'s forwards" in sweeps.headline(rows)
    rows[1]["family_bound"] = math.inf
    assert sweeps.headline(rows).startswith("No setting is shown to lose at most one point")
    assert "`fsd 0.3` takes 0.70" in sweeps.headline(rows) and "0.889 of `exact`'s forwards" in sweeps.headline(rows)


def test_a_chosen_tree_is_kept_for_all_stages(place):
    args = replace(options(place, "kept"), tree=None)
    model = eagle_fsd.load(place / "target", place / "head", device="cpu", tree=None)
    fitted = TreeConfig(8, 3, 2, confidence=Confidence((-2.0, 0.0), (-1.0, 0.0), (-3.0, -1.0)), least_reach=0.25)
    model.tree = fitted
    assert sweep.kept_tree(args, model) == fitted
    model.tree = TreeConfig(4, 2, 2)  # as on another machine, or with another number of threads
    again = sweep.kept_tree(args, model)
    assert again == fitted and hash(again) == hash(fitted)


def test_corrections_are_learned_from_the_other_thresholds():
    """Real gains are the predicted ones to the power 0.5, real nats 0.8 of the predicted: corrected exactly."""
    rows = [{"setting": "exact", "tau": 4.0, "temperature": 0.0, "predicted": None}]
    for threshold, gain in ((0.1, 1.1), (0.2, 1.3), (0.4, 1.6)):
        rows.append({"setting": f"fsd {threshold:g}", "threshold": threshold, "temperature": 0.0,
                     "tau": 4 * gain**0.5, "regret_per_token": 0.8 * threshold, "kl_per_token": None,
                     "predicted": {"tau": 4 * gain, "cost": threshold}})
    rows.append({**rows[1], "setting": "tilt 1", "threshold": 1.0})  # alone of its rule: as it was
    errors = prediction_errors(rows)
    for quantity in ("tau", "nats"):
        assert errors[quantity]["fsd 0.2"]["raw"] > 0.1
        assert errors[quantity]["fsd 0.2"]["corrected"] == pytest.approx(0)
        assert errors[quantity]["tilt 1"]["corrected"] == errors[quantity]["tilt 1"]["raw"]


def test_processes_share_the_questions(place):
    """Started as the documentation says; each answer is made once."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = ["--target", place / "target", "--draft", place / "head", "--questions", place / "tasks.jsonl",
                 "--work", place / "shared", "--out", place / "shared" / "out", "--tree", "8,3,3",
                 "--max-new-tokens", "8", "--settings", "tilt 1", "--stage", "answers"]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port),
         "-m", "eval.sweep", *map(str, arguments)],
        cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    records = [json.loads(line) for line in (place / "shared" / "answers-0-0.jsonl").read_text().splitlines()[1:]]
    answered = [(record["setting"], record["question"]) for record in records]
    assert len(answered) == len(set(answered)) and sum(name == "exact" for name, _ in answered) == len(PROMPTS)
