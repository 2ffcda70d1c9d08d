"""Files that long work adds to, and files that are whole or not there."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from safetensors import SafetensorError

log = logging.getLogger(__name__)
T = TypeVar("T")


def read_lines(path: Path, repair: bool = True) -> list:
    """The values of a JSON lines file, none where it does not exist; a last line that was cut off does not count.

    Args:
        repair: take such a line away from the file, so that it can be added to; not while others are writing.

    Raises:
        ValueError: a complete line that is no JSON; the file and the line are named.
    """
    if not path.exists():
        return []
    whole, _, cut_off = path.read_bytes().rpartition(b"\n")
    if cut_off and repair:
        os.truncate(path, path.stat().st_size - len(cut_off))
    values = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            values.append(parse_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return values


def parse_json(line: bytes) -> object:
    """The value of one line.

    Raises:
        ValueError: it is no JSON, in a message that leaves the place of the line to be said by who knows it.
    """
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deep") from error


def append_lines(path: Path, values: Iterable) -> None:
    """Add lines in one write, so that processes can share the file; in several where the system takes only a part."""
    left = "".join(json.dumps(value) + "\n" for value in values).encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while left:
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


def write_lines(path: Path, values: Iterable) -> None:
    """Replace the file by these values, a line each."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_entries(path: str | None, name: str, build: Callable[[dict], T], command: str) -> list[T]:
    """The entries of a JSON file {name: [...]}, none where there is none (None).

    Raises:
        ValueError: the file is damaged; `command` makes it anew.
    """
    try:
        return [build(entry) for entry in json.loads(Path(path).read_text(encoding="utf-8"))[name]] if path else []
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and run {command} again") from error


def write_entries(path: Path, name: str, entries: Iterable[dict]) -> Path:
    """Replace the file's entries, one per line; returns the path."""
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    save_atomically(path, lambda part: part.write_text(f'{{"{name}": [\n{lines}\n]}}\n', encoding="utf-8"))
    return path


def save_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in place with the permissions of any new file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.touch()
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)  # safetensors writes files that are for their owner only
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, (SafetensorError, RuntimeError)):  # what they make of a disk that is full
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


@contextmanager
def together(directory: Path) -> Iterator[Path]:
    """A folder for files that then go into `directory` together, config.json last; where one fails, none does.

    Raises:
        OSError: `directory` cannot be written; one that was not there is not there afterwards either.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    part = directory / f".{os.getpid()}.part"
    try:
        part.mkdir(parents=True)
        yield part
        for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, directory / file.name)
        part.rmdir()
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # one that is not empty
            for folder in made:
                folder.rmdir()
        if isinstance(error, OSError):
            raise OSError(f"{directory} cannot be written: {error}") from error
        raise


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[BinaryIO]:
    """Within, no other process or thread that asks for the same lock has it; the file, which stays, is given.

    The lock is the system's: it ends with the process, however that ends. Where there is none, it is warned of.

    Raises:
        BlockingIOError: another has it, and it is not to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        try:
            lock = importlib.import_module("fcntl")  # which Windows has not
            lock.flock(file, lock.LOCK_EX | (0 if wait else lock.LOCK_NB))
        except BlockingIOError:
            raise
        except (ImportError, OSError) as error:
            log.warning("%s cannot be locked (%s): see to it that no other process writes beside it", path, error)
        yield file


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Within, no other process that asks for the same gets to write a folder, or a file that is added to.

    The lock is on a file `.writer.lock` in the folder or .NAME.writer.lock beside the file, which says who holds it.

    Args:
        path: a folder that is there, or a file, which need not be.

    Raises:
        ValueError: another process holds it; it is named.
    """
    folder = path.is_dir()
    place = path / ".writer.lock" if folder else path.with_name(f".{path.name}.writer.lock")
    own = f"process {os.getpid()} on {platform.node()} ({shlex.join(sys.orig_argv)[:300]})"
    try:
        with locked(place, wait=False) as file:
            file.truncate(0)
            file.write(f"{' '.join(own.split())} since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
            file.flush()
            yield
            file.truncate(0)
    except BlockingIOError:
        holder = place.read_text(encoding="utf-8", errors="replace") or "another process"  # which is just beginning
        raise ValueError(f"{path} is being written by {holder}: wait for its end or choose another "
                         f"{'folder' if folder else 'file'}") from None


def cache_directory() -> Path:
    """EAGLE_FSD_CACHE, else eagle_fsd in the user's cache directory."""
    given = os.environ.get("EAGLE_FSD_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"
