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
from train import features, prepare_data, train_draft_head

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
ARGUMENTS = {"eval.benchmark": BenchmarkArguments, "eval.forwards": ForwardsArguments,
             "eval.lossless_check": LosslessArguments, "train.features": features.Arguments,
             "train.prepare_data": prepare_data.Arguments}


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
    assert [config.head for config in asked] == ["eagle2", "eagle2", "eagle3"]
    assert (tmp_path / "out" / "questions.jsonl").is_file() and (tmp_path / "out" / "model.log").is_file()


def test_what_is_not_there_or_fails_is_told(tmp_path):
    found = take(tmp_path / "out", "model", "teste")
    assert found.returncode == 2 and "there is no part teste" in found.stdout
    found = take(tmp_path / "out", "forwards", PYTHON="false")
    assert found.returncode == 1 and found.stdout.endswith("failed, or out of time: forwards\n")


def test_results_come_back_in_parts(tmp_path):
    """All but what is large and not a result."""
    out, back = tmp_path / "out", tmp_path / "back"
    for name in ("head/best", "head/head", "head/states", "features", "own"):
        (out / name).mkdir(parents=True)
        (out / name / "file").write_bytes(os.urandom(1000))
    (out / "large").write_bytes(os.urandom(16 * 2**20))
    assert take(out, "forwards", PYTHON="true", BACK=str(back)).returncode == 0
    parts = sorted(back.iterdir())
    assert [part.name for part in parts] == ["results.tar.gz.00", "results.tar.gz.01"]
    assert all(part.stat().st_size <= 16 * 2**20 for part in parts)
    listed = subprocess.run(["tar", "tz"], input=b"".join(part.read_bytes() for part in parts), capture_output=True)
    names = {name for name in listed.stdout.decode().split() if not name.endswith("/")}
    assert names == {"./large", "./head/head/file", "./forwards.log", "./questions.jsonl", "./conversations.jsonl"}


def test_files_are_cut_and_joined(tmp_path):
    """Each part arrives in a call of its own; a damaged one is noticed."""
    def run(folder, *words):
        return subprocess.run(["bash", ROOT / "eval" / "in_parts.sh", *words], cwd=folder, capture_output=True,
                              text=True, env={**os.environ, "PART": "1000"}, timeout=60)

    for folder in ("here", "there/.parts"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a model.gguf").write_bytes(content := os.urandom(2500))
    assert run(tmp_path / "here", "cut", str(tmp_path / "a model.gguf")).returncode == 0
    parts = sorted((tmp_path / "here" / ".parts").iterdir())
    assert [part.suffix for part in parts] == [".000", ".001", ".002", ".sha256"]
    for damaged in (False, True):
        for part in parts:
            arrived = tmp_path / "there" / ".parts" / part.name
            arrived.write_bytes(part.read_bytes()[damaged and part.suffix == ".001" :])
            found = run(tmp_path / "there", "join", "joined")
            assert found.returncode == (damaged and part.suffix == ".sha256")
        assert ("FAILED" if damaged else "a model.gguf: OK") in found.stdout
        if not damaged:
            assert (tmp_path / "there" / "joined" / "a model.gguf").read_bytes() == content
            assert len(list((tmp_path / "there" / "joined").iterdir())) == 1
