"""How far long work has come."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm

LOG_SECONDS = 30.0  # between the lines where there is no terminal


class Progress(tqdm):
    """Work that is counted: iterate over it, or tell `update` what is done. A bar on a terminal, elsewhere a line every
    half minute.

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
        lines = {} if sys.stderr.isatty() else {
            "mininterval": LOG_SECONDS, "miniters": 1, "delay": LOG_SECONDS,
            "bar_format": "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left{postfix}\n"}
        super().__init__(work, desc=desc, unit=unit, total=total, initial=done, disable=quiet, leave=leave,
                         unit_scale=unit == "token", **lines)

    def update(self, count: int = 1, **shown: object) -> None:
        """So many more are done; `shown` is said beside."""
        if shown and not self.disable:
            self.set_postfix(shown, refresh=False)
        super().update(count)
