"""Files that interrupted work can go on with."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_fsd.utils import progress
from eagle_fsd.utils.files import (
    append_lines,
    check_same,
    only_writer,
    read_lines,
    remembered,
    save_atomically,
    write_lines,
)
from eagle_fsd.utils.progress import Progress

HOLD = """
import sys, time
from pathlib import Path
from eagle_fsd.utils.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder_of(path: Path) -> subprocess.Popen:
    """A process that holds `path` until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).parents[1])
    assert process.stdout.readline() == "held\n"
    return process


def test_a_line_that_was_cut_off_is_taken_away(tmp_path):
    path = tmp_path / "record.jsonl"
    assert read_lines(path) == []
    append_lines(path, [{"a": 1}, [2, "ü\u2028\x85"]])
    whole = path.read_bytes()
    for cut in range(1, 6):
        path.write_bytes(whole + b'{"b": 3}'[:cut])
        assert read_lines(path) == [{"a": 1}, [2, "ü\u2028\x85"]]
        assert path.read_bytes() == whole
    append_lines(path, [4])
    assert read_lines(path) == [{"a": 1}, [2, "ü\u2028\x85"], 4]


def test_all_is_written_where_the_system_takes_only_parts(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    append_lines(tmp_path / "record.jsonl", [{"a": 1}, "ü" * 9])
    assert read_lines(tmp_path / "record.jsonl") == [{"a": 1}, "ü" * 9]


def test_a_complete_line_that_is_no_json_is_not_thrown_away(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"a"\n{"b": 1}\n')
    with pytest.raises(ValueError, match="record.jsonl, line 1: not JSON: .*, at character 5"):
        read_lines(path)
    assert path.read_bytes() == b'{"a"\n{"b": 1}\n'


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "record.jsonl"
    write_lines(path, [1, 2])

    def fails(part):
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        save_atomically(path, fails)
    assert read_lines(path) == [1, 2] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["folder", "answers.jsonl"])
def test_a_second_writer_is_told_who_the_first_is(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    process = holder_of(path)
    try:
        with pytest.raises(ValueError, match=f"{name} is being written by process {process.pid}: "), only_writer(path):
            raise AssertionError
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with only_writer(path), pytest.raises(ValueError, match=f"process {os.getpid()}:"), only_writer(path):
        raise AssertionError  # what was killed holds nothing any more; in one process it is the same
    with pytest.raises(RuntimeError), only_writer(path):
        raise RuntimeError
    with only_writer(path):
        pass
    assert not [each for each in tmp_path.rglob("*") if each.name.endswith(".writer.lock")]


def test_callers_that_find_the_same_value_at_once_all_store_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    start = threading.Barrier(8)

    def find() -> list[int]:
        start.wait()
        return list(range(1000))

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(remembered, "kernels", "facts", find, lambda value: True) for _ in range(8)]
    assert [call.result() for call in calls] == [list(range(1000))] * 8 and not caplog.records
    (file,) = (tmp_path / "kernels").iterdir()
    assert json.loads(file.read_text()) == list(range(1000))


def test_a_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with only_writer(tmp_path):
        pass
    assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_is_shown_as_a_bar_or_in_lines(terminal, monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    assert list(Progress(range(9), desc="quiet", unit="y", quiet=True)) == list(range(9)) and not shown.getvalue()
    with Progress(desc="tau", unit="token", total=4000, done=1000) as work:
        work.update(900, loss="0.5")
    monkeypatch.setattr(sys, "stderr", None)  # as in a service
    with Progress([7], desc="tau", unit="token", leave=False) as work:
        assert list(work) == [7]
        work.update(1, loss="0.5")
    assert "tau" in shown.getvalue() and "1.90k" in shown.getvalue() and "loss=0.5" in shown.getvalue()
    assert shown.getvalue().endswith("\n") and (terminal or "of 4.00k" in shown.getvalue())


@pytest.mark.parametrize("recorded", [{"seed": 1}, ["seed", 1], None])
def test_what_differs_is_named_whatever_the_file_holds(tmp_path, recorded):
    check_same(tmp_path, {"seed": 0, "tree": [1, 2]}, {"tree": (1, 2), "seed": 0})
    with pytest.raises(ValueError, match=r"was made with another seed \(was (1|None), now 0\): choose another path"):
        check_same(tmp_path, recorded, {"seed": 0})
