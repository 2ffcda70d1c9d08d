"""How well the lossless pass predicts what a setting does, before and after a correction."""

from __future__ import annotations

import numpy as np

from eagle_fsd.measure.experiment import EXACT
from eval.report.sweeps import by_rule


def prediction_errors(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """How far predictions from the lossless pass lie from real runs, relatively: by quantity and setting, raw and
    corrected.

    Quantities: tau, and nats per token (KL when sampling, regret when greedy). A correction is learned from the real
    runs of the same rule's other thresholds: for tau the power of (predicted over exact's) that fits them best, for
    nats a factor. It makes up for what a lossless pass cannot see: cycles that start elsewhere than exact's.
    """
    exact = next(row["tau"] for row in rows if row["setting"] == EXACT)
    rules = {row["setting"]: rule for rule, family in by_rule(rows).items() for row in family}
    known: dict[str, dict[str, tuple[str, float, float]]] = {"tau": {}, "nats": {}}
    for row in rows:
        if row["predicted"] is not None:
            known["tau"][row["setting"]] = rules[row["setting"]], row["predicted"]["tau"] / exact, row["tau"] / exact
            real = row["kl_per_token"] if row["temperature"] else row["regret_per_token"]
            if real and row["predicted"]["cost"]:
                known["nats"][row["setting"]] = rules[row["setting"]], row["predicted"]["cost"], real
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for quantity, found in known.items():
        errors[quantity] = {}
        for setting, (rule, predicted, real) in found.items():
            others = np.log([(p, r) for name, (same, p, r) in found.items() if same == rule and name != setting])
            corrected = predicted
            if len(others) and quantity == "tau":
                corrected = predicted ** ((others[:, 0] @ others[:, 1]) / max(1e-12, others[:, 0] @ others[:, 0]))
            elif len(others):
                corrected = predicted * np.exp((others[:, 1] - others[:, 0]).mean())
            errors[quantity][setting] = {"raw": predicted / real - 1, "corrected": float(corrected / real - 1)}
    return errors


def prediction_text(errors: dict[str, dict[str, dict[str, float]]]) -> str:
    """The largest errors in one line per quantity."""
    lines = []
    for quantity, found in errors.items():
        if found:
            worst = {kind: max(abs(error[kind]) for error in found.values()) for kind in ("raw", "corrected")}
            far = sum(abs(error["corrected"]) > 0.05 for error in found.values())
            lines.append(f"- {quantity}: {len(found)} settings predicted from the lossless pass; largest error "
                         f"{100 * worst['raw']:.1f}%, corrected {100 * worst['corrected']:.1f}%; {far} are still "
                         "more than 5% off")
    return "\n".join(lines)
