"""How far long work has come: a bar on a terminal, elsewhere a line in the log every half minute."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from tqdm import tqdm
from transformers.utils import logging as bars

log = logging.getLogger(__name__)
T = TypeVar("T")

BLINK = 1 << 30  # bytes that are read in about a second
LOG_SECONDS = 30.0  # between lines; one that takes longer has a line of its own


class Progress(Generic[T]):
    """Work that is counted: iterate over it, or tell `update` what is done.

    Args:
        work: what is iterated over, if anything.
        desc: what is done, such as "features". unit: what is counted, in the singular.
        total: how many there are; None: as many as `work` has, unknown where it has no length.
        done: how many of them were there before.
        quiet: show nothing, as on all but one of several processes.
        leave: whether the bar stays on the terminal.
    """

    def __init__(
        self, work: Iterable[T] = (), *, desc: str, unit: str, total: int | None = None, done: int = 0,
        quiet: bool = False, leave: bool = True,
    ) -> None:
        self.work, self.desc, self.unit = work, desc, unit
        self.total = len(work) if total is None and isinstance(work, Sized) and work != () else total
        self.before = self.done = done
        self.bar = tqdm(total=self.total, initial=done, desc=desc, unit=unit, unit_scale=unit == "token",
                        disable=True if quiet else None, leave=leave)
        self.logs = self.bar.disable and not quiet
        self.started = self.said = time.monotonic()

    def update(self, count: int = 1, **shown: object) -> None:
        """So many more are done; `shown` is said beside."""
        self.done += count
        self.bar.update(count)
        if shown and not self.bar.disable:
            self.bar.set_postfix(shown, refresh=False)
        now = time.monotonic()
        if self.logs and now - self.said >= LOG_SECONDS:
            self.said = now
            log.info("%s", self.line(now - self.started, shown))

    def line(self, seconds: float, shown: dict[str, object]) -> str:
        """How far it is after so many seconds of work."""
        rate = (self.done - self.before) / max(seconds, 1e-9)
        parts = [f"{self.desc}: {self.done}{'' if self.total is None else f' of {self.total}'} {self.unit}s"]
        if rate:
            parts.append(f"{rate:.{0 if rate >= 10 else 1}f} {self.unit}s/s" if rate >= 1 else
                         f"{1 / rate:.0f} s/{self.unit}")
        parts += [f"{name} {value}" for name, value in shown.items()]
        if rate and self.total is not None:
            left = max(0, self.total - self.done) / rate  # batches may bring more than was asked for
            parts.append(f"{left / 60:.0f} min left" if left >= 60 else f"{left:.0f} s left")
        return ", ".join(parts)

    def __iter__(self) -> Iterator[T]:
        with self:
            for each in self.work:
                yield each
                self.update()

    def __enter__(self) -> Progress[T]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.close()


@contextmanager
def no_bars_for(place: str | Path) -> Iterator[None]:
    """Within, `transformers` shows no bars where it loads a file or directory of less than `BLINK` bytes.

    Args:
        place: a hub id counts as large: it may have to be downloaded.
    """
    files = [Path(place)] if Path(place).is_file() else list(Path(place).glob("*"))
    if not files or sum(file.stat().st_size for file in files) >= BLINK or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Within, the lines are written to stderr, as a command wants them; nothing where logging is set up already."""
    if logging.getLogger().handlers:
        yield
        return
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
