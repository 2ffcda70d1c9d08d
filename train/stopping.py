"""Ctrl-C and SIGTERM, which end a run with its state saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator


def anywhere(accelerator: Accelerator, said: bool) -> bool:
    """Whether any process says so, the same answer on all, which all must ask."""
    if accelerator.num_processes == 1:
        return said
    return bool(accelerator.reduce(torch.tensor(float(said), device=accelerator.device), "sum") > 0)


class StopRequest:
    """Signals ask for a stop after the present step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = self.urgent = False
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: whoever runs there handles signals
                break

    def _ask(self, number: int, frame: object) -> None:
        urgent, self.asked = self.asked or self.urgent, True
        if urgent:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, the first signal raises KeyboardInterrupt, as one that came before does."""
        self.urgent = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self.urgent = False

    def anywhere(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked, the same answer on all."""
        return anywhere(accelerator, self.asked)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
