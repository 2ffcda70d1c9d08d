"""Progress of long jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm

LOG_SECONDS = 30.0  # between lines without a terminal


class Progress(tqdm):
    """A progress bar on a terminal, elsewhere a line every half minute. Iterate over it, or call `update`.

    Args:
        work: the items to iterate over, if any.
        desc: name of the job, such as "features". unit: of the items, in the singular.
        total: number of items; None: the length of `work`, if it has one.
        done: number of items that were done before.
        quiet: show nothing, as on all but one of several processes; without a stderr nothing is shown either.
        leave: keep the finished bar on the terminal.
        delay: seconds before it appears on a terminal.
    """

    def __init__(
        self, work: Iterable | None = None, *, desc: str, unit: str, total: int | None = None, done: int = 0,
        quiet: bool = False, leave: bool = True, delay: float = 0.0,
    ) -> None:
        quiet = quiet or sys.stderr is None  # in a service, or under pythonw
        lines = {"delay": delay} if quiet or sys.stderr.isatty() else {
            "mininterval": LOG_SECONDS, "miniters": 1, "delay": LOG_SECONDS,
            "bar_format": "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left{postfix}\n"}
        super().__init__(work, desc=desc, unit=unit, total=total, initial=done, disable=quiet, leave=leave,
                         unit_scale=unit == "token", **lines)

    def update(self, count: int = 1, **shown: object) -> None:
        """Add `count` finished items, and display the values in `shown`."""
        if shown and not self.disable:
            self.set_postfix(shown, refresh=False)
        super().update(count)
