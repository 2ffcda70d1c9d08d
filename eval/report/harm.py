"""Which fuzzily accepted tokens cost right answers, from the receipts that an experiment's records keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eagle_fsd.measure.experiment import EXACT, Experiment
from eval.report.tables import markdown, percent

TOKEN_KINDS = ("digit", "word", "other")


def token_kind(text: str) -> str:
    """Of a token's text: one with a digit, one with a letter but no digit, or punctuation and white space."""
    return "digit" if any(map(str.isdigit, text)) else "word" if any(map(str.isalpha, text)) else "other"


def harm_rows(run: Experiment, setting: str, text_of: Callable[[int], str]) -> list[dict]:
    """One row per kind of fuzzy token among the answers that are right losslessly.

    Returns:
        kind; tokens: how many were accepted; regret: their mean, nats; answers: those with at least one; lost: those of
        them that became wrong; alone: answers whose fuzzy tokens are all of this kind; alone_lost: those of them that
        became wrong, which only this kind can have done.
    """
    answers = [([(token_kind(text_of(token)), regret) for token, regret in record["fuzzy_tokens"]], lost)
               for record, lost in _with_fuzzy(run, setting)]
    rows = []
    for kind in TOKEN_KINDS:
        regrets = [regret for tokens, _ in answers for this, regret in tokens if this == kind]
        inside = [lost for tokens, lost in answers if any(this == kind for this, _ in tokens)]
        alone = [lost for tokens, lost in answers if all(this == kind for this, _ in tokens)]
        rows.append({"setting": setting, "kind": kind, "tokens": len(regrets),
                     "regret": sum(regrets) / len(regrets) if regrets else None,
                     "answers": len(inside), "lost": sum(inside), "alone": len(alone), "alone_lost": sum(alone)})
    return rows


def _with_fuzzy(run: Experiment, setting: str) -> Iterable[tuple[dict, bool]]:
    """Records with fuzzy tokens of answers that are right losslessly, and whether they became wrong."""
    for ours, exact in zip(run.results(setting), run.results(EXACT), strict=True):
        if ours["fuzzy_tokens"] and exact["correct"]:
            yield ours, not ours["correct"]


def added_up(tables: list[list[dict]]) -> list[dict]:
    """The rows of several runs (seeds) of one setting, added up."""
    rows = []
    for same in zip(*tables, strict=True):
        tokens = sum(row["tokens"] for row in same)
        regret = sum(row["tokens"] * row["regret"] for row in same if row["tokens"])
        counts = {name: sum(row[name] for row in same) for name in ("answers", "lost", "alone", "alone_lost")}
        rows.append({**same[0], "tokens": tokens, "regret": regret / tokens if tokens else None, **counts})
    return rows


def harm_table(rows: list[dict]) -> str:
    """In Markdown; kinds that did not occur are left out."""
    return markdown({
        "setting": row["setting"], "fuzzy tokens": row["kind"], "number": row["tokens"],
        "mean regret (nats)": f"{row['regret']:.2f}", "answers with such": row["answers"],
        "lost of these": _counted(row["lost"], row["answers"]), "answers with no others": row["alone"],
        "lost of those": _counted(row["alone_lost"], row["alone"]),
    } for row in rows if row["tokens"])


def _counted(part: int, whole: int) -> str:
    return f"{part} ({percent(part / whole) if whole else '-'})"
