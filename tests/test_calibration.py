"""Promises, the statistics behind them, and settings found on a tiny pair."""

import copy
import dataclasses
import json
import math
import random

import pytest
from tiny import PROMPT, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.acceptance import make_rule, walk
from eagle_fsd.cli import main
from eagle_fsd.data.files import only_writer
from eagle_fsd.data.questions import Question
from eagle_fsd.drafting.config import Choice
from eagle_fsd.measure.calibrations import Calibration, read_calibrations, store_calibration
from eagle_fsd.measure.cycles import log_cycles
from eagle_fsd.measure.experiment import Experiment, settings_of, spread
from eagle_fsd.measure.methods import prompt_seed
from eagle_fsd.measure.promises import Promise, parse_promise
from eagle_fsd.measure.search import calibrate, check_promise
from eagle_fsd.measure.statistics import (
    drop_bound,
    drop_is_within,
    fewest_answers,
    fixed_sequence,
    mean_bound,
)
from eagle_fsd.measure.summaries import first_difference, paired, repetition, summarise
from eagle_fsd.measure.traces import Observer, emitted, predict
from eagle_fsd.models.placement import weights_digest

TREE = eagle_fsd.TreeConfig(8, 3, 3)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(tokenizer=tiny_tokenizer())


# Promises


@pytest.mark.parametrize(
    ("text", "promise", "name"),
    [
        ("accuracy_drop<=1%", Promise("accuracy_drop", 0.01), "accuracy_drop<=1%"),
        (" accuracy_drop <= 0.01 ", Promise("accuracy_drop", 0.01), "accuracy_drop<=1%"),
        ("diverging<=2.5%", Promise("diverging", 0.025), "diverging<=2.5%"),
        ("kl<=.02", Promise("kl", 0.02), "kl<=0.02"),
        ("speedup>=2.5", Promise("speedup", 2.5), "speedup>=2.5"),
    ],
)
def test_promises_are_read_and_written(text, promise, name):
    assert parse_promise(text) == promise
    assert str(promise) == name and parse_promise(name) == promise


@pytest.mark.parametrize(
    "text", ["", "accuracy<=1%", "accuracy_drop>=1%", "speedup<=2", "kl<=2%", "accuracy_drop<=0", "diverging<=100%",
             "accuracy_drop<=-1%", "kl<=nan"]
)
def test_what_is_no_promise_is_refused(text):
    with pytest.raises(ValueError, match="promise|limit"):
        parse_promise(text)


# Statistics


def test_the_fewest_answers_are_just_enough():
    for margin in (0.005, 0.01, 0.05):
        count = fewest_answers(margin)
        assert drop_is_within(0, 0, count, margin)
        assert (1 - margin) ** count <= 0.05 < (1 - margin) ** (count - 1)
    assert fewest_answers(0.01) == 299


def test_the_score_test_with_no_gain_is_that_of_a_share():
    """With nothing gained it is the one-sample score test of a binomial share."""
    for lost, count, margin in ((3, 1000, 0.01), (5, 1000, 0.01), (9, 400, 0.05)):
        z = (lost / count - margin) / math.sqrt(margin * (1 - margin) / count)
        assert drop_is_within(lost, 0, count, margin) is (z <= -1.6448536)


def test_the_bound_is_where_the_test_turns():
    for lost, gained, count in ((0, 0, 300), (5, 2, 500), (20, 25, 1000), (60, 10, 200)):
        bound = drop_bound(lost, gained, count)
        assert drop_is_within(lost, gained, count, bound + 1e-6)
        assert not drop_is_within(lost, gained, count, bound - 1e-6)
        assert bound > (lost - gained) / count
    assert drop_bound(5, 2, 500) < drop_bound(6, 2, 500)
    assert drop_bound(0, 300, 500) == 0 and drop_bound(500, 0, 500) == 1


def test_the_bound_of_a_mean_is_students():
    """Of 1, 2 and 3: the quantile of t with 2 degrees of freedom, by hand, times the standard error."""
    t = 0.9 * math.sqrt(2 / (1 - 0.9**2))  # P(T <= t) = 0.95
    assert mean_bound([1.0, 2.0, 3.0]) == pytest.approx(2 + t / math.sqrt(3))
    assert mean_bound([4.0] * 3) == 4 and mean_bound([1.0]) == math.inf


def test_a_true_drop_at_the_margin_passes_about_one_time_in_twenty():
    rng = random.Random(0)
    count, margin = 1000, 0.02
    passed = 0
    for _ in range(3000):
        draws = [rng.random() for _ in range(count)]
        lost, gained = sum(d < 0.05 for d in draws), sum(0.05 <= d < 0.05 + 0.05 - margin for d in draws)
        passed += drop_is_within(lost, gained, count, margin)
    assert 0.035 < passed / 3000 < 0.065


def test_a_sequence_ends_at_its_first_failure():
    asked = []

    def passes(name):
        asked.append(name)
        return name != "c"

    assert fixed_sequence("abcde", passes) == ["a", "b"] and asked == ["a", "b", "c"]


# The lossless pass


SETTINGS = settings_of({"fsd": (0.05, 0.3), "tilt": (0.5,), "relaxed": (1.0,), "typical": (0.5,)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_observer_tells_which_answers_a_rule_changes(pair, temperature):
    """Exactly those, and in the cycles before the first change it knows accepted lengths and KL."""
    rules = {name: make_rule(**options) for name, options in SETTINGS.items()}
    seen = {True: 0, False: 0}
    for seed in range(6):
        options = {"max_new_tokens": 8, "tree": TREE, "temperature": temperature, "seed": seed}
        prompt = [*PROMPT, seed + 4]
        observer = Observer(rules)
        observed = eagle_fsd.generate(prompt, pair, acceptance=observer, **options)
        exact = eagle_fsd.generate(prompt, pair, acceptance="exact", **options)
        assert observed.token_ids == exact.token_ids
        assert observed.stats.accepted_lengths == exact.stats.accepted_lengths
        for name, rule in rules.items():
            output = eagle_fsd.generate(prompt, pair, acceptance=rule, **options)
            trace = observer.traces[name]
            if not trace.diverges:
                assert output.token_ids == exact.token_ids
                assert output.stats.accepted_lengths == trace.lengths
            elif output.token_ids == exact.token_ids:  # only tokens behind the limit differ
                assert exact.finish_reason == "length"
            assert len(trace.lengths) == len(trace.costs) == len(exact.stats.accepted_lengths)
            assert None not in trace.costs
            seen[trace.diverges] += 1
    assert min(seen.values()) >= 3


def test_what_is_emitted_ends_with_an_end_token(pair):
    cycles = []

    def look(verification):
        walked = walk(verification, make_rule("fsd", math.inf)(verification))
        whole = emitted(verification, walked)
        assert emitted(verification, walked, {whole[0]}) == whole[:1]
        assert emitted(verification, walked, {whole[-1]}) == whole[: whole.index(whole[-1]) + 1]
        cycles.extend(whole)
        return make_rule("fsd", math.inf)(verification)

    output = eagle_fsd.generate(PROMPT, pair, acceptance=look, max_new_tokens=12, tree=TREE)
    assert cycles[:11] == output.token_ids[1:]  # the first one is the prefill's


def test_predictions_are_means_over_cycles(pair):
    observer = Observer({"a": make_rule("tilt", 0.5)})
    eagle_fsd.generate(PROMPT, pair, acceptance=observer, max_new_tokens=20, tree=TREE, temperature=1.0, seed=0)
    trace = observer.traces["a"]
    found = predict([trace, trace])
    assert found["tau"] == pytest.approx(sum(trace.lengths) / len(trace.lengths) + 1)
    assert found["cost"] == pytest.approx(sum(trace.costs) / len(trace.costs) / found["tau"])


# Experiments


def questions(count, answers=True):
    """Different ones, with a reference that no answer equals."""
    return [Question(i, "letters", (LETTERS[i % 20 : i % 20 + 4] + LETTERS[i // 20 % 20],), "x" if answers else None)
            for i in range(count)]


def answered(pair, count, new_tokens):
    """The same, nine in ten with the lossless answer as reference."""
    found = []
    for question in questions(count):
        chat = [{"role": "user", "content": question.turns[0]}]
        text = eagle_fsd.generate(chat, pair, acceptance="exact", max_new_tokens=new_tokens, tree=TREE).text
        found.append(dataclasses.replace(question, answer=text if question.id % 10 else "x"))
    return found


def experiment(pair, log, **options):
    return Experiment(pair, questions(12), SETTINGS, log, max_new_tokens=10, tree=TREE, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_that_are_not_generated_again_are_the_right_ones(pair, tmp_path, temperature):
    run = experiment(pair, tmp_path / "log.jsonl", temperature=temperature)
    run.observe()
    for name, options in SETTINGS.items():
        run.answer(name)
        for question, record in zip(run.questions, run.results(name), strict=True):
            chat = [{"role": "user", "content": question.turns[0]}]
            output = eagle_fsd.generate(chat, pair, acceptance=make_rule(**options), max_new_tokens=10, tree=TREE,
                                        temperature=temperature, seed=prompt_seed(0, chat))
            assert record["text"] == output.text
            assert record["tokens"] == len(output.token_ids)
            assert record["accepted"] == sum(output.stats.accepted_lengths)
            assert record["regret"] == pytest.approx(sum(r.regret for r in output.receipts))
            assert (record["kl"] is None) == (temperature == 0)
    summary = summarise(run.results("fsd 0.3"))
    assert summary["differing"] > 0 and summary["regret_per_token"] >= 0 and summary["accuracy"] == 0
    if temperature:
        assert summary["kl_per_token"] > summarise(run.results("fsd 0.05"))["kl_per_token"] >= 0
        assert summarise(run.results("exact"))["kl_per_token"] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_questions_that_are_answered_together_get_what_they_would_alone(pair, tmp_path, temperature):
    """Of several turns, with traces and KL."""
    talks = [Question(each.id, "letters", (each.turns[0], "b a d e"[: each.id + 1])[: 1 + each.id % 2], "x")
             for each in questions(7)]
    found = []
    for batch in (1, 4):
        run = Experiment(pair, talks, SETTINGS, tmp_path / f"{batch}.jsonl", max_new_tokens=9, tree=TREE,
                         temperature=temperature, batch=batch)
        run.observe()
        for name in SETTINGS:
            run.answer(name)
        found.append(run)
    alone, together = found
    for name in ("exact", *SETTINGS):
        for one, other in zip(*(copy.deepcopy(run.results(name)) for run in (alone, together)), strict=True):
            parts = {part: (one.pop(part, None), other.pop(part, None))
                     for part in ("logprob", "regret", "kl", "fuzzy_tokens", "traces")}
            assert one == other
            for part in ("logprob", "regret", "kl"):
                assert parts[part][0] == pytest.approx(parts[part][1], abs=1e-3)
            tokens = [[token for token, _ in found] for found in parts["fuzzy_tokens"]]
            assert tokens[0] == tokens[1]
            if name == "exact":
                for ours, theirs in ([found[setting] for found in parts["traces"]] for setting in SETTINGS):
                    assert (ours["lengths"], ours["diverges"]) == (theirs["lengths"], theirs["diverges"])
                    assert ours["costs"] == pytest.approx(theirs["costs"], abs=1e-3)
    with pytest.raises(ValueError, match="begun with other batch"):
        Experiment(pair, talks, SETTINGS, tmp_path / "4.jsonl", max_new_tokens=9, tree=TREE, temperature=temperature)


def test_an_experiment_goes_on_where_it_was(pair, tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    first = experiment(pair, log)
    first.observe()
    first.answer("fsd 0.3")
    lines = log.read_bytes()
    log.write_bytes(lines[:-20])  # as if killed while writing
    again = experiment(pair, log)
    made = []
    monkeypatch.setattr(Experiment, "_converse", lambda self, question, *_: made.append(question))
    again.observe()
    assert made == []
    monkeypatch.undo()
    again.answer("fsd 0.3")
    assert again.results("fsd 0.3") == first.results("fsd 0.3")
    with pytest.raises(ValueError, match="begun with other seed; delete it"):
        experiment(pair, log, seed=1)


def test_questions_that_are_too_long_are_refused_at_once(pair, tmp_path):
    asked = [*questions(2), Question("long", "none", ("a " * 500,))]
    with pytest.raises(ValueError, match="question long: the prompt has .* tokens, the target takes at most"):
        Experiment(pair, asked, SETTINGS, tmp_path / "log.jsonl", max_new_tokens=10, tree=TREE)
    with pytest.raises(ValueError, match="the prompt has .* tokens"):
        log_cycles(pair, ["a", "a " * 500], make_rule("exact"))


def test_one_tree_serves_all_settings_of_an_experiment(pair, tmp_path):
    class Trees:
        def of(self, rule, temperature, rows=1):
            return Choice(TREE if rule.name == "exact" else eagle_fsd.TreeConfig(4, 2, 2))

    pair.trees = Trees()
    try:
        with pytest.raises(ValueError, match="different trees for the rules under test: give one tree"):
            Experiment(pair, questions(2), SETTINGS, tmp_path / "log.jsonl")
    finally:
        pair.trees = None
    Experiment(pair, questions(2), SETTINGS, tmp_path / "log.jsonl")


def test_answers_to_something_else_are_not_taken(pair, tmp_path):
    log = tmp_path / "log.jsonl"
    first = experiment(pair, log)
    first.observe()
    first.answer("fsd 0.3")
    another = Experiment(pair, [Question(0, "none", ("another question",)), *questions(2)[1:]], SETTINGS, log,
                         max_new_tokens=10, tree=TREE)
    with pytest.raises(ValueError, match="1 answers of exact are missing"):
        another.results("exact")
    with pytest.raises(ValueError, match="begun with other target, head"):
        experiment(tiny_pair(seed=1, tokenizer=pair.tokenizer), log)
    # A rule of the same name that means something else is observed and answered anew; the others stay.
    other = SETTINGS | {"fsd 0.3": {"rule": "fsd", "threshold": 0.3, "divergence": "tv"}}
    again = Experiment(pair, questions(12), other, log, max_new_tokens=10, tree=TREE)
    with pytest.raises(ValueError, match="12 answers of fsd 0.3 are missing"):
        again.results("fsd 0.3")
    again.observe()
    again.answer("fsd 0.3")
    assert again.traces("tilt 0.5") == first.traces("tilt 0.5")
    rule = make_rule("fsd", 0.3, "tv")
    for question, record in zip(again.questions, again.results("fsd 0.3"), strict=True):
        chat = [{"role": "user", "content": question.turns[0]}]
        output = eagle_fsd.generate(chat, pair, acceptance=rule, max_new_tokens=10, tree=TREE)
        assert record["text"] == output.text


def test_unfinished_answers_are_no_lossless_ones(pair, tmp_path):
    run = experiment(pair, tmp_path / "log.jsonl")
    run.observe()
    count = sum(trace.diverges for trace in run.traces("fsd 0.3"))
    assert count > 0
    with pytest.raises(ValueError, match=f"{count} answers of fsd 0.3 are missing"):
        run.results("fsd 0.3")
    with pytest.raises(ValueError, match="cannot be called 'exact'"):
        Experiment(pair, questions(2), {"exact": {"rule": "fsd"}}, tmp_path / "other")


def test_timed_questions_are_spread():
    assert [question.id for question in spread(questions(10), 3)] == [0, 3, 6]
    assert len(spread(questions(4), 9)) == 4


def test_processes_share_the_questions(pair, tmp_path):
    log = tmp_path / "log.jsonl"
    for number in range(2):
        part = experiment(pair, log, share=(number, 2))
        part.observe()
        part.answer("tilt 0.5")
    part = experiment(pair, log)
    alone = experiment(pair, tmp_path / "alone.jsonl")
    alone.observe()
    alone.answer("tilt 0.5")
    assert part.results("tilt 0.5") == alone.results("tilt 0.5")


def test_measures_of_texts():
    assert repetition([1, 2, 3]) == 0 and repetition([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1 and first_difference([1], [1, 2]) == 1
    records = [{"correct": c} for c in (True, False, None, True)]
    reference = [{"correct": c} for c in (True, True, None, False)]
    assert paired(records, reference) == (1, 1, 3)


# Calibration


def test_too_few_prompts_are_refused_before_anything_is_generated(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(Experiment, "observe", lambda self: pytest.fail("something was generated"))
    with pytest.raises(ValueError, match="50 prompts are too few to tell accuracy_drop<=1%: at least 299"):
        calibrate(pair, questions(50), "accuracy_drop<=1%", tmp_path / "log")
    with pytest.raises(ValueError, match="needs prompts with answers"):
        calibrate(pair, questions(400, answers=False), "accuracy_drop<=1%", tmp_path / "log")
    with pytest.raises(ValueError, match="promise about sampling"):
        calibrate(pair, questions(400), "kl<=0.02", tmp_path / "log")
    promise = parse_promise("accuracy_drop<=1%")
    check_promise(promise, questions(299), 0.0, {"fsd": []})
    with pytest.raises(ValueError, match="too few"):  # several rules share the risk
        check_promise(promise, questions(299), 0.0, {"fsd": [], "tilt": []})
    with pytest.raises(ValueError, match="too few to tell kl<=0.02: at least 30"):
        check_promise(parse_promise("kl<=0.02"), questions(20), 1.0, {"fsd": []})
    with pytest.raises(ValueError, match="whose KL is known"):
        longest = make_rule("fsd", 0.1, sibling="longest")
        check_promise(parse_promise("kl<=0.02"), questions(30), 1.0, {"fsd": [longest]})
    with pytest.raises(ValueError, match="timed must be at least 1, got 0"):
        calibrate(pair, questions(400), "accuracy_drop<=1%", tmp_path / "log", timed=0)


@pytest.mark.parametrize(
    ("promise", "temperature"), [("accuracy_drop<=10%", 0.0), ("diverging<=30%", 0.0), ("kl<=0.05", 1.0)]
)
def test_a_calibration_keeps_its_promise_where_it_was_made(pair, tmp_path, promise, temperature):
    lines = []
    found = calibrate(
        pair, answered(pair, 80, 8), promise, tmp_path / "log", temperature=temperature,
        dials={"fsd": (0.01, 0.05, 0.2), "tilt": (0.05, 0.2, 1.0)},
        max_new_tokens=8, tree=TREE, timed=2, repeats=1, report=lines.append,
    )
    tried = {row["setting"]: row for row in found.curve}
    assert found.options["rule"] in ("exact", "fsd", "tilt")
    if found.options["rule"] != "exact":
        row = tried[f"{found.options['rule']} {found.options['threshold']:g}"]
        assert row["passes"] and row["bound"] <= parse_promise(promise).limit
        assert row["time"]["seconds_per_answer"] == found.measured["seconds_per_answer"]
    for rule, thresholds in (("fsd", (0.01, 0.05, 0.2)), ("tilt", (0.05, 0.2, 1.0))):
        outcomes = [tried[name]["passes"] for name in (f"{rule} {t:g}" for t in thresholds) if name in tried]
        assert all(outcomes[:-1])  # none is tried behind a failure
    assert lines and json.dumps(found.curve)
    if promise.startswith("accuracy"):
        assert found.measured["exact_accuracy"] == 0.9
        assert any(row["lost"] > 0 for row in found.curve)


def test_where_nothing_is_right_there_is_nothing_to_promise(pair, tmp_path):
    with pytest.raises(ValueError, match="answers 0.0% of the prompts rightly: there is nothing to lose"):
        calibrate(pair, questions(40), "accuracy_drop<=10%", tmp_path / "log", dials={"fsd": (0.01,)}, max_new_tokens=8,
                  tree=TREE, timed=2, repeats=1)


def test_a_speedup_is_promised_by_time_alone(pair, tmp_path):
    options = {"dials": {"fsd": (0.01, 0.2)}, "max_new_tokens": 8, "tree": TREE, "timed": 2, "repeats": 1}
    found = calibrate(pair, questions(4), "speedup>=0.01", tmp_path / "log", **options)
    assert found.options == {"rule": "exact"}
    with pytest.raises(ValueError, match="no setting reaches speedup>=1000; the fastest is"):
        calibrate(pair, questions(4), "speedup>=1000", tmp_path / "log", **options)


@pytest.mark.parametrize(("rule", "gate"), [("fsd+fly", 1.0), ("fsd+regret", 4.0)])
def test_rules_with_gates_are_calibrated_and_used(pair, tmp_path, rule, gate):
    asked = answered(pair, 40, 8)
    options = {"max_new_tokens": 8, "tree": TREE, "timed": 2, "repeats": 1}
    found = calibrate(pair, asked, "diverging<=60%", tmp_path / "log", dials={rule: (0.05, 0.5)},
                      options={"gate_threshold": gate}, **options)
    assert [row["setting"] for row in found.curve][:1] == [f"{rule} 0.05"]
    assert found.options["rule"] in ("exact", rule)
    given = {"rule": rule, "threshold": 0.5, "gate_threshold": gate}
    observed = Experiment(pair, asked, {"loose": given}, tmp_path / "other", max_new_tokens=8, tree=TREE)
    observed.observe()
    observed.answer("loose")
    changed = [trace.diverges for trace in observed.traces("loose")]
    assert any(changed)
    for question, diverges, record in zip(asked, changed, observed.results("loose"), strict=True):
        out = eagle_fsd.generate([{"role": "user", "content": question.turns[0]}], pair, acceptance=make_rule(**given),
                                 max_new_tokens=8, tree=TREE)
        assert out.text == record["text"]
        assert diverges == ("fuzzy" in [receipt.source for receipt in out.receipts])
    pair.calibrations = [calibration(pair, options=given)]
    wanted = eagle_fsd.generate(PROMPT, pair, acceptance=make_rule(**given), max_new_tokens=16, tree=TREE)
    found = eagle_fsd.generate(PROMPT, pair, quality="accuracy_drop<=1%", max_new_tokens=16, tree=TREE)
    assert found.token_ids == wanted.token_ids
    pair.calibrations = []


# The file and its use


def calibration(pair, **changes):
    fields = {
        "promise": "accuracy_drop<=1%", "options": {"rule": "fsd", "threshold": 0.3}, "temperature": 0.0,
        "target": pair.target.digest(), "head": weights_digest(pair.draft), "dtype": "torch.float32",
        "tree": repr(TREE), "prompts": "p.jsonl", "answers": 300,
        "measured": {"speedup": 2.0}, "curve": [],
    }
    return Calibration(**fields | changes)


def test_calibrations_are_stored_beside_the_head(pair, tmp_path):
    store_calibration(tmp_path, calibration(pair))
    store_calibration(tmp_path, calibration(pair, promise="kl<=0.02", temperature=0.7))
    store_calibration(tmp_path, calibration(pair, options={"rule": "fsd", "threshold": 0.1}))
    stored = read_calibrations(tmp_path)
    assert [(c.promise, c.options["threshold"]) for c in stored] == [("kl<=0.02", 0.3), ("accuracy_drop<=1%", 0.1)]
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_calibrations(tmp_path)


def test_quality_uses_the_calibration(pair, caplog):
    pair.calibrations = [calibration(pair), calibration(pair, promise="kl<=0.02", temperature=0.7,
                                                        options={"rule": "tilt", "threshold": 0.2})]
    options = {"max_new_tokens": 16, "tree": TREE}
    wanted = eagle_fsd.generate(PROMPT, pair, threshold=0.3, **options)
    assert eagle_fsd.generate(PROMPT, pair, quality="accuracy_drop <= 0.01", **options).token_ids == wanted.token_ids
    assert not caplog.records
    eagle_fsd.generate(PROMPT, pair, quality="accuracy_drop<=1%", temperature=0.7, **options)
    assert "calibrated with temperature 0.0, not 0.7: the promise may not hold" in caplog.text
    pair.calibrations = [calibration(pair, target="another", dtype="torch.bfloat16", head="a head", tree="a tree")]
    eagle_fsd.generate(PROMPT, pair, quality="accuracy_drop<=1%", **options, repetition_penalty=1.1)
    assert all(text in caplog.text for text in (
        "target another", "dtype torch.bfloat16", "head a head", "tree a tree", "without top_k"))
    with pytest.raises(ValueError, match=r"not calibrated for kl<=0.5 \(calibrated: accuracy_drop<=1%\)"):
        eagle_fsd.generate(PROMPT, pair, quality="kl<=0.5", **options)
    with pytest.raises(ValueError, match="chooses the rule: leave acceptance"):
        eagle_fsd.generate(PROMPT, pair, quality="accuracy_drop<=1%", threshold=0.1, **options)
    pair.calibrations = []


@pytest.mark.parametrize(("promise", "options", "warns"), [
    ("accuracy_drop<=1%", {"rule": "exact"}, False), ("diverging<=1%", {"rule": "fsd", "threshold": 0.0}, False),
    ("accuracy_drop<=1%", {"rule": "fsd", "threshold": 0.1}, True), ("speedup>=2", {"rule": "exact"}, True),
])
def test_what_is_lossless_keeps_promises_about_quality_anywhere(pair, caplog, promise, options, warns):
    pair.calibrations = [calibration(pair, promise=promise, options=options, target="another", dtype="torch.bfloat16")]
    eagle_fsd.generate(PROMPT, pair, quality=promise, max_new_tokens=8, tree=TREE, repetition_penalty=1.1)
    assert ("may not hold" in caplog.text) is warns
    pair.calibrations = []


def test_the_command_refuses_what_cannot_be_found_out(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter, "answer": "x"}) + "\n" for letter in LETTERS))
    assert main(["calibrate", "--prompts", str(prompts), "--budget", "accuracy_drop<=1%"]) == 2
    assert "26 prompts are too few to tell accuracy_drop<=1%: at least 299 are needed" in capsys.readouterr().err
    assert main(["calibrate", "--prompts", str(prompts), "--budget", "accuracy<=1%"]) == 2
    assert "no promise; accepted are such as accuracy_drop<=1%" in capsys.readouterr().err
    sampled = ["calibrate", "--prompts", str(prompts), "--budget", "kl<=1", "--temperature", "1"]
    prompts.write_text(prompts.read_text() * 2)
    assert main([*sampled, "--acceptance", "fsd+fly", "--gate-threshold", "0.9"]) == 2
    assert "needs rules whose KL is known; that of Gated(" in capsys.readouterr().err
    assert main([*sampled, "--acceptance", "fsd", "fsd+fly", "--gate-threshold", "0.9"]) == 2
    assert "--gate-threshold are those of one rule" in capsys.readouterr().err


def test_one_process_at_a_time_writes_a_log_of_answers(tmp_path, capsys):
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in LETTERS * 3))
    with only_writer(log):
        assert main(["calibrate", "--prompts", str(prompts), "--budget", "speedup>=1", "--log", str(log),
                     "--out", str(tmp_path)]) == 2
    assert "answers.jsonl is being written by process" in capsys.readouterr().err
