"""Files that long work adds to, and files that are whole or not there."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

log = logging.getLogger(__name__)


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
def locked(path: Path, *, wait: bool, remove: bool = False) -> Iterator[BinaryIO]:
    """Within, no other process or thread that asks for the same lock has it; the file is given.

    The lock is the system's: it ends with the process, however that ends. Where there is none, it is warned of.

    Args:
        remove: the file at the end; all who ask for the lock have to say so.

    Raises:
        BlockingIOError: another has it, and it is not to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab+") as file:
            try:
                lock = importlib.import_module("fcntl")  # which Windows has not
                lock.flock(file, lock.LOCK_EX | (0 if wait else lock.LOCK_NB))
            except BlockingIOError:
                raise
            except (ImportError, OSError) as error:
                log.warning("%s cannot be locked (%s): see to it that no other process writes beside it", path, error)
            else:
                try:
                    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        continue
                except FileNotFoundError:  # who had it has removed the file; others would lock a new one
                    continue
            try:
                yield file
            finally:
                if remove:
                    with suppress(OSError):
                        path.unlink()
            return


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Within, no other process that asks for the same gets to write a folder, or a file that is added to.

    The lock is on a file `.writer.lock` in the folder or .NAME.writer.lock beside the file.

    Raises:
        ValueError: another process holds it; its number is said.
    """
    place = path / ".writer.lock" if path.is_dir() else path.with_name(f".{path.name}.writer.lock")
    try:
        with locked(place, wait=False) as file:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield
    except BlockingIOError:
        raise ValueError(f"{path} is being written by process {place.read_text()}: wait for its end, or choose another "
                         "place") from None


def cache_directory() -> Path:
    """EAGLE_FSD_CACHE, else eagle_fsd in the user's cache directory."""
    given = os.environ.get("EAGLE_FSD_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"


def cache_limit() -> float:
    """Bytes that dequantised models may take in the cache: EAGLE_FSD_CACHE_GB, else 30 GB.

    Raises:
        ValueError: no number.
    """
    given = os.environ.get("EAGLE_FSD_CACHE_GB", "30")
    try:
        return float(given) * 1e9
    except ValueError:
        raise ValueError(f"EAGLE_FSD_CACHE_GB must be a number of gigabytes, got {given!r}") from None


def remove_folder(path: Path) -> None:
    """Remove a folder of the cache, which is at no time there in part: what is interrupted leaves NAME.part."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def bytes_in(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())
