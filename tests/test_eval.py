"""The commands of evaluation, on tiny random pairs: methods, bookkeeping, records."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tiny import PROMPT, save_pair, small_model, tiny_chat_pair
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

import eagle_fsd
from eagle_fsd.cli import main as eagle_fsd_command
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.data.questions import converse
from eagle_fsd.drafting.sizing import WIDE_TREE
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.loading import timing
from eagle_fsd.loading.pair import check_once
from eagle_fsd.measure import comparison
from eagle_fsd.measure.cycles import wide_cycles
from eagle_fsd.measure.methods import assisted, described, draft_model, engine, hf_generate
from eagle_fsd.measure.records import ROOT, environment, shown, write_record
from eagle_fsd.measure.settings import ComparisonOptions
from eagle_fsd.models.linear import packed_form
from eagle_fsd.utils import installation
from eval import forwards, likelihood, memory, quantisation

TREE = eagle_fsd.TreeConfig(8, 3, 2)
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["ab", "cd"]},
    {"question_id": 82, "category": "writing", "turns": ["ef"]},
    {"question_id": 83, "category": "maths", "turns": ["gh"]},
]


def write_questions(folder, questions=QUESTIONS) -> str:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return str(path)


@pytest.fixture
def chat_model(monkeypatch):
    pair = tiny_chat_pair()
    monkeypatch.setattr(Loading, "load", lambda self, *tree: pair)
    return pair


# Methods


def test_methods_give_the_same_greedy_answer(model):
    baseline = hf_generate(model)(PROMPT, 20)
    undrafted = engine(model, speculative=False)(PROMPT, 20)
    exact = engine(model, acceptance="exact", tree=TREE)(PROMPT, 20)
    assert undrafted.token_ids == exact.token_ids == baseline.token_ids
    assert undrafted.text == exact.text == baseline.text
    assert undrafted.output.stats.mean_accepted_length == 1 < exact.output.stats.mean_accepted_length


def test_later_turns_process_only_what_is_new_and_first_ones_all():
    pair = tiny_chat_pair()
    kept, reread = (engine(pair, acceptance="exact", tree=TREE, keep_history=keep) for keep in (True, False))
    answers = [converse(lambda chat, method=method: method(chat, 12), ("ab", "cd")) for method in (kept, kept, reread)]
    assert len({tuple(answer.text for answer in each) for each in answers}) == 1
    first, again, whole = [[answer.output.stats.prefill_tokens for answer in each] for each in answers]
    assert first == again and first[0] == whole[0] and first[1] < whole[1]


def test_comparisons_leave_out_the_repetition_penalty_of_a_checkpoint(model, monkeypatch):
    """Many checkpoints have a repetition penalty."""
    expected = hf_generate(model)(PROMPT, 20).token_ids
    stock = model.target.model
    monkeypatch.setattr(stock.generation_config, "repetition_penalty", 1.5)
    penalised = stock.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)[0, len(PROMPT) :].tolist()
    assert hf_generate(model)(PROMPT, 20).token_ids == engine(model)(PROMPT, 20).token_ids == expected != penalised
    assert stock.generation_config.repetition_penalty == 1.5


@pytest.fixture
def two_models():
    """A target, and a model that predicts roughly the same as its drafter."""
    pair = tiny_chat_pair()
    return eagle_fsd.EagleModel.from_parts(pair.target.model, small_model(pair.target.model), pair.tokenizer)


@pytest.mark.skipif(not hasattr(GenerationConfig(), "assistant_ensemble_weight"), reason="an older transformers")
@pytest.mark.parametrize("packed", [False, True])
def test_assisted_generation_uses_both_models_as_they_are(two_models, packed):
    """Without the sampling options of their checkpoints; it counts what it accepts."""
    if packed:
        for each in (two_models.target, two_models.draft):
            each.model.bfloat16()
            each.pack(None)
    target, drafter = two_models.target.model, two_models.draft.model
    drafter.generation_config.repetition_penalty, before = 1.5, drafter.generation_config
    plain, mixed = (assisted(two_models, weight=weight)(PROMPT, 24) for weight in (1.0, 0.01))
    assert plain.token_ids == hf_generate(two_models, stock=target)(PROMPT, 24).token_ids
    assert drafter.generation_config is before
    assert sum(plain.accepted_lengths) + len(plain.accepted_lengths) == 24 > len(plain.accepted_lengths)
    alone = hf_generate(two_models, stock=drafter)(PROMPT, 24).token_ids
    assert (mixed.token_ids != plain.token_ids) or alone == plain.token_ids
    assert len(mixed.accepted_lengths) <= len(plain.accepted_lengths)


def test_what_needs_a_draft_model_says_so(model):
    for call in (lambda: assisted(model), lambda: draft_model(model, "--drafter-alone")):
        with pytest.raises(ValueError, match=r"needs a causal LM as the drafter \(--draft\), got a head"):
            call()
    with pytest.raises(ValueError, match=r"weight of assisted generation must lie in \(0, 1\], got 0"):
        assisted(model, weight=0)


def test_the_draft_model_answers_alone(two_models, tmp_path):
    options = ComparisonOptions(out=tmp_path / "x", drafter_alone=True, tree=TREE)
    methods = comparison.setting_methods(two_models, ["fsd 0.3"], options)
    assert list(methods) == ["exact", "fsd 0.3", "drafter alone"]
    alone = hf_generate(two_models, stock=two_models.draft.model)(PROMPT, 12)
    assert methods["drafter alone"](PROMPT, 12).token_ids == alone.token_ids


def test_cycles_are_observed_as_they_were_accepted(model):
    cycles = wide_cycles(model, [PROMPT, PROMPT[:5]], 24, 0.0)
    answer = engine(model, acceptance="exact", tree=WIDE_TREE, text_drafts="off")
    answers = [answer(prompt, 24) for prompt in (PROMPT, PROMPT[:5])]
    lengths = [length for answer in answers for length in answer.output.stats.accepted_lengths]
    assert [sum(cycle.accepted) for cycle in cycles] == lengths and sum(lengths) > 0
    for cycle in cycles:
        assert all(cycle.accepted[parent] for parent, taken in zip(cycle.parents, cycle.accepted, strict=True)
                   if taken and parent >= 0)


# eagle-fsd benchmark, eagle-fsd calibrate


def read_run(out, run=1):
    """All records of a run, and about.json."""
    folder = out.with_name(f"{out.name}.answers") / f"run_{run}"
    records = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return records, json.loads((folder / "about.json").read_text())


def ids_of(records):
    return {(record["asked"], record["model_id"]): record["ids"] for record in records}


def test_a_benchmark_says_per_category_and_in_all_what_the_methods_did(chat_model, tmp_path, capsys, plots):
    out = tmp_path / "results" / "run"
    assert eagle_fsd_command(["benchmark", "--questions", write_questions(tmp_path), "--max-new-tokens", "6",
                              "--warm-up", "0", "--settings", "fsd 0.3", "--tree", "8,3,2", "--out", str(out)]) == 0
    record = json.loads((tmp_path / "results" / "run.json").read_text())
    assert record["environment"]["torch"] and record["tree"].startswith("TreeConfig")
    assert {category: rows[0]["answers"] for category, rows in record["rows"].items()} == {
        "all": 3, "writing": 2, "maths": 1}
    assert {turn: rows[0]["answers"] for turn, rows in record["turns"].items()} == {"turn 1": 1, "turn 2": 1}
    assert record["history"] == "kept" and record["also"] == {}
    for rows in record["rows"].values():
        by_name = {row["method"]: row for row in rows}
        assert list(by_name) == ["model.generate", "prompt lookup", "no drafting", "EAGLE-2 (head alone)", "exact",
                                 "fsd 0.3"]
        stock, exact = by_name["model.generate"], by_name["exact"]
        assert by_name["EAGLE-2 (head alone)"]["same_answers"] == 1
        assert stock["speedup"] == stock["time"] == 1 and stock["tau"] is None
        assert by_name["prompt lookup"]["tau"] >= 1 and by_name["prompt lookup"]["steps"] > 0
        assert exact["same_answers"] == exact["same_tokens"] == by_name["no drafting"]["same_answers"] == 1
        assert exact["tau"] > 1 == by_name["no drafting"]["tau"] and exact["fuzzy_share"] == 0
        assert exact["speedup"] == pytest.approx(exact["tokens_per_second"] / stock["tokens_per_second"])
        assert exact["speedup_interval"] is None is exact["time_interval"]  # of fewer than five questions
    page = (tmp_path / "results" / "run.md").read_text()
    assert "| exact " in page and "| maths " in page and page.strip() in capsys.readouterr().out
    target, head = chat_model.described()
    assert f"\nTarget: {target}\\\nDrafter: {head}\n" in page and record["names"] == {"target": target, "head": head}
    assert " k parameters, float32, " in target and "3 of them timed, model.generate in float32,\n" in page
    assert " to " not in page.partition("\n- **")[0].partition("| method")[2]  # no intervals
    legend = page.partition("\n- **")[2]
    for heading in page.partition("| method | ")[2].partition(" |\n")[0].split(" | "):
        assert heading.partition(" vs ")[0].partition("/answer")[0] in legend, heading
    assert "A lossless method has 100%" in legend
    assert "exact" in plots["run.png"][0][1]


def test_answers_are_compared_with_those_of_our_engine(chat_model, tmp_path):
    """The stock model's are others where it computes in another dtype: here with other weights."""
    other = tiny_chat_pair(seed=5).target.model.bfloat16()
    vars(chat_model)["stock"] = other
    words = ["benchmark", "--questions", write_questions(tmp_path), "--max-new-tokens", "6", "--warm-up", "0",
             "--settings", "--tree", "8,3,2", "--out", str(tmp_path / "run")]
    assert eagle_fsd_command(words) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    same = {row["method"]: row["same_answers"] for row in record["rows"]["all"]}
    assert same.pop("model.generate") == same.pop("prompt lookup") == 0 and set(same.values()) == {1}
    assert (record["reference"], record["texts"]) == ("model.generate", "no drafting")
    page = " ".join((tmp_path / "run.md").read_text().split())
    assert "answers with the same tokens as no drafting's;" in page
    assert "model.generate computes in bfloat16 and our engine in float32, so texts may differ from its." in page


def spec_bench_speed(path, base, tokenizer, task):
    """What `speed` of Spec-Bench's evaluation/speed.py computes (hemingkx/Spec-Bench at 132ba4c), in our words."""
    def asked(file):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        eight = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
        categories = eight if task == "mt_bench" else [task]
        return [line["choices"][0] for line in lines if task == "overall" or line["category"] in categories]

    ours = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in asked(path)]
    accepted = [count for choice in asked(path) for count in choice["accept_lengths"]]
    theirs = [sum(len(tokenizer(turn).input_ids) - 1 for turn in choice["turns"]) / sum(choice["wall_time"])
              for choice in asked(base)]
    return np.mean(ours), np.mean(theirs), np.mean(ours) / np.mean(theirs), accepted


def test_spec_bench_reads_the_same_numbers_from_our_files(chat_model, tmp_path):
    """Means over three runs with their deviations, of each of its tasks, as its `get_mean_speedup` has them."""
    tasks = {"writing": "mt_bench", "math": "mt_bench", "translation": "translation", "qa": "qa", "rag": "rag"}
    questions = [{"question_id": i, "category": category, "turns": ["ab", "c"] if i < 2 else ["d" * i]}
                 for i, category in enumerate([*tasks, "translation"])]
    out = tmp_path / "run"
    assert eagle_fsd_command(["benchmark", "--questions", write_questions(tmp_path, questions), "--max-new-tokens", "8",
                              "--warm-up", "0", "--runs", "3", "--settings", "--tree", "8,3,2", "--out", str(out),
                              "--leave-out", "model.generate"]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert list(rows) == ["all", "mt-bench", "translation", "qa", "rag"] and rows["mt-bench"][0]["answers"] == 2
    for task, name in {"overall": "all", "mt_bench": "mt-bench", "translation": "translation", "rag": "rag"}.items():
        folders = [tmp_path / "run.answers" / f"run_{number}" for number in (1, 2, 3)]
        speeds, _, ratios, accepted = zip(*(spec_bench_speed(
            folder / "exact.jsonl", folder / "prompt-lookup.jsonl", chat_model.tokenizer, task)
            for folder in folders), strict=True)
        (row,) = [row for row in rows[name] if row["method"] == "exact"]
        assert row["mean_speed"] == pytest.approx(np.mean(speeds))
        assert row["mean_speed_deviation"] == pytest.approx(np.std(speeds, ddof=1))
        assert row["mean_speedup"] == pytest.approx(np.mean(ratios))
        assert row["mean_speedup_deviation"] == pytest.approx(np.std(ratios, ddof=1))
        assert row["tau"] == pytest.approx(np.mean([count for each in accepted for count in each]))
    assert "| mt-bench | 2 | " in out.with_suffix(".md").read_text() and " ± " in out.with_suffix(".md").read_text()


def test_a_benchmark_compares_forms_and_turns(chat_model, tmp_path, monkeypatch):
    """The counts of the turns add up to those of the answers; other forms are methods under their own names."""
    loaded = []
    monkeypatch.setattr(
        Loading, "load", lambda self, *tree: loaded.append((self.dtype, self.quantization, self.draft)) or chat_model)
    out = tmp_path / "run"
    assert eagle_fsd_command(["benchmark", "--questions", write_questions(tmp_path), "--then", "more", "--limit", "2",
                              "--runs", "2", "--max-new-tokens", "6", "--warm-up", "0", "--settings", "--also", "int8",
                              "bfloat16", "draft=my/head", "--reread", "--tree", "8,3,2", "--out", str(out)]) == 0
    assert loaded == [("auto", None, None), ("auto", "int8", None), ("bfloat16", None, None), ("auto", None, "my/head")]
    record, names = json.loads(out.with_suffix(".json").read_text()), ["no drafting", "EAGLE-2 (head alone)", "exact"]
    forms = list(record["also"])
    assert record["history"] == "read again" and forms == ["int8", "bfloat16", "draft=my/head"]
    assert [row["method"] for row in record["rows"]["all"]] == [
        "model.generate", "prompt lookup", *names, *(f"{form}, {name}" for form in forms for name in names)]
    assert {turn: rows[0]["answers"] for turn, rows in record["turns"].items()} == {
        "turn 1": 2, "turn 2": 2, "turn 3": 1}
    for line in read_run(out, 2)[0]:
        for key in ("tokens", "forwards", "emitted"):
            assert sum(turn[key] for turn in line["by_turn"]) == line[key]
    page = out.with_suffix(".md").read_text()
    assert "\nLater turns: history read again, by model.generate always read again\n" in page
    assert "and tau, by turn:\n\n| method | turn 1 | turn 2 | turn 3 |" in page


def test_a_benchmark_in_batches_gives_the_answers_of_single_questions(chat_model, tmp_path):
    """Greedy and sampled, of every method; the questions have one and two turns, the last batch one question."""
    for temperature in ("0", "0.8"):
        words = ["--questions", write_questions(tmp_path), "--max-new-tokens", "6", "--warm-up", "1", "--static",
                 "--temperature", temperature, "--settings", "--tree", "8,3,2", "--out"]
        ids = []
        for name, more in (("alone", ["--leave-out", "prompt lookup"]), ("rows", ["--rows", "2"])):
            assert eagle_fsd_command(["benchmark", *words, str(tmp_path / f"{name}-{temperature}"), *more]) == 0
            ids.append(ids_of(read_run(tmp_path / f"{name}-{temperature}")[0]))
        stock = ("model.generate", "model.generate, static cache")
        assert len(ids[0]) == 15 and ids[0].keys() == ids[1].keys()
        for key, found in ids[0].items():  # torch's noise depends on the batch, ours on the prompt
            assert found == ids[1][key] or temperature != "0" and key[1] in stock
        for asked, _ in ids[0]:
            assert ids[1][asked, stock[0]] == ids[1][asked, stock[1]]
    page = (tmp_path / "rows-0.md").read_text()
    assert "\nBatches of 2 questions: " in page and "\nLater turns: history read again, " in page


def test_a_benchmark_ends_after_some_minutes_and_continues(chat_model, tmp_path, caplog):
    words = ["benchmark", "--questions", write_questions(tmp_path), "--max-new-tokens", "4", "--warm-up", "0",
             "--settings", "--tree", "8,3,2", "--leave-out", "model.generate", "prompt lookup",
             "--out", str(tmp_path / "run")]
    assert eagle_fsd_command([*words, "--minutes", "1e-9"]) == 0
    assert "2 of 3 questions are missing, and the same command continues" in caplog.text
    record = json.loads((tmp_path / "run.json").read_text())
    assert [row["method"] for row in record["rows"]["all"]] == ["no drafting", "EAGLE-2 (head alone)", "exact"]
    assert record["rows"]["all"][0]["answers"] == 1 and record["baseline_dtype"] is None
    assert eagle_fsd_command(words) == 0
    assert json.loads((tmp_path / "run.json").read_text())["rows"]["all"][0]["answers"] == 3


@pytest.mark.parametrize("names", [["model.generator"], ["model.generate", "prompt lookup", "no drafting", "exact"]])
def test_methods_that_are_not_there_or_all_but_one_cannot_be_left_out(chat_model, tmp_path, capsys, names):
    assert eagle_fsd_command(["benchmark", "--questions", write_questions(tmp_path), "--settings", "--tree", "8,3,2",
                              "--out", str(tmp_path / "x"), "--leave-out", *names]) == 2
    assert "--leave-out takes names of methods and leaves at least two, got " in capsys.readouterr().err


@pytest.mark.parametrize(("more", "said"), [
    (("--per-category", "0"), "--per-category must be at least 1"),
    (("--rows", "0"), "--rows must be at least 1"),
    (("--rows", "2", "--endpoints", "a=http://127.0.0.1:9/v1"), "--rows 2 is for batches in this process"),
    (("--settings", "fast 1"), "unknown rule 'fast'"),
    (("--settings", "0.3"), "unknown rule '0.3'"),
    (("--settings", "exact"), "exact is always included"),
    (("--also", "int4"), "--also takes int8, bfloat16 or draft=HEAD, got 'int4'"),
])
def test_a_benchmark_of_nothing_is_refused_before_loading(more, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Loading, "load", lambda self, *tree: pytest.fail("loaded"))
    assert eagle_fsd_command(["benchmark", "--questions", write_questions(tmp_path), "--out", str(tmp_path / "x"),
                              *more]) == 2
    assert said in capsys.readouterr().err


def test_calibrate_times_some_questions_and_answers_the_others_in_batches(
        chat_model, tmp_path, monkeypatch, capsys, plots):
    questions = [{"prompt": letter, "answer": "x"} for letter in "abcdefg"]
    words = ["calibrate", "--questions", write_questions(tmp_path, questions), "--max-new-tokens", "8", "--tree",
             "8,3,2", "--settings", "fsd 0.5 head_guard=none", "--also", "int8", "--batch", "3", "--timed", "2",
             "--out", str(tmp_path / "q")]
    assert eagle_fsd_command(words) == 0
    record = json.loads((tmp_path / "q.json").read_text())
    exact, fuzzy, int8 = record["rows"]["all"]
    assert (int8["method"], int8["answers"], int8["same_answers"]) == ("int8, exact", 7, 1)  # here the same pair
    assert (exact["answers"], exact["timed"], exact["graded"]) == (7, 2, 7) and fuzzy["tau"] > exact["tau"] > 1
    assert record["recommended"] is None and "answers 0.0% correctly" in record["conclusion"]
    alone = [word for word in words if word not in ("--batch", "3")]
    assert eagle_fsd_command([*alone[:-1], str(tmp_path / "alone")]) == 0
    texts = []
    for name in ("q", "alone"):
        lines = read_run(tmp_path / name)[0]
        texts.append(ids_of(lines))
        together = [line for line in lines if not line["timed"] and line["model_id"] == "exact"]
        assert len(together) == 5 * (name == "q") and all(line["emitted"] == line["forwards"] for line in together)
    assert texts[0] == texts[1]  # in a batch each is answered as alone; exact answers without drafting
    first = read_run(tmp_path / "q")[0][0]["choices"][0]["turns"][0]
    monkeypatch.setattr(comparison, "CODE_END", first[2:4])
    assert eagle_fsd_command([*words[:-1], str(tmp_path / "stopped"), "--stop-after-code"]) == 0
    records, about = read_run(tmp_path / "stopped")
    assert records[0]["choices"][0]["turns"] == [first[:2]] and about["stop"] == first[2:4]
    assert "exact" in plots["q.png"][0][1]


def test_a_log_of_other_answers_is_not_continued(chat_model, tmp_path, monkeypatch, capsys):
    """Whatever answers depend on; the message names what changed. Timings, grades and texts are kept as they are."""
    words = ["calibrate", "--questions", write_questions(tmp_path), "--max-new-tokens", "4", "--tree", "8,3,2",
             "--settings", "fsd 0.3", "--out", str(tmp_path / "q")]
    assert eagle_fsd_command(words) == 0
    before = read_run(tmp_path / "q")
    assert eagle_fsd_command(words) == 0  # nothing changed, nothing is answered again
    assert eagle_fsd_command([*words, "--points", "2"]) == 0  # of the recommendation alone
    assert eagle_fsd_command([*words, "--limit", "2"]) == 0
    for more, name in ((["--seed", "5"], "seed (was 0, now 5)"),
                       (["--text-drafts", "off"], "text_drafts (was auto, now off)"),
                       (["--batch", "2"], "batch (was 1, now 2)"), (["--run-code"], "run_code (was False, now True)"),
                       (["--temperature", "1"], "temperature (was 0.0, now 1.0)"),
                       (["--stop-after-code"], "stop (was None, now "), (["--tree", "4,2,2"], "tree (was TreeConfig"),
                       (["--max-new-tokens", "5"], "max_new_tokens (was 4, now 5)")):
        assert eagle_fsd_command([*words, *more]) == 2
        assert f"was made with another {name}" in capsys.readouterr().err, name

    def assert_refused(name):
        assert eagle_fsd_command(words) == 2
        assert f"was made with another {name} (" in capsys.readouterr().err, name

    for change, name in (
            (lambda: setattr(chat_model.tokenizer, "chat_template", "{{ messages[0].content }}"), "chat_template"),
            (lambda: chat_model.tokenizer.add_tokens(["more"]), "vocabulary"),
            (lambda: chat_model.draft.layers[0].mlp.up_proj.weight.data.mul_(2), "head"),
            (lambda: chat_model.target.lm_head.weight.data.mul_(2), "target")):
        weights = chat_model.target.lm_head.weight
        saved = copy.deepcopy((chat_model.tokenizer, chat_model.draft.state_dict(), weights.data))
        change()
        assert_refused(name)
        chat_model.tokenizer = saved[0]
        chat_model.draft.load_state_dict(saved[1])
        weights.data = saved[2]
    for where, attribute, value, name in (
            (timing, "processor_name", lambda: "other", "processor"), (torch, "get_num_threads", lambda: 77, "threads"),
            (installation, "__version__", "0", "eagle_fsd"), (torch, "__version__", "0", "torch"),
            (chat_model.target.model.config, "rms_norm_eps", 0.5, "config"),
            (chat_model.draft.config, "rms_norm_eps", 0.5, "head_config"),
            (chat_model.target.model.generation_config, "no_repeat_ngram_size", 3, "generation_config")):
        with monkeypatch.context() as patch:
            patch.setattr(where, attribute, value)
            assert_refused(name)
    assert eagle_fsd_command(words) == 0 and read_run(tmp_path / "q") == before


def test_runs_have_their_own_seeds_and_answers(chat_model, tmp_path):
    """Accuracy and speeds are over all runs, and all else is of the first."""
    questions = write_questions(tmp_path, [{"prompt": letter, "answer": "x"} for letter in "abc"])
    words = ["calibrate", "--prompts", questions, "--max-new-tokens", "8", "--tree", "8,3,2", "--settings",
             "fsd 0.5 head_guard=none", "--batch", "2", "--timed", "1", "--out", str(tmp_path / "q"), "--runs", "2",
             "--temperature", "1"]
    assert eagle_fsd_command(words) == 0
    assert ", 2 runs\n" in (tmp_path / "q.md").read_text()
    texts = []
    for run in (1, 2):
        lines, about = read_run(tmp_path / "q", run)
        assert len(lines) == 6 and sum(line["timed"] for line in lines) == 2 and about["seed"] == run - 1
        texts.append(ids_of(lines))
    assert texts[0] != texts[1]
    exact = json.loads((tmp_path / "q.json").read_text())["rows"]["all"][0]
    assert exact["answers"] == 3 and exact["tokens_per_answer"] * 3 == sum(
        len(ids) for (_, name), ids in texts[0].items() if name == "exact")
    assert exact["mean_speed"] > 0 < exact["mean_speed_deviation"]


def test_judges_say_how_likely_answers_are(chat_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(likelihood, "load", lambda *_, **__: chat_model)
    asked = write_questions(tmp_path)
    assert eagle_fsd_command(["calibrate", "--questions", asked, "--max-new-tokens", "8", "--tree", "8,3,2",
                              "--settings", "fsd 0.5 head_guard=none", "--out", str(tmp_path / "q")]) == 0
    logs = sorted(map(str, (tmp_path / "q.answers" / "run_1").glob("*.jsonl")))
    words = ["--answers", *logs, "--questions", asked, "--judges", "tiny", "--out", str(tmp_path / "judged")]
    assert likelihood.main(words) == 0
    exact, fuzzy = json.loads((tmp_path / "judged.json").read_text())["rows"]
    nats, sizes, number = 0.0, 0, 0
    for record in read_run(tmp_path / "q")[0]:  # in the order of the questions
        if record["model_id"] == "exact":
            chat, turns, number = [], QUESTIONS[number]["turns"], number + 1
            for turn, text in zip(turns, record["choices"][0]["turns"], strict=True):
                chat.append({"role": "user", "content": turn})
                prompt = encode_prompt(chat, chat_model)
                ids = torch.tensor([[*prompt, *chat_model.tokenizer.encode(text, add_special_tokens=False)]])
                labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
                with torch.no_grad():
                    nats += chat_model.target.model(ids, labels=labels).loss.item() * (ids.shape[1] - len(prompt))
                sizes += len(text.encode())
                chat.append({"role": "assistant", "content": text})
    found = exact["judges"]["tiny"]
    assert found["nats_per_byte"] == pytest.approx(nats / sizes, rel=1e-4) and found["interval"] is None
    other = fuzzy["judges"]["tiny"]
    assert other["difference"] == pytest.approx(other["nats_per_byte"] - found["nats_per_byte"]) != 0
    assert likelihood.main([*words, "--reference", "best"]) == 2
    assert "takes one of exact, fsd 0.5 head_guard=none" in capsys.readouterr().err


# eval.forwards


def test_forwards_are_timed_by_nodes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forwards, "LARGE", (64, 256))
    out = tmp_path / "forwards"
    assert forwards.main(["--shape", "tiny", "--device", "cpu", "--nodes", "1", "8", "--rows", "1", "2", "--rounds",
                          "2", "--context", "16", "--tree", "8,2,3", "--captured", "--draft-vocabularies", "0", "64",
                          "--out", str(out)]) == 0
    record = json.loads((tmp_path / "forwards.json").read_text())
    cells = {(row["part"], row["nodes"]): row["ms"] for row in record["rows"]}
    parts = ["forward", "forward and output layer", "cycle, exact", "cycle, fsd 0.3"]
    assert cells.keys() == {(f"random {part}, {rows} rows", nodes) for part in parts for rows in (1, 2)
                            for nodes in (1, 8) if nodes > 1 or not part.startswith("cycle,")} | {
        (f"random cycle without drafting, {rows} rows", 1) for rows in (1, 2)} | {
        ("random floor of a forward", nodes) for nodes in (1, 8)} | {("random prompt, 1 rows", 16)} | {
        (f"captured {part}, {rule}{words}, {rows} rows", nodes) for rows in (1, 2) for words in (
            "", ", 64 tokens drafted") for rule in ("exact", "fsd 0.3") for nodes in (1, 8)
        for part in ("draft", "verify", "walk", "cycle") if nodes > 1 or rule == "exact" and part != "draft"}
    assert min(cells.values()) > 0 and record["computed_by"] == {"random": "fused"}
    assert record["weights"] == {"random": "plain"} and "; weights: random plain; 16 tokens" in (
        tmp_path / "forwards.md").read_text()
    assert "| random forward, 1 rows |" in capsys.readouterr().out
    assert forwards.main(["--shape", "tiny", "--nodes", "0", "--out", str(out)]) == 2


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")
def test_forms_without_rotation_are_named_so():
    pairs = [tiny_chat_pair() for _ in range(3)]
    for pair, block in zip(pairs, (1, 8, None), strict=True):
        with nullcontext() if block is None else forwards.rotated_by(block):
            pair.prepack("int8-fast")
    assert [packed_form(pair.target.model) for pair in pairs] == [
        "int8, unrotated, fast", "int8, rotated by 8, fast", "int8, rotated, fast"]


def test_forwards_of_a_causal_lm_that_drafts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forwards, "LARGE", (64, 256))
    options = ["--shape", "tiny", "--draft-shape", "tiny", "--device", "cpu", "--nodes", "1", "4", "--tree", "4,3,1",
               "--rounds", "2", "--context", "16", "--settings", "exact", "--captured", "--out",
               str(tmp_path / "chain")]
    assert forwards.main(options) == 0
    record = json.loads((tmp_path / "chain.json").read_text())
    parts = {row["part"] for row in record["rows"]}
    assert {"random cycle, exact",
            *(f"captured {part}, exact" for part in ("draft", "verify", "walk", "cycle"))} <= parts
    assert "tiny with tiny" in capsys.readouterr().out
    assert forwards.main([*options, "--draft-vocabularies", "64"]) == 2


def test_int8_is_compared_with_what_is_stored(tmp_path, monkeypatch, capsys):
    """Here both forms are the same pair, so that nothing may differ."""
    pair = tiny_chat_pair()
    monkeypatch.setattr(Loading, "load", lambda self, *tree: pair)
    questions = write_questions(tmp_path)
    assert quantisation.main(["--likelihood", questions, "--blocks", "1", "64", "--out", str(tmp_path / "both")]) == 0
    record = json.loads((tmp_path / "both.json").read_text())
    assert record["by_block"] == [{"rotated by": block, "KL": 0, "same best token": 1} for block in (1, 64)]
    found = record["likelihood"]
    assert found["KL"] == 0 and found["same best token"] == 1
    assert found["tokens"] == 6  # two letters after "<s>", thrice
    texts = [torch.tensor([pair.tokenizer.encode(text)]) for text in ("ab", "ef", "gh")]
    with torch.no_grad():
        losses = [cross_entropy(pair.target.model(ids).logits[0, :-1], ids[0, 1:]).item() for ids in texts]
    assert found["perplexity, int8"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    (tmp_path / "short.jsonl").write_text('{"prompt": ""}\n')
    assert quantisation.main(["--likelihood", str(tmp_path / "short.jsonl"), "--out", str(tmp_path / "short")]) == 2
    assert "short.jsonl has no text of 2 tokens or more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_is_measured_in_a_process_of_its_own(tmp_path):
    save_pair(tmp_path)
    assert memory.main(["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--forms", "fused",
                        "--dtype", "bfloat16", "--out", str(tmp_path / "memory")]) == 0
    (row,) = json.loads((tmp_path / "memory.json").read_text())["rows"]
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", dtype="bfloat16", prepack=False)
    weights = sum(weight.nbytes for model in (pair.target.model, pair.draft) for weight in model.parameters())
    assert row["weights"] * 2**20 == weights and row["peak"] >= row["resident"] > 0


# Records


def test_records_name_no_folder_of_a_machine(monkeypatch):
    assert shown(ROOT / "runs" / "x") == "runs/x" and shown("a/b") == "a/b" and shown(3) == "3"
    assert shown((ROOT / "a", ROOT.parent / "b")) == "a ../b"
    assert shown("/a/b/c/model.gguf") == "model.gguf"  # elsewhere: no record names a machine's folders
    assert shown(f"x=--lr 1 --data {ROOT / 'eval'}") == "x=--lr 1 --data eval"
    assert shown(f"draft={ROOT / 'eval'}") == "draft=eval" and shown("yes/no /or") == "yes/no /or"
    monkeypatch.setattr("sys.argv", [str(ROOT / "eval" / "x.py"), "--out", str(ROOT / "runs")])
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/liba.so.4:/opt/libb.so")
    assert environment()["command"] == "python -m eval.x --out runs"
    assert environment()["preloaded"] == ["liba.so.4", "libb.so"]


def test_records_hold_any_text(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--data", os.fsdecode(b"\xe9")])  # a file name that is no UTF-8
    write_record(tmp_path / "x", {"text": "\u65e5"}, "\u65e5")
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert record["text"] == "\u65e5" and record["environment"]["command"] == environment()["command"]
    assert "\u65e5" in (tmp_path / "x.md").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package eagle_fsd, in place of ours; and git, after which this is a new process."""
    def git(*words):
        installation.commit.cache_clear()
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=tmp_path, check=True)

    for name in ("eagle_fsd/rows.py", "eagle_fsd/__init__.py", "setup.py", "docs/method.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "Begin")
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    yield tmp_path, git
    installation.commit.cache_clear()


def test_a_record_says_whether_its_commit_is_all_there_is_to_the_code(checkout, tmp_path, monkeypatch):
    folder, git = checkout
    begun = environment()["commit"]
    assert environment()["clean"] and re.fullmatch("[0-9a-f]{7,}", begun)
    (folder / "docs" / "method.md").write_text("2")
    git("status")
    assert environment()["clean"] and environment()["commit"] == begun
    (folder / "eagle_fsd" / "rows.py").write_text("2")
    assert environment()["clean"]  # this process has imported it before
    git("status")
    assert environment()["commit"].startswith(f"{begun}+changes-") and not environment()["clean"]
    assert "NOT A CLEAN COMMIT" in write_record(tmp_path / "x", {}, "text")
    changed = environment()["commit"]
    (folder / "eagle_fsd" / "new_rule.py").write_text("3")
    git("status")
    assert environment()["commit"] != changed  # a new module, which git does not know yet
    git("status")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert environment()["commit"] == "unknown" and not environment()["clean"]


def test_what_is_stored_is_of_one_commit_and_its_changes(checkout, pair, tmp_path, monkeypatch):
    """Latencies, the checks of targets, and what answers depend on."""
    folder, git = checkout
    cache, keys = tmp_path / "cache", set()
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(cache))
    for number, change in enumerate((None, "changed", "changed again", None), 1):
        if change:
            (folder / "eagle_fsd" / "rows.py").write_text(change)
            git("status")
        elif number > 1:
            git("commit", "-qam", "Change")
        keys.add(described(pair)["eagle_fsd"])
        for _ in range(2):
            check_once(pair.target.model, fused=True)
            timing.known_latency(pair.target, pair.draft)
        assert [len(list((cache / name).iterdir())) for name in ("checked", "latency")] == [number] * 2
    assert len(keys) == 4 and all(key.startswith(f"{eagle_fsd.__version__}, commit ") for key in keys)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_package_in_a_repository_of_its_user_is_not_of_that_repositorys_commit(tmp_path, monkeypatch, tracked):
    """Unless the repository tracks the package's files."""
    package = tmp_path / "venv" / "site-packages" / "eagle_fsd"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "theirs.py").touch()
    for words in (["init", "-q"], ["add", "." if tracked else "theirs.py"],
                  ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "Begin"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(installation, "ROOT", package.parent)
    installation.commit.cache_clear()
    found = environment()
    installation.commit.cache_clear()
    assert (found["commit"] is None) != tracked and found["clean"] == tracked
    assert found["eagle_fsd"] == eagle_fsd.__version__
    page = write_record(tmp_path / "x", {}, "text")
    assert f"by eagle_fsd {eagle_fsd.__version__}, " in page and "NOT A CLEAN" not in page
    assert (", commit " in page) == tracked
