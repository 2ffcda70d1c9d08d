"""How OpenMP's threads wait: chosen by the load before torch is imported."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from eagle_fsd.utils.threads import choose_wait_policy, in_own_thread

ROOT = Path(__file__).parents[1]


@pytest.fixture
def policy(monkeypatch):
    """The policy that is set on a machine of so many CPUs and cores, if other programs take a share of its time."""
    def chosen(percent, cpus=2, cores=2, **exported):
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in exported.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: cpus if logical else cores)
        choose_wait_policy()
        return os.environ.get("OMP_WAIT_POLICY")

    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that what is set here is undone
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return chosen


def test_threads_sleep_where_another_program_needs_one_of_their_cores(policy):
    assert policy(50) == "passive" and policy(100) == "passive" and policy(10) is None
    assert policy(50, cores=None) == "passive"  # the system does not say how many cores
    assert policy(25, 8, 4) is None and policy(75, 8, 4) == "passive"  # 4 threads on 8 CPUs
    assert policy(50, OMP_NUM_THREADS="1") is None and policy(100, OMP_NUM_THREADS="1") is None
    assert policy(50, 8, 8, OMP_NUM_THREADS="4") is None and policy(75, 8, 8, OMP_NUM_THREADS="4") == "passive"


def test_the_policy_of_a_user_stays(policy):
    assert policy(100, OMP_WAIT_POLICY="active") == "active" and policy(100, GOMP_SPINCOUNT="3000") is None


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_have_another_openmp(policy, system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    assert policy(100) is None


def test_nothing_is_set_once_torch_is_imported(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    assert policy(100) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another OpenMP")
@pytest.mark.parametrize("command", ["generate", "chat", "serve", "demo", "calibrate", "tune"])
def test_commands_that_decode_choose_before_torch_is_imported(command):
    program = ("import atexit, os, sys, psutil; from eagle_fsd.cli import main\n"
               "atexit.register(lambda: print(os.environ.get('OMP_WAIT_POLICY')))\n"
               "psutil.cpu_percent = lambda interval: print('torch' in sys.modules) or 100.0\n"
               "psutil.cpu_count = lambda logical=True: 2\n"
               f"main(['{command}', '--no-such-option'])")
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True,
                         check=False)
    assert ran.stdout.split() == ["False", "passive"], ran.stdout + ran.stderr


def test_work_in_a_thread_of_its_own():
    """Which has ended, with its OpenMP threads, when the result or error is there."""
    threads = []

    def work():
        threads.append(threading.current_thread())
        return len(threads)

    assert in_own_thread(work) == 1
    with pytest.raises(KeyboardInterrupt, match="stop"):
        in_own_thread(lambda: (_ for _ in ()).throw(KeyboardInterrupt("stop")))
    threads[0].join(5)
    assert not threads[0].is_alive() and threads[0] is not threading.current_thread()
