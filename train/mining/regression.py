"""Logistic regression of harm on what is known of a mismatch, cross-validated by question, and how signals are scored.

K mismatches, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from eagle_fsd.acceptance.judge import SIGNALS
from train.mining.store import Mined

FOLDS = 5
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # inverse strength (C), the choice in each fold by its own training part


def columns(mined: Mined, features: bool = True, signals: Sequence[str] = SIGNALS) -> np.ndarray:  # [K, C]
    """What a regression reads: the target's feature at the substitute's node, then signals."""
    parts = [np.array([[row["signals"][name] for name in signals] for row in mined.rows], dtype=np.float32)]
    if features:
        parts.insert(0, mined.features[:, 1].numpy())
    return np.concatenate(parts, 1)


def folds(harmful: np.ndarray, groups: np.ndarray, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test parts; all mismatches of a question are in one of them.

    Raises:
        ValueError: too few questions, or only one class, in all or in a training part.
    """
    least = min(len(np.unique(groups[harmful == value])) for value in (False, True))
    if least < 2:
        raise ValueError(f"{int(harmful.sum())} of {len(harmful)} mismatches are harmful, and one of the two kinds "
                         f"occurs in {least} questions: at least 2 are needed, mine more")
    splitter = StratifiedGroupKFold(min(FOLDS, least), shuffle=True, random_state=seed)
    parts = list(splitter.split(harmful, harmful, groups))
    if any(harmful[train].all() or not harmful[train].any() for train, _ in parts):
        raise ValueError(f"{int(harmful.sum())} of {len(harmful)} mismatches are harmful, and without the questions of "
                         "one fold only one of the two kinds is left: mine more")
    return parts


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted regression.

    Args:
        scores: [K] probability of harm of each mismatch by a fit that has not seen its question.
        model: fitted to all of them, standardisation included. penalty: of it.
    """

    scores: np.ndarray
    model: Pipeline
    penalty: float


def fit(known: np.ndarray, harmful: np.ndarray, groups: np.ndarray, seed: int = 0) -> Fit:
    """Fit harm [K] to what is known [K, C]; the penalty is chosen by cross-validation, within each fold anew."""
    scores = np.empty(len(harmful))
    for train, test in folds(harmful, groups, seed):
        model, _ = _chosen(known[train], harmful[train], groups[train], seed)
        scores[test] = model.predict_proba(known[test])[:, 1]
    return Fit(scores, *_chosen(known, harmful, groups, seed))


def _chosen(known: np.ndarray, harmful: np.ndarray, groups: np.ndarray, seed: int) -> tuple[Pipeline, float]:
    """A fit to all, with the penalty of the best cross-validated area under the curve."""
    def area(penalty: float) -> float:
        scores = np.empty(len(harmful))
        for train, test in parts:
            scores[test] = _fitted(known[train], harmful[train], penalty).predict_proba(known[test])[:, 1]
        return roc_auc_score(harmful, scores)

    try:
        parts = folds(harmful, groups, seed)
    except ValueError:  # a fold's training part of few questions
        return _fitted(known, harmful, PENALTIES[0]), PENALTIES[0]
    penalty = max(PENALTIES, key=area)
    return _fitted(known, harmful, penalty), penalty


def _fitted(known: np.ndarray, harmful: np.ndarray, penalty: float) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=1000)).fit(known, harmful)


def passing(scores: np.ndarray, harmful: np.ndarray, groups: np.ndarray, stopped: float, seed: int = 0) -> np.ndarray:
    """[K] bool: what passes a dial that stops this share of the harmful of the *other* folds' questions."""
    passes = np.zeros(len(scores), dtype=bool)
    for train, test in folds(harmful, groups, seed):
        passes[test] = scores[test] < dial_stopping(scores[train], harmful[train], stopped)
    return passes


def dial_stopping(scores: np.ndarray, harmful: np.ndarray, stopped: float) -> float:
    """The largest score that is reached by at least this share of the harmful."""
    ordered = np.sort(scores[harmful])
    return float(ordered[int(np.floor((1 - stopped) * len(ordered) + 1e-9))])
