"""Grading: numbers, values, instructions, programs in their limits."""

import json
import os

import pytest

from eagle_fsd.data.questions import Question, read_questions
from eagle_fsd.measure import grading, ifeval
from eagle_fsd.measure.grading import cut_program, extract_result, final_number, is_right, outcome, passes
from eagle_fsd.measure.ifeval import check_instructions


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 + 4 = 7.", "7"), ("#### 1,234", "1234"), ("It is 5.\n#### 12 eggs\nor 13", "12"), ("-2.50 dollars", "-2.5"),
     ("#### $18.00", "18"), ("none", None), ("", None)],
)
def test_final_numbers(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(("text", "result"), [("a\n#### 5", "5"), ("#### 5\n#### 6 \n", "6"), ("no mark", None)])
def test_extract_result(text, result):
    assert extract_result(text) == result


@pytest.mark.parametrize(
    ("category", "answer", "text", "right"),
    [
        ("gsm8k", "x\n#### 72", "She has 72.", True),
        ("gsm8k", "x\n#### 72", "She has 72 and 3.", False),
        ("json", '{"a": 1, "b": "x"}', 'So:\n#### {"b": "x", "a": 1}', True),
        ("json", '{"a": 1}', "#### {a: 1", False),
        ("json", '{"a": 1}', "#### " + "[" * 100_000, False),
        ("json", '{"a": 1}', "#### " + "1" * 5000, False),
        ("list", "3, 4", "These.\n#### 3, 4", True),
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
        ("    return a + b\n", True),
        ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds.", True),
        ("```\n    return a + b\n```", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("I cannot.", False),
    ],
)
def test_programs_in_completions_and_fences(answer, right):
    assert is_right(PROBLEM, answer, run_code=True) is right


def test_answers_that_are_no_numbers_are_compared_as_text():
    question = Question(1, "gsm8k", ("q",), "yes")
    assert is_right(question, "yes") is True and is_right(question, "I do not know") is False


PROBLEM = Question("HumanEval/x", "humaneval", ("def add(a, b):\n",), tests="assert add(2, 3) == 5\n")


def test_programs_are_run_only_where_it_is_allowed():
    with pytest.raises(ValueError, match="--run-code"):
        is_right(PROBLEM, "    return a + b")
    assert is_right(PROBLEM, "    return a + b\n\ndef other(", run_code=True)
    assert not is_right(PROBLEM, "    return a - b", run_code=True)
    assert not is_right(PROBLEM, "    return (", run_code=True)


@pytest.mark.parametrize(
    ("answer", "right"),
    [("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nFor example:\n```\nadd(1, 2)\n```", True),
     ("def add(a, b):\n    return a + b", True), ("```python\ndef add(a, b):\n    return a - b\n```", False),
     ("No.", False)],
)
def test_programs_of_mbpp(answer, right):
    question = Question(511, "mbpp", ("Add.",), tests="assert add(2, 3) == 5\n")
    assert is_right(question, answer, run_code=True) is right
    assert (outcome(question, answer, run_code=True) == (("gives", 5),)) is right
    with pytest.raises(ValueError, match="grading HumanEval and MBPP runs .*; allow it with --run-code"):
        outcome(question, answer)


def test_the_outcome_of_a_program_is_what_it_gives_in_the_tests():
    question = Question(1, "mbpp", ("Add.",), tests="import math\nassert f(1) == 2\nassert f(\n  4) == math.inf\n")
    inf = "2 if x == 1 else math.inf"  # which is no literal: whether the test passes is all that is told
    for answer, given in (("2", (2, 2)), ("math.inf", (False, True)), (inf, (2, True)), ("None", (None, None)),
                          ("[x, {x}]", ([1, {1}], [4, {4}])), ("g(x)", "no"), ("= 2", "no")):
        expected = tuple(None if given == "no" else ("passes" if isinstance(each, bool) else "gives", each)
                         for each in given)
        assert outcome(question, f"def f(x): return {answer}", run_code=True) == expected
        assert is_right(question, f"def f(x): return {answer}", run_code=True) is (answer == inf)


def test_other_tests_of_a_program_pass_or_not():
    tests = "assert f(1)\nassert f(2) != 3, 'no'\nassert f(\nassert 2 == f(1)\n"
    question = Question(1, "mbpp", ("Add.",), tests=tests)
    assert [passed for _, passed in outcome(question, "def f(x): return x + 1", run_code=True)] == [
        True, False, False, True]
    whole = Question("HumanEval/x", "humaneval", ("def add(a, b):\n",),
                     tests="def check(candidate):\n    assert candidate(2, 3) == 5\n\ncheck(add)\n")
    for sign, passed in (("+", True), ("-", False), ("*", False)):
        assert outcome(whole, f"    return a {sign} b", run_code=True) == (("passes", passed),)


def test_instructions_are_checked_as_the_harness_does(tmp_path):
    record = {"key": 7, "prompt": "Say hello.", "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
              "kwargs": [{}, {"keywords": ["hello"]}]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(record))
    (question,) = read_questions(tmp_path / "questions.jsonl")
    assert (question.id, question.category, question.turns) == (7, "ifeval", ("Say hello.",))
    with pytest.raises(ValueError, match="line 1: a prompt, an instruction_id_list and as many kwargs are needed"):
        (tmp_path / "bad.jsonl").write_text(json.dumps({**record, "kwargs": []}))
        read_questions(tmp_path / "bad.jsonl")
    pytest.importorskip("lm_eval.tasks.ifeval.utils")
    assert is_right(question, "Oh hello") and not is_right(question, "Oh, hello") and not is_right(question, "Hi")
    assert outcome(question, "Oh, hello") == (False, True)
    for changed in ({"instruction_id_list": ["no:such", "keywords:existence"]}, {"kwargs": [{"wrong": 1}, {}]}):
        unknown = Question(1, "ifeval", ("q",), tests=json.dumps(
            {"instruction_id_list": record["instruction_id_list"], "kwargs": record["kwargs"]} | changed))
        with pytest.raises(ValueError, match="question 1: the harness cannot check its instructions"):
            check_instructions([question, unknown])
    needy = Question(1, "ifeval", ("q",), tests=json.dumps(
        {"instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [{"num_sentences": 2}]}))
    if not ifeval._has_punkt():
        with pytest.raises(ValueError, match="question 1: length_constraints:number_sentences .* punkt_tab"):
            check_instructions([needy])


def test_instructions_take_the_harness(monkeypatch):
    monkeypatch.setattr(ifeval, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no " + name)))
    ifeval._checks.cache_clear()
    with pytest.raises(ValueError, match="graded by lm-evaluation-harness, which is not there .*pip install"):
        check_instructions([PROBLEM, Question(1, "ifeval", ("q",), tests='{"instruction_id_list": [], "kwargs": []}')])
    ifeval._checks.cache_clear()


def test_values_that_cannot_be_shown_are_no_error():
    """4301 digits, and a name that is the one that is looked at."""
    question = Question(1, "mbpp", ("Big.",), tests="assert f() == 10**5000\n")
    assert outcome(question, "def f(): return 10**5000", run_code=True) == (("passes", True),)
    assert passes("class A:\n    __repr__ = None\n_result = A()", "")


@pytest.mark.parametrize(
    ("category", "first", "second", "same"),
    [("gsm8k", "So 3.\n#### 4", "It is 4", True), ("gsm8k", "4 or 5", "4", False), ("gsm8k", "none", "no number", True),
     ("list", "a\n#### 3, 4", "b\n#### 3, 4 ", True), ("list", "#### 3, 4", "#### 4, 3", False),
     ("json", '#### {"a": 1, "b": [2]}', '#### { "b":[2.0], "a":1}', True), ("json", "#### [1]", "#### [2]", False),
     ("json", "#### [1", "#### [1]", False), ("json", "#### [1", "#### [1", True), ("json", "[1]", "#### [1]", False),
     ("prompts", " 4\n", "4", True), ("prompts", "4", "It is 4", False), ("prompts", "#### 4", "4", True),
     ("prompts", "It is Paris", "Paris, I think", True)],  # neither is the answer: nothing else can be told
)
def test_outcomes_are_what_answers_come_to(category, first, second, same):
    question = Question(1, category, ("q",), "4")
    assert (outcome(question, first) == outcome(question, second)) is same


def test_completions_end_with_their_function():
    assert cut_program("    return 1\n\n\ndef g():\n    pass") == "    return 1\n\n"
    assert cut_program("    return 1") == "    return 1"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(3 << 30)",
        "open('big', 'wb').write(bytes(2 << 20))",
        pytest.param("import os; os.fork()", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may fork")),
        "import os; os._exit(1)",
        "files = [open(f'f{i}', 'w') for i in range(40)]",
    ],
)
def test_limits_hold(program, monkeypatch):
    monkeypatch.setattr(grading, "SECONDS", 1)
    assert not passes(program, "")


@pytest.mark.parametrize("leave", ["sys.exit(0)", "raise SystemExit", "os._exit(0)"])
def test_a_program_that_leaves_before_its_tests_has_not_passed(leave):
    assert not passes(f"import os, sys\nprint('passed')\n{leave}", "assert False")
    assert not passes(f"import os, sys\ndef f():\n    {leave}", "assert f() == 3")


def test_the_environment_and_directory_are_empty():
    assert passes("import os; assert os.listdir() == ['program.py'] and not set(os.environ) - {'LC_CTYPE'}", "")
