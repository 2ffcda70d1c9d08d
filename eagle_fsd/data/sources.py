"""Directories and hub repositories: what names them, and the local paths of their files."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file


def check_source(name: str, source: object) -> str:
    """A directory or hub id as text. What is meant as a path is not looked for at the hub, which takes half a minute
    without a network: no hub id by its form, the name of a file, or a path below a folder that is here.

    Raises:
        TypeError: neither text nor a path.
        ValueError: a file, or a path at which there is nothing.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"{name} must be a directory or a hub id, got {source!r}")
    text, path = str(source), Path(source)
    if path.is_file():
        raise ValueError(f"{name} must be a directory or a hub id, {text!r} is a file")
    if path.is_dir() and text:
        return text
    accepted = f"{name} must be a directory or a hub id"
    if path.suffix in (".gguf", ".safetensors", ".bin", ".pt"):
        raise ValueError(f"{accepted}, there is no file {text!r}")
    if isinstance(source, Path) or not is_hub_id(text):
        raise ValueError(f"{accepted}, there is no directory {text!r}")
    if path.parent != Path() and path.parent.is_dir() and not in_cache(text):
        raise ValueError(f"{accepted}, there is no directory {text!r} (where a folder {str(path.parent)!r} is, no such "
                         "hub id is asked for)")
    return text


def is_hub_id(text: str) -> bool:
    """Whether the hub could have a repository of this name."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def fetch(source: str, filename: str, *, needed: bool = False) -> str | None:
    """Local path of a file of a directory or hub repository; None where it has no such file, or none is in the cache
    and the hub cannot be reached.

    Raises:
        OSError: the repository cannot be found, or a hub's file that is `needed` is not to be had.
    """
    if Path(source).is_dir():
        path = Path(source) / filename
        return str(path) if path.is_file() else None
    return cached_file(source, filename, _raise_exceptions_for_missing_entries=needed)


def in_cache(hub_id: str) -> bool:
    """Whether the hub's cache has the config of a repository."""
    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
