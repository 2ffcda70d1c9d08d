"""Grading: numbers, values, instructions, programs in their limits."""

import json
import os

import pytest

from eagle_fsd.data.questions import Question, read_questions
from eagle_fsd.measure import grading
from eagle_fsd.measure.grading import check_gradable, final_number, is_right, passes

PROBLEM = Question("HumanEval/x", "humaneval", ("def add(a, b):\n",), tests="assert add(2, 3) == 5\n")


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 + 4 = 7.", "7"), ("#### 1,234", "1234"), ("It is 5.\n#### 12 eggs\nor 13", "12"), ("-2.50 dollars", "-2.5"),
     ("#### $18.00", "18"), ("none", None)],
)
def test_final_numbers(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("category", "answer", "text", "right"),
    [
        ("gsm8k", "x\n#### 72", "She has 72.", True),
        ("gsm8k", "x\n#### 72", "She has 72 and 3.", False),
        ("gsm8k", "yes", "yes", True),  # no number: compared as text
        ("list", "3, 4", "These.\n#### 5\n#### 3, 4 ", True),
        ("prompts", "Paris", " Paris\n", True),
        ("prompts", "Paris", "It is Paris", False),
        ("writing", None, "whatever", None),
    ],
)
def test_answers(category, answer, text, right):
    assert is_right(Question(1, category, ("q",), answer), text) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return a + b\n\ndef other(", True),
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds.", True),
        ("```\n    return a + b\n```", True),
        ("Sure:\n```python\ndef add(a, b):\n    return a + b", True),  # an answer that was stopped there
        ("    return a - b", False),
        ("    return (", False),
        ("I cannot.", False),
    ],
)
def test_programs_in_completions_and_fences(answer, right):
    assert is_right(PROBLEM, answer, run_code=True) is right
    assert is_right(PROBLEM, answer) is None  # without leave


@pytest.mark.parametrize(
    ("answer", "right"),
    [("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nFor example:\n```\nadd(1, 2)\n```", True),
     ("def add(a, b):\n    return a + b", True), ("```python\ndef add(a, b):\n    return a - b\n```", False)],
)
def test_programs_of_mbpp(answer, right):
    question = Question(511, "mbpp", ("Add.",), tests="assert add(2, 3) == 5\n")
    assert is_right(question, answer, run_code=True) is right


def test_instructions_are_checked_as_the_harness_does(tmp_path):
    pytest.importorskip("lm_eval.tasks.ifeval.utils")
    record = {"key": 7, "prompt": "Say hello.", "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
              "kwargs": [{}, {"keywords": ["hello"]}]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(record))
    (question,) = read_questions(tmp_path / "questions.jsonl")
    assert is_right(question, "Oh hello") and not is_right(question, "Oh, hello") and not is_right(question, "Hi")
    for changed in ({"instruction_id_list": ["no:such", "keywords:existence"]}, {"kwargs": [{"wrong": 1}, {}]}):
        unknown = Question(1, "ifeval", ("q",), tests=json.dumps(
            {"instruction_id_list": record["instruction_id_list"], "kwargs": record["kwargs"]} | changed))
        with pytest.raises(ValueError, match="question 1: the harness cannot check its instructions"):
            check_gradable([question, unknown])


def test_instructions_take_the_harness(monkeypatch):
    monkeypatch.setattr(grading, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no " + name)))
    grading._checks.cache_clear()
    with pytest.raises(ValueError, match="graded by lm-evaluation-harness, which is not installed .*pip install"):
        check_gradable([PROBLEM, Question(1, "ifeval", ("q",), tests='{"instruction_id_list": [], "kwargs": []}')])
    grading._checks.cache_clear()


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(3 << 30)",
        "open('big', 'wb').write(bytes(2 << 20))",
        pytest.param("import os; os.fork()", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may fork")),
        "files = [open(f'f{i}', 'w') for i in range(40)]",
    ],
)
def test_limits_hold(program, monkeypatch):
    monkeypatch.setattr(grading, "SECONDS", 1)
    monkeypatch.setattr(grading, "WALL_SECONDS", 2)
    assert not passes(program, "")


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_program_that_leaves_before_its_tests_has_not_passed(leave):
    assert not passes(f"import os, sys\nprint('passed')\n{leave}", "assert False")
    assert not passes(f"import os, sys\ndef f():\n    {leave}", "assert f() == 3")


def test_the_environment_and_directory_are_empty():
    assert passes("import os; assert os.listdir() == ['program.py'] and not set(os.environ) - {'LC_CTYPE'}", "")
