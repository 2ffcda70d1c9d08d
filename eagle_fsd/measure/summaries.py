"""What answers are like: those of one conversation, all under one setting, and two settings' side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from ..engine.receipts import Output

LOW = -math.log(0.2)  # regret of a token with a fifth of the best one's probability
GRAM = 4


def repetition(tokens: Sequence[int]) -> float:
    """Share of the text's 4-grams that have occurred before."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Where two texts part; None where they are the same."""
    pairs = enumerate(zip_longest(tokens, reference))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), None)


def conversation_record(outputs: Sequence[Output], reference: Sequence[int] | None = None) -> dict[str, Any]:
    """What one conversation's answers are like, as a record keeps it; their turns are joined.

    Returns:
        tokens; cycles and accepted (draft tokens); fuzzy_tokens: [token, regret in nats] of those that only the rule
        accepted; low: tokens below a fifth of the target's best probability; logprob and regret: sums in nats under the
        target; repetition; cut_off: whether any turn ended at the length limit; differs_at: first token that differs
        from `reference`.
    """
    tokens = [token for output in outputs for token in output.token_ids]
    receipts = [receipt for output in outputs for receipt in output.receipts]
    lengths = [length for output in outputs for length in output.stats.accepted_lengths]
    return {
        "tokens": len(tokens), "cycles": len(lengths), "accepted": sum(lengths),
        "fuzzy_tokens": [[token, round(receipt.regret, 4)] for token, receipt in zip(tokens, receipts, strict=True)
                         if receipt.source == "fuzzy"],
        "low": sum(receipt.regret > LOW for receipt in receipts),
        "logprob": sum(receipt.logprob for receipt in receipts),
        "regret": sum(receipt.regret for receipt in receipts),
        "repetition": repetition(tokens), "cut_off": any(output.finish_reason == "length" for output in outputs),
        "differs_at": None if reference is None else first_difference(tokens, reference),
    }


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Means over the answers of one setting; rates are per token, `low_per_thousand` per thousand tokens."""
    records = list(records)
    tokens, cycles = sum(r["tokens"] for r in records), sum(r["cycles"] for r in records)
    graded = [r["correct"] for r in records if r["correct"] is not None]
    parted = [r["differs_at"] for r in records if r["differs_at"] is not None]
    kl = [r["kl"] for r in records]
    return {
        "answers": len(records),
        "accuracy": statistics.fmean(graded) if graded else None,
        "tau": sum(r["accepted"] for r in records) / cycles + 1 if cycles else 1.0,
        "tokens_per_answer": tokens / len(records),
        "cycles_per_answer": cycles / len(records),
        "fuzzy_share": sum(len(r["fuzzy_tokens"]) for r in records) / tokens,
        "low_per_thousand": 1000 * sum(r["low"] for r in records) / tokens,
        "logprob_per_token": sum(r["logprob"] for r in records) / tokens,
        "regret_per_token": sum(r["regret"] for r in records) / tokens,
        # Of all tokens that the cycles emitted, those behind an end included, as the KL is.
        "kl_per_token": None if None in kl else sum(kl) / max(1, cycles + sum(r["accepted"] for r in records)),
        "differing": len(parted) / len(records),
        "median_first_difference": statistics.median(parted) if parted else None,
        "repetition": statistics.fmean(r["repetition"] for r in records),
        "cut_off": statistics.fmean(r["cut_off"] for r in records),
    }


def paired(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """(lost, gained, count) of graded answers: right only in the reference, right only here, all pairs."""
    pairs = [(theirs["correct"], ours["correct"]) for ours, theirs in zip(records, reference, strict=True)
             if ours["correct"] is not None]
    return (sum(theirs and not ours for theirs, ours in pairs), sum(ours and not theirs for theirs, ours in pairs),
            len(pairs))
