"""Directories and hub repositories: check their names, find their files."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file

from ..utils.checks import OptionError

# The files of a model that transformers reads, but not weights in other formats beside them.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "token_map.pt"]
BIN = "pytorch_model*.bin*"
SECOND_COPIES = ["*/*", "consolidated*"]


def check_source(name: str, source: object) -> str:
    """A directory or hub id as a string; files that `is_gguf` knows are not for this function.

    A missing path is not looked up at the hub, which takes half a minute without a network. A string is taken as a path
    if it is no valid hub id, such as ./head, or has the suffix of a weights file.

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
        near = Path(source).parent != Path() and Path(source).parent.is_dir()  # perhaps it was meant as a path
        here = f"there is no directory {source!r}, and at the hub: " if near else ""
        raise OSError(f"{source}: {here}{error}") from error


def at_revision(option: str, source: str | Path | None, revision: str | None) -> str | Path | None:
    """The directory of a hub repository at a revision, downloaded into the hub's cache; without one, the source.

    Args:
        option: its name, for messages. revision: a branch, a tag or a commit.

    Raises:
        ValueError: the source is a directory or file.
        OSError: the repository has no such revision, or cannot be reached.
    """
    if revision is None:
        return source
    if source is None or Path(source).exists():
        raise OptionError(option, problem=f"is for a hub id, got {source!r}")
    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=FILES, ignore_patterns=SECOND_COPIES)
        if not any(Path(folder).glob("*.safetensors")):
            snapshot_download(source, revision=revision, allow_patterns=[BIN], ignore_patterns=SECOND_COPIES)
        return folder
    except OSError as error:
        raise OSError(f"{source}, revision {revision!r}: {error}") from error


def in_cache(hub_id: str) -> bool:
    """Whether the hub's cache contains the config of a repository."""
    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
