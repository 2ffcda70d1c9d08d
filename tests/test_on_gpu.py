"""`eval/on_gpu.sh`, the commands of a first hour on a GPU, at toy size on the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_fsd.measure.records import environment

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def take(folder, *parts):
    given = {"PYTHON": sys.executable, "TOY": "1", "DEVICE": "cpu", "EAGER": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", ROOT / "eval" / "on_gpu.sh", folder, *parts], env={**os.environ, **given},
                          capture_output=True, text=True, timeout=300)


def test_parts_that_are_not_there_are_refused(tmp_path):
    found = take(tmp_path / "out", "step", "teste")
    assert found.returncode == 2 and "there is no part teste" in found.stdout


def test_a_part_runs_and_leaves_its_results(tmp_path):
    found = take(tmp_path / "out", "step")
    assert found.returncode == 0 and found.stdout.endswith("all ran\n"), found.stdout + found.stderr
    assert len(json.loads((tmp_path / "out" / "step.json").read_text())["kernels"]) == 25
    assert "aten::" in (tmp_path / "out" / "step.log").read_text()


def test_a_record_is_written_where_there_is_no_git(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment()["commit"] == "unknown"


def test_what_fails_is_told_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMIT", "0.1")
    found = take(tmp_path / "out", "step")
    assert found.returncode == 1 and found.stdout.endswith("failed, or out of time: step\n")
