"""What a wide tree's nodes did in some hundred cycles, logged and stored beside a head or in the user's cache.

A log belongs to a pair, a rule and a temperature, not to a machine. Those of the user's own prompts are in the user's
cache directory, by what tells the pair from others.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..acceptance import Decision, Rule, Verification, walk
from ..data.files import cache_directory, read_entries, write_entries
from ..data.sources import fetch
from ..drafting.config import TreeConfig
from ..heads.eagle import DraftHead
from ..models.placement import weights_digest
from ..models.target import TargetModel

log = logging.getLogger(__name__)
FILE = "tree.json"
LOGGED_TREE = TreeConfig(total_tokens=64, depth=16, top_k=4, draft_temperature=0.5)  # what is logged
LEAST_CYCLES = 100  # from fewer the tokens per cycle are not known to a tenth


@dataclass
class LoggedCycle:
    """One cycle's wide tree without its root: a row per node, parents first."""

    parents: list[int]  # index of the parent's row, -1 for the root
    ranks: list[int]  # among the siblings, the best 0
    log_probs: list[float]  # of the step under the draft, at temperature 1
    accepted: list[bool]


class CycleLog:
    """Decodes by a rule, as a rule for `generate`, and notes each cycle's tree and what was accepted."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.cycles: list[LoggedCycle] = []

    def __call__(self, verification: Verification) -> Decision:
        decision = self.rule(verification)
        tree = verification.tree
        if tree.max_depth:
            draft = verification.node_draft_logits.log_softmax(-1)
            log_probs = verification.of_step(draft)[0, 1:].tolist()
            parents = tree.parents[0, 1:].tolist()
            accepted = walk(verification, decision).accepted[0, 1:].tolist()
            ranks = [sum(other == parent and log_probs[j] > log_probs[i] for j, other in enumerate(parents))
                     for i, parent in enumerate(parents)]
            self.cycles.append(LoggedCycle([parent - 1 for parent in parents], ranks, log_probs, accepted))
        return decision


@dataclass(frozen=True)
class TreeLog:
    """Logged cycles of a rule at a temperature."""

    rule: str  # repr
    temperature: float
    cycles: list[LoggedCycle]

    @property
    def key(self) -> tuple[str, float]:
        """What there is one log of in a place."""
        return self.rule, self.temperature


def read_logs(head: str | Path) -> list[TreeLog]:
    """Those stored beside a head, in a directory or hub repository; none where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    def build(entry: dict) -> TreeLog:
        if not entry["cycles"]:
            raise ValueError("a log without cycles")
        return TreeLog(entry["rule"], float(entry["temperature"]), [_unpacked(*each) for each in entry["cycles"]])

    return read_entries(fetch(str(head), FILE), "logs", build, "eagle-fsd tune")


def own_logs(target: TargetModel, head: DraftHead) -> Path:
    """Where the user's own logs of a pair are, in the user's cache directory."""
    pair = f"{target.digest()}; {weights_digest(head)}"
    return cache_directory() / "trees" / hashlib.sha256(pair.encode()).hexdigest()[:16]


def with_own_logs(logs: Sequence[TreeLog], target: TargetModel, head: DraftHead) -> list[TreeLog]:
    """These logs and the user's own ones; of those for the same rule and temperature the one of more cycles."""
    place, own = own_logs(target, head), []
    try:
        own = read_logs(place) if place.is_dir() else []
    except (OSError, ValueError) as error:
        log.warning("%s", error)
    best: dict[tuple[str, float], TreeLog] = {}
    for entry in [*own, *logs]:
        known = best.get(entry.key)
        if known is None or len(entry.cycles) > len(known.cycles):
            best[entry.key] = entry
    return list(best.values())


def store_log(head: str | Path, found: TreeLog) -> Path:
    """Add one to those beside a head, in place of one for the same rule and temperature."""
    kept = [entry for entry in read_logs(head) if entry.key != found.key]
    return write_entries(Path(head) / FILE, "logs", [
        {"rule": entry.rule, "temperature": entry.temperature, "cycles": [_packed(cycle) for cycle in entry.cycles]}
        for entry in [*kept, found]])


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
