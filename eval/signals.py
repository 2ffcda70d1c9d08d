"""Which signals tell harmful mismatches from harmless ones? All on the same mined labels.

    python -m eval.signals --mined data/mined.jsonl --out eval/results/signals

What is learned is cross-validated by question, and so is every dial; intervals are of resampled questions. An oracle
gate, which passes exactly the harmless mismatches, says what the best gate could give.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from eagle_fsd.measure.records import record_path, shown, write_record
from eval.command import noted, run_command
from eval.report.signals import agreement, kind_table, oracle_row, plot_signals, signal_rows, signal_table
from eval.report.tables import markdown, percent
from train.judge import labelled
from train.mining.kinds import KINDS
from train.mining.mismatches import DIVERGENCES
from train.mining.regression import columns, fit
from train.mining.store import Mined, read_mined
from train.mining.trails import MODES

NEVER = 1e9  # nats, of what a window does not let pass and of texts that do not meet again
WINDOWS = (2, 3)
ALL = "all"


@dataclass(frozen=True)
class SignalsArguments:
    """What `eval.signals` compares.

    Args:
        mined: files of train.mine, all of one pair.
        out: files for what is found, without suffix.
        label: by which harm is told; both takes the outcome where there is one.
        seed: of the folds of what is learned.
    """

    mined: tuple[Path, ...]
    out: Path = Path("eval/results/signals")
    label: Literal["outcome", "likelihood", "both"] = "both"
    seed: int = 0


def scores_of(mined: Mined, has: np.ndarray, harmful: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Scores by signal of the mismatches that have a label, larger where harm is likelier."""
    rows = [row for row, one in zip(mined.rows, has, strict=True) if one]
    values = {name: np.array([row["signals"][name] for row in rows]) for name in rows[0]["signals"]}
    groups = np.array(mined.groups)[has]
    found = {name: values[name] for name in DIVERGENCES}
    found |= {"entropy": -values["entropy"], "entropy of the top 3": -values["entropy_top3"],
              "entropy of the top 3, not renormalised": -values["entropy_top3_parts"],
              "regret": values["regret"], "p2 / p1": -values["log_ratio"], "p target": -values["log_prob"],
              "p draft": -values["draft_log_prob"]}
    for window in WINDOWS:  # as FLy: the entropy decides where the steps that follow are the target's own
        opens = values["own_steps"] >= window - 1
        found[f"window {window}"] = np.where(opens, -values["entropy_top3"], NEVER)
    in_code = [row.get("in_code") for row in rows]  # files of earlier versions do not say
    if set(in_code) == {True, False}:
        found["outside code"] = np.array(in_code, dtype=float)
    known = {"judge, features only": columns(mined, signals=()), "judge, signals only": columns(mined, features=False),
             "judge": columns(mined)}
    found |= {name: fit(each[has], harmful, groups, seed).scores for name, each in known.items()}
    # Both gates at the same share of mismatches: what is low in both ranks passes.
    found["js + judge"] = np.maximum(rankdata(found["js"]), rankdata(found["judge"]))
    return found


def compare(mined: Mined, label: str, seed: int = 0) -> dict:
    """What the record holds besides how it was made.

    Raises:
        ValueError: no such labels, or too few of a kind.
    """
    has, harmful = labelled(mined, label)
    rows = [row for row, one in zip(mined.rows, has, strict=True) if one]
    groups = np.array(mined.groups)[has]
    kinds, modes = np.array([row["kind"] for row in rows]), np.array([row["mode"] for row in rows])
    parts = {ALL: np.ones(len(rows), dtype=bool), **{kind: kinds == kind for kind in KINDS}}
    scores = scores_of(mined, has, harmful, seed)
    again = [each.get("again_differs") for each in mined.questions if label != "likelihood"]
    rights = [each["own_right"] for each in mined.questions]
    found = {"label": label, "mismatches": len(rows), "harmful": float(harmful.mean()),
             "questions": len(mined.questions), "tokens": sum(each["tokens"] for each in mined.questions),
             "own_right": None if set(rights) == {None} else rights.count(True),
             "noise": {"answers": len(again) - again.count(None), "differ": again.count(True)},
             "by_mode": {mode: {"count": int((modes == mode).sum()), "harmful": float(harmful[modes == mode].mean())}
                         for mode in MODES if (modes == mode).any()},
             "rows": signal_rows(scores, harmful, groups, parts, seed)}
    found["oracle"] = [oracle_row(part, inside, harmful, groups, mined.questions)
                       for part, inside in parts.items() if inside.any()]
    right = np.array([row["own_right"] is True for row in rows])
    if right.any() and not right.all():
        found["right_alone"] = _right_alone(mined, scores, harmful, groups, right, seed)
    both = [(row, group) for row, group in zip(rows, groups, strict=True)  # both of what happens to the own answer
            if row.get("outcome") is not None and row.get("likelihood") is not None and not row["kept_before"]]
    if both:
        nats = [NEVER if row["lost_nats"] is None else row["lost_nats"] for row, _ in both]
        found["agreement"] = agreement([row["outcome"] for row, _ in both], [row["likelihood"] for row, _ in both],
                                       nats, np.array([group for _, group in both]))
    return found


def _right_alone(
    mined: Mined, scores: Mapping[str, np.ndarray], harmful: np.ndarray, groups: np.ndarray, right: np.ndarray,
    seed: int,
) -> dict | None:
    """The same of the questions whose own answer is right; None where these are too few."""
    inside, every = {name: values[right] for name, values in scores.items()}, np.ones(int(right.sum()), dtype=bool)
    try:
        rows = signal_rows(inside, harmful[right], groups[right], {ALL: every}, seed)
    except ValueError:  # a kind is missing
        return None
    return {"rows": rows, "oracle": [oracle_row(ALL, every, harmful[right], groups[right], mined.questions)]}


def page(found: Mapping) -> str:
    """The record as Markdown."""
    every = [row for row in found["rows"] if row["part"] == ALL]
    modes = ", ".join(f"{mode} {row['count']} ({percent(row['harmful'], 1)} harmful)"
                      for mode, row in found["by_mode"].items())
    oracle, noise = found["oracle"][0], found["noise"]
    right = "" if found["own_right"] is None else f" ({found['own_right']} of them right)"
    parts = [
        f"{found['mismatches']} mismatches of {found['questions']} answers{right}, label {found['label']}: "
        f"{percent(found['harmful'], 1)} are harmful. Tried: {modes}.",
        f"An oracle gate, which passes exactly the harmless ones, would pass {percent(oracle['passed'], 1)} of the "
        f"mismatches that were tried ({' to '.join(percent(end, 1) for end in oracle['passed_interval'])}): "
        f"{oracle['per_100_tokens']:.1f} fuzzy tokens in 100, with all mismatches of these answers counted.",
        *([f"The outcome label's noise, in questions tried alone: {noise['differ']} of {noise['answers']} own answers "
           "come to something else when they are gone on with from the first tried mismatch with nothing replaced."]
          if noise["answers"] else []),
        "Shares are of unseen questions: each dial is set on the other folds. A judge's scores are each of a fit to "
        "the other folds, so those that a dial is set on come from fits that saw the questions it is measured on.",
        signal_table(every),
        "## AUC by kind of token", kind_table(found["rows"], KINDS),
    ]
    if found.get("right_alone"):
        parts += ["## Questions whose own answer is right", signal_table(found["right_alone"]["rows"])]
    if "agreement" in found:
        both = found["agreement"]
        parts += ["## The likelihood label against the outcome label", markdown([{
            "mismatches with both": both["count"], "agree": percent(both["agree"], 1),
            "kappa": "-" if both["kappa"] is None else f"{both['kappa']:.2f}",
            **{heading: "-" if both[name] is None else percent(both[name], 1) for heading, name in (
                ("harmful called harmful", "harmful_found"), ("harmless called harmless", "harmless_found"))},
            "AUC of the nats lost": "-" if both["auc_of_nats"] is None else f"{both['auc_of_nats']:.3f}"}])]
    return "\n\n".join(parts)


def run(args: SignalsArguments) -> None:
    mined = read_mined(args.mined)
    found = compare(mined, args.label, args.seed)
    picture = record_path(args.out, ".png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot_signals([row for row in found["rows"] if row["part"] == ALL], picture)
    settings = {**noted(args), "mined": " ".join(map(shown, args.mined))}
    record = {"settings": settings, "mined": mined.about, **found}
    print(write_record(args.out, record, f"{page(found)}\n\n![Signals]({picture.name})"))


main = partial(run_command, "eval.signals", SignalsArguments, run)

if __name__ == "__main__":
    sys.exit(main())
