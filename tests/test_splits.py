"""Choosing on one half and looking at the other."""

import json
import random
from pathlib import Path

import pytest

from eagle_fsd.measure.summaries import paired
from eval.splits import choose_on, half_records, time_of_exact, try_splits


def record(count: int, drops: dict[str, float], seed: int = 0) -> dict:
    """`exact` is right nine times in ten; a setting loses answers with the given probability."""
    rng = random.Random(seed)
    exact = [int(rng.random() < 0.9) for _ in range(count)]
    settings = {}
    for number, (name, drop) in enumerate(drops.items()):
        rule, threshold = name.split()
        settings[name] = {"rule": rule, "threshold": float(threshold), "seconds": [0.9 - number / 50] * count,
                          "correct": [c and int(rng.random() >= drop) for c in exact]}
    return {"exact": exact, "settings": settings, "timed": list(range(count)), "exact_seconds": [1.0] * count}


def test_the_fastest_setting_that_is_shown_to_be_harmless_is_chosen():
    found = record(2000, {"fsd 0.1": 0.0, "fsd 0.2": 0.001, "fsd 0.3": 0.2, "fsd 0.4": 0.0})
    assert choose_on(found, range(1000), 0.01) == "fsd 0.2"  # nothing is tried behind 0.3
    found["settings"]["fsd 0.1"]["seconds"] = [0.5] * 2000
    assert choose_on(found, range(1000), 0.01) == "fsd 0.1"
    assert choose_on(record(2000, {"fsd 0.1": 0.2}), range(1000), 0.01) == "exact"
    assert choose_on(record(2000, {"fsd 0.1": 0.0}), range(100), 0.01) == "exact"  # too few to tell


def test_times_are_those_of_the_half():
    found = record(8, {"fsd 0.1": 0.0})
    found["settings"]["fsd 0.1"]["seconds"] = [0.5] * 4 + [1.5] * 4
    assert time_of_exact(found, "fsd 0.1", {0, 1, 2, 3}) == 0.5
    assert time_of_exact(found, "fsd 0.1", {0, 7}) == 1.0
    assert time_of_exact(found, "exact", {0}) == 1.0


def test_a_half_that_was_not_timed_is_refused():
    found = record(8, {"fsd 0.1": 0.0}) | {"timed": [0], "exact_seconds": [1.0]}
    found["settings"]["fsd 0.1"]["seconds"] = [0.5]
    with pytest.raises(ValueError, match="none of the 1 timed questions"):
        time_of_exact(found, "fsd 0.1", {1, 2})


def test_losses_are_paired():
    found = {"exact": [1, 1, 0, 0], "settings": {"fsd 0.1": {"correct": [1, 0, 1, 0]}}}
    assert paired(*half_records(found, "fsd 0.1", range(4))) == (1, 1, 4)
    assert paired(*half_records(found, "fsd 0.1", [1, 3])) == (1, 0, 2)


def test_a_setting_that_may_be_slower_is_not_chosen():
    found = record(2000, {"fsd 0.1": 0.0})
    found["settings"]["fsd 0.1"]["seconds"] = [0.5, 1.45] * 20
    found |= {"timed": list(range(40)), "exact_seconds": [1.0] * 40}
    assert time_of_exact(found, "fsd 0.1", range(1000)) < 1 and choose_on(found, range(1000), 0.01) == "exact"


def test_a_setting_just_beyond_the_margin_is_seldom_chosen():
    """It loses 1.5%: on most halves that is seen, and where not, the promise is broken on the other half at times."""
    rows = [row for seed in range(10) for row in try_splits(record(2000, {"fsd 0.1": 0.017}, seed), 0.01)]
    assert sum(row["drop"] > 0.01 for row in rows) <= len(rows) / 20
    harmless = try_splits(record(2000, {"fsd 0.1": 0.0005}), 0.01)
    assert all(row["setting"] == "fsd 0.1" and row["drop"] <= 0.01 for row in harmless)


def test_on_the_demo_pairs_answers_the_promise_is_kept():
    """1,000 answers of the stored sweep, in 20 random halves."""
    stored = json.loads((Path(__file__).parents[1] / "eval" / "results" / "splits.json").read_text())
    rows = try_splits(stored, 0.01)
    assert rows == stored["splits"] and len(rows) == 20 and len(stored["exact"]) == 1000
    assert sum(row["drop"] <= 0.01 for row in rows) >= 19
