"""The files of a drafter's `Curves`, some 150 numbers, which `eagle-fsd tune` fits (`measure/cycles.py`).

They belong to a drafter, not to a machine, and are stored beside it in `curves.json`, or in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..data.sources import fetch
from ..drafting.drafter import Drafter
from ..drafting.sizing import PRICES, Curves, HeadCurves
from ..models.target import TargetModel
from ..utils.files import cache_directory, save_atomically

log = logging.getLogger(__name__)
FILE = "curves.json"


def read_curves(head: str | Path) -> HeadCurves | None:
    """Read the curves stored beside a head, in a directory or hub repository; None if there are none.

    Raises:
        ValueError: the file is damaged.
    """
    path = fetch(str(head), FILE)
    if path is None:
        return None
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        return HeadCurves(*(_checked(**stored[name]) for name in HeadCurves._fields))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it, or run eagle-fsd tune again") from error


def _checked(**stored: Sequence) -> Curves:
    columns = {name: tuple(map(float, stored.pop(name))) for name in ("knots", "first", "others", "reaches")}
    worth = tuple(tuple(map(float, row)) for row in stored.pop("worth"))
    curves, lengths = Curves(**columns, worth=worth, **stored), {len(row) for row in worth}
    if len(curves.knots) < 2 or not len(curves.knots) == len(curves.first) == len(curves.others):
        raise ValueError("there must be as many rates as knots, and at least two")
    if len(curves.reaches) != len(worth) or not worth or lengths != {len(PRICES)}:
        raise ValueError(f"each reach needs {len(PRICES)} numbers")
    ascending = (curves.knots, curves.reaches)
    if not all(map(math.isfinite, [*sum(columns.values(), ()), *sum(worth, ())])) or any(
            column != tuple(sorted(set(column))) for column in ascending):
        raise ValueError("knots and reaches must ascend, and all numbers must be finite")
    return curves


def store_curves(head: str | Path, curves: HeadCurves) -> Path:
    """Store curves beside a head; returns the file."""
    path = Path(head) / FILE
    lines = ",\n".join(f'"{name}": {json.dumps(asdict(curve))}' for name, curve in curves._asdict().items())
    save_atomically(path, lambda part: part.write_text(f"{{{lines}}}\n", encoding="utf-8"))
    return path


@functools.cache
def default_curves(*, reads_features: bool = True) -> HeadCurves:
    """Curves for drafters without their own: those of SmolLM2's bundled head, or for causal LMs, which read no
    features, those of Qwen2.5-Coder-0.5B for the 1.5B."""
    place = Path(__file__).parent
    curves = read_curves(place if reads_features else place / "causal_lm")
    assert curves is not None
    return curves


def own_place(target: TargetModel, drafter: Drafter) -> Path:
    """The folder in the user's cache for curves that the user fitted to this pair."""
    pair = f"{target.digest()}; {drafter.digest()}"
    return cache_directory() / "trees" / hashlib.sha256(pair.encode()).hexdigest()[:16]


def known_curves(beside: HeadCurves | None, target: TargetModel, drafter: Drafter) -> HeadCurves:
    """The user's own curves, else those stored beside the drafter, else the defaults."""
    own = None
    try:
        place = own_place(target, drafter)
        own = read_curves(place) if (place / FILE).is_file() else None
    except (OSError, ValueError) as error:
        log.warning("%s", error)
    return own or beside or default_curves(reads_features=drafter.reads_features)
