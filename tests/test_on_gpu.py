"""`eval/on_gpu.sh`, the commands of a first hour on a GPU: those for a CPU, with other programs in Python's place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_fsd.cli.arguments import parse_options
from eval.benchmark import BenchmarkArguments
from eval.forwards import ForwardsArguments
from eval.lossless_check import LosslessArguments
from train import prepare_data, train_draft_head

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
ARGUMENTS = {"eval.benchmark": BenchmarkArguments, "eval.forwards": ForwardsArguments,
             "eval.lossless_check": LosslessArguments, "train.prepare_data": prepare_data.Arguments}


def take(folder, *parts, **given):
    return subprocess.run(["bash", ROOT / "eval" / "on_gpu.sh", folder, *parts], capture_output=True, text=True,
                          env={**os.environ, "DEVICE": "cpu", **given}, timeout=60)


def test_every_part_gives_commands_that_can_be_read(tmp_path, monkeypatch):
    words = tmp_path / "words"
    words.write_text('#!/bin/bash\nprintf "%s\\t" "$@"; echo\n')
    words.chmod(0o755)
    found = take(tmp_path / "out", PYTHON=str(words))
    assert found.returncode == 0 and found.stdout.endswith("all ran\n"), found.stdout + found.stderr
    commands = [line.split("\t")[1:-1] for line in found.stdout.splitlines() if line.startswith("-m\t")]
    asked = []
    monkeypatch.setattr(train_draft_head, "train", asked.append)
    for module, *given in commands:
        if module == "train.train_draft_head":
            monkeypatch.setattr(sys, "argv", [module, *given])
            assert train_draft_head.main() == 0
        elif module != "pytest":
            parse_options(ARGUMENTS[module], given)
    assert {module for module, *_ in commands} == {*ARGUMENTS, "pytest", "train.train_draft_head"}
    assert [config.head for config in asked] == ["eagle2", "eagle3"]
    assert (tmp_path / "out" / "questions.jsonl").is_file() and (tmp_path / "out" / "model.log").is_file()


def test_what_is_not_there_or_fails_is_told(tmp_path):
    found = take(tmp_path / "out", "model", "teste")
    assert found.returncode == 2 and "there is no part teste" in found.stdout
    found = take(tmp_path / "out", "forwards", PYTHON="false")
    assert found.returncode == 1 and found.stdout.endswith("failed, or out of time: forwards\n")
