"""Servers for tests: a thread with a tiny pair, or the command `eagle-fsd serve` in a process."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from tiny import tiny_chat_pair

import eagle_fsd
from eagle_fsd.serve.app import create_app
from eagle_fsd.serve.limits import ServeOptions
from eagle_fsd.serve.server import Server, configuration, reserve

ROOT = Path(__file__).parents[1]
SMALL = [str(Path(__file__).parent / "pairs" / name) for name in ("small-target", "small-draft")]
STARTS = 90  # seconds that the command may take to start


class Here:
    """A server in a thread."""

    def __init__(self, pair, options, key, tree):
        self.pair, place = pair, reserve(options)
        self.engine = eagle_fsd.Engine(pair, **options.engine, tree=tree)
        app = create_app(self.engine, "tiny", options, {}, key)
        self.port = place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(configuration(app, options), self.engine)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([place])))
        self.thread.start()
        wait_until(lambda: self.server.started)

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.engine.close(drain=False)
        self.thread.join(30)


@contextmanager
def here(pair=None, key=None, tree=None, **options):
    """A server in a thread with these `ServeOptions`, for `pair` or a tiny one."""
    server = Here(pair or tiny_chat_pair(max_position_embeddings=2048), ServeOptions(port=0, **options), key, tree)
    try:
        yield server
    finally:
        server.stop()


class Served:
    """The command in a separate process, with its URL and its log."""

    def __init__(self, process):
        self.process, self.log, self.url = process, [], None
        self.ready = threading.Event()
        threading.Thread(target=self.listen, daemon=True).start()
        if not self.ready.wait(STARTS) or self.url is None:
            process.kill()
            raise RuntimeError("the server did not start: " + "".join(self.log))

    def listen(self):
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"serving .* at (http://\S+)", line):
                self.url = match[1]
                self.ready.set()
        self.ready.set()


@contextmanager
def served(*words, key=None):
    """The command with these flags, for the small pair."""
    target, draft = SMALL
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if key is None else {"EAGLE_FSD_API_KEY": key})
    command = [sys.executable, "-m", "eagle_fsd", "serve", "--target", target, "--draft", draft, "--port", "0",
               "--name", "small", "--device", "cpu", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield Served(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_health(server, seconds=30, **expected):
    """Wait until /health reports these values of rows and waiting."""
    wait_until(lambda: expected.items() <= httpx.get(f"{server.url}/health").json().items(), seconds)
