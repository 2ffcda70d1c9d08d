"""`eagle-fsd calibrate` and what it is made of: intervals, records, what is recommended."""

import json
import math
import random

import numpy as np
import pytest
import torch
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.data.questions import Question
from eagle_fsd.measure.comparison import compare, cross_fit_text, difference_text, join_runs, recommend, record_of
from eagle_fsd.measure.lost import lost_answers, lost_table
from eagle_fsd.measure.methods import Answer, engine
from eagle_fsd.measure.records import plot_comparison
from eagle_fsd.measure.settings import ComparisonOptions, parse_setting
from eagle_fsd.measure.statistics import (
    by_category,
    by_turn,
    cross_fitted,
    drop_bound,
    drop_interval,
    first_difference,
    interval,
    method_rows,
    ratio_interval,
    repetition,
)
from eagle_fsd.utils.checks import require_integer

TREE = eagle_fsd.TreeConfig(8, 3, 2)


# Statistics


def test_intervals_are_percentiles_over_questions():
    def mean(values):
        return values.mean(-1)

    assert interval(mean, np.array([0.0, 1.0] * 4))[1] < 1
    ours, theirs = np.array([1.0, 3.0] * 50), np.array([2.0, 6.0] * 50)
    assert ratio_interval(ours, theirs) == [0.5, 0.5]  # question by question: pairs are drawn together
    low, high = interval(mean, ours)
    half = 1.96 * ours.std() / 10
    assert low == pytest.approx(2 - half, abs=0.03) and high == pytest.approx(2 + half, abs=0.03)
    for few in range(1, 5):  # of two it would be their minimum and maximum
        assert interval(mean, np.arange(few)) is ratio_interval(np.ones(few), np.ones(few)) is None
    assert interval(mean, np.arange(5.0))[0] > 0


def test_bounds_of_a_drop_are_tangos():
    """By hand where nothing changed: -n d / sqrt(n d (1 - d)) = -z, so that d = z^2 / (n + z^2)."""
    z = 1.6448536
    assert drop_bound(0, 0, 100) == pytest.approx(z**2 / (100 + z**2), abs=1e-6)
    assert drop_interval(0, 0, 50) == pytest.approx([-drop_bound(0, 0, 50, 0.975), drop_bound(0, 0, 50, 0.975)])
    low, high = drop_interval(10, 2, 200)
    assert low < 0.04 < high and drop_interval(2, 10, 200) == pytest.approx([-high, -low])
    assert low == pytest.approx(0.04 - 1.96 * math.sqrt(12 / 200 - 0.04**2) / math.sqrt(200), abs=0.01)
    assert drop_bound(40, 0, 100) > drop_bound(40, 0, 100, 0.5) > 0.39 > drop_bound(0, 40, 100)
    assert drop_bound(5, 5, 100, 0.99) > drop_bound(5, 5, 100, 0.95)


def test_measures_of_texts():
    assert repetition([1, 2, 3]) == 0 and repetition([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1 and first_difference([1], [1, 2]) == 1


# Records and rows


def question(number: int, category: str = "prompts") -> Question:
    return Question(number, category, (f"question {number}",), "yes")


def method(text: str, ids: list[int], seconds: float):
    return lambda chat, max_new_tokens: Answer(seconds, ids, text)


def test_rows_are_paired_question_by_question(tmp_path, plots):
    questions = [question(number, "odd" if number % 2 else "even") for number in range(6)]
    wrong = iter([False, True, False, False, True, False])
    methods = {"exact": method("yes", [1, 2, 3, 4], 2.0),
               "half": lambda chat, most: Answer(1.0, [1, 2, 9], "no" if next(wrong) else "yes")}
    found = compare(methods, questions, ComparisonOptions(out=tmp_path / "x"), {"seed": 0}, warm_up=0)
    rows = by_category(found, "exact")
    assert list(rows) == ["all", "even", "odd"]
    exact, half = rows["all"]
    assert (half["speedup"], half["time"]) == (1.5, 0.5) and half["time_interval"] == [0.5, 0.5]
    assert (half["same_answers"], half["same_tokens"]) == (0, 2 / 3) and exact["same_tokens"] == 1
    assert (half["lost"], half["gained"], half["drop"]) == (2, 0, 1 / 3) and half["accuracy"] == pytest.approx(2 / 3)
    assert half["bound"] == drop_bound(2, 0, 6) and half["drop_interval"] == drop_interval(2, 0, 6)
    assert half["tau"] is None  # not our engine
    together = by_category([line | {"category": "all"} for line in found], "exact")  # without categories
    assert list(together) == ["all"]
    for line in found[1::2]:  # a category that is not graded
        for record in line["methods"].values():
            record["right"] = None
    panels = by_category(found, "exact")
    assert panels["all"][0]["accuracy"] == 1 and panels["odd"][0]["accuracy"] is None
    for name, shown in (("each", panels), ("one", together)):
        plot_comparison(shown, "exact", tmp_path / f"{name}.png")
    methods = [row["method"] for row in panels["all"]]
    assert plots == {"each.png": [(name, methods) for name in panels], "one.png": [("", methods)]}


def test_accuracy_of_several_runs_is_judged_question_by_question(tmp_path):
    """Of 8 questions, half answers two rightly in both runs, and four with one."""
    asked = [question(number) for number in range(8)]
    found = []
    for seed, given in enumerate(("11100000", "11011001")):
        turn = iter(map(int, given))
        methods = {"exact": method("yes", [seed], 1.0),
                   "half": lambda chat, most, turn=turn: Answer(1.0, [2], "yes" if next(turn) else "no")}
        options = ComparisonOptions(out=tmp_path / str(seed))
        found.append(compare(methods, asked, options, {}, warm_up=0))
    assert join_runs(found[:1]) == found[0]
    joined = join_runs(found)
    assert [line["methods"]["exact"]["ids"] for line in joined] == [[0]] * 8
    exact, half = method_rows(joined, "exact")
    assert (exact["accuracy"], exact["drop"], exact["drop_interval"]) == (1, 0, drop_interval(0, 0, 8))
    assert (half["accuracy"], half["lost"], half["gained"], half["drop"]) == (0.5, 4, 0, 0.5)
    falls = np.array([0, 0, 0.5, 0.5, 0.5, 1, 1, 0.5])
    assert half["drop_interval"] == interval(lambda fall: fall.mean(-1), falls)
    assert half["bound"] == interval(lambda fall: fall.mean(-1), falls, ends=(0.5, 0.95))[1] < half["drop_interval"][1]


def test_records_sum_up_what_receipts_say(model):
    answer = engine(model, acceptance="fsd", threshold=0.6, head_guard=None, tree=TREE)([3, 1, 4], 24)
    record = record_of([answer, answer], Question(1, "x", ("a", "b")), run_code=False)
    receipts, stats = answer.output.receipts, answer.output.stats
    assert record["tokens"] == 48 and record["forwards"] == 2 * stats.target_forwards
    assert record["emitted"] / record["forwards"] == pytest.approx(stats.mean_accepted_length)
    assert record["fuzzy"] == 2 * sum(receipt.source == "fuzzy" for receipt in receipts) > 0
    assert record["regret"] == pytest.approx(2 * sum(receipt.regret for receipt in receipts)) and record["regret"] > 0
    assert record["cut_off"] and record["right"] is None
    first = next(at for at, receipt in enumerate(receipts) if receipt.source == "fuzzy")
    assert (record["lengths"], record["first_fuzzy"]) == (2 * stats.accepted_lengths, first)


def test_lost_answers_say_where_the_first_fuzzy_token_stands():
    def record(ids, right, first=None):
        return {"ids": ids, "tokens": len(ids), "right": right, "fuzzy": int(first is not None), "first_fuzzy": first}

    found = [{"id": number, "category": "x", "methods": {
        "exact": record([1, 2, 3, 4], True), "fsd": record([1, 2, 7, 4], right, first),
        "lossless": record([1, 2, 3, 5], False), "drafter alone": record([8], number == 2)}}
        for number, (right, first) in enumerate([(True, 2), (False, 2), (False, None)])]
    lost = lost_answers(found, "exact", lambda ids: "|".join(map(str, ids)), "drafter alone")
    assert [(each["method"], each["id"], each["at"], each["drafter_right"]) for each in lost] == [
        ("fsd", 1, 2, False), ("fsd", 2, 2, True)]
    assert (lost[0]["before"], lost[0]["token"], lost[0]["instead"]) == ("1|2", "7", "3")
    assert '| fsd | 1 | 2 of 4 | "1\\|2" | "7" | "3" | wrong |' in lost_table(lost)
    assert '| fsd | 2 | none: 2 of 4 |' in lost_table(lost)


def test_a_comparison_goes_on_where_it_was(tmp_path):
    asked, log, given = [], tmp_path / "x.answers" / "run_1" / "a.jsonl", ComparisonOptions(out=tmp_path / "x")

    def counted(name):
        return lambda chat, most: asked.append((name, chat[0]["content"])) or Answer(1.0, [1], "yes")

    def run(names, count, **options):
        asked.clear()
        return compare({name: counted(name) for name in names}, [question(n) for n in range(count)], given,
                       {"seed": 0}, warm_up=0, **options)

    run("ab", 2)
    assert [name for name, _ in asked] == ["a", "b", "b", "a"]  # the order rotates
    log.write_bytes(log.read_bytes() + b'{"asked": "cut o')  # as if killed while writing
    run("ab", 3)
    assert asked == [("a", "question 2"), ("b", "question 2")]
    run("abc", 2)
    assert len(asked) == 6  # what is compared in time is timed side by side
    kept = [json.loads(line)["question_id"] for line in log.read_text().splitlines()]
    assert kept == [2, 0, 1]  # each answer once: those to other questions, then these in their order
    together = {name: counted(name) for name in "ab"}
    found = run("ab", 5, timed=1, together=together, workers=2)
    assert sorted(asked) == [(name, f"question {number}") for name in "ab" for number in (3, 4)]
    assert [line["id"] for line in found] == [0, 1, 2, 3, 4] and not found[4]["methods"]["a"]["timed"]
    assert method_rows(found, "a")[1]["timed"] == 3 and method_rows(found[3:], "a")[1]["time"] is None
    with pytest.raises(ValueError, match=r"made with another seed \(was \d, now \d\): .* delete it"):
        compare({"a": counted("a")}, [question(0)], given, {"seed": 1})


def test_speeds_are_means_over_runs_with_their_deviations():
    """Two questions of one and two turns in three runs; the reference takes a second for a token."""
    def record(tokens, seconds, lengths=()):
        return {"asked": str(tokens), "ids": [1] * tokens, "tokens": tokens, "seconds": seconds, "lengths": lengths,
                "forwards": len(lengths), "emitted": sum(lengths) + len(lengths), "steps": len(lengths), "timed": True,
                "fuzzy": 0, "regret": 0.0, "repeated": 0.0, "cut_off": False, "right": None}

    by_run = [[{"category": "x", "methods": {"plain": record(tokens, float(tokens)),
                                             "fast": record(tokens, tokens / speed, lengths)}}
               for tokens, speed, lengths in ((2, speed, [0, 1]), (6, 2 * speed, [2, 3, 0]))]
              for speed in (1.0, 2.0, 6.0)]
    plain, fast = method_rows(join_runs(by_run), "plain")
    assert (plain["mean_speed"], plain["mean_speed_deviation"], plain["mean_speedup"]) == (1, 0, 1)
    speeds = np.array([1.5, 3.0, 9.0])
    assert fast["mean_speed"] == fast["mean_speedup"] == pytest.approx(speeds.mean())
    assert fast["mean_speed_deviation"] == fast["mean_speedup_deviation"] == pytest.approx(speeds.std(ddof=1))
    seconds = np.mean([2 + 6 / 2, 2 / 2 + 6 / 4, 2 / 6 + 6 / 12])
    assert fast["tokens_per_second"] == pytest.approx(8 / seconds) and fast["time"] == pytest.approx(seconds / 8)
    assert (fast["tau"], fast["steps"]) == (11 / 5, 2.5)
    assert fast["accepted"] == pytest.approx([3 / 5, 2 / 3, 1 / 2])  # of [0, 1, 2, 3, 0]
    assert method_rows(by_run[0], "plain")[1]["mean_speed_deviation"] is None  # of one run
    for lines, turns in zip(by_run, (2, 2, 1), strict=True):  # in one run the first conversation ended early
        for line, count in zip(lines, (turns, 1), strict=True):
            for name in line["methods"]:
                line["methods"][name]["by_turn"] = [record(1, 1.0)] * count
    assert {turn: rows[0]["answers"] for turn, rows in by_turn(join_runs(by_run), "plain").items()} == {"turn 1": 2}


@pytest.mark.parametrize(("dtype", "baseline", "ours", "temperature", "said"), [
    (torch.float32, None, True, 0.0, "A lossless method has 100%"),
    (torch.float32, torch.bfloat16, True, 0.0, "x computes in bfloat16 and our engine in float32, so texts may differ"),
    (torch.float32, torch.bfloat16, False, 0.0, "can have less than 100% in bfloat16"),
    (torch.bfloat16, None, True, 1.0, "can have less than 100% in bfloat16"),
    (torch.float32, torch.float32, True, 1.0, "with other noise"),
])
def test_a_page_says_why_lossless_texts_part(dtype, baseline, ours, temperature, said):
    pair = tiny_chat_pair()
    pair.target.model.to(dtype)
    assert said in difference_text(pair, temperature, baseline and ("x", baseline), ours)


def test_an_error_names_the_question(tmp_path):
    """Unless it is a fault of the program, whose traceback is shown."""
    for fails, said in ((lambda *_: require_integer("prompt", "x", 1), "question 7: prompt must be an int, got 'x'"),
                        (lambda *_: int("x"), "^invalid literal")):
        for options in ({"warm_up": 0}, {"timed": 0, "together": {"a": fails}}):
            with pytest.raises(ValueError, match=said):
                compare({"a": fails}, [question(7)], ComparisonOptions(out=tmp_path / "x"), {}, **options)


# What is recommended


def row(name: str, time: float, bound: float, accuracy: float | None = 0.6, high: float | None = None) -> dict:
    return {"method": name, "time": time, "time_interval": [time - 0.05, time + 0.05 if high is None else high],
            "bound": bound, "accuracy": accuracy, "graded": 400}


@pytest.mark.parametrize(("rows", "name", "said"), [
    ([row("a", 0.8, 0.008), row("b", 0.7, 0.009), row("c", 0.5, 0.02)], "b", "Recommended: b, 0.70 of exact's time"),
    ([row("c", 0.5, 0.02)], None, "no setting loses at most 1 points"),
    ([row("a", 0.97, 0.008, high=1.02)], None, "takes significantly less time than exact and loses at most 1 points"),
    ([row("a", 0.5, 0.0, accuracy=None)], None, "cannot be graded"),
    ([row("a", 0.5, 0.0, accuracy=0.0)], None, "too little to measure a loss"),
    ([row("a", 0.5, 0.0) | {"time_interval": None}], None, "at least 5 timed questions"),
])
def test_the_fastest_of_those_that_surely_lose_little(rows, name, said):
    found, text = recommend([row("exact", 1.0, 0.01, rows[0]["accuracy"]), *rows], "exact", 1)
    assert found == name and said in text


def test_a_choice_is_judged_on_questions_that_it_has_not_seen():
    """Against both halves by hand: in each the fastest that loses little there, and what it does in the other."""
    draw = random.Random(3)

    def record(name, number):
        right = draw.random() < {"exact": 0.9, "wild": 0.6}.get(name, 0.85)
        seconds = {"exact": 4.0, "wild": 1.0}.get(name, 3.0) + draw.random()
        return {"ids": [1], "tokens": 1, "seconds": seconds, "forwards": 0, "fuzzy": 0, "regret": 0.0, "repeated": 0.0,
                "right": right, "timed": number % 5 == 0}

    found = [{"category": "x", "methods": {name: record(name, number) for name in ("exact", "a", "b", "wild")}}
             for number in range(60)]
    timed, other = found[::5], [line for number, line in enumerate(found) if number % 5]
    halves = timed[::2] + other[::2], timed[1::2] + other[1::2]

    def total(lines, name, key):
        return sum(line["methods"][name][key] for line in lines if key != "seconds" or line["methods"][name]["timed"])

    def best_of(lines):
        little = [name for name in ("exact", "a", "b", "wild") if 100 * (
            total(lines, "exact", "right") - total(lines, name, "right")) / len(lines) <= 5]
        return min(little, key=lambda name: total(lines, name, "seconds"))

    chosen, crossed = [best_of(half) for half in halves], cross_fitted(found, "exact", 5)
    assert crossed["chosen"] == chosen and "wild" not in chosen
    pairs = list(zip(chosen, halves[::-1], strict=True))
    lost = sum(total(rest, "exact", "right") - total(rest, name, "right") for name, rest in pairs)
    assert crossed["drop"] == pytest.approx(lost / 60)
    assert crossed["time"] == pytest.approx(sum(total(rest, name, "seconds") for name, rest in pairs)
                                            / sum(total(rest, "exact", "seconds") for rest in halves))
    assert "on the two halves), measured on the other half: " in cross_fit_text(crossed, "exact", 5)
    for line in found:
        line["methods"]["a"]["timed"] = False
    assert cross_fitted(found, "exact", 5) is None and cross_fitted(found[:1], "exact", 5) is None


# The command


def test_settings_are_rules_with_options():
    assert parse_setting(" fsd  0.3 ") == ("fsd 0.3", {"acceptance": "fsd", "threshold": 0.3})
    assert parse_setting("exact top_p=0.6") == ("exact top_p=0.6", {"acceptance": "exact", "top_p": 0.6})
    assert parse_setting("fsd 0.5 head_guard=none divergence=tv top_k=5")[1] == {
        "acceptance": "fsd", "threshold": 0.5, "head_guard": None, "divergence": "tv", "top_k": 5}
    assert parse_setting("fsd 0.2 tree=16,15,1")[1]["tree"] == eagle_fsd.TreeConfig(16, 15, 1)
    with pytest.raises(ValueError, match="a tree must be total_tokens,depth,top_k.*got '16,15'"):
        parse_setting("fsd 0.2 tree=16,15")
    for text in ("", "fsd x", "fsd 0.1 0.2", "fsd threshold=none"):
        with pytest.raises(ValueError, match="a setting must be"):
            parse_setting(text)


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    pair = tiny_chat_pair()
    monkeypatch.setattr(Loading, "load", lambda self, *tree: pair)
    asked = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
    answers = [eagle_fsd.generate(chat, pair, acceptance="exact", max_new_tokens=8).text for chat in asked]
    lines = [{"prompt": chat[0]["content"], "answer": text} for chat, text in zip(asked, answers, strict=True)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "prompts.jsonl"


def test_calibrate_says_what_settings_buy_and_cost(prompts, tmp_path, capsys, plots):
    words = ["calibrate", "--prompts", str(prompts), "--settings", "fsd 0", "fsd 0.6 head_guard=none", "--tree",
             "8,3,2", "--max-new-tokens", "8", "--out", str(tmp_path / "found")]
    assert main(words) == 0
    said, record = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    exact, lossless, fuzzy = record["rows"]["all"]
    assert exact["accuracy"] == lossless["accuracy"] == lossless["same_tokens"] == 1
    assert {each["method"] for each in record["lost"]} == {"fsd 0.6 head_guard=none"}
    assert "instead of" in said
    assert fuzzy["lost"] > 0 < fuzzy["fuzzy_share"] and fuzzy["tau"] > exact["tau"] and fuzzy["regret_per_token"] > 0
    assert record["recommended"] is None and "no setting loses at most 1 points" in said
    assert plots["found.png"] == [("", ["exact", "fsd 0", "fsd 0.6 head_guard=none"])]
    paths = list((tmp_path / "found.answers" / "run_1").iterdir())
    before = [path.read_bytes() for path in paths]
    assert main(words) == 0 and len(paths) >= 4
    assert [path.read_bytes() for path in paths] == before


def test_a_batch_of_fuzzy_requests_has_one_tree(prompts, tmp_path, capsys):
    """Said before anything is answered."""
    words = ["calibrate", "--prompts", str(prompts), "--out", str(tmp_path / "found"), "--batch", "4", "--settings"]
    assert main([*words, "exact tree=4,3,1", "fsd 0.6 tree=8,3,2"]) == 2
    assert "leave it out of 'fsd 0.6 tree=8,3,2'" in capsys.readouterr().err
    assert not (tmp_path / "found.answers").exists()
