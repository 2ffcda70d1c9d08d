"""How far long work has come: a bar on a terminal, elsewhere a line in the log every half minute."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

LOG_SECONDS = 30.0  # between lines; one that takes longer has a line of its own
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {rate_fmt}, {remaining} left{postfix}"


class _Lines(io.StringIO):
    """What a bar is written to where there is no terminal."""

    def write(self, text: str) -> int:
        if text.strip():
            log.info("%s", text.strip())
        return len(text)


class Progress(tqdm):
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
        self, work: Iterable | None = None, *, desc: str, unit: str, total: int | None = None, done: int = 0,
        quiet: bool = False, leave: bool = True,
    ) -> None:
        shown = {} if sys.stderr.isatty() else {
            "file": _Lines(), "mininterval": LOG_SECONDS, "miniters": 1, "delay": LOG_SECONDS, "bar_format": LINE}
        super().__init__(work, desc=desc, unit=unit, total=total, initial=done, disable=quiet, leave=leave,
                         unit_scale=unit == "token", **shown)

    def update(self, count: int = 1, **shown: object) -> None:
        """So many more are done; `shown` is said beside."""
        if shown and not self.disable:
            self.set_postfix(shown, refresh=False)
        super().update(count)


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
