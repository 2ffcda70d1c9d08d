"""A server in a process of its own, on the small bundled pair."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from eagle_fsd.data.bundled import small_pair

ROOT = Path(__file__).parents[1]
STARTS = 240  # seconds until it must answer


class Served:
    """Where it listens, what it has said, and its end."""

    def __init__(self, process):
        self.process, self.said, self.url = process, [], None
        self.ready = threading.Event()
        threading.Thread(target=self.listen, daemon=True).start()
        if not self.ready.wait(STARTS) or self.url is None:
            process.kill()
            raise RuntimeError("the server did not start: " + "".join(self.said))

    def listen(self):
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"serving .* at (http://\S+)", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def stop(self, number=signal.SIGTERM, seconds=60):
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def served(*words, key=None):
    """A server with these flags."""
    target, draft = small_pair()
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
