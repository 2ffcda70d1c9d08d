"""The learned judge: what it learns from known harm, its file, requests that use it, and the signals' table."""

import itertools
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from known_harm import TREE, known_pair, write_questions
from random_trees import random_verification
from safetensors.torch import save_file
from tiny import save_pair, tiny_pair, tiny_tokenizer

import eagle_fsd
from eagle_fsd.acceptance import RULES, make_rule
from eagle_fsd.acceptance.judge import SIGNALS, LearnedJudge, step_signals
from eagle_fsd.data.questions import read_questions
from eagle_fsd.measure.experiment import Experiment, meaning
from eagle_fsd.measure.judges import JUDGE_FILE, read_judge, store_judge
from eval.report.signals import agreement, area, oracle_row, resampled
from eval.signals import SignalsArguments, compare, page
from eval.signals import run as compare_files
from train.judge import Arguments, learn, main, run
from train.mine import Arguments as MineArguments
from train.mine import mine, read_checked
from train.mining.mismatches import DIVERGENCES
from train.mining.regression import dial_stopping, folds, passing
from train.mining.store import Mined, read_mined


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pair whose harm is known, mined, with a judge beside its head."""
    folder = tmp_path_factory.mktemp("known")
    pair = known_pair()
    save_pair(folder, pair)
    given = MineArguments("target", "head", write_questions(folder / "questions.jsonl", 48), folder / "mined.jsonl",
                          label="both", batch=16, max_new_tokens=12, tree=TREE)
    mine(pair, read_checked(given), given)
    run(Arguments((given.out,), folder / "head"))
    return folder


@pytest.fixture(scope="module")
def pair(folder):
    return eagle_fsd.load(folder / "target", folder / "head", tree=None)


def text(pair, question, **options):
    return eagle_fsd.generate([{"role": "user", "content": question}], pair, tree=TREE, **options).text


def test_the_judge_learns_what_was_constructed(folder):
    card = json.loads((folder / "head" / "judge.json").read_text())
    assert card["auc"] == 1 and card["mismatches"] == 64 and card["harmful"] == 32 and card["answers"] == 48
    assert [row["stopped"] for row in card["at_recall"]] == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert all(row["precision"] == 1 and row["harmless_passed"] == 1 for row in card["at_recall"][-1:])
    assert card["at_recall"][-1]["really_stopped"] >= 0.9  # the dials of other questions do it, too
    assert card["data"][0]["file"] == "questions.jsonl" and card["environment"]["torch"] == torch.__version__
    stored = read_judge(folder / "head")
    assert stored.card == card and stored.width == 32


def test_a_rule_that_is_lossless_only_when_greedy_has_the_judge_when_sampling(pair):
    """`relaxed` at 0 may take the target's best token where another was drawn; then the judge is asked."""
    options = {"acceptance": "relaxed+judge", "threshold": 0.0, "gate_threshold": 0.5}
    assert text(pair, "ra", **options) == "efg1"
    sampled = [eagle_fsd.generate([0, 4], pair, tree=TREE, max_new_tokens=8, temperature=2.0, seed=seed, **options)
               for seed in range(6)]
    assert all(output.stats.target_forwards for output in sampled)
    with pytest.raises(ValueError, match="needs a judge"):
        eagle_fsd.generate([3, 1], tiny_pair(), temperature=1.0, **options)


@pytest.mark.parametrize(
    "options",
    [{"acceptance": "judge", "threshold": 0.5},
     {"acceptance": make_rule("fsd+judge", math.inf, gate_threshold=0.5)}],
    ids=["judge", "fsd+judge"],
)
def test_requests_let_harmless_tokens_pass_and_no_others(pair, options):
    assert [text(pair, "r" + last, **options) for last in "abc"] == ["ekg1", "hi4", "np5"]
    batch = eagle_fsd.generate([[0, 4], [0, 5], [0, 6]], pair, tree=TREE, **options)
    assert [output.text for output in batch] == ["ekg1", "hi4", "np5"]


def test_the_targets_own_generate_uses_it_too(folder, pair):
    model, ids = pair.target.model, torch.tensor([[0, 4]])
    options = {"custom_generate": eagle_fsd.custom_generate, "acceptance": "judge", "threshold": 0.5, "tree": TREE}
    found = model.generate(ids, draft=str(folder / "head"), max_new_tokens=8, do_sample=False, **options)
    assert pair.tokenizer.decode(found[0, 2:], skip_special_tokens=True) == "ekg1"
    with pytest.raises(ValueError, match="there is no judge.safetensors beside the head"):
        model.generate(ids, draft=pair.draft, max_new_tokens=8, do_sample=False, **options)


def test_a_budget_holds_when_sampling_too(pair):
    """The KL of what it does is known: a judge looks at the most likely child, whatever the noise."""
    options = {"acceptance": "judge", "threshold": 0.5, "temperature": 1.0, "tree": TREE, "max_new_tokens": 8}
    loose = [eagle_fsd.generate([0, 4], pair, seed=seed, budget=100.0, **options) for seed in range(8)]
    assert all(output.stats.budget_spent > 0 for output in loose)
    stingy = [eagle_fsd.generate([0, 4], pair, seed=seed, budget=0.01, **options) for seed in range(8)]
    exact = [eagle_fsd.generate([0, 4], pair, seed=seed, **{**options, "threshold": 0.0}) for seed in range(8)]
    assert [output.token_ids for output in stingy] == [output.token_ids for output in exact]


def test_experiments_give_the_rules_under_test_the_judge(folder, pair, tmp_path):
    questions = read_questions(folder / "questions.jsonl")[:6]
    settings = {"judge 0.5": {"rule": "judge", "threshold": 0.5}, "judge 1": {"rule": "judge", "threshold": 1.0}}
    found = Experiment(pair, questions, settings, tmp_path / "log.jsonl", max_new_tokens=12, tree=TREE)
    found.observe()
    for name, texts in (("judge 0.5", ["ekg1", "hi4", "np5"]), ("judge 1", ["ekg2", "hlm3", "np5"])):
        found.answer(name)
        assert [record["text"] for record in found.results(name)] == [text for text in texts for _ in range(2)]
    learned = found.rules["judge 1"].learned  # another judge is another rule, whose answers are not known
    other = replace(found.rules["judge 1"], learned=replace(learned, weight=learned.weight + 1))
    assert meaning(other) != meaning(found.rules["judge 1"]) == meaning(replace(other, learned=learned))


def test_both_ends_of_the_dial(pair):
    assert [text(pair, "r" + last, acceptance="judge", threshold=0.0) for last in "abc"] == ["efg1", "hi4", "no5"]
    assert [text(pair, "r" + last, acceptance="judge", threshold=1.0) for last in "abc"] == ["ekg2", "hlm3", "np5"]
    assert text(pair, "ra", acceptance="judge") == "efg1"  # the default is lossless


def test_the_rule_reads_what_was_mined(folder, pair):
    """The judge of the file, asked about the mined numbers, is that of the rule in a tree."""
    mined = read_mined([folder / "mined.jsonl"])
    signals = torch.tensor([[row["signals"][name] for name in SIGNALS] for row in mined.rows])
    harm = pair.judge.harm(mined.features[:, 1], signals)
    wanted = torch.tensor([row["outcome"] for row in mined.rows])
    assert torch.equal(harm > 0.5, wanted)
    seen = {}

    def noting(verification):
        judged = pair.judge.harm(verification.features, step_signals(verification))[0]
        for node in range(1, judged.numel()):
            parent = verification.tree.parents[0, node]
            seen[verification.tree.tokens[0, parent].item(), verification.tree.tokens[0, node].item()] = judged[node]
        return make_rule("exact")(verification)

    for last in "abc":
        text(pair, "r" + last, acceptance=noting)
    for row, value, features in zip(mined.rows, harm, mined.features, strict=True):
        found = seen[features[0].argmax().item(), row["substitute"]]
        torch.testing.assert_close(found, value, atol=1e-2, rtol=0)  # columns that hardly vary make much of rounding


# --- the rule -----------------------------------------------------------------------------------


def test_signals_of_steps_are_those_of_the_definitions():
    verification = random_verification(3, greedy=True, batch=2)
    found = step_signals(verification)
    for row, node in itertools.product(range(2), range(1, 12)):
        parent, token = verification.tree.parents[row, node], verification.tree.tokens[row, node]
        z = verification.target_logits[row, parent].double().tolist()
        q = verification.own_logits[row, verification.tree.draft_rows[row, parent]].double().tolist()
        p, d = ([math.exp(x) / sum(map(math.exp, each)) for x in each] for each in (z, q))
        mean = [(a + b) / 2 for a, b in zip(p, d, strict=True)]
        js = sum(a * math.log(a / m) + b * math.log(b / m) for a, b, m in zip(p, d, mean, strict=True)) / 2
        wanted = [math.log(p[token]), max(z) - z[token], -sum(a * math.log(a) for a in p), math.log(d[token]), js]
        assert found[row, node].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_without_a_judge_a_request_says_how_to_make_one():
    pair = tiny_pair()
    for acceptance in ("judge", make_rule("fsd+judge", 0.1, gate_threshold=0.5)):
        with pytest.raises(ValueError, match=r"needs a judge.*python -m train.mine and python -m train.judge make one"):
            eagle_fsd.generate([3, 1], pair, acceptance=acceptance, threshold=0.5)
    with pytest.raises(ValueError, match="rule 'judge'.*in \\[0, 1\\]|threshold of rule 'judge'"):
        make_rule("judge", 1.5)


def test_a_judge_of_another_target_is_refused(pair):
    other = tiny_pair()
    other.judge = pair.judge
    with pytest.raises(ValueError, match=r"was made for the target LlamaForCausalLM/32.*make one with python -m"):
        eagle_fsd.generate([3, 1], other, acceptance="judge", threshold=0.5)


def test_a_judge_of_another_head_is_used_with_a_warning(folder, pair, caplog):
    other = eagle_fsd.load(folder / "target", folder / "head", tree=None)
    other.judge = replace(pair.judge, card={**pair.judge.card, "head": "another"})
    assert text(other, "ra", acceptance="judge", threshold=0.5) == "ekg1"
    text(other, "rb", acceptance="judge", threshold=0.5)
    assert caplog.text.count("the judge was made with another head") == 1  # not at every request


def test_files_that_do_not_fit_are_refused(pair, tmp_path):
    assert read_judge(tmp_path) is None
    path = store_judge(tmp_path, pair.judge)
    found = read_judge(tmp_path)
    assert torch.equal(found.weight, pair.judge.weight) and found.bias == pair.judge.bias
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="delete it and run python -m train.judge again"):
        read_judge(tmp_path)
    part = torch.ones(32 + len(SIGNALS))
    card = {**pair.judge.card, "signals": list(SIGNALS), "hidden_size": 32}

    def write(changes, without=(), **tensors):
        given = {"weight": part, "mean": part.clone(), "scale": part.clone(), "bias": torch.zeros(1), **tensors}
        save_file(given, path, metadata={
            "card": json.dumps({name: value for name, value in {**card, **changes}.items() if name not in without})})

    write({})
    assert read_judge(tmp_path).width == 32
    for name in ("target", "head", "floor"):
        write({}, without=[name])
        with pytest.raises(ValueError, match=f"{JUDGE_FILE} cannot be read \\(its card has no {name}\\)"):
            read_judge(tmp_path)
    for message, changes, tensors in (
        ("it reads the signals", {"signals": ["log_prob"]}, {}), ("are of shapes", {"hidden_size": 31}, {}),
        ("are of shapes", {}, {"mean": torch.ones(3)}), ("not finite", {}, {"weight": part * math.nan}),
        ("not finite", {}, {"bias": torch.full((1,), math.inf)}),
        ("floor of its card must be above 0 and at most 1, got 0", {"floor": 0}, {}),
        ("not above 0", {}, {"scale": part * 0}),
    ):
        write(changes, **tensors)
        with pytest.raises(ValueError, match=f"{JUDGE_FILE} cannot be read.*{message}"):
            read_judge(tmp_path)


def test_the_command_refuses_what_it_cannot_use(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["judge", "--mined", str(folder / "mined.jsonl"), "--out", str(tmp_path)])
    assert main() == 2
    assert f"--out {tmp_path} is no folder of a head: it has no config.json" in capsys.readouterr().err
    save_pair(tmp_path, tiny_pair(tokenizer=tiny_tokenizer()))
    with pytest.raises(ValueError, match="were mined with another head than that in --out"):
        run(Arguments((folder / "mined.jsonl",), tmp_path / "head"))
    mined = read_mined([folder / "mined.jsonl"])
    with pytest.raises(ValueError, match="0 of 32 mismatches are harmful.*mine more"):
        learn(mined, "likelihood")


def test_a_judge_is_no_option_of_other_rules():
    assert "judge" in RULES and make_rule("judge", 0.3).threshold == 0.3
    with pytest.raises(ValueError, match="has no option 'learned'"):
        make_rule("relaxed", 0.3, learned=None)


# --- the comparison of signals ------------------------------------------------------------------


def by_pairs(scores, harmful):
    """AUC by its meaning: of all pairs of a harmful and a harmless one."""
    pairs = [(bad > good) + (bad == good) / 2 for bad in scores[harmful] for good in scores[~harmful]]
    return sum(pairs) / len(pairs)


def test_areas_are_shares_of_pairs():
    random = np.random.default_rng(0)
    for size in (10, 60):
        scores, harmful = random.integers(6, size=size).astype(float), np.arange(size) % 3 == 0
        weights = random.integers(1, 4, size=(3, size))
        assert area(scores, harmful, np.ones((1, size)))[0] == pytest.approx(by_pairs(scores, harmful))
        for row, found in zip(weights, area(scores, harmful, weights), strict=True):
            repeated = np.repeat(np.arange(size), row)
            assert found == pytest.approx(by_pairs(scores[repeated], harmful[repeated]))


def test_dials_stop_what_they_are_to_stop():
    random = np.random.default_rng(1)
    scores, harmful = random.integers(30, size=300).astype(float), random.random(300) < 0.3
    for wanted in (0.5, 0.95, 0.99, 1.0):
        dial = dial_stopping(scores, harmful, wanted)
        assert (scores[harmful] >= dial).mean() >= wanted > (scores[harmful] > dial).mean()  # and no larger one does


def test_dials_of_unseen_questions_stop_about_as_many():
    random = np.random.default_rng(2)
    groups = np.repeat(np.arange(400), 5)
    harmful = random.random(2000) < 0.4
    scores = random.normal(size=2000) + 1.0 * harmful
    passes = passing(scores, harmful, groups, 0.95)
    assert not np.array_equal(passes, passing(scores, harmful, groups, 0.95, seed=1))
    assert (~passes)[harmful].mean() == pytest.approx(0.95, abs=0.02)
    dial = np.quantile(scores[harmful], 0.05)
    assert passes[~harmful].mean() == pytest.approx((scores[~harmful] < dial).mean(), abs=0.05)


def test_resamples_draw_whole_questions():
    weights = resampled(np.array([7, 7, 9, 9, 9, 4]))
    assert (weights[:, 0] == weights[:, 1]).all() and (weights[:, 2] == weights[:, 4]).all()
    assert (weights[:, [0, 2, 5]].sum(1) == 3).all() and weights[:, 5].mean() == pytest.approx(1, abs=0.1)


def constructed(questions=120, each=4, signal=2.0, seed=0) -> Mined:
    """Harm that the feature's first column knows, js half, nothing else at all; a third of the answers are wrong."""
    random = np.random.default_rng(seed)
    count = questions * each
    harmful = random.random(count) < 0.5
    features = random.normal(size=(count, 2, 6)).astype(np.float32)
    features[:, 1, 0] += signal * harmful
    rows = []
    for number in range(count):
        values = dict.fromkeys((*DIVERGENCES, *SIGNALS, "entropy_top3", "entropy_top3_parts", "log_ratio"), 0.0)
        values |= {name: random.normal() for name in ("log_prob", "regret", "entropy", "entropy_top3", "tv")}
        values |= {"js": random.normal() + signal / 2 * harmful[number], "own_steps": int(random.integers(4))}
        rows.append({"outcome": bool(harmful[number]), "likelihood": bool(harmful[number] ^ (number % 10 == 0)),
                     "lost_nats": None if harmful[number] else 0.1, "kind": "digit" if number % 4 else "word",
                     "kept_before": 0, "mode": "alone" if number % 2 else "sequence",
                     "own_right": number // each % 3 > 0, "signals": values})
    about = dict.fromkeys(("file", "questions", "dtype", "tree", "floor", "max_new_tokens", "nats"), 0)
    lines = [{"tokens": 50, "mismatches": 10, "own_right": number % 3 > 0} for number in range(questions)]
    return Mined([{**about, "target": "t", "head": "h"}], lines, rows, list(np.repeat(np.arange(questions), each)),
                 torch.from_numpy(features))


def normal_area(distance):
    """AUC of two normal distributions of variance 1."""
    return 0.5 * (1 + math.erf(distance / 2))


@pytest.fixture(scope="module")
def found():
    return compare(constructed(), "outcome")


def test_the_table_has_the_areas_that_were_constructed(found):
    rows = {row["signal"]: row for row in found["rows"] if row["part"] == "all"}
    for name, distance in (("judge, features only", 2.0), ("js", 1.0), ("regret", 0.0), ("tv", 0.0)):
        assert rows[name]["auc"] == pytest.approx(normal_area(distance), abs=0.06), name
        low, high = rows[name]["auc_interval"]
        assert low < normal_area(distance) < high and high - low < 0.15
    assert rows["kl"]["auc"] == 0.5  # the same for all
    assert rows["judge"]["auc"] > rows["judge, features only"]["auc"] > rows["js"]["auc"]
    assert rows["judge"]["auc"] == pytest.approx(normal_area(math.sqrt(5)), abs=0.05)
    for row in rows.values():
        assert row["passed_99"] <= row["passed_95"] and row["stopped_99"] >= row["stopped_95"]
    assert rows["judge"]["stopped_95"] == pytest.approx(0.95, abs=0.04)
    assert rows["judge"]["passed_95"] > rows["js"]["passed_95"] > rows["regret"]["passed_95"] - 0.05
    assert {"window 2", "window 3", "js_top10", "kl", "reverse_kl", "p2 / p1", "p target", "js + judge"} <= set(rows)


def test_the_record_has_its_parts(found):
    parts = {row["part"]: row["count"] for row in found["rows"]}
    assert parts == {"all": 480, "digit": 360, "word": 120}
    harmless = 1 - found["harmful"]
    assert found["oracle"][0]["passed"] == pytest.approx(harmless)
    assert found["oracle"][0]["per_100_tokens"] == pytest.approx(100 * harmless * 1200 / 6000)  # 10 of each, 4 tried
    low, high = found["oracle"][0]["passed_interval"]
    assert low < harmless < high
    assert found["own_right"] == 80 and found["by_mode"]["alone"]["count"] == 240
    assert {row["part"] for row in found["right_alone"]["rows"]} == {"all"}
    assert found["right_alone"]["rows"][0]["count"] == 320
    both = found["agreement"]
    assert both["count"] == 480 and both["agree"] == pytest.approx(0.9) and both["auc_of_nats"] == 1
    assert both["kappa"] == pytest.approx(0.8, abs=0.02)


def test_without_gold_answers_the_page_says_nothing_of_them(found):
    assert "480 mismatches of 120 answers (80 of them right), label outcome: " in page(found)
    open_ended = constructed(40)
    for each in (*open_ended.questions, *open_ended.rows):
        each["own_right"] = None
    found = compare(open_ended, "likelihood")
    assert "160 mismatches of 40 answers, label likelihood: " in page(found) and "right_alone" not in found


def test_oracle_counts_all_mismatches_of_labelled_questions():
    """Two of three tried are harmless, of 9; one of one is, of 2; the third question has no label and no say."""
    questions = [{"tokens": 40, "mismatches": 9}, {"tokens": 1000, "mismatches": 50}, {"tokens": 60, "mismatches": 2}]
    harmful, groups = np.array([True, False, False, False]), np.array([0, 0, 0, 2])
    every = np.ones(4, dtype=bool)
    assert oracle_row("all", every, harmful, groups, questions)["per_100_tokens"] == pytest.approx(9 * 2 / 3 + 2)
    inside = np.array([True, True, False, False])  # a kind: one harmless of three
    assert oracle_row("digit", inside, harmful, groups, questions)["per_100_tokens"] == pytest.approx(9 / 3)


def test_folds_of_one_kind_are_refused():
    """Both kinds are in two questions, but the harmful fold leaves nothing harmful behind."""
    groups = np.repeat([0, 1, 2], [19, 16, 11])
    harmful = np.repeat([False, True, True], [19, 16, 11])
    harmful[[36, 38, 40, 41]] = False
    with pytest.raises(ValueError, match="23 of 46 mismatches are harmful, and without the questions of one fold only"):
        folds(harmful, groups)


def test_agreement_by_hand():
    truth, said = [True, True, True, False], [True, False, True, False]
    found = agreement(truth, said, [3.0, 0.2, 1.0, 0.5], np.arange(4))
    assert (found["agree"], found["harmful_found"], found["harmless_found"]) == (0.75, 2 / 3, 1.0)
    assert found["kappa"] == pytest.approx((0.75 - 0.5) / 0.5) and found["auc_of_nats"] == pytest.approx(2 / 3)


def test_the_command_writes_record_page_and_picture(folder, tmp_path, capsys):
    compare_files(SignalsArguments((folder / "mined.jsonl",), tmp_path / "signals", label="outcome"))
    record = json.loads((tmp_path / "signals.json").read_text())
    assert {"commit", "torch", "command"} <= record["environment"].keys() and record["settings"]["label"] == "outcome"
    rows = {row["signal"]: row for row in record["rows"] if row["part"] == "all"}
    assert rows["judge"]["auc"] == 1 and rows["judge"]["passed_95"] == 1
    assert rows["judge"]["stopped_99"] >= 0.8  # harmful ones are alike but for rounding, which a dial may split
    page = (tmp_path / "signals.md").read_text()
    assert page in capsys.readouterr().out and "| judge " in page and "An oracle gate" in page
    assert "64 mismatches of 48 answers" in page and "in questions tried alone: 0 of 24 own answers" in page
    assert "label outcome: 50.0% are harmful" in page
    assert (tmp_path / "signals.png").read_bytes().startswith(b"\x89PNG")
    assert record["agreement"]["harmful_found"] == 0  # where the tables have no memory, no likelihood falls


def test_a_judge_says_half_where_it_knows_nothing():
    judge = LearnedJudge(torch.zeros(9), torch.zeros(9), torch.ones(9), 0.0, {"floor": 0.01})
    assert judge.harm(torch.randn(2, 3, 8), torch.randn(2, 3, 5)).eq(0.5).all()
    weight = torch.tensor([0.0, 0, 0, 2, 0, 0, 0, 0, 1])
    told = LearnedJudge(weight, torch.full((9,), 3.0), torch.full((9,), 2.0), -1.0, {"floor": 0.01})
    features, signals = torch.arange(8.0), torch.arange(5.0)  # the last 4 features are those of the last layer
    log_odds = 2 * (7 - 3) / 2 + (4 - 3) / 2 - 1
    assert told.harm(features, signals).item() == pytest.approx(1 / (1 + math.exp(-log_odds)))
