"""Grading of answers: GSM8K, HumanEval, MBPP, IFEval, and any file of prompts with answers."""

from __future__ import annotations

import ast
import builtins
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

from markdown_it import MarkdownIt

from ..data.questions import Question
from ..utils.installation import install_command

log = logging.getLogger(__name__)
# Thousands are separated by a comma or a space, also in LaTeX: 9,500, 9{,}500, 9\,500.
SEPARATOR = r"(?:\{,\}|,\\!|\\[,;: ]|[,~ '’\N{NO-BREAK SPACE}\N{FIGURE SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])"
DIGITS = rf"(?:\d{{1,3}}(?:{SEPARATOR}\d{{3}})+(?!\d)|\d{{1,3}}(?:,\d\d)+,\d{{3}}(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+"
NUMBER = re.compile(  # after a digit, word or bracket, "-" is no sign: 20-15
    rf"(?:(?<![\w)\]}}%])(?P<minus>-))?\\?[$€£]?(?:(?P<whole>\d{{1,3}}) (?=\d+/[1-9]))?(?P<digits>{DIGITS})"
    r"(?:[eE](?P<exponent>[+-]?\d+)\b|\s?(?:×|\\times|\\cdot|\*)\s?10\^\{?(?P<power>-?\d+))?(?:/(?P<parts>[1-9]\d*))?")
MARKED = re.compile(  # "#### 1. Title" above a text is a heading
    rf"(?:(?<!#)####(?!#)[^\w\n]{{0,40}}?|\\boxed\{{[^}}\n]{{0,40}}?){NUMBER.pattern}(?!\d|[.)] +\S.*\n\s*\S)")
FRACTION = re.compile(r"(\d?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
# Parsers of fenced blocks alone; the second one takes deeply indented fences, too.
FENCES = [MarkdownIt("zero").enable(["fence", "list", "blockquote", *more]) for more in (["code"], [])]
for _parser in FENCES:
    _parser.parse("x")  # fills its cache of rules, which is not safe in threads that parse first
CONTINUES = re.compile(r"\n*(?: {2,}|\t)\s*(?!```|~~~)\S")  # a completion of a function begins with its indented body
MOST_LINES = 50  # lines of one statement at most that are not indented; limits the work on lines that never parse
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
    if question.category == "ifeval" and question.tests is not None:
        return all(followed(question, text))
    if question.answer is None:
        return None
    is_number = question.category == "gsm8k" or "\n#### " in question.answer  # a file may name its own categories
    if is_number and final_number(question.answer) is not None:
        return final_number(text) == final_number(question.answer)
    _, mark, marked = f"\n{text}".rpartition("\n#### ")  # a result, or a heading above it
    found = marked.partition("\n")[::2] if mark else (text,)
    return question.answer.strip() in [result.strip() for result in found]


def final_number(text: str) -> str | None:
    """The final number of an answer: the last one that is marked, after `#### ` as in GSM8K or in `\\boxed{}`; else the
    last one in the text."""
    text = FRACTION.sub(lambda found: f"{found[1] and found[1] + ' '}{found[2]}/{found[3]}",
                        text.replace("\N{MINUS SIGN}", "-"))
    *_, found = [None, *(list(MARKED.finditer(text)) or NUMBER.finditer(text))]
    if found is None:
        return None
    power = found["exponent"] or found["power"] or 0
    number = float(f"{re.sub(SEPARATOR, '', found['digits'])}e{power}") / float(found["parts"] or 1)
    number = (number + float(found["whole"] or 0)) * (-1 if found["minus"] else 1)
    return str(int(number)) if number.is_integer() else str(number)


def program_of(question: Question, text: str) -> str:
    """The program in an answer: the last fenced block that defines what the question asks for, else what defines it
    outside of fences, else the completion of the prompt (of MBPP: the last block, or the whole answer).

    Of HumanEval's prompt, what precedes the function precedes the block. A block may lack its closing fence.
    """
    prompt, text = question.turns[-1], text.replace("\r\n", "\n")
    functions = list(re.finditer(r"^def (\w+)", prompt, flags=re.MULTILINE)) if question.category == "humaneval" else []
    names = [functions[-1][1]] if functions else called_names(question.tests or "")
    asked = "|".join(names) or r"\w+"
    definition = re.compile(rf"^(?:(?:async )?def (?:{asked})\b|class (?:{asked})\b|(?:{asked}) *=)", re.MULTILINE)
    blocks, any_indent = ([token.content for token in parser.parse(text) if token.type == "fence"] for parser in FENCES)
    continues = question.category == "humaneval" and CONTINUES.match(text)
    for program in (*reversed(blocks), *reversed(any_indent), *([] if continues else [top_level_code(text)])):
        if definition.search(program):
            return prompt[: functions[-1].start() if functions else 0] + program
    if question.category == "humaneval":
        return prompt + cut_program(blocks[-1] if blocks and not continues else text)
    return blocks[-1] if blocks else text


def called_names(tests: str) -> list[str]:
    """The names that tests call and do not define; empty if the tests cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError):
        return []
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias))}
    return sorted(called - own - set(dir(builtins)))


def top_level_code(text: str) -> str:
    """The imports, definitions and assignments that begin at the start of a line, without the prose around them."""
    lines, code, at = text.split("\n"), [], 0
    ends = [number for number, line in enumerate(lines) if line[:1].strip()] + [len(lines)]
    while at < len(lines):
        starts = re.match(r"(?:import|from|(?:async )?def|class) |@|\w+ *=", lines[at])
        near = [end for end in ends if end > at][:MOST_LINES] if starts else []
        end = next((end for end in near if parses("\n".join(lines[at:end]))), None)
        code += lines[at:end] if end else []
        at = end or at + 1
    return "\n".join(code)


def parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def cut_program(text: str) -> str:
    """A completion up to the end of the function that it continues (the stop strings of HumanEval's authors, and the
    end of a fence)."""
    ends = [at for stop in ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```") if (at := text.find(stop)) >= 0]
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
                         f"{install_command('lm_eval')}") from error


def check_gradable(questions: Sequence[Question], run_code: bool = True) -> None:
    """Warn if programs will not be graded, and raise if an IFEval question cannot be.

    Raises:
        ValueError: the harness, or data that it needs for some instructions, is not installed; or it does not know an
            instruction or its arguments.
    """
    if not run_code and any(question.category in CODE for question in questions):
        log.warning("programs are not graded without --run-code")
    for question in questions:
        if question.category == "ifeval" and question.tests is not None:
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
