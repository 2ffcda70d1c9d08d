"""Stop a run on Ctrl-C or SIGTERM, after it has saved its state."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is set on any process. All processes must call it, and all get the same result."""
    if flag:
        accelerator.set_trigger()
    return accelerator.check_trigger()


class StopRequest:
    """The first signal requests a stop after the current step; a second one stops immediately."""

    def __init__(self) -> None:
        self.requested = self.immediate = False
        self.previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread, which handles signals itself
                break

    def _handle(self, number: int, frame: object) -> None:
        interrupt, self.requested = self.requested or self.immediate, True
        if interrupt:
            raise KeyboardInterrupt

    @contextmanager
    def immediately(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on the first signal inside this context, and on entry if one has already arrived."""
        self.immediate = True
        try:
            if self.requested:
                raise KeyboardInterrupt
            yield
        finally:
            self.immediate = False

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
