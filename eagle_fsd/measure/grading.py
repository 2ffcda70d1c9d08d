"""Whether an answer is right: generated tasks, GSM8K, HumanEval, MBPP, IFEval, and any file of prompts with answers."""

from __future__ import annotations

import ast
import json
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from ..data.questions import Question
from .ifeval import followed

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CODE = ("humaneval", "mbpp")  # categories of questions whose answers are programs
# What such a program may use.
SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20
# Runs in the child before the program: from here on it can use no more than the limits. What comes on standard input
# is written to a file at the end, which a program that exits before its tests are through does not reach.
LIMITED = """
import resource, runpy, sys
from os import write
proof = sys.stdin.buffer.read()
for limit, value in ((resource.RLIMIT_CPU, {seconds}), (resource.RLIMIT_AS, {memory}), (resource.RLIMIT_FSIZE, {file}),
                     (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (value, value))
found = runpy.run_path("program.py", run_name="__main__")
try:
    shown = repr(found.get("{result}"))
except Exception:
    shown = "?"
write({place}, proof + shown.encode(errors="replace")[:{file} // 2])
"""
RESULT = "_result"  # the name of what a program leaves to be looked at


def extract_result(text: str) -> str | None:
    """The last `#### result` line of an answer, or None where it has none."""
    found = re.findall(r"^#### (.+)$", text, flags=re.MULTILINE)
    return found[-1].strip() if found else None


def same_json(text: str, wanted: str) -> bool:
    """Whether `text` is JSON of the wanted value."""
    try:
        return json.loads(text) == json.loads(wanted)
    except (ValueError, RecursionError):
        return False


def final_number(text: str) -> str | None:
    """The number that an answer ends with, as GSM8K counts it: behind the last `####`, else the last in the text."""
    marked = extract_result(text)
    found = NUMBER.findall(marked if marked is not None else text)
    if not found:
        return None
    number = float((found[0] if marked is not None else found[-1]).replace(",", ""))
    return str(int(number)) if number.is_integer() else str(number)


def is_right(question: Question, text: str, *, run_code: bool = False) -> bool | None:
    """Whether `text` answers the question; None where the set has no answer to compare with.

    Args:
        run_code: allow programs of HumanEval and MBPP to be run (in a limited subprocess).

    Raises:
        ValueError: a question for a program without leave to run code.
    """
    if question.category in CODE:
        _check_leave(run_code)
        return None if question.tests is None else passes(program_of(question, text), question.tests)
    if question.category == "ifeval":
        return all(followed(question, text))
    if question.answer is None:
        return None
    if question.category == "gsm8k" and final_number(question.answer) is not None:
        return final_number(text) == final_number(question.answer)
    if question.category == "json":
        return same_json(extract_result(text) or "", question.answer)
    stated = extract_result(text)
    return (text.strip() if stated is None else stated) == question.answer.strip()


def _check_leave(run_code: bool) -> None:
    if not run_code:
        raise ValueError("grading HumanEval and MBPP runs generated programs; allow it with --run-code")


def outcome(question: Question, text: str, *, run_code: bool = False) -> object:
    """What an answer comes to, right or wrong: a number, a result, or what its program does in each of the tests.

    A text that states no result is the right answer, whole, or None: any two of these that are wrong come to the same.
    Of instructions, which of them it follows. Of a program, see `behaviour`, in each test that begins a line; of
    others, as in HumanEval, whether it passes all.

    Args:
        run_code: see `is_right`.

    Raises:
        ValueError: a question for a program without leave to run code.
    """
    if question.category in CODE:
        _check_leave(run_code)
        before, *tests = re.split(r"^(?=assert )", question.tests or "", flags=re.MULTILINE)
        program = program_of(question, text)
        return tuple(behaviour(program, before, test) for test in tests or [""])
    if question.category == "ifeval":
        return followed(question, text)
    if question.category == "gsm8k" and final_number(question.answer or "") is not None:
        return final_number(text)
    stated = extract_result(text)
    if stated is None:
        return (question.answer or "").strip() if is_right(question, text) else None
    if question.category == "json":
        try:
            return json.loads(stated)
        except (ValueError, RecursionError):
            pass
    return stated


def program_of(question: Question, text: str) -> str:
    """The program that an answer gives: the prompt with its completion, or a fenced block that has the function.

    That of an MBPP question is the last fenced block with a function, or all of the answer.
    """
    prompt = question.turns[-1]
    fenced = re.findall(r"```(?:[Pp]y\w*)?\n(.*?)```", text, flags=re.DOTALL)
    if question.category == "mbpp":
        return next((block for block in reversed(fenced) if "def " in block), fenced[-1] if fenced else text)
    asked = re.findall(r"^def (\w+)", prompt, flags=re.MULTILINE)
    if fenced:
        whole = next((block for block in reversed(fenced) if asked and f"def {asked[-1]}" in block), None)
        if whole is not None:
            return prompt[: prompt.index(f"def {asked[-1]}")] + whole  # with the prompt's imports and helpers
        text = fenced[-1]
    return prompt + cut_program(text)


def cut_program(text: str) -> str:
    """A completion up to where the function it continues has ended (as HumanEval's authors stop it)."""
    ends = [at for stop in ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint") if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def behaviour(program: str, before: str, test: str) -> object:
    """What a program does in one test, right or wrong: ("gives", the value that the left side of `assert f(...) == ...`
    has there), or None where it raises; ("passes", whether the test does) where the test is of another form, or the
    value is no plain Python literal."""
    match _statement(test):
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()])) if any(
            isinstance(node, ast.Call) for node in ast.walk(left)
        ):
            found = finish(program, f"{before}\n{RESULT} = {ast.unparse(left)}")
            try:
                return None if found is None else ("gives", ast.literal_eval(found))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                pass
    return "passes", passes(program, before + test)


def _statement(test: str) -> ast.stmt | None:
    """The only statement of a test; None: it is something else."""
    try:
        (statement,) = ast.parse(test).body
    except (SyntaxError, ValueError):
        return None
    return statement


def passes(program: str, tests: str) -> bool:
    """Whether a program passes its tests and gets to their end, see `finish`."""
    return finish(program, tests) is not None


def finish(program: str, tests: str) -> str | None:
    """Run a program and what follows it to the end; None: it does not get there.

    In a subprocess with an empty environment and directory, limited in processor and wall time, memory, file size, open
    files and (unless the user is root) to no further processes. POSIX only.

    The limits stop accidents; they are no jail for hostile code (files that the user can read, it can read).

    Returns:
        What `RESULT` is then, as `repr` says it.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as end:
        Path(folder, "program.py").write_text(f"{program}\n\n{tests}\n", encoding="utf-8")
        starter = LIMITED.format(seconds=SECONDS, memory=MEMORY_BYTES, file=FILE_BYTES, place=end.fileno(),
                                 result=RESULT)
        proof = secrets.token_bytes()
        try:
            finished = subprocess.run(
                [sys.executable, "-I", "-S", "-c", starter], cwd=folder, env={}, timeout=4 * SECONDS,
                input=proof, pass_fds=[end.fileno()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return None
        end.seek(0)
        written = end.read()
        ended = finished.returncode == 0 and written.startswith(proof)
        return written[len(proof) :].decode(errors="replace") if ended else None
