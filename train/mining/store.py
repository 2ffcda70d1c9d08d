"""Mined mismatches on disk: a JSON lines file, a line per question, and a folder of features beside it.

K mismatches, D hidden size of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_fsd.data.files import append_lines, read_lines, save_atomically
from train.mining.trails import Trail


def features_path(out: Path, group: int) -> Path:
    """The features of a group of questions."""
    return out.with_name(f"{out.name}.features") / f"{group:05d}.safetensors"


def append_group(out: Path, group: int, trails: Sequence[Trail]) -> None:
    """Add a group of questions; its features are whole before the first line is.

    Args:
        group: a number that no line has.
    """
    features = [each for trail in trails for each in trail.features]
    if features:
        path = features_path(out, group)
        path.parent.mkdir(exist_ok=True)
        save_atomically(path, lambda part: save_file({"features": torch.stack(features)}, part))
    lines, place = [], 0
    for trail in trails:
        lines.append({**trail.about, "group": group, "first": place, "rows": trail.rows})
        place += len(trail.rows)
    append_lines(out, lines)


@dataclass(frozen=True, eq=False)
class Mined:
    """Mismatches of one or several files of one target.

    Args:
        about: what each file was begun with. questions: a line each, without their rows; one that several files hold
            is there once.
        rows: of each mismatch. groups: number of its question in `questions`, by which folds are made.
        features: [K, 2, D] float32, see `train.mining.mismatches.Mismatch`.
    """

    about: list[dict]
    questions: list[dict]
    rows: list[dict]
    groups: list[int]
    features: Tensor

    def labels(self, name: str) -> list[bool | None]:
        """Whether each is harmful by the label "outcome" or "likelihood"; None where it has none."""
        return [row.get(name) for row in self.rows]


def read_mined(paths: Sequence[Path]) -> Mined:
    """Read files of `train.mine`, finished or not.

    A question is told by its prompt, so one that is in two files is in one fold; the same substitution, tried in the
    same mode, counts once, as the first file has it.

    Raises:
        ValueError: a file that is none, is empty or has lost its features; or files of different targets.
    """
    about, questions, rows, groups, features = [], [], [], [], []
    numbers: dict[str, int] = {}  # of questions, by prompt
    seen: set[tuple] = set()
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} does not exist: python -m train.mine makes it")
        begun, *lines = read_lines(path, repair=False) or [None]
        if not isinstance(begun, dict) or "floor" not in begun:
            raise ValueError(f"{path} is no file of python -m train.mine")
        about.append(begun)
        shards: dict[int, Tensor] = {}
        for line in lines:
            if line["rows"] and line["group"] not in shards:
                shards[line["group"]] = _features(path, line["group"])
            if line["prompt"] not in numbers:
                numbers[line["prompt"]] = len(questions)
                questions.append({name: value for name, value in line.items() if name != "rows"})
            for place, row in enumerate(line["rows"], line["first"]):
                key = (line["prompt"], row["at"], row["substitute"], line["mode"])
                if key not in seen:
                    seen.add(key)
                    rows.append({**row, "mode": line["mode"], "own_right": line["own_right"]})
                    groups.append(numbers[line["prompt"]])
                    features.append(shards[line["group"]][place])
    for name in ("target", "head"):
        found = {begun[name] for begun in about}
        if len(found) > 1:
            raise ValueError(f"the files were mined with different pairs, whose {name}s are {', '.join(sorted(found))}")
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: there is no mismatch")
    return Mined(about, questions, rows, groups, torch.stack(features).float())


def _features(path: Path, group: int) -> Tensor:
    place = features_path(path, group)
    try:
        return load_file(place)["features"]
    except Exception as error:  # safetensors raises its own
        raise ValueError(f"{place} cannot be read ({error}): it belongs to {path}") from error
