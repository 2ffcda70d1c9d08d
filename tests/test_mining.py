"""Mining on a pair whose harm is known by construction: labels, losses, the file and its continuation."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_harm import HARMFUL, NEXT, SUBSTITUTES, TREE, known_pair, write_questions
from tiny import PROMPT, save_pair, tiny_pair, tiny_tokenizer

import eagle_fsd
import train.judge
from eagle_fsd.acceptance.judge import SIGNALS
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.data.files import append_lines
from eagle_fsd.data.questions import Question
from train.mine import GROUP, Arguments, main, mine, read_checked, run
from train.mining.kinds import is_in_code, kind_of
from train.mining.likelihood import HORIZON, MEETING, OFFSETS, WINDOW, Loss, losses
from train.mining.mismatches import Mismatch
from train.mining.rollouts import Answer, Decoding, Run
from train.mining.store import features_path, read_mined
from train.mining.trails import Labels, Losses

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pair():
    return known_pair()


def arguments(folder, **changes) -> Arguments:
    questions = folder / "questions.jsonl"
    if not questions.exists():
        write_questions(questions)
    given = {"questions": questions, "out": folder / "mined.jsonl", "label": "both", "batch": 4, "tree": TREE,
             "max_new_tokens": 12, **changes}
    return Arguments("target", "head", **given)


def mined_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@pytest.fixture(scope="module")
def mined(pair, tmp_path_factory):
    given = arguments(tmp_path_factory.mktemp("mined"))
    counts = mine(pair, read_checked(given), given)
    return given, counts


def test_the_pair_says_what_its_tables_say(pair):
    for question, text in {"ra": "efg1", "rb": "hi4", "sc": "no5"}.items():
        output = eagle_fsd.generate([{"role": "user", "content": question}], pair, acceptance="exact", tree=TREE)
        assert output.text == text and output.finish_reason == "eos"


def test_labels_are_what_was_constructed(mined):
    given, counts = mined
    lines = mined_lines(given.out)
    assert [line["question"] for line in lines] == list(range(12))
    assert [line["mode"] for line in lines] == ["alone", "sequence"] * 6
    assert [line["own_right"] for line in lines] == [True, True, True, True, False, False] * 2
    places = {"a": [(1, "f", "k"), (3, "1", "2")], "b": [(1, "i", "l")], "c": [(1, "o", "p")]}
    for line in lines:
        rows = line["rows"]
        last = "abc"[line["question"] // 2 % 3]
        assert [(row["at"], row["own_text"], row["text"]) for row in rows] == places[last]
        assert [row["outcome"] for row in rows] == [HARMFUL[row["text"]] for row in rows]
        kept = [0, 1] if line["mode"] == "sequence" else [0, 0]  # the harmless k stays, and 2 is tried on top of it
        assert [row["kept_before"] for row in rows] == kept[: len(rows)]
        assert [row["kind"] for row in rows] == ["word", "digit"][: len(rows)]
        assert line["mismatches"] == len(rows)
        assert line["again_differs"] is (False if line["mode"] == "alone" else None)
    assert counts["mismatches"] == 16 and counts["harmful by outcome"] == 8 and counts["questions"] == 12
    assert counts["own answers that are right"] == 8


def test_signals_and_features_are_those_of_the_tables(pair, mined):
    found = read_mined([mined[0].out])
    number, table = pair.tokenizer.convert_tokens_to_ids, pair.target.lm_head.weight.detach() * 32**0.5  # [next, last]
    before = {substitute: last for last, substitute in SUBSTITUTES.items()}
    for row, features in zip(found.rows, found.features, strict=True):
        last = before[row["text"]]
        one_hot = torch.zeros(2, 32)
        one_hot[0, number(last)] = one_hot[1, row["substitute"]] = 32**0.5
        torch.testing.assert_close(features, one_hot, rtol=1e-3, atol=1e-3)
        logits = table[:, number(last)]
        log_probs = logits.log_softmax(-1)
        signals = row["signals"]
        assert row["own"] == number(NEXT[last]) and logits.argmax() == row["own"]
        assert signals["log_prob"] == pytest.approx(log_probs[row["substitute"]].item(), abs=1e-4)
        assert signals["regret"] == pytest.approx(1.0, abs=1e-3) == -signals["log_ratio"]
        assert signals["entropy"] == pytest.approx(-(log_probs.exp() * log_probs).sum().item(), abs=1e-3)
        three = logits.topk(3).values.log_softmax(-1), log_probs.topk(3).values  # the latter as in FLy's code
        for name, best in zip(("entropy_top3", "entropy_top3_parts"), three, strict=True):
            assert signals[name] == pytest.approx(-(best.exp() * best).sum().item(), abs=1e-3)
        assert signals["draft_log_prob"] == pytest.approx(0, abs=1e-2) and 0 < signals["js"] < 0.7
        assert signals["js"] <= signals["tv"] <= 1 and set(SIGNALS) <= signals.keys()
        # Trees are 3 deep: 2 stands at the second level in an own answer, at the first behind a given k.
        assert signals["own_steps"] == {"k": 1, "2": 1 + row["kept_before"], "l": 2, "p": 2}[row["text"]]


def by_hand(target, prompt, answer, at, token):
    """`losses` of one substitution, by whole forwards without a cache."""
    def log_probs(tokens):
        return target.logits(target.features(torch.tensor([tokens])))[0].log_softmax(-1)

    own, found = log_probs([*prompt, *answer]), []
    for offset in OFFSETS:
        rest = answer[at + 1 + offset :][:HORIZON]
        if not rest:
            continue
        begun = [*prompt, *answer[:at], token]
        ours = log_probs([*begun, *rest])[len(begun) - 1 :]
        is_own = [ours[place].argmax().item() == token for place, token in enumerate(rest)]
        met = [place for place in range(min(WINDOW, len(rest))) if all(is_own[place : place + MEETING])]
        if met:
            first = len(prompt) + at + offset  # predicts the first token of the rest
            lost = sum((own[first + place, rest[place]] - ours[place, rest[place]]).item()
                       for place in range(met[0], len(rest)))
            found.append((met[0], lost, offset))
    return min(found)[1:] if found else (None, 0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.inference_mode()
def test_losses_equal_whole_forwards(family):
    pair = tiny_pair(family)
    answer = eagle_fsd.generate(PROMPT, pair, acceptance="exact", max_new_tokens=24).token_ids
    substitutions = [(at, token) for at in (0, 7, 22, 23) for token in (answer[at], answer[min(at + 1, 23)], 17, 29)]
    found = losses(pair.target, PROMPT, answer, substitutions)
    expected = [by_hand(pair.target, PROMPT, answer, at, token) for at, token in substitutions]
    for ours, (nats, offset) in zip(found, expected, strict=True):
        assert (ours.nats is None) == (nats is None) and ours.offset == offset
        assert ours.nats is None or ours.nats == pytest.approx(nats, abs=1e-3)
    kinds = {ours.nats is None for ours in found}
    assert kinds == {True, False}  # some meet, some do not
    same = [ours for ours, (at, token) in zip(found, substitutions, strict=True) if token == answer[at] and at < 23]
    assert all(abs(ours.nats) < 1e-3 for ours in same)  # the answer itself loses nothing


def test_a_harmless_substitute_stays_in_the_text_by_likelihood(pair, tmp_path):
    """By likelihood nothing is harm here: behind a substitute the tables go on as they would have."""
    given = arguments(tmp_path, label="likelihood")
    counts = mine(pair, read_checked(given), given)
    assert counts["harmful by likelihood"] == 0 and "harmful by outcome" not in counts
    rows = [row for line in mined_lines(given.out) if line["mode"] == "sequence" for row in line["rows"]]
    assert [row["kept_before"] for row in rows if row["at"] == 3] == [1, 1]
    assert all(abs(row["lost_nats"]) < 0.1 for row in rows)


def test_answers_that_were_cut_have_no_outcome(pair, tmp_path, monkeypatch):
    """efg1 and hi4 end with the fifth and the fourth token; behind l there are five, hlm3 and the end."""
    given = arguments(tmp_path, max_new_tokens=4)
    counts = mine(pair, read_checked(given), given)
    for line in mined_lines(given.out):
        last = "abc"[line["question"] // 2 % 3]
        assert line["own_ended"] is (last != "a") and line["rows"]
        assert all(("outcome" in row) is line["own_ended"] for row in line["rows"])
    assert counts["own answers that were cut"] == 4
    monkeypatch.setattr("train.mining.trails.outcome", lambda *_, **__: 0)  # nothing differs but the ends
    given = arguments(tmp_path, max_new_tokens=4, label="outcome", out=tmp_path / "ends.jsonl")
    mine(pair, read_checked(given), given)
    for line in mined_lines(given.out):
        harm = {"a": [], "b": [True], "c": [False]}["abc"[line["question"] // 2 % 3]]
        assert [row["outcome"] for row in line["rows"]] == harm


def carried(trail, answers, nats):
    """A trail that is sent these answers and losses: what it returns."""
    asked, nats = next(trail), iter(nats)
    while True:
        try:
            found = [Loss(next(nats)) for _ in asked.substitutions] if isinstance(asked, Losses) else [
                answers(run_) for run_ in asked]
            asked = trail.send(found)
        except StopIteration as end:
            return end.value


def test_in_a_sequence_the_nats_add_up():
    """0.6 and 0.6 are harm together, where the limit is 1; alone neither is."""
    mismatches = [Mismatch(at, 5, 6, {}, torch.zeros(2, 1)) for at in range(6)]
    labels = Labels(False, True, 1.0, 8, 0, False, str)
    question = Question(1, "gsm8k", ("q",), "#### 3")

    def answers(run_):
        return Answer([5] * 6, "#### 3", mismatches, True)

    lost = [0.6, 0.6, 0.3, 0.2, -0.5, 0.5]
    rows = carried(labels.trail(question, [3], "sequence"), answers, lost).rows
    kept = [0, 0.6, 0.6, 0.9, 0.9, 0.4]
    assert [row["carried_nats"] for row in rows] == pytest.approx(kept)
    assert [row["likelihood"] for row in rows] == [before + nats > 1 for before, nats in zip(kept, lost, strict=True)]
    alone = carried(labels.trail(question, [3], "alone"), answers, lost).rows
    assert not any(row["likelihood"] for row in alone)


def test_the_noise_of_the_outcome_is_that_of_an_answer_with_nothing_replaced():
    mismatches = [Mismatch(at, 5, 6, {}, torch.zeros(2, 1)) for at in (2, 4)]
    own, question = [1, 2, 5, 3, 5, 4], Question(1, "gsm8k", ("q",), "#### 3")

    def answers(run_, again):
        replaced = list(run_.begun) != own[: len(run_.begun)]
        return Answer(own, "#### 3" if run_.mines or replaced else again, mismatches, True)

    for again, differs in (("#### 3", False), ("#### 4", True)):
        trail = Labels(True, False, 1.0, 8, 0, False, str).trail(question, [3], "alone")
        found = carried(trail, lambda run_, again=again: answers(run_, again), [])
        assert found.about["again_differs"] is differs
        assert [row["outcome"] for row in found.rows] == [False, False]


def test_a_sequence_that_goes_by_the_outcome_has_no_likelihood_label():
    mismatches = [Mismatch(at, 5, 6, {}, torch.zeros(2, 1)) for at in range(3)]
    trail = Labels(True, True, 1.0, 8, 0, False, str).trail(Question(1, "gsm8k", ("q",), "3"), [3], "sequence")
    rows = carried(trail, lambda run_: Answer([5] * 3, "3", mismatches, True), []).rows
    assert [(row["outcome"], row.get("likelihood")) for row in rows] == [(False, None)] * 3


def answers_of(decoding, runs):
    found = dict(decoding.answers(deque(enumerate(runs)), mines=runs[0].mines))
    return [found[number] for number in range(len(runs))]


def test_an_answer_that_begins_with_an_end_is_over(pair):
    decoding = Decoding(pair, TREE, 0.01, 3, 2)
    ended, full, going = answers_of(decoding, [Run([5], [4, 1]), Run([5], [4, 8, 9]), Run([5], [4])])
    assert (ended.ended, full.ended, going.ended) == (True, False, False)
    assert (ended.tokens, full.tokens) == ([4, 1], [4, 8, 9]) and not ended.mismatches
    assert going.tokens[0] == 4 and len(going.tokens) == 3


def test_mismatches_of_a_batch_are_those_of_its_answers():
    """Answers of different lengths, decoded together and alone: the same mismatches at the same places."""
    pair = tiny_pair()
    pair.target.model.generation_config.eos_token_id = [3, 7, 11]
    pair.tokenizer = tiny_tokenizer()
    decoding = Decoding(pair, replace(TREE, total_tokens=8), 0.01, 30, 3)
    runs = [Run(PROMPT[:length], PROMPT[length : length + begun])
            for length, begun in ((4, 0), (9, 0), (6, 2), (12, 0))]
    together = answers_of(decoding, runs)
    assert len({len(answer.tokens) for answer in together}) > 1
    assert sum(len(answer.mismatches) for answer in together) > 3
    for answer, run_ in zip(together, runs, strict=True):
        (alone,) = answers_of(decoding, [run_])
        assert alone.tokens == answer.tokens
        assert [(m.at, m.own, m.substitute) for m in alone.mismatches] == [
            (m.at, m.own, m.substitute) for m in answer.mismatches]
    undrafted = answers_of(decoding, [replace(run_, mines=False) for run_ in runs])
    for answer, plain in zip(together, undrafted, strict=True):
        assert plain.tokens == answer.tokens and not plain.mismatches


# --- the file -----------------------------------------------------------------------------------


def assert_same_mined(out, other):
    """Which company an answer is decoded in changes the rounding, and where the file was cut how it is in shards."""
    ours, theirs = read_mined([out]), read_mined([other])
    for row, same in zip([*ours.rows, *ours.questions], [*theirs.rows, *theirs.questions], strict=True):
        row, same = ({name: value for name, value in each.items() if name not in ("group", "first")}
                     for each in (row, same))
        for name in ("signals", "lost_nats"):
            assert row.pop(name, None) == pytest.approx(same.pop(name, None), abs=1e-3)
        assert row == same
    torch.testing.assert_close(ours.features, theirs.features, rtol=1e-3, atol=1e-3)


def contents(given):
    shards = {path.name: path.read_bytes() for path in features_path(given.out, 0).parent.iterdir()}
    return given.out.read_bytes(), shards


@pytest.mark.parametrize("share", [0.05, 0.4, 0.75, 0.99])
def test_a_file_cut_off_anywhere_ends_the_same(pair, mined, share, tmp_path):
    """As kill -9 leaves it: a last line that is not whole, and features that no line names yet."""
    whole = contents(mined[0])
    given = replace(mined[0], out=tmp_path / "mined.jsonl")
    given.out.write_bytes(whole[0][: int(share * len(whole[0]))])
    kept = len(given.out.read_bytes().splitlines()) - 2
    for name, shard in whole[1].items():
        if int(name[:5]) * GROUP * given.batch <= kept:
            path = features_path(given.out, int(name[:5]))
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(shard)
    assert mine(pair, read_checked(given), given) == mined[1]
    assert_same_mined(given.out, mined[0].out)


def test_killed_and_started_again(tmp_path):
    """A real process, killed with -9 in the middle: what was finished is kept, and the file ends the same."""
    save_pair(tmp_path, known_pair())
    write_questions(tmp_path / "questions.jsonl", 240)
    first, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    given = Arguments(str(tmp_path / "target"), str(tmp_path / "head"), tmp_path / "questions.jsonl", out, batch=4,
                      max_new_tokens=12, tree=TREE)
    command = [sys.executable, "-m", "train.mine", "--target", given.target, "--draft", given.draft, "--batch", "4",
               "--questions", str(given.questions), "--out", str(out), "--max-new-tokens", "12", "--tree", "6,3,2"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while (not out.exists() or out.read_bytes().count(b"\n") < 9) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = out.read_bytes().count(b"\n")
    assert 9 <= finished < 241, "it was to be killed in the middle"
    assert run(given) == run(replace(given, out=first)) and len(mined_lines(first)) == 240
    assert_same_mined(out, first)


def test_a_file_of_other_settings_is_not_continued(pair, mined, tmp_path):
    given = replace(mined[0], out=tmp_path / "mined.jsonl", floor=0.5)
    shutil.copy(mined[0].out, given.out)
    with pytest.raises(ValueError, match="was begun with other settings"):
        mine(pair, read_checked(given), given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"floor": 0.0}, "--floor must be above 0 and at most 1, got 0.0"),
     ({"floor": 1.5}, "--floor must be above 0 and at most 1, got 1.5"), ({"nats": -1.0}, "--nats"),
     ({"batch": 0}, "--batch must be at least 1, got 0"), ({"most": 0}, "--most must be at least 1, got 0"),
     ({"dtype": "int3"}, "int3"), ({"questions": Path("no-such-file")}, "--questions no-such-file does not exist")],
)
def test_bad_options_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(arguments(tmp_path, **changes))


def test_questions_need_what_their_label_needs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "open.jsonl"
    path.write_text(json.dumps({"question_id": 7, "turns": ["Write a poem."]}) + "\n")
    words = ["mine", "--target", "t", "--draft", "d", "--questions", str(path), "--out", str(tmp_path / "o.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 2
    assert "question 7 has no answer to tell outcomes by: take --label likelihood" in capsys.readouterr().err
    path.write_text(json.dumps({"task_id": "H/1", "prompt": "def f():", "test": "", "entry_point": "f"}) + "\n")
    assert main() == 2
    assert "question H/1 is graded by running programs: allow it with --run-code" in capsys.readouterr().err


def test_documented_commands_parse():
    page = (ROOT / "docs" / "judge.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^python -m train\.(mine|judge) (.*)$", page, re.MULTILINE)
    assert {name for name, _ in commands} == {"mine", "judge"}
    for name, words in commands:
        own = Arguments if name == "mine" else train.judge.Arguments
        assert isinstance(parse_options(own, shlex.split(words)), own)


def test_files_that_are_none_are_named(mined, tmp_path):
    with pytest.raises(ValueError, match="does not exist: python -m train.mine makes it"):
        read_mined([tmp_path / "none"])
    other = tmp_path / "other.jsonl"
    append_lines(other, [{"a": 1}])
    with pytest.raises(ValueError, match="is no file of python -m train.mine"):
        read_mined([other])
    lone = tmp_path / "lone.jsonl"
    shutil.copy(mined[0].out, lone)
    with pytest.raises(ValueError, match="lone.jsonl.features/00000.safetensors cannot be read"):
        read_mined([lone])


def test_a_question_of_two_files_is_one_group(pair, mined, tmp_path):
    """Whatever its id there: the other file asks the same in another order, so that modes change, too."""
    lines = mined[0].questions.read_text().splitlines()
    turned = [{**json.loads(line), "question_id": f"other {number}"} for number, line in enumerate(lines[1:7])]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, turned)))
    given = arguments(tmp_path)
    mine(pair, read_checked(given), given)
    alone, both = read_mined([mined[0].out]), read_mined([mined[0].out, given.out])
    assert len(both.questions) == len(alone.questions) == 12
    assert [both.questions[group]["prompt"] for group in alone.groups] == [
        alone.questions[group]["prompt"] for group in alone.groups]
    keys = [(group, row["at"], row["substitute"], row["mode"])
            for group, row in zip(both.groups, both.rows, strict=True)]
    assert len(set(keys)) == len(keys) == len(both.features) > len(alone.rows)
    again = read_mined([mined[0].out, mined[0].out])
    assert again.rows == alone.rows and torch.equal(again.features, alone.features) and again.groups == alone.groups


@pytest.mark.parametrize(
    ("token", "in_code", "kind"),
    [(" 12", False, "digit"), ("x1", True, "digit"), (" +=", True, "operator"), ("<", False, "operator"),
     (" for", True, "keyword"), (" for", False, "word"), ("count", True, "name"), (" count", False, "word"),
     ("\n\n", False, "layout"), (",", False, "layout"), ("):", True, "layout"), ("", False, "layout")],
)
def test_kinds_of_tokens(token, in_code, kind):
    assert kind_of(token, in_code) == kind


def test_code_is_within_fences_or_where_a_bare_program_is_asked_for():
    answer = "So:\n```python\nx = 3\n```\nThus done"
    assert is_in_code("So:\n```python\nx = ", answer, "gsm8k")
    for before in ("So", "So:\n```python\nx = 3\n```\nThus "):
        assert not is_in_code(before, answer, "humaneval")
    assert is_in_code("    return ", "    return x", "humaneval") and not is_in_code("It is ", "It is 3", "gsm8k")
