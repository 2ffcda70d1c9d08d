"""A lock whose owner can be copied and pickled."""

from __future__ import annotations

import threading


class Lock:
    """A lock of which a copy or a pickle is a new, open one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple:
        return Lock, ()
