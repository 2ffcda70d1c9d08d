"""Published draft heads, by the hub id of their target: a list that was looked up, not a search on the hub."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

KNOWN = Path(__file__).with_name("catalogue.json")
KINDS = ("eagle", "eagle3")  # EAGLE-1 and EAGLE-2 share their heads


@dataclass(frozen=True)
class PublishedHead:
    """One published pair.

    target, head: hub ids. Where the source names the target without one, the id of its publisher's repository.
    licence: of the head, as its hub page states it; "unknown" where that was not looked at.
    source, looked_up: the page that lists the pair, and when.
    preferred: taken where the target has several heads; that of the method's authors.
    """

    target: str
    head: str
    kind: str
    licence: str
    source: str
    looked_up: str
    preferred: bool = False


@functools.cache
def known_heads() -> tuple[PublishedHead, ...]:
    """All known heads, ordered by target."""
    return tuple(PublishedHead(**entry) for entry in json.loads(KNOWN.read_text(encoding="utf-8")))


def find_head(target: str | Path) -> PublishedHead:
    """The head that is taken for a target where none is given.

    Raises:
        ValueError: no head is known for the target, or several of which none is preferred.
    """
    if Path(target).exists():  # its config's _name_or_path may be that of the model it was fine-tuned from
        what = "directory" if Path(target).is_dir() else "file"
        raise ValueError(f"draft= is missing: heads are known by their target's hub id, and {target} is a {what}")
    heads = [head for head in known_heads() if head.target.casefold() == str(target).casefold()]
    if not heads:
        targets = ", ".join(dict.fromkeys(head.target for head in known_heads()))
        raise ValueError(f"draft= is missing, and no head is known for {str(target)!r}; known targets: {targets}")
    chosen = heads if len(heads) == 1 else [head for head in heads if head.preferred]
    if len(chosen) != 1:
        choices = ", ".join(f"{head.head} ({head.kind}, licence {head.licence})" for head in heads)
        raise ValueError(f"draft= is missing, and several heads are known for {heads[0].target}: {choices}")
    return chosen[0]
