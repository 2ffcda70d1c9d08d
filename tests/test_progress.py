"""How far long work has come, where no terminal shows a bar."""

import io
import logging
import sys

import pytest

from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data import progress
from eagle_fsd.data.progress import Progress


@pytest.fixture
def lines(caplog, monkeypatch):
    """The lines that were said, here of every unit of work."""
    caplog.set_level(logging.INFO, progress.__name__)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    return lambda: [record.getMessage() for record in caplog.records if record.name == progress.__name__]


def test_lines_say_how_much_is_done(lines):
    with Progress(desc="tau", unit="token", total=40, done=10) as shown:
        shown.update(10, loss="0.5")
    assert any(line.startswith("tau: 20") and "of 40" in line and "0.5" in line for line in lines())


def test_nothing_is_said_of_short_work_nor_by_quiet_processes(lines, monkeypatch):
    assert list(Progress(range(9), desc="x", unit="y", quiet=True)) == list(range(9))
    monkeypatch.setattr(progress, "LOG_SECONDS", 30.0)
    assert list(Progress(range(9), desc="x", unit="y")) == list(range(9))
    assert lines() == []


def test_on_a_terminal_there_is_a_bar_and_no_line(lines, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(desc="draft head", unit="step", total=3) as shown:
        shown.update(loss="0.5")
    assert lines() == [] and "draft head" in terminal.getvalue()


def test_commands_say_it_where_they_set_up_no_logging(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    assert exit_status("timed", lambda: list(Progress(range(2), desc="timing", unit="answer"))) == 0
    assert "timing: 1 of 2 answers" in capsys.readouterr().err
    assert progress.log.handlers == []
