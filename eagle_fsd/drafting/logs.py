"""What a wide tree's nodes did in some hundred cycles, logged and stored beside a head or in the user's cache.

A log belongs to a pair and a setting, not to a machine. Those of the user's own prompts are in the user's cache
directory, by what tells the pair from others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.files import cache_directory, save_atomically
from ..data.sources import fetch
from ..heads.eagle import DraftHead
from ..models.placement import weights_digest
from ..models.target import TargetModel
from .config import TreeConfig
from .coupling import Coupling
from .growth import IMPOSSIBLE
from .tree import DraftTree

log = logging.getLogger(__name__)
FILE = "tree.json"
LOGGED_TREE = TreeConfig(total_tokens=64, depth=16, top_k=4, draft_temperature=0.5)  # what is logged
LEAST_CYCLES = 100  # from fewer the tokens per cycle are not known to a tenth


class Setting(NamedTuple):
    """What logs are told apart by: a place has one log of each. Divergence, top-p and the like are not in it."""

    rule: str
    threshold: float
    head_guard: float | None
    temperature: float

    @classmethod
    def of(cls, rule: Any, temperature: float) -> Setting:
        """That of an acceptance rule; all that are lossless accept what `exact` accepts."""
        if rule.is_lossless(temperature == 0):
            return cls("exact", 0.0, None, float(temperature))
        return cls(rule.name, float(rule.threshold), getattr(rule, "head_guard", None), float(temperature))

    def __str__(self) -> str:
        threshold = "" if self.rule == "exact" else f" {self.threshold:g}"
        guard = "" if self.head_guard is None else f" with head_guard {self.head_guard:g}"
        return f"{self.rule}{threshold}{guard} at temperature {self.temperature:g}"


@dataclass
class LoggedCycle:
    """One cycle's wide tree without its root: an entry per node, parents first."""

    parents: list[int]  # index of the parent's entry, -1 for the root
    ranks: list[int]  # among the siblings, the best 0
    log_probs: list[float]  # of the step: the draft's at temperature 1, or what it makes of the target's noise
    accepted: list[bool]


@dataclass(frozen=True)
class TreeLog:
    """Logged cycles of a setting."""

    setting: Setting
    cycles: list[LoggedCycle]


def logged_cycle(
    tree: DraftTree,  # with nodes below the root
    draft_logits: Sequence[Tensor],  # of each level [B, K or 1, R]
    path: Sequence[int],  # of one row: nodes that were accepted, the root included
    row: int = 0,
    draft_tokens: Tensor | None = None,  # [R], the target's number of each token of the draft; None: the same
    coupling: Coupling | None = None,  # that the tree was drafted with
) -> LoggedCycle:
    """The tree of one row of a batch, and what became of its nodes."""
    if coupling is not None:
        draft_logits = [coupling.perturb(level, depth) for depth, level in enumerate(draft_logits)]
    tokens, parents = tree.tokens[row, 1:], tree.parents[row, 1:]
    if draft_tokens is not None:
        tokens = (draft_tokens == tokens[:, None]).long().argmax(-1)
    starts = torch.tensor([0, *itertools.accumulate(level.shape[1] for level in draft_logits)], device=tokens.device)
    rows = starts[tree.depths[row, parents]] + tree.draft_rows[row, parents]
    steps = torch.cat([level[row] for level in draft_logits]).log_softmax(-1).clamp_min(IMPOSSIBLE)
    log_probs, places = steps[rows, tokens].tolist(), [parent - 1 for parent in parents.tolist()]
    ranks = [sum(other == parent and (log_probs[j], -j) > (log_probs[i], -i) for j, other in enumerate(places))
             for i, parent in enumerate(places)]
    return LoggedCycle(places, ranks, log_probs, [node in path for node in range(1, len(places) + 1)])


def read_logs(head: str | Path) -> list[TreeLog]:
    """Those stored beside a head, in a directory or hub repository; none where there are none.

    Raises:
        ValueError: the file is damaged, or of a version that named rules otherwise.
    """
    path = fetch(str(head), FILE)
    try:
        return [_unpacked_log(entry) for entry in json.loads(Path(path).read_text())["logs"]] if path else []
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and run eagle-fsd tune again") from error


def own_logs(target: TargetModel, head: DraftHead) -> Path:
    """Where the user's own logs of a pair are, in the user's cache directory."""
    pair = f"{target.digest()}; {weights_digest(head)}"
    return cache_directory() / "trees" / hashlib.sha256(pair.encode()).hexdigest()[:16]


def with_own_logs(logs: Sequence[TreeLog], target: TargetModel, head: DraftHead) -> list[TreeLog]:
    """These logs and the user's own ones; of those of the same setting the one of more cycles."""
    place, own = own_logs(target, head), []
    try:
        own = read_logs(place) if place.is_dir() else []
    except (OSError, ValueError) as error:
        log.warning("%s", error)
    best: dict[Setting, TreeLog] = {}
    for entry in [*own, *logs]:
        if entry.setting not in best or len(entry.cycles) > len(best[entry.setting].cycles):
            best[entry.setting] = entry
    return list(best.values())


def store_log(head: str | Path, found: TreeLog) -> Path:
    """Add one to those beside a head, in place of one of the same setting."""
    kept = [entry for entry in read_logs(head) if entry.setting != found.setting]
    entries = [{**entry.setting._asdict(), "cycles": [_packed(cycle) for cycle in entry.cycles]}
               for entry in [*kept, found]]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    path = Path(head) / FILE
    save_atomically(path, lambda part: part.write_text(f'{{"logs": [\n{lines}\n]}}\n'))
    return path


def _unpacked_log(entry: dict) -> TreeLog:
    if not entry["cycles"]:
        raise ValueError("a log without cycles")
    guard = entry["head_guard"]
    numbers = float(entry["threshold"]), None if guard is None else float(guard), float(entry["temperature"])
    return TreeLog(Setting(str(entry["rule"]), *numbers), [_unpacked(*each) for each in entry["cycles"]])


def _packed(cycle: LoggedCycle) -> list:
    return [cycle.parents, cycle.ranks, [round(value, 2) for value in cycle.log_probs],
            [node for node, taken in enumerate(cycle.accepted) if taken]]


def _unpacked(parents: list[int], ranks: list[int], log_probs: list[float], taken: list[int]) -> LoggedCycle:
    count = len(parents)
    if not 0 < count == len(ranks) == len(log_probs) or not all(-1 <= p < node for node, p in enumerate(parents)):
        raise ValueError("a cycle needs as many parents, ranks and log-probabilities, and parents before children")
    if not all(map(math.isfinite, log_probs)):
        raise ValueError("log-probabilities must be finite")
    return LoggedCycle(parents, ranks, log_probs, [node in taken for node in range(count)])
