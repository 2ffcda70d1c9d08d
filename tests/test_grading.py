"""Grading: numbers, values, instructions, programs in their limits."""

import json
import os

import pytest

from eagle_fsd.data.questions import Question, read_questions
from eagle_fsd.measure import grading
from eagle_fsd.measure.grading import check_gradable, final_number, is_right, passes, program_of

PROBLEM = Question("HumanEval/x", "humaneval", ("def add(a, b):\n",), tests="assert add(2, 3) == 5\n")


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 + 4 = 7.", "7"), ("#### 1,234", "1234"), ("It is 5.\n#### 12 eggs\nor 13", "12"), ("-2.50 dollars", "-2.5"),
     ("#### $18.00", "18"), ("none", None)],
)
def test_final_numbers(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # Separators of thousands: commas, LaTeX, spaces. Numbers beside one another are not joined.
        ("9,500", "9500"), ("9{,}500", "9500"), (r"9\,500", "9500"), ("9 500", "9500"), ("9\u202f500", "9500"),
        ("9\u00a0500", "9500"), (r"9,\!500", "9500"), ("1 234 567.5", "1234567.5"), ("12,34,567", "1234567"),
        ("in 2020 500", "500"), ("3, 400", "400"), ("(3,4)", "4"), ("1.5 200", "200"), ("9,5000", "5000"),
        # Signs, and dashes between numbers.
        ("\u22125", "-5"), ("-$5", "-5"), (r"-\$5", "-5"), ("$-5", "-5"), ("x=-5", "-5"), ("**-5**", "-5"),
        ("20-15", "15"), ("3-5", "5"), ("(2+1)-5", "5"), ("- 5 apples", "5"), ("50%-5", "5"),
        # Other notations.
        ("1e3", "1000"), ("2.5E-1", "0.25"), (r"1.5 \times 10^{3}", "1500"), ("2 × 10^3", "2000"), ("3/4", "0.75"),
        ("1 1/2", "1.5"), (r"\frac{3}{4}", "0.75"), (r"1\dfrac{1}{2}", "1.5"), ("5/0", "0"), ("$.50", "0.5"),
        ("v1.2.3", "3"), ("5/day", "5"), ("1e999", "inf"),
        # What is marked counts, also where more text follows.
        ("#### 9{,}500", "9500"), ("It is 5.\n#### 12. So 13 - 1 = 12 with 1 left", "12"),
        ("so 5 #### 18\nof 20", "18"), ("#### 12\nor 13", "12"),
        (r"\boxed{18} eggs in 7 days", "18"), (r"\boxed{9{,}500} of 3", "9500"), (r"\boxed{\$5} a day, 7 days", "5"),
        (r"\boxed{x = -\frac{3}{4}}, so 3", "-0.75"), (r"\boxed{A} of 3", "3"), (r"#### \boxed{18} of 3", "18"),
        (r"\boxed{1} then \boxed{2} of 3", "2"), ("#### -5", "-5"), ("#### **$1,234** in 3", "1234"),
        # A heading of Markdown marks nothing.
        ("#### Final Answer\nThe total is 18.", "18"), ("#### Step 3: add\n5 + 13 = 18", "18"),
        ("#### 1. Add\n5 + 13 = 18", "18"), ("##### 3\n18", "18"),
    ],
)
def test_notations_of_numbers(text, number):
    assert final_number(text) == number
    assert final_number(f"First 77.\n{text}") == number


@pytest.mark.parametrize(
    ("category", "answer", "text", "right"),
    [
        ("gsm8k", "x\n#### 72", "She has 72.", True),
        ("gsm8k", "x\n#### 72", "She has 72 and 3.", False),
        ("gsm8k", "x\n#### 9{,}500", "It is 9500", True),
        ("gsm8k", "x\n#### 9,500", r"\boxed{9\,500} in 3 years", True),
        ("gsm8k", "yes", "yes", True),  # no number: compared as text
        ("algebra", "x\n#### 72", "She has 72.", True),  # GSM8K's form, with the file's own category
        ("ifeval", "Paris", "Paris", True),  # the file's own category, without IFEval's instructions
        ("prompts", "Paris", "#### Final Answer\n\nParis", True),
        ("prompts", "Paris", "#### Paris\nHope this helps.", True),
        ("list", "3, 4", "These.\n#### 5\n#### 3, 4 ", True),
        ("prompts", "Paris", " Paris\n", True),
        ("prompts", "Paris", "It is Paris", False),
        ("writing", None, "whatever", None),
    ],
)
def test_answers(category, answer, text, right):
    assert is_right(Question(1, category, ("q",), answer), text) is right


WHOLE = "def add(a, b):\n    return a + b\n"
WRAPPED = [  # a right program, however it is wrapped
    f"Sure:\n```python\n{WHOLE}```\nThat adds.",
    "Sure:\n```python\ndef add(a, b):\n    return a + b",  # an answer that was stopped there
    f"```python \n{WHOLE}```",
    f"Sure:\n```python\n{WHOLE}```\n".replace("\n", "\r\n"),
    f"~~~py\n{WHOLE}~~~",
    f"````\n{WHOLE}````",
    f"Install it:\n```bash\npip install x\n```\nThen:\n```python\n{WHOLE}```",
    f"```bash\npip install x\n```\n\n{WHOLE}",
    "1. Add:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n2. Done.",
    "So:\n\n    ```python\n    def add(a, b):\n        return a + b\n    ```",
    "- Add:\n  ```python\ndef add(a, b):\n    return a + b\n```\nThat adds.",
    "> ```python\n> def add(a, b):\n>     return a + b\n> ```",
    f"```python\n{WHOLE}```\nTest it:\n```python\ndef test_add():\n    assert add(1, 2) == 4\n\ntest_add()\n```",
    f"```python\n{WHOLE}```\nFor more:\n```python\ndef add_all(*numbers):\n    return sum(numbers)\n```",
    f"```python\n{WHOLE}```\nFor example:\n```\nadd(1, 2)\n```",
    "```python\ndef add(a, b):\n    \"\"\"\n    ```\n    add(1, 2)\n    ```\n    \"\"\"\n    return a + b\n```",
    "<div>\n```python\ndef add(a, b):\n    return a + b\n```\n</div>",
    WHOLE,
    f"Here is the function:\n\n{WHOLE}",
    f"Here is the function:\n\n{WHOLE}\nDone\n\nIt adds two numbers.",
    f"from math import pi\n\n{WHOLE}",
    f"{WHOLE}\nprint(add(1, 2) / 0)",
    f"You need\nimport operator\n\nand this.\n\n{WHOLE.replace('a + b', 'plus(a, b)')}\n\n"
    "def plus(a, b):\n    return operator.add(a, b)\n\nFor example:\n\ndef test_add(",
    "Here it is:```python\ndef add(\n    a,\n    b,\n):\n    return a + b\n```",
]


@pytest.mark.parametrize("answer", WRAPPED)
@pytest.mark.parametrize("question", [PROBLEM, Question(511, "mbpp", ("Add.",), tests=PROBLEM.tests)],
                         ids=["humaneval", "mbpp"])
def test_a_right_program_does_not_fail_for_its_wrapping(question, answer):
    assert is_right(question, answer, run_code=True)
    assert not is_right(question, answer.replace("+", "-").replace("operator.add", "operator.sub"), run_code=True)
    assert is_right(question, answer) is None  # without leave


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return a + b\n\ndef other(", True),
        ("    return a + b\n```\n\nThat adds.", True),
        ("    return a + b\n\ndef add(a, b):\n    return 0", True),  # what follows the completion is not of it
        ("```\n    return a + b\n```", True),
        ("    return (", False),
        ("I cannot.", False),
    ],
)
def test_programs_in_completions(answer, right):
    assert is_right(PROBLEM, answer, run_code=True) is right


def test_a_program_keeps_what_the_prompt_has_before_the_function():
    prompt = "import math\n\ndef add_one(a):\n    return a + 1\n\ndef add(a, b):\n"
    question = Question("HumanEval/x", "humaneval", (prompt,), tests=PROBLEM.tests)
    body = "def add(a, b):\n    return add_one(a) - 1 + math.floor(b)\n"
    for answer in (f"```python\n{body}```", f"Here:\n\n{body}", body.partition("\n")[2]):
        assert is_right(question, answer, run_code=True)


def test_the_functions_of_mbpp_are_those_that_its_tests_call():
    tests = "class Pair:\n    pass\n\nassert set(first(Pair())) == {1} and math.isclose(1, 1)\n"
    question = Question(1, "mbpp", ("Do it.",), tests=tests)
    block = "def second(x):\n    return 0\n"
    answer = f"```python\ndef first(x):\n    return [1]\n```\n```python\n{block}```"
    assert program_of(question, answer) == "def first(x):\n    return [1]\n"
    assert program_of(question, f"```python\nfirst = list\n```\n```python\n{block}```") == "first = list\n"
    assert program_of(Question(1, "mbpp", ("Do it.",), tests="assert ("), answer) == block  # unknown: the last


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
