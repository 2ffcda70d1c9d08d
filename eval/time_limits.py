"""Work that stops when its time is up, and as many training steps as fit into a time."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRIAL = (3, 8, 28)  # steps of the trials that a step's time is told from; the first warms up


class TimeIsUp(Exception):
    """The work was interrupted because its time had passed."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Within this context work is interrupted as by Ctrl-C after so many seconds.

    Raises:
        TimeIsUp: in place of that KeyboardInterrupt.
    """
    passed = threading.Event()

    def interrupt() -> None:
        passed.set()
        _thread.interrupt_main()

    timer = threading.Timer(max(0.0, seconds), interrupt)
    timer.daemon = True
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in what a shell starts in the background
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            timer.start()
            yield
        finally:
            timer.cancel()
            timer.join()  # an interrupt on its way arrives here
    except KeyboardInterrupt:
        if passed.is_set():
            raise TimeIsUp from None
        raise
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def steps_within(seconds: float, trial: Callable[[int], object]) -> int:
    """How many steps take so long, from trials of a few steps each: what they need besides steps cancels out."""
    taken = []
    for steps in TRIAL:
        started = time.perf_counter()
        trial(steps)
        taken.append(time.perf_counter() - started)
    each = max(1e-4, (taken[2] - taken[1]) / (TRIAL[2] - TRIAL[1]))
    return max(TRIAL[2], round(seconds / each))
