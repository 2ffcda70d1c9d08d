"""Speeds computed from logged cycles, for a drafter whose levels cost another share of a forward of the target.

A cycle costs one forward of the target, whatever its number of nodes, and `cost` forwards for each drafted level. So it
is on a GPU: a level costs 0.02 to 0.1 where a model of 1 to 8 B drafts for one of 70 B.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .records import decimals, markdown

COSTS = (0.05, 0.02)  # of a level, in forwards of the target
LEGEND = """\
Tokens per forward of the target, computed from the timed answers' cycles: a level of the draft costs this share of a
forward, and verification as much as a single token, which is 1.00. "Best" shortens every cycle to the number of levels
that is fastest. It assumes that the text and what is accepted stay the same, which is not so for a rule with a window;
it is empty where cycles draft different numbers of levels, or accept more (copies)."""


def level_rows(records: Sequence[Mapping], reference: str) -> list[dict]:
    """For each method that drafts: levels per cycle, forwards per answer of target and drafter, and for each cost the
    speed as it is and with the best number of levels, both also relative to the reference's best (None: unknown).

    Args:
        records: of `compare`; only timed ones count, since batches do not draft for all methods.
    """
    timed = [line["methods"] for line in records if all(record["timed"] for record in line["methods"].values())]
    rows = []
    for name in timed[0] if timed else ():
        ours = [line[name] for line in timed]
        forwards, drafted = (sum(record.get(key, 0) for record in ours) for key in ("forwards", "draft_forwards"))
        if not drafted:
            continue
        cycles = [record["lengths"] for record in ours]
        levels, most = drafted // forwards, max(length for lengths in cycles for length in lengths)
        costs = {}
        for cost in COSTS:
            costs[cost] = {"speed": sum(record["emitted"] for record in ours) / (forwards + cost * drafted),
                           "best": None, "best_levels": None}
            if drafted == levels * forwards and most <= levels:
                costs[cost]["best"], costs[cost]["best_levels"] = max(
                    (shortened(cycles, levels, count, cost), count) for count in range(1, levels + 1))
        rows.append({"method": name, "levels": drafted / forwards, "forwards_per_answer": forwards / len(ours),
                     "draft_forwards_per_answer": drafted / len(ours), "costs": costs})
    theirs = next((row["costs"] for row in rows if row["method"] == reference), None)
    for row in rows:
        for cost, values in row["costs"].items():
            base = theirs and theirs[cost]["best"]
            for key in ("speed", "best"):
                values[f"{key}_ratio"] = values[key] / base if base and values[key] else None
    return rows


def shortened(cycles: Sequence[Sequence[int]], levels: int, count: int, cost: float) -> float:
    """Tokens per forward if every cycle drafted `count` levels instead of `levels`.

    A token that the draft predicted is accepted wherever the cycle reaches it. Of the token after a cycle that accepted
    all levels this is unknown: it counts as predicted as often as others.

    Args:
        cycles: for each answer, the accepted tokens of each cycle.
    """
    draw, tokens, cycle_count = random.Random(0), 0, 0
    accepted, all_accepted = sum(map(sum, cycles)), sum(length >= levels for lengths in cycles for length in lengths)
    rejected = sum(map(len, cycles)) - all_accepted
    for lengths in cycles:
        predicted: list[bool] = []  # by token
        for length in lengths:
            known = length < levels
            predicted += [True] * length
            predicted.append(not known and draw.random() < accepted / max(1, accepted + rejected))
        at = 0
        while at < len(predicted):
            reach = at
            while reach < min(at + count, len(predicted)) and predicted[reach]:
                reach += 1
            at, cycle_count = reach + 1, cycle_count + 1
        tokens += len(predicted)
    return tokens / (cycle_count * (1 + cost * count)) if cycle_count else 0.0


def level_table(rows: Sequence[Mapping], reference: str) -> str:
    """The rows as a Markdown table with its legend."""
    def cell(values: Mapping, key: str) -> str:
        ratio = values[f"{key}_ratio"]
        return decimals(values[key]) + ("" if ratio is None else f" ({ratio:.2f}x)")

    return markdown({
        "method": row["method"], "levels/cycle": decimals(row["levels"], 1),
        "forwards/answer: target, drafter": f"{row['forwards_per_answer']:.1f}, {row['draft_forwards_per_answer']:.1f}",
        **{heading: text for cost, values in row["costs"].items() for heading, text in (
            (f"at {cost:g} (vs {reference}'s best)", cell(values, "speed")),
            (f"best at {cost:g}: levels, tokens",
             "" if values["best"] is None else f"{values['best_levels']}, {cell(values, 'best')}"))},
    } for row in rows) + f"\n\n{LEGEND}"
