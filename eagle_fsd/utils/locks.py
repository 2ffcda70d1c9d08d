"""A lock whose owner can be copied and pickled, and the lock of loading."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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


_loading = threading.RLock()


def one_at_a_time(load: Callable[P, T]) -> Callable[P, T]:
    """A function that loads models. No two threads run such functions at once, because transformers sets the default
    dtype and the functions of `torch.nn.init` for the whole process while it loads."""
    @functools.wraps(load)
    def locked(*args: P.args, **keywords: P.kwargs) -> T:
        with _loading:
            return load(*args, **keywords)

    return locked
