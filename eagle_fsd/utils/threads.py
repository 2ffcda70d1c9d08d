"""Threads: how those of OpenMP wait for one another, chosen by what other programs leave of the processor; work in a
thread of its own; the lock of loading."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import psutil

SECONDS = 0.2  # for which the load is watched
P = ParamSpec("P")
T = TypeVar("T")
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def choose_wait_policy() -> None:
    """Set OMP_WAIT_POLICY=passive if other programs need a core that one of torch's threads would run on.

    By default a waiting thread of GNU OpenMP, which torch's wheels for Linux contain, spins for some milliseconds
    before it sleeps. That is fastest while every thread has a core of its own. Beside a busy program the spinning
    thread takes the core that the other thread needs.

    OpenMP reads the variable when torch is imported. Nothing is set after that, on other systems, or where the user has
    set a policy.
    """
    if sys.platform != "linux" or "torch" in sys.modules or any(name in os.environ for name in WAIT_POLICIES):
        return
    cpus, threads = psutil.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", "")
    needed = int(threads) if threads.isdecimal() else psutil.cpu_count(logical=False) or cpus  # torch's default
    if needed > 1 and psutil.cpu_percent(SECONDS) / 100 * cpus > cpus - needed + 0.5:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def in_own_thread(work: Callable[[], T]) -> T:
    """Run some work in a thread of its own, and return its result. Ctrl-C does not wait for it.

    OpenMP keeps a team of threads for each thread that has used it, as long as this lives. With more of them than
    cores, GNU OpenMP lets waiting threads sleep at once. So what loads or measures a model and then leaves decoding to
    another thread, such as an engine's, does it here: on two cores SmolLM2 decodes 127 tokens/s so, and 88 otherwise.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result()


_loading = threading.RLock()


def one_at_a_time(load: Callable[P, T]) -> Callable[P, T]:
    """A function that loads models. No two threads run such functions at once, because transformers sets the default
    dtype and the functions of `torch.nn.init` for the whole process while it loads."""
    @functools.wraps(load)
    def locked(*args: P.args, **keywords: P.kwargs) -> T:
        with _loading:
            return load(*args, **keywords)

    return locked
