"""Which code runs: the version and, in a checkout, the commit and the changes to it; on which processor; and how to
install the packages that it lacks. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from .. import __version__
from .threads import WAIT_POLICIES

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


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """The name of the processor, from the system, and what the environment sets of its instructions and waits."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    settings = {name: os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", *WAIT_POLICIES)}
    return ", ".join([next(names, platform.processor() or platform.machine()),
                      *(f"{name}={value}" for name, value in settings.items() if value not in (None, "DEFAULT"))])


def packages_of(extra: str) -> list[Requirement]:
    """The packages that an extra names.

    Raises:
        PackageNotFoundError: this is a checkout that is not installed.
    """
    found = map(Requirement, requires("eagle_fsd") or ())
    return [each for each in found if each.marker is not None and each.marker.evaluate({"extra": extra})]


def is_installed(package: Requirement) -> bool:
    try:
        return package.specifier.contains(version(package.name), prereleases=True)
    except PackageNotFoundError:
        return False


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra that are missing or too old. It names them, or the checkout:
    `eagle_fsd[extra]` would look for eagle_fsd in the package index, where it may be another project."""
    try:
        packages = packages_of(extra)
        missing = [each for each in packages if not is_installed(each)] or packages
        words = list(dict.fromkeys(f"{each.name}{each.specifier}" for each in missing))
    except PackageNotFoundError:
        words = [f"{ROOT}[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *words])
