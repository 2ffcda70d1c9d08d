"""Which code runs: the version and, in a checkout, the commit and the changes to it. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from .. import __version__

ROOT = Path(__file__).parents[2]
CHANGES = "+changes-"  # between a commit and a digest of what was changed


@functools.cache  # a process runs the code that it has imported, whatever is committed meanwhile
def commit() -> str | None:
    """The commit of the repository that tracks this package, such as "abc1234"; with changes to tracked files, except
    in results and documentation, or new modules, "abc1234+changes-" and a digest of them. None: the package is
    installed, wherever that lies; "unknown": a checkout without git."""
    def git(*args: str) -> bytes:
        try:
            return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, check=False).stdout
        except OSError:  # git is not installed
            return b""

    # A package lies untracked in a repository of its user, if in any.
    head = git("ls-files", "eagle_fsd/__init__.py") and git("rev-parse", "--short", "HEAD").decode().strip()
    if not head:
        return "unknown" if (ROOT / "setup.py").is_file() else None
    changes = git("diff", "HEAD", "--binary", "--no-ext-diff", "--", ".", ":!eval/results", ":!docs", ":!*.md")
    new = git("ls-files", "-z", "--others", "--exclude-standard", "--", "eagle_fsd/*.py", "train/*.py", "eval/*.py")
    for name in filter(None, new.split(b"\0")):
        changes += name + (ROOT / os.fsdecode(name)).read_bytes()
    return head + (CHANGES + hashlib.sha256(changes).hexdigest()[:8] if changes else "")


def code_version() -> str:
    """Version and `commit` as one text, for keys of what depends on the code."""
    return __version__ if commit() is None else f"{__version__}, commit {commit()}"
