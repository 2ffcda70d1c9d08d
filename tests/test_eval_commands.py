"""The commands of evaluation: what was documented and stored still parses, and bad options end in one line."""

import ast
import importlib
import json
import re
import shlex
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest

from eagle_fsd import TreeConfig
from eagle_fsd.cli.arguments import parse_options
from eval import lossless_check, speed
from eval.command import noted
from eval.lossless_check import LosslessArguments
from eval.mt_bench import MtBenchArguments
from eval.report.intervals import interval, ratio_interval
from eval.report.tables import markdown
from eval.step import StepArguments

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "eval" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "eval").glob("*.py"))]


def stored(value: object) -> list[str]:
    """The commands that a record names."""
    if isinstance(value, dict):
        return [found for name, each in value.items()
                for found in ([each] if name == "command" else stored(each))]
    return [found for each in value for found in stored(each)] if isinstance(value, list) else []


def documented(text: str) -> list[str]:
    """The commands at the beginning of lines and between backticks."""
    text = text.replace("\\\n", " ")
    return re.findall(r"^(?: *|while )(python -m eval\.[^#;\n]*)", text, re.MULTILINE) + re.findall(
        r"`(python -m eval\.[^`]+)`", text)


COMMANDS = sorted({command for path in RESULTS for command in stored(json.loads(path.read_text(encoding="utf-8")))
                   if command.startswith("python -m eval.")}
                  | {command.strip() for path in PAGES for command in documented(path.read_text(encoding="utf-8"))})


def arguments_of(module: str, words: list[str]) -> type:
    """The dataclass of a command's options."""
    found = importlib.import_module("eval.step" if "--step" in words else module)
    (own,) = [value for name, value in vars(found).items() if name.endswith("Arguments") and is_dataclass(value)
              and value.__module__ == found.__name__]
    return own


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_were_documented_or_stored_parse(command):
    module, *words = [word.strip("[]") for word in shlex.split(command)[2:] if word != "..."]
    if module == "eval.report":
        assert not words
        return
    own = arguments_of(module, words)
    words = [word for word in words if word != "--step"]
    if issubclass(own, MtBenchArguments) and "--answers" not in words:  # the text names the command only
        words += ["--answers", "answers.jsonl"]
    assert isinstance(parse_options(own, words), own)


def test_there_are_commands_to_look_at():
    assert len(COMMANDS) > 40 and len({command.split()[2] for command in COMMANDS}) >= 11


def test_records_note_every_option_by_its_flag():
    args = parse_options(LosslessArguments, ["--target", "a/b", "--tree", "8,3,2", "--threshold", "0.5"])
    found = noted(args)
    assert (found["target"], found["threshold"], found["acceptance"], found["prompts"]) == ("a/b", "0.5", "exact", "50")
    assert found["tree"] == str(TreeConfig(8, 3, 2)) and "pair" not in found and "decoding" not in found


@pytest.mark.parametrize("words", [["--shape", "huge"], ["--shape", "tiny", "--tree", "8,x"], ["--shap", "tiny"], []])
def test_words_that_are_no_options_end_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_options(StepArguments, words)
    assert stopped.value.code == 2 and capsys.readouterr().err


def test_values_that_cannot_be_accepted_end_in_one_line(capsys):
    assert lossless_check.main(["--prompts", "0"]) == 2
    assert capsys.readouterr().err == "eval.lossless_check: --prompts must be at least 1, got 0\n"
    assert speed.main(["no-file", "no-other"]) == 2
    assert capsys.readouterr().err == "eval.speed: no-file does not exist\n"


def test_intervals_are_percentiles_over_questions():
    """Of two questions a resample has mean 0, 1/2 or 1 with 1/4, 1/2 and 1/4."""
    assert interval(np.mean, np.array([0.0, 1.0])) == [0, 1]
    ours, theirs = np.array([1.0, 3.0] * 50), np.array([2.0, 6.0] * 50)
    assert ratio_interval(ours, theirs) == [0.5, 0.5]  # question by question: pairs are drawn together
    low, high = interval(np.mean, ours)
    half = 1.96 * ours.std() / 10
    assert low == pytest.approx(2 - half, abs=0.03) and high == pytest.approx(2 + half, abs=0.03)
    assert ratio_interval(np.array([3.0]), np.array([2.0])) == [1.5, 1.5]


def test_tables_leave_out_what_a_row_lacks():
    lines = markdown([{"a": 1, "b": "0.50"}, {"a": "x"}]).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])] == [
        ["a", "b"], ["1", "0.50"], ["x", ""]]


@pytest.mark.parametrize("path", sorted((ROOT / "train").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_training_does_not_import_evaluation(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert not [name for name in names if name.split(".")[0] == "eval"]
