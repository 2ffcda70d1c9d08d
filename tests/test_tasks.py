"""The task generator: results, splits and wordings."""

import json
import random
import re
import statistics

import pytest

from eagle_fsd.measure.grading import extract_result
from train.tasks import generator
from train.tasks.families import FAMILIES
from train.tasks.generator import Arguments, Task, is_correct, make_task, split_of, tasks, write_tasks
from train.tasks.wordings import PHRASES, QUESTIONS, STORY_EVENTS, STRING_EDITS


def test_same_arguments_give_the_same_tasks():
    first, again = (list(tasks("train", seed=3, count=40)) for _ in range(2))
    assert first == again
    assert first != list(tasks("train", seed=4, count=40))


def test_families_take_turns():
    drawn = [task.family for task in tasks("heldout", seed=0, count=2 * len(FAMILIES))]
    assert drawn == 2 * list(FAMILIES)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_operands_belong_to_the_split(split):
    for task in tasks(split, seed=1, count=400):
        assert split_of(task.family, task.operands) == split


def test_no_held_out_operands_in_training():
    trained = {(task.family, task.operands) for task in tasks("train", seed=0, count=20_000)}
    heldout = {(task.family, task.operands) for task in tasks("heldout", seed=0, count=4_000)}
    assert not trained & heldout


def test_every_worked_answer_is_correct_and_ends_in_its_result():
    for task in tasks("heldout", seed=2, count=800):
        assert is_correct(task, task.answer)
        assert task.answer.splitlines()[-1] == f"#### {task.result}"


def test_arithmetic_results_are_those_of_python():
    for _ in range(200):
        task = make_task("arithmetic", random.Random(_), "train")
        expression = re.search(r"\d[\d +*-]*\d", task.messages[-1]["content"]).group()
        assert str(eval(expression)) == task.result  # noqa: S307 (digits and operators only, by the pattern)


def test_list_results_are_those_of_python():
    for seed in range(300):
        task = make_task("list", random.Random(seed), "train")
        numbers = [operand for operand in task.operands if isinstance(operand, int)]
        kind = task.operands[0]
        if kind == "largest to smallest":
            assert task.result == ", ".join(map(str, sorted(numbers, reverse=True)))
        elif kind == "smallest to largest":
            assert task.result == ", ".join(map(str, sorted(numbers)))
        elif kind == "count" and task.operands[1] in ("even", "odd"):
            assert task.result == str(sum(n % 2 == (task.operands[1] == "odd") for n in numbers))


def test_every_calculation_in_an_answer_holds():
    for task in tasks("train", seed=5, count=800):
        for a, op, b, c in re.findall(r"(?<![\d*+-] )\b(\d+) ([*+-]) (\d+) = (\d+)\b(?! [*+])", task.answer):
            assert eval(f"{a}{op}{b}") == int(c), task.answer  # noqa: S307


def test_steps_have_at_least_four_phrasings_and_questions_unseen_ones():
    for key, wordings in (PHRASES | STORY_EVENTS | STRING_EDITS).items():
        assert len(set(wordings)) >= 4, key
    for key, wordings in QUESTIONS.items():
        trained, unseen = wordings["trained"], wordings["unseen"]
        assert len(trained) >= 4 and unseen, key
        assert not set(trained) & set(unseen), key


def test_unseen_wordings_are_never_trained_on():
    def openings(drawn: list[Task]) -> set[str]:
        return {re.sub(r"\d+", "0", task.messages[-1]["content"])[:12] for task in drawn if task.family == "arithmetic"}

    unseen = list(tasks("heldout", seed=0, count=200, unseen_wording=True))
    assert all(task.unseen_wording for task in unseen)
    assert not openings(unseen) & openings(list(tasks("train", seed=0, count=4000)))


def test_answers_are_long_enough_to_measure_decoding():
    answers = [task.answer.lower() for task in tasks("heldout", seed=0, count=400)]
    words = statistics.median(len(re.findall(r"\d|[a-z]+|[^\sa-z\d]", answer)) for answer in answers)
    assert words >= 40  # about 60 tokens of the demo tokenizer


def test_followups_carry_their_first_turn():
    task = make_task("followup", random.Random(1), "train")
    assert [m["role"] for m in task.messages] == ["user", "assistant", "user"]
    assert extract_result(task.messages[1]["content"]) is not None


def test_json_results_are_compared_as_values():
    task = make_task("json", random.Random(0), "train")
    record = json.loads(task.result)
    reordered = json.dumps(dict(reversed(record.items())))
    assert is_correct(task, f"#### {reordered}")
    assert not is_correct(task, "#### " + json.dumps(record | {"price": -1}))
    assert not is_correct(task, "#### {not json")


@pytest.mark.parametrize(
    ("family", "split", "unseen", "word"),
    [("poems", "train", False, "poems"), ("list", "test", False, "test"), ("list", "train", True, "held-out")],
)
def test_bad_requests_are_refused(family, split, unseen, word):
    with pytest.raises(ValueError, match=word):
        make_task(family, random.Random(0), split, unseen_wording=unseen)


def test_level_is_respected():
    assert {make_task("list", random.Random(s), "train", level=2).level for s in range(5)} == {2}
    assert generator.HELDOUT_BUCKETS > 1


def test_the_command_writes_conversations_and_refuses_an_empty_file(tmp_path):
    write_tasks(Arguments(out=tmp_path / "new" / "tasks.json", count=9, seed=4))
    written = json.loads((tmp_path / "new" / "tasks.json").read_text())
    for record, task in zip(written, tasks("train", seed=4, count=9), strict=True):
        assert [turn["value"] for turn in record["conversations"]][-1] == task.answer
        assert [turn["from"] for turn in record["conversations"]][:2] == ["human", "gpt"]
    with pytest.raises(ValueError, match="--count must be at least 1, got 0"):
        write_tasks(Arguments(out=tmp_path / "none.json", count=0))
