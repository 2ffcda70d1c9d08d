"""A lock that its owner can be copied with."""

from __future__ import annotations

import threading


class Lock:
    """A lock that a copy or a pickle of its owner has anew, and open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple:
        return Lock, ()
