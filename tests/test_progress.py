"""How far long work has come, where no terminal shows a bar."""

import io
import logging
import sys

import pytest

from eagle_fsd.cli.exits import exit_status
from eagle_fsd.data import progress
from eagle_fsd.data.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, and the lines that were said."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, progress.__name__)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_every_half_minute(clock, lines):
    for _ in Progress(range(10), desc="answers", unit="prompt"):
        clock[0] += 12
    assert lines() == ["answers: 3 of 10 prompts, 12 s/prompt, 1 min left",
                       "answers: 6 of 10 prompts, 12 s/prompt, 48 s left",
                       "answers: 9 of 10 prompts, 12 s/prompt, 12 s left"]


def test_work_that_takes_longer_has_a_line_each(clock, lines):
    with Progress(desc="tau", unit="token", total=4000, done=1000) as shown:
        for count in (900, 0, 100):
            clock[0] += 60
            shown.update(count, loss="0.5")
    assert lines() == ["tau: 1900 of 4000 tokens, 15 tokens/s, loss 0.5, 2 min left",
                       "tau: 1900 of 4000 tokens, 7.5 tokens/s, loss 0.5, 5 min left",
                       "tau: 2000 of 4000 tokens, 5.6 tokens/s, loss 0.5, 6 min left"]


def test_how_many_there_are_may_be_unknown(clock, lines):
    for _ in Progress((number for number in range(2)), desc="rows", unit="row"):
        clock[0] += 31
    assert lines() == ["rows: 1 rows, 31 s/row", "rows: 2 rows, 31 s/row"]


def test_nothing_is_said_of_short_work_nor_by_quiet_processes(clock, lines):
    for quiet, seconds in ((False, 2), (True, 100)):
        assert list(Progress(range(9), desc="x", unit="y", quiet=quiet)) == list(range(9))
        with Progress(desc="x", unit="y", quiet=quiet) as shown:
            clock[0] += seconds
            shown.update()
    assert lines() == []


def test_on_a_terminal_there_is_a_bar_and_no_line(clock, lines, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(desc="draft head", unit="step", total=3) as shown:
        clock[0] += 100
        shown.update(loss="0.5")
    assert lines() == [] and "draft head" in terminal.getvalue()


def test_commands_say_it_where_they_set_up_no_logging(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    assert exit_status("timed", lambda: list(Progress(range(2), desc="timing", unit="answer"))) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "timing: 1 of 2 answers" in said[0]
    assert progress.log.handlers == []
