"""What requests to an endpoint under load came to: summaries, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.report.tables import markdown


@dataclass
class Asked:
    """What became of one request; seconds count from the moment that it was to be sent."""

    began: float  # seconds after the first
    first: float | None = None  # to the first text
    total: float = 0.0
    tokens: int = 0
    counted: bool = False  # tokens by usage, not by events
    tau: float | None = None
    refused: int = 0  # how often it was told to come back
    error: str | None = None


def summary(found: Sequence[Asked]) -> dict:
    """Medians, 95th percentiles, throughput, and what failed."""
    good = [each for each in found if each.error is None and each.first is not None]
    row: dict = {"answers": len(good), "failed": len(found) - len(good),
                 "refused": sum(each.refused for each in found)}
    if not good:
        return row
    wall = max(each.began + each.total for each in found) - min(each.began for each in found)
    first = np.array([each.first for each in good])
    each_token = np.array([(each.total - each.first) / (each.tokens - 1) for each in good if each.tokens > 1])
    taus = [each.tau for each in good if each.tau is not None]
    row |= {"tokens": sum(each.tokens for each in good), "seconds": wall,
            "tokens_per_second": sum(each.tokens for each in good) / wall,
            "first_token_p50": float(np.median(first)), "first_token_p95": float(np.quantile(first, 0.95))}
    if len(each_token):
        row |= {"per_token_p50": float(np.median(each_token)), "per_token_p95": float(np.quantile(each_token, 0.95))}
    return row | ({"tau": float(np.mean(taus))} if taus else {})


def table(rows: Sequence[dict]) -> str:
    """The summaries as Markdown: milliseconds and tokens per second."""
    def ms(row: dict, name: str) -> str:
        return f"{1000 * row[name]:.0f}" if name in row else ""

    return markdown([{
        "what": row["what"], "clients": row["clients"], "answers": row["answers"], "failed": row["failed"],
        "refused": row["refused"], "tokens/s": f"{row.get('tokens_per_second', 0):.1f}",
        "first token p50, ms": ms(row, "first_token_p50"), "p95": ms(row, "first_token_p95"),
        "per token p50, ms": ms(row, "per_token_p50"), "p95 ": ms(row, "per_token_p95"),
        "tau": f"{row['tau']:.2f}" if "tau" in row else "",
    } for row in rows])
