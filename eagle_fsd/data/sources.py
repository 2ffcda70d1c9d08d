"""Directories and hub repositories: what names them, and the local paths of their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError
from transformers.utils import cached_file
from transformers.utils import logging as bars

BLINK = 1 << 30  # bytes that are read in about a second


def check_source(name: str, source: object) -> str:
    """A directory or hub id as text.

    Raises:
        TypeError: neither text nor a path.
        ValueError: a file, or a path at which there is nothing.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"{name} must be a directory or a hub id, got {source!r}")
    text, path = str(source), Path(source)
    if path.is_file():
        raise ValueError(f"{name} must be a directory or a hub id, {text!r} is a file")
    is_path = isinstance(source, Path) or path.is_absolute() or text.startswith(".")
    if not text or is_path and not path.is_dir():
        raise ValueError(f"{name} must be a directory or a hub id, there is no directory {text!r}")
    return text


def fetch(source: str, filename: str) -> str | None:
    """Local path of a file of a directory or hub repository; None where it has no such file, or none is known of while
    the hub cannot be reached and other files of the repository have been fetched before.

    Raises:
        OSError: the repository cannot be found, or the hub cannot be reached and nothing of it is here.
    """
    if Path(source).is_dir():
        path = Path(source) / filename
        return str(path) if path.is_file() else None
    if not isinstance(_kept(source, filename), str):
        reason = _why_unreachable(source, filename)
        if reason is not None:
            if isinstance(_kept(source, "config.json"), str):
                return None
            raise OSError(f"{source!r} is no directory, nothing of it is in the cache, and the hub cannot be reached: "
                          f"{reason}")
    return cached_file(source, filename, _raise_exceptions_for_missing_entries=False)


def _kept(source: str, filename: str) -> object:
    """Local path of a file that has been fetched before."""
    try:
        return try_to_load_from_cache(source, filename)
    except ValueError:  # no id of the hub
        return None


def _why_unreachable(source: str, filename: str) -> str | None:
    """Why the hub gives no answer at all, tried once: `cached_file` tries for 23 seconds, and then says that there is
    no such file."""
    try:
        get_hf_file_metadata(hf_hub_url(source, filename))
    except (HfHubHTTPError, FileMetadataError, ValueError):  # an answer, or no id of the hub: said by `cached_file`
        return None
    except Exception as error:  # of the HTTP package, which differs between versions
        return str(error) or type(error).__name__
    return None


@contextmanager
def no_bars_for(place: str | Path) -> Iterator[None]:
    """Within, `transformers` shows no bars where it loads a file or directory of less than `BLINK` bytes.

    Args:
        place: a hub id counts as large: it may have to be downloaded.
    """
    files = [Path(place)] if Path(place).is_file() else list(Path(place).glob("*"))
    if not files or sum(file.stat().st_size for file in files) >= BLINK or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
