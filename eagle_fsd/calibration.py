"""A rule's dial from a promise about quality or speed, measured on the user's own prompts.

One lossless pass over the prompts shows every cycle's verification to every setting (a rule with its dial) and notes
what it would have done: how many tokens it would have accepted, what it would have given up, and whether it would have
said something else. A setting that would have emitted the lossless tokens in every cycle of an answer gives that
answer, cycle by cycle; only the others have to be generated again to know what became of them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .acceptance import Decision, Rule, Verification, Walk, make_rule, walk
from .budget import EXACT_RULE, cycle_cost
from .checkpoint import fetch
from .files import read_entries, write_entries

CONFIDENCE = 0.95  # one-sided, of every promise about quality


@dataclass(frozen=True)
class Promise:
    """What a calibrated setting keeps, such as `accuracy_drop<=1%`.

    kind: "accuracy_drop" (share of answers, against lossless decoding, at most), "kl" (nats per token to the target,
    when sampling, at most), "diverging" (share of answers that differ from the lossless ones, at most) or "speedup"
    (over `model.generate`, in tokens per second, at least).
    """

    kind: str
    limit: float

    def __str__(self) -> str:
        if self.kind in ("accuracy_drop", "diverging"):
            return f"{self.kind}<={100 * self.limit:g}%"
        return f"{self.kind}{'>=' if self.kind == 'speedup' else '<='}{self.limit:g}"


def parse_promise(text: str) -> Promise:
    """The promise that a string states.

    Raises:
        ValueError: it is of no known form.
    """
    accepted = "accuracy_drop<=1%, diverging<=1%, kl<=0.02, speedup>=2.5"
    if not isinstance(text, str):
        raise TypeError(f"a promise is a string such as {accepted}; got {text!r}")
    found = re.fullmatch(r"\s*(accuracy_drop|diverging|kl|speedup)\s*(<=|>=)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is no promise; accepted are such as {accepted}")
    kind, sign, number, percent = found.groups()
    share = kind in ("accuracy_drop", "diverging")
    if sign != (">=" if kind == "speedup" else "<=") or bool(percent) and not share:
        raise ValueError(f"{text!r} is no promise; accepted are such as {accepted}")
    limit = float(number) / (100 if percent else 1)
    if limit <= 0 or share and limit >= 1:
        raise ValueError(f"{text!r}: the limit must be above 0" + (" and below 100%" if share else ""))
    return Promise(kind, limit)


# Statistics --------------------------------------------------------------------------------------------------


def fewest_answers(margin: float, confidence: float = CONFIDENCE) -> int:
    """How many answers are needed to tell, if not one of them is lost, that the loss is at most `margin`.

    From (1 - margin)^n <= 1 - confidence, which below a few hundred asks for more than the score test.
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-margin))


def drop_is_within(lost: float, gained: float, count: int, margin: float, confidence: float = CONFIDENCE) -> bool:
    """Whether paired answers show that accuracy fell by at most `margin` (Tango, Stat. Med. 17, 1998, score test).

    Args:
        lost: answers that are right losslessly and wrong with the rule. gained: the reverse. count: all pairs.
            lost and gained may be fractions: means over seeds of the same questions.
    """
    if count < 1 or not 0 < margin < 1:
        raise ValueError(f"count must be at least 1 and margin in (0, 1), got {count} and {margin}")
    # Maximum-likelihood rate of `gained` where the drop is exactly the margin.
    a, b, c = 2 * count, (2 * count - lost + gained) * margin - lost - gained, -gained * margin * (1 - margin)
    rate = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    spread = math.sqrt(count * (2 * rate + margin * (1 - margin)))
    return (lost - gained - count * margin) / spread <= -statistics.NormalDist().inv_cdf(confidence)


def drop_bound(lost: float, gained: float, count: int, confidence: float = CONFIDENCE) -> float:
    """Upper bound of the accuracy drop: the smallest margin that `drop_is_within` accepts."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        within = drop_is_within(lost, gained, count, middle, confidence)
        low, high = (low, middle) if within else (middle, high)
    return high


def mean_bound(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Upper bound of a mean by the normal approximation."""
    if len(values) < 2:
        return math.inf
    z = statistics.NormalDist().inv_cdf(confidence)
    return statistics.fmean(values) + z * statistics.stdev(values) / math.sqrt(len(values))


def fixed_sequence(settings: Sequence[str], passes: Callable[[str], bool]) -> list[str]:
    """The settings that pass, from the safest on, up to the first that does not.

    Testing in an order fixed beforehand and stopping at the first failure keeps the error of the whole sequence at that
    of one test (Maurer, Hothorn and Lehmacher, 1995).
    """
    passed = []
    for setting in settings:
        if not passes(setting):
            break
        passed.append(setting)
    return passed


# The lossless pass -------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What one setting would have done in the cycles of one lossless answer."""

    lengths: list[int] = field(default_factory=list)  # accepted draft tokens
    costs: list[float | None] = field(default_factory=list)  # nats, see `cycle_cost`; None where not known
    diverges: bool = False  # whether any cycle would have emitted other tokens, or fewer at a time


def emitted(verification: Verification, walked: Walk, stop_ids: Collection[int] = ()) -> list[int]:
    """The tokens of a single row's cycle, up to the first that ends the answer."""
    path = walked.accepted[0].nonzero()[1:, 0]
    tokens = [*verification.tree.tokens[0, path].tolist(), walked.choice[0, walked.last[0]].item()]
    end = next((count for count, token in enumerate(tokens, 1) if token in stop_ids), len(tokens))
    return tokens[:end]


class Observer:
    """Decodes losslessly, as a rule for `generate`, and notes what each of `rules` would have done in each cycle.

    Args:
        stop_ids: end tokens; what a rule would do behind them does not count.
    """

    def __init__(self, rules: Mapping[str, Rule], stop_ids: Collection[int] = ()) -> None:
        self.rules, self.stop_ids = rules, stop_ids
        self.traces = {name: Trace() for name in rules}

    def __call__(self, verification: Verification) -> Decision:
        exact = EXACT_RULE(verification)
        said = emitted(verification, walk(verification, exact), self.stop_ids)
        for name, rule in self.rules.items():
            decision = rule(verification)
            walked = walk(verification, decision)
            trace = self.traces[name]
            trace.lengths.append(walked.length.item())
            known = verification.greedy or decision.kl is not None
            trace.costs.append(cycle_cost(verification, decision) if known else None)
            trace.diverges |= emitted(verification, walked, self.stop_ids) != said
        return exact


def predict(traces: Sequence[Trace]) -> dict[str, float | None]:
    """What the traces of all answers say about a setting, without generating.

    Returns:
        tau: mean over the lossless cycles. cost: nats per emitted token, None where not known. diverging: share of
        answers that change, at most.
    """
    lengths = [length + 1 for trace in traces for length in trace.lengths] or [1]
    costs = [cost for trace in traces for cost in trace.costs]
    return {"tau": statistics.fmean(lengths), "cost": None if None in costs else sum(costs) / sum(lengths),
            "diverging": statistics.fmean(trace.diverges for trace in traces)}


# Results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """A setting that keeps a promise, and what it was found under."""

    promise: str
    options: dict[str, Any]  # of `make_rule`
    temperature: float
    target: str  # digest
    head: str  # digest
    dtype: str
    tree: str
    prompts: str  # the file, or what it was
    answers: int
    measured: dict[str, float]
    curve: list[dict[str, Any]]  # every setting that was tried


FILE = "calibration.json"


def read_calibrations(head: str | Path) -> list[Calibration]:
    """Those stored beside a head, in a directory or hub repository; none where there are none.

    Raises:
        ValueError: the file is damaged.
    """
    def build(entry: dict) -> Calibration:
        found = Calibration(**entry)
        parse_promise(found.promise)
        make_rule(**found.options)
        return found

    return read_entries(fetch(str(head), FILE), "calibrations", build, "eagle-fsd calibrate")


def store_calibration(head: str | Path, calibration: Calibration) -> Path:
    """Add one to those beside a head, in place of one for the same promise and circumstances."""
    def key(entry: Calibration) -> tuple:
        return entry.promise, entry.target, entry.head, entry.dtype, entry.temperature, entry.tree

    kept = [entry for entry in read_calibrations(head) if key(entry) != key(calibration)]
    return write_entries(Path(head) / FILE, "calibrations", [asdict(entry) for entry in [*kept, calibration]])
