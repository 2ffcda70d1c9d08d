"""Files that interrupted work can go on with."""

import os

import pytest

from eagle_fsd.data.files import append_lines, read_lines, save_atomically, write_lines


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


def test_only_half_a_line(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"a"')
    assert read_lines(path) == [] and path.read_bytes() == b""


def test_a_complete_line_that_is_no_json_is_not_thrown_away(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b'{"a"\n{"b": 1}\n')
    with pytest.raises(ValueError):
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
    assert read_lines(path) == [1, 2]
