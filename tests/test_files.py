"""Files that interrupted work can go on with."""

import errno
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_fsd.data import progress
from eagle_fsd.data.files import append_lines, locked, only_writer, read_lines, save_atomically, together, write_lines
from eagle_fsd.data.progress import Progress

HOLD = """
import sys, time
from pathlib import Path
from eagle_fsd.data.files import only_writer
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


def test_files_go_into_a_folder_together_or_not_at_all(tmp_path):
    (tmp_path / "kept").write_text("old")
    with together(tmp_path / "deep" / "new") as part:
        (part / "a").write_text("1")
        (part / "config.json").write_text("2")
        assert not (tmp_path / "deep" / "new" / "a").exists()
    assert {path.name for path in (tmp_path / "deep" / "new").iterdir()} == {"a", "config.json"}
    for folder in (tmp_path, tmp_path / "other" / "new"):
        with pytest.raises(OSError, match=f"{folder} cannot be written: .*No space"), together(folder) as part:
            (part / "kept").write_text("new")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "kept").read_text() == "old" and not (tmp_path / "other").exists()
    with pytest.raises(KeyError), together(tmp_path / "other"):
        raise KeyError
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "deep"}


@pytest.mark.parametrize("name", ["folder", "answers.jsonl"])
def test_a_second_writer_is_told_who_the_first_is(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    process = holder_of(path)
    kind = "folder" if name == "folder" else "file"
    try:
        with pytest.raises(ValueError, match=rf"{name} is being written by process {process.pid} on .*python.*{name}\) "
                                             rf"since \d{{4}}-\d\d-\d\d .*choose another {kind}"), only_writer(path):
            raise AssertionError
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with only_writer(path), pytest.raises(ValueError, match=f"process {os.getpid()} "), only_writer(path):
        raise AssertionError  # what was killed holds nothing any more; in one process it is the same
    with pytest.raises(RuntimeError), only_writer(path):
        raise RuntimeError
    with only_writer(path):
        pass


def test_a_holder_that_has_not_said_who_it_is(tmp_path):
    with locked(tmp_path / ".writer.lock", wait=False), pytest.raises(ValueError, match="another process"), \
            only_writer(tmp_path):
        raise AssertionError


def test_a_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with only_writer(tmp_path):
        pass
    assert "cannot be locked" in caplog.text


# How far long work has come ----------------------------------------------------------------------------------


def test_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, progress.__name__)
    for _ in Progress(range(3), desc="answers", unit="prompt"):
        pass
    with Progress(desc="tau", unit="token", total=4000, done=1000) as shown:
        shown.update(900, loss="0.5")
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("answers: 2 of 3 prompts, ") and line.endswith(" left") for line in said)
    assert any(line.startswith("tau: 1.90k of 4.00k tokens, ") and line.endswith(", loss=0.5") for line in said)


def test_nothing_is_said_of_short_work_nor_by_quiet_processes(caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO, progress.__name__)
    assert list(Progress(range(9), desc="x", unit="y")) == list(range(9))
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    assert list(Progress(range(9), desc="x", unit="y", quiet=True)) == list(range(9))
    assert not caplog.records and capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch, caplog):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    caplog.set_level(logging.INFO, progress.__name__)
    with Progress(desc="draft head", unit="step", total=3) as shown:
        shown.update(loss="0.5")
    assert not caplog.records and "draft head" in terminal.getvalue()
