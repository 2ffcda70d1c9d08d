"""tree="auto": the tree that emits the most tokens per second with this pair, rule, temperature and machine.

Logged cycles say how likely a draft probability is to be accepted (`fit_confidence`) and how many tokens any smaller
tree would have emitted there; `Latency` says how long it would have taken. `choose` tries shapes and stopping rules on
these logs, without generating.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scipy.stats import gmean

from ..acceptance import Rule
from ..drafting.config import CPU_TREE, Choice, TreeConfig
from .fitting import fit_confidence
from .latency import Latency
from .logs import LOGGED_TREE, LoggedCycle, TreeLog
from .replay import Replay

log = logging.getLogger(__name__)
TRIED_NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
REACHES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
WORTH = 1.1  # what a batch has to gain: where drafting fails after all, every row of it has to catch up to try again
PROBABILITIES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3)


def choose(cycles: Sequence[LoggedCycle], latency: Latency, *, stopping: bool = True, rows: int = 1) -> Choice:
    """The tree with the most tokens per second on these cycles.

    Shape first, then the stopping rules, then the shape again.

    Args:
        stopping: whether a cycle may draft less than the whole tree, which waits for the device at every level.
        rows: sequences of the batch.
    """
    base, replays = _replays(cycles, latency)
    rate, tree = _best_shape(base, replays, latency, [rows])
    if stopping:
        whole = replace(base, depth=LOGGED_TREE.depth, total_tokens=max(TRIED_NODES))
        candidates = [replace(whole, top_k=top_k, least_reach=reach, least_probability=p)
                      for top_k in replays for reach in REACHES for p in PROBABILITIES]
        start = max(candidates, key=lambda c: replays[c.top_k].rate(c, latency, rows=rows)[0])
        rate, tree = max((rate, tree), _best_shape(start, replays, latency, [rows]), key=lambda each: each[0])
    plain = latency.plain_cycle(rows)
    log.info("tree for %d logged cycles in batches of %d: %s, %.1f tokens/s expected, %.1f plainly", len(cycles), rows,
             describe_tree(tree), rows * rate, rows / plain)
    worth = 1.0 if rows == 1 else WORTH
    return Choice(tree if rate * plain > worth else None, rate, cost_of(tree, latency, rows))


def choose_steady(cycles: Sequence[LoggedCycle], latency: Latency, rows: Sequence[int]) -> TreeConfig:
    """The tree without stopping rules for batches whose sizes change: with the highest geometric mean of the tokens per
    second at these numbers of rows."""
    return _best_shape(*_replays(cycles, latency), latency, rows)[1]


def _replays(cycles: Sequence[LoggedCycle], latency: Latency) -> tuple[TreeConfig, dict[int, Replay]]:
    """A smallest tree with the confidence that these cycles show, and they themselves, by top_k."""
    confidence = fit_confidence(cycles)
    widths = [top_k for top_k in sorted(latency.level) if top_k <= LOGGED_TREE.top_k]
    return TreeConfig(2, 1, 1, confidence=confidence), {k: Replay(cycles, confidence, k) for k in widths}


def _best_shape(
    start: TreeConfig, replays: Mapping[int, Replay], latency: Latency, rows: Sequence[int]
) -> tuple[float, TreeConfig]:
    """The best rate, a geometric mean over these numbers of rows, of such a tree with any nodes, depth and top_k."""
    found = []
    for top_k, replay in replays.items():
        for depth in range(1, LOGGED_TREE.depth + 1):
            tree = replace(start, depth=depth, top_k=top_k)
            rates = gmean([replay.rate(tree, latency, TRIED_NODES, count) for count in rows])
            at = int(rates.argmax())
            found.append((float(rates[at]), replace(tree, total_tokens=TRIED_NODES[at])))
    return max(found, key=lambda each: each[0])


def cost_of(tree: TreeConfig, latency: Latency, rows: int) -> Callable[[int, int], float]:
    """Of cycles of a batch with such a tree, by nodes and levels, in cycles without drafting: see `Choice`."""
    plain = latency.plain_cycle(rows)
    return lambda nodes, levels: latency.cycle(nodes, levels, tree.top_k, rows) / plain


def describe_tree(tree: TreeConfig) -> str:
    """A tree without its confidence's numbers."""
    shape = f"{tree.total_tokens} nodes, depth {tree.depth}, top_k {tree.top_k}"
    stops = f", least_reach {tree.least_reach:g}, least_probability {tree.least_probability:g}"
    return shape + (stops if tree.least_reach or tree.least_probability else "")


class AutoTree:
    """Chooses the tree of a request, from the logs beside a head and this machine's latency.

    Args:
        default: the tree where there are no logs.
        single: latency of single prompts where they run otherwise, as CUDA graphs.
    """

    def __init__(
        self, logs: Sequence[TreeLog], latency: Latency, *, stopping: bool, default: TreeConfig = CPU_TREE,
        single: Latency | None = None,
    ) -> None:
        self.logs, self.latency, self.stopping, self.default = logs, latency, stopping, default
        self.single = single or latency
        self._chosen: dict[tuple[int, int], Choice] = {}

    def __getstate__(self) -> dict:
        """Without the choices, which hold functions: they are made again."""
        return {**vars(self), "_chosen": {}}

    @property
    def largest(self) -> list[TreeConfig]:
        """No tree that it chooses has more nodes, levels or nodes of a level than the largest of these."""
        return [self.default, LOGGED_TREE]

    def steady(self, most_rows: int) -> TreeConfig:
        """That of a batch in which up to so many requests come and go: without stopping rules, which go by the mean
        over rows. By the log of a fuzzy rule, where there is one: only their texts depend on the tree."""
        if not self.logs:
            return replace(self.default, least_reach=0, least_probability=0)
        chosen = min(self.logs, key=lambda entry: (entry.rule.startswith("Exact"), entry.temperature))
        powers = [1 << power for power in range((most_rows - 1).bit_length())]
        return choose_steady(chosen.cycles, self.latency, [*powers, most_rows])

    def of(self, rule: Rule, temperature: float, rows: int = 1) -> Choice:
        """For a rule at a temperature: greedy logs for greedy decoding, of those at the nearest temperature its own,
        else that of `exact` (which accepts least), else any. A batch gets that of the next power of two."""
        ours, rows = repr(rule), 1 << (rows - 1).bit_length()
        latency = self.single if rows == 1 else self.latency
        if not self.logs:
            return Choice(self.default, cost=cost_of(self.default, latency, rows))

        def distance(entry: TreeLog) -> tuple:
            return ((entry.temperature == 0) != (temperature == 0), abs(entry.temperature - temperature),
                    entry.rule != ours, not entry.rule.startswith("Exact"))

        nearest = min(range(len(self.logs)), key=lambda number: distance(self.logs[number]))
        if (nearest, rows) not in self._chosen:
            cycles = self.logs[nearest].cycles
            self._chosen[nearest, rows] = choose(cycles, latency, stopping=self.stopping, rows=rows)
        return self._chosen[nearest, rows]
