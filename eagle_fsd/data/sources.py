"""Directories and hub repositories: check their names, find their files."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file


def check_source(name: str, source: object) -> str:
    """A directory or hub id as a string; files that `is_gguf` knows are not for this function.

    A missing path is not looked up at the hub, which takes half a minute without a network. A string is taken as a path
    if it is no valid hub id, has the suffix of a weights file, or its parent is an existing folder.

    Raises:
        TypeError: `source` is neither a string nor a path.
        ValueError: `source` is a file or a missing path.
    """
    accepted = f"{name} must be a directory, a GGUF file or a hub id"
    if not isinstance(source, (str, Path)):
        raise TypeError(f"{accepted}, got {source!r}")
    text, path = str(source), Path(source)
    if path.is_file():
        raise ValueError(f"{accepted}, {text!r} is a file" if is_gguf(path) else
                         f"{accepted}, {text} is no GGUF file: it does not begin with the bytes GGUF")
    if path.is_dir() and text:
        return text
    if path.suffix.lower() in (".gguf", ".safetensors", ".bin", ".pt"):
        raise ValueError(f"{accepted}, there is no file {text!r}")
    if isinstance(source, Path) or not is_hub_id(text):
        raise ValueError(f"{accepted}, there is no directory {text!r}")
    if path.parent != Path() and path.parent.is_dir() and not in_cache(text):
        raise ValueError(f"{accepted}, there is no directory {text!r} (it is not looked up at the hub, because there "
                         f"is a folder {str(path.parent)!r})")
    return text


def is_gguf(source: object) -> bool:
    """Whether a source is a GGUF file, of any name."""
    if not (isinstance(source, (str, Path)) and Path(source).is_file()):
        return False
    with open(source, "rb") as content:
        return content.read(4) == b"GGUF"


def is_hub_id(text: str) -> bool:
    """Whether the text is a valid name of a hub repository."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def fetch(source: str, filename: str, *, needed: bool = False) -> str | None:
    """The local path of a file in a directory or hub repository; None if the file does not exist, or is not in the
    cache while the hub cannot be reached.

    Raises:
        OSError: the repository does not exist, or a `needed` file of the hub is not available.
    """
    if Path(source).is_dir():
        path = Path(source) / filename
        return str(path) if path.is_file() else None
    try:
        return cached_file(source, filename, _raise_exceptions_for_missing_entries=needed)
    except OSError as error:  # without a network its message does not name the repository
        raise OSError(f"{source}: {error}") from error


def in_cache(hub_id: str) -> bool:
    """Whether the hub's cache contains the config of a repository."""
    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
