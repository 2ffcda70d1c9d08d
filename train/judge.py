"""Learn from mined mismatches which of them matter, for the acceptance rule `judge`.

    python -m train.judge --mined data/mined.jsonl --out checkpoints/my-head

A logistic regression on the target's feature at the substitute's node and on five signals, standardised. It is written
beside the head as judge.safetensors, with its card: what it was learned from, and how well it does on questions that it
has not seen.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from eagle_fsd.acceptance.judge import SIGNALS, LearnedJudge
from eagle_fsd.cli.arguments import parse_options
from eagle_fsd.cli.exits import exit_status
from eagle_fsd.heads.checkpoint import load_head
from eagle_fsd.measure.judges import store_judge
from eagle_fsd.measure.records import environment
from eagle_fsd.models.placement import weights_digest
from train.mining.regression import columns, dial_stopping, fit, passing
from train.mining.store import Mined, read_mined

ABOUT = ("file", "questions", "dtype", "tree", "floor", "max_new_tokens", "nats")  # of a file of train.mine
RECALLS = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Arguments:
    """Learn from mined mismatches which of them matter, for the acceptance rule judge.

    Args:
        mined: files of train.mine, all of the pair that the head belongs to.
        out: folder of the head.
        label: by which harm is told; both takes the outcome where there is one.
        seed: of the folds.
    """

    mined: tuple[Path, ...]
    out: Path
    label: Literal["outcome", "likelihood", "both"] = "both"
    seed: int = 0


def labelled(mined: Mined, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Which mismatches have a label [K] bool, and of those whether they are harmful.

    Raises:
        ValueError: none has it.
    """
    outcome, likelihood = mined.labels("outcome"), mined.labels("likelihood")
    if label == "both":
        values = [second if first is None else first for first, second in zip(outcome, likelihood, strict=True)]
    else:
        values = outcome if label == "outcome" else likelihood
    has = np.array([value is not None for value in values])
    if not has.any():
        raise ValueError(f"no mismatch has the label {label}")
    return has, np.array([value for value in values if value is not None], dtype=bool)


def learn(mined: Mined, label: str, seed: int = 0) -> LearnedJudge:
    """The judge of these mismatches.

    Raises:
        ValueError: too few of a kind, see `train.mining.regression.folds`.
    """
    has, harmful = labelled(mined, label)
    groups = np.array(mined.groups)[has]
    found = fit(columns(mined)[has], harmful, groups, seed)
    scaler, regression = found.model[0], found.model[-1]
    card = {
        "target": mined.about[0]["target"], "head": mined.about[0]["head"], "signals": list(SIGNALS), "label": label,
        "floor": min(begun["floor"] for begun in mined.about),
        "data": [{name: begun[name] for name in ABOUT} for begun in mined.about],
        "mismatches": len(harmful), "harmful": int(harmful.sum()), "answers": len(np.unique(groups)),
        "penalty": found.penalty, "auc": float(roc_auc_score(harmful, found.scores)),
        "at_recall": [{
            "stopped": recall, "dial": dial_stopping(found.scores, harmful, recall),
            **unseen(found.scores, harmful, groups, recall, seed)} for recall in RECALLS],
        "environment": environment(),
    }
    weight, mean, scale = (torch.from_numpy(part).float()
                           for part in (regression.coef_[0], scaler.mean_, scaler.scale_))
    return LearnedJudge(weight, mean, scale, float(regression.intercept_[0]), card)


def unseen(scores: np.ndarray, harmful: np.ndarray, groups: np.ndarray, recall: float, seed: int) -> dict:
    """What dials do that stop this share of the harmful of other questions than they are measured on: which share they
    stop, how many of all that they stop are harmful, and the share of the harmless that they pass."""
    passes = passing(scores, harmful, groups, recall, seed)
    return {"really_stopped": float((~passes)[harmful].mean()),
            "precision": float(harmful[~passes].mean()) if not passes.all() else None,
            "harmless_passed": float(passes[~harmful].mean())}


def run(arguments: Arguments) -> dict:
    """Learn and write the judge; returns its card.

    Raises:
        ValueError: `out` holds no head, or another than was mined with; see `read_mined` and `learn`.
    """
    if not (arguments.out / "config.json").is_file():
        raise ValueError(f"--out {arguments.out} is no folder of a head: it has no config.json")
    mined, head = read_mined(arguments.mined), load_head(arguments.out)
    # One that shares the target's embeddings is another number without them.
    if not head.shares_embeddings and weights_digest(head) != mined.about[0]["head"]:
        raise ValueError(f"the files were mined with another head than that in --out {arguments.out}: give the head "
                         "that was --draft, or a copy of it")
    judge = learn(mined, arguments.label, arguments.seed)
    store_judge(arguments.out, judge)
    return judge.card


def main() -> int:
    arguments = parse_options(Arguments, program="python -m train.judge")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    return exit_status("train.judge", lambda: print(json.dumps(run(arguments), indent=1)))


if __name__ == "__main__":
    sys.exit(main())
