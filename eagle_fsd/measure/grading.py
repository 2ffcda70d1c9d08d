"""Grading of answers: GSM8K, HumanEval, MBPP, IFEval, and any file of prompts with answers."""

from __future__ import annotations

import json
import logging
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from ..data.questions import Question

log = logging.getLogger(__name__)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CODE = ("humaneval", "mbpp")  # categories with programs as answers
CODE_END = "\n```\n"  # the end of a fenced program; also a stop string of EvalPlus
# Limits of a program.
SECONDS, WALL_SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 40, 1 << 30, 1 << 20
# Runs in the subprocess before the program and sets its limits. At the end it writes the bytes from standard input to a
# file; a program that exits before its tests have finished does not get there.
LIMITED = """
import resource, runpy, sys
from os import write
proof = sys.stdin.buffer.read()
for limit, value in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_FSIZE, {file}),
                     (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
runpy.run_path("program.py", run_name="__main__")
write({place}, proof)
"""


def is_right(question: Question, text: str, *, run_code: bool = False) -> bool | None:
    """Whether `text` answers the question; None: there is no reference, or programs may not run.

    Args:
        run_code: run the programs of HumanEval and MBPP answers (in a limited subprocess).
    """
    if question.category in CODE:
        graded = run_code and question.tests is not None
        return passes(program_of(question, text), question.tests) if graded else None
    if question.category == "ifeval":
        return all(followed(question, text))
    if question.answer is None:
        return None
    if question.category == "gsm8k" and final_number(question.answer) is not None:
        return final_number(text) == final_number(question.answer)
    return (extract_result(text) or text).strip() == question.answer.strip()


def extract_result(text: str) -> str | None:
    """The last `#### result` line of an answer, or None."""
    found = re.findall(r"^#### (.+)$", text, flags=re.MULTILINE)
    return found[-1].strip() if found else None


def final_number(text: str) -> str | None:
    """The final number of an answer, as defined by GSM8K: after the last `####`, else the last number in the text."""
    marked = extract_result(text)
    found = NUMBER.findall(text if marked is None else marked)
    if not found:
        return None
    number = float(found[-1 if marked is None else 0].replace(",", ""))
    return str(int(number)) if number.is_integer() else str(number)


def program_of(question: Question, text: str) -> str:
    """The program in an answer: the prompt with its completion, or the fenced block that contains the function.

    For MBPP it is the last fenced block with a function, or the whole answer. A block may lack its closing fence.
    """
    prompt = question.turns[-1]
    fenced = re.findall(r"```(?:[Pp]y\w*)?\n(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    if question.category == "mbpp":
        return next((block for block in reversed(fenced) if "def " in block), fenced[-1] if fenced else text)
    names = re.findall(r"^def (\w+)", prompt, flags=re.MULTILINE)
    if fenced:
        whole = next((block for block in reversed(fenced) if names and f"def {names[-1]}" in block), None)
        if whole is not None:
            return prompt[: prompt.index(f"def {names[-1]}")] + whole  # keeps the prompt's imports and helpers
        text = fenced[-1]
    return prompt + cut_program(text)


def cut_program(text: str) -> str:
    """A completion up to the end of the function that it continues (the stop strings of HumanEval's authors)."""
    ends = [at for stop in ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint") if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def passes(program: str, tests: str) -> bool:
    """Whether a program passes its tests and runs to their end. POSIX only.

    The program runs in a subprocess with an empty environment and directory, with limits on processor and wall time,
    memory, file size and open files, and (unless the user is root) without further processes.

    The limits prevent accidents. They are not a sandbox: hostile code can read every file that the user can read.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as end:
        Path(folder, "program.py").write_text(f"{program}\n\n{tests}\n", encoding="utf-8")
        starter = LIMITED.format(seconds=SECONDS, memory=MEMORY_BYTES, file=FILE_BYTES, place=end.fileno())
        proof = secrets.token_bytes()
        try:
            finished = subprocess.run(
                [sys.executable, "-I", "-S", "-c", starter], cwd=folder, env={}, timeout=WALL_SECONDS,
                input=proof, pass_fds=[end.fileno()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return False
        end.seek(0)
        return finished.returncode == 0 and end.read() == proof


# IFEval, with the strict checks of lm-evaluation-harness.


@cache
def _checks() -> object:
    """The module of the harness.

    Raises:
        ValueError: the harness is not installed.
    """
    try:
        import_module("langdetect").DetectorFactory.seed = 0  # its default differs in every process
        return import_module("lm_eval.tasks.ifeval.utils")
    except (ImportError, AssertionError) as error:  # AssertionError: the version of nltk
        raise ValueError(f"IFEval is graded by lm-evaluation-harness, which is not installed ({error}): "
                         "pip install 'eagle-fsd[lm_eval]'") from error


def check_gradable(questions: Sequence[Question], run_code: bool = True) -> None:
    """Warn if programs will not be graded, and raise if an IFEval question cannot be.

    Raises:
        ValueError: the harness, or data that it needs for some instructions, is not installed; or it does not know an
            instruction or its arguments.
    """
    if not run_code and any(question.category in CODE for question in questions):
        log.warning("programs are not graded without --run-code")
    for question in questions:
        if question.category == "ifeval":
            try:
                followed(question, "x")
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"question {question.id}: the harness cannot check its instructions (some need python -m "
                    f"nltk.downloader punkt_tab): {error!r}") from error


def followed(question: Question, text: str) -> list[bool]:
    """For each instruction, whether the answer follows it; see `check_gradable`."""
    checks = _checks()
    instructions = checks.InputExample(key=question.id, prompt=question.turns[0], **json.loads(question.tests or "{}"))
    return checks.test_instruction_following_strict(instructions, text).follow_instruction_list
