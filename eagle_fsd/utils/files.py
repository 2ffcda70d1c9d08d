"""Files that long jobs append to, and files that are written completely or not at all."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

log = logging.getLogger(__name__)


def read_lines(path: Path, repair: bool = True) -> list:
    """The values of a JSON lines file, without a truncated last line; empty if the file does not exist.

    Args:
        repair: remove a truncated last line from the file, so that lines can be appended; not while others write.

    Raises:
        ValueError: a complete line is no JSON; the message contains the file and the line number.
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
    """The JSON value of one line.

    Raises:
        ValueError: it is no JSON; the caller adds file and line number to the message.
    """
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be parsed: nested too deeply") from error


def append_lines(path: Path, values: Iterable) -> None:
    """Append lines in one write, so that processes can share the file; in several if the system writes only a part."""
    left = "".join(json.dumps(value) + "\n" for value in values).encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while left:
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


def write_lines(path: Path, values: Iterable) -> None:
    """Replace the file by these values, one per line."""
    text = "".join(json.dumps(value) + "\n" for value in values)
    save_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def json_digest(value: object) -> str:
    """A digest of a JSON value, in which the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_same(
    place: Path, recorded: object, wanted: Mapping[str, object], advice: str = "choose another path, or delete it"
) -> None:
    """Compare what stored results depend on with what is asked for.

    Args:
        recorded: a mapping; any other JSON value, of a file that is not ours, has nothing in common with it.
        advice: what to do if they differ.

    Raises:
        ValueError: something differs; the message names each part.
    """
    recorded = recorded if isinstance(recorded, Mapping) else {}
    wanted = json.loads(json.dumps(wanted))
    changed = [f"{name} (was {recorded.get(name)}, now {wanted.get(name)})" for name in {**recorded, **wanted}
               if recorded.get(name) != wanted.get(name)]
    if changed:
        raise ValueError(f"{place} was made with another {', '.join(changed)}: {advice}")


def save_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary path beside `path`, then rename the file, with the permissions of any new file.

    Raises:
        OSError: the file cannot be written. No temporary file remains.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.touch()
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)  # safetensors writes files that only their owner can read
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, (SafetensorError, RuntimeError)):  # raised by safetensors and torch on a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[BinaryIO]:
    """Lock a file against other processes and threads that lock it; yield the open file, and remove it at the end.

    It is a lock of the operating system, which ends with the process in any case. If the system supports none, a
    warning is logged.

    Args:
        wait: for another holder of the lock.

    Raises:
        BlockingIOError: another process or thread has the lock, and `wait` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab+") as file:
            try:
                lock = importlib.import_module("fcntl")  # not on Windows
                lock.flock(file, lock.LOCK_EX | (0 if wait else lock.LOCK_NB))
            except BlockingIOError:
                raise
            except (ImportError, OSError) as error:
                log.warning("%s cannot be locked (%s): make sure that no other process writes there", path, error)
            else:
                try:
                    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        continue
                except FileNotFoundError:  # the last holder has removed the file; others would lock a new one
                    continue
            try:
                yield file
            finally:
                with suppress(OSError):
                    path.unlink()
            return


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Prevent other callers from writing the same folder or file within the context.

    The lock is on a file `.writer.lock` in the folder, or .NAME.writer.lock beside the file, which is removed.

    Raises:
        ValueError: another process is writing; the message contains its process id.
    """
    lock = path / ".writer.lock" if path.is_dir() else path.with_name(f".{path.name}.writer.lock")
    writer = "that has just ended"
    try:
        with locked(lock, wait=False) as file:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield
    except BlockingIOError:
        with suppress(FileNotFoundError):  # it has just ended
            writer = lock.read_text(encoding="utf-8")
        raise ValueError(f"{path} is being written by process {writer}: wait for its end, or choose another "
                         "path") from None


def cache_directory() -> Path:
    """EAGLE_FSD_CACHE, else eagle_fsd in the user's cache directory.

    Raises:
        OSError: neither is known, as for a user without an entry in the system, in a container.
    """
    if own := os.environ.get("EAGLE_FSD_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle_fsd"
    except RuntimeError as error:
        raise OSError("this user has no home directory for a cache: set EAGLE_FSD_CACHE to a folder") from error


def remembered(
    kind: str, facts: object, find: Callable[[], object], is_valid: Callable[[object], bool]
) -> object:
    """What `find` returned when it was called for the same facts in the cache of this user, else what it returns now: a
    JSON value. A cache that cannot be written is logged.

    Args:
        kind: the folder in the cache. facts: everything that the value depends on; its `repr` counts.
        is_valid: whether a value from a file is of the right form; damaged files are replaced.
    """
    name = f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads((cache_directory() / kind / name).read_text(encoding="utf-8"))
        if is_valid(value):
            return value
    value = find()
    try:
        path = cache_directory() / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f"{name}.lock"), wait=True):
            save_atomically(path, lambda part: part.write_text(json.dumps(value), encoding="utf-8"))
    except OSError as error:
        log.warning("%s cannot be stored (%s) and will be found again next time", kind, error)
    return value


def cache_limit() -> float:
    """The limit of dequantised models in the cache, in bytes: EAGLE_FSD_CACHE_GB, else 30 GB.

    Raises:
        ValueError: EAGLE_FSD_CACHE_GB is not a number.
    """
    limit = os.environ.get("EAGLE_FSD_CACHE_GB", "30")
    try:
        return float(limit) * 1e9
    except ValueError:
        raise ValueError(f"EAGLE_FSD_CACHE_GB must be a number of gigabytes, got {limit!r}") from None


def remove_folder(path: Path) -> None:
    """Remove a folder of the cache atomically: an interrupted removal leaves NAME.part."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def bytes_in(path: Path) -> int:
    """The size in bytes of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
