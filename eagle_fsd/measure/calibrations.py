"""Calibrated settings, stored beside a head with what they were found under."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..acceptance import make_rule
from ..data.files import read_entries, write_entries
from ..data.sources import fetch
from .promises import parse_promise


@dataclass(frozen=True)
class Calibration:
    """A setting that keeps a promise, and what it was found under."""

    promise: str
    options: dict[str, Any]  # of `make_rule`
    temperature: float
    target: str  # digest
    head: str  # digest
    dtype: str
    tree: str
    prompts: str  # the file, or what it was
    answers: int
    measured: dict[str, float]
    curve: list[dict[str, Any]]  # every setting that was tried

    def holds_anywhere(self, greedy: bool) -> bool:
        """Whether the promise is kept under any circumstances: the rule is lossless, and no speed is promised."""
        return make_rule(**self.options).is_lossless(greedy) and parse_promise(self.promise).kind != "speedup"


CALIBRATION_FILE = "calibration.json"


def read_calibrations(head: str | Path) -> list[Calibration]:
    """Those stored beside a head, in a directory or hub repository; none where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    def build(entry: dict) -> Calibration:
        found = Calibration(**entry)
        parse_promise(found.promise)
        make_rule(**found.options)
        return found

    return read_entries(fetch(str(head), CALIBRATION_FILE), "calibrations", build, "eagle-fsd calibrate")


def store_calibration(head: str | Path, calibration: Calibration) -> Path:
    """Add one to those beside a head, in place of one for the same promise and circumstances."""
    def key(entry: Calibration) -> tuple:
        return entry.promise, entry.target, entry.head, entry.dtype, entry.temperature, entry.tree

    kept = [entry for entry in read_calibrations(head) if key(entry) != key(calibration)]
    entries = [asdict(entry) for entry in [*kept, calibration]]
    return write_entries(Path(head) / CALIBRATION_FILE, "calibrations", entries)
