"""`eval/on_gpu.sh`, the commands of a first hour on a GPU, small and on the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")]


def take(folder, *parts, **given):
    return subprocess.run(["bash", ROOT / "eval" / "on_gpu.sh", folder, *parts], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", **given}, timeout=300)


def test_parts_run_and_leave_their_results(tmp_path):
    found = take(tmp_path / "out", "forwards", "model")
    assert found.returncode == 0 and found.stdout.endswith("all ran\n"), found.stdout + found.stderr
    assert json.loads((tmp_path / "out" / "forwards.json").read_text())["rows"]
    assert json.loads((tmp_path / "out" / "model.json").read_text())["rows"]["all"][3]["same_answers"] == 1


def test_what_is_not_there_or_fails_is_told(tmp_path):
    found = take(tmp_path / "out", "model", "teste")
    assert found.returncode == 2 and "there is no part teste" in found.stdout
    found = take(tmp_path / "out", "forwards", LIMIT="0.1")
    assert found.returncode == 1 and found.stdout.endswith("failed, or out of time: forwards forwards-pair\n")
