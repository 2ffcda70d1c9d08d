"""Which fuzzily accepted tokens cost right answers, from the receipts that an experiment's records keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eagle_fsd.experiments.experiment import EXACT, Experiment

KINDS = ("digit", "word", "other")


def kind_of(text: str) -> str:
    """Of a token's text: one with a digit, one with a letter but no digit, or punctuation and white space."""
    return "digit" if any(map(str.isdigit, text)) else "word" if any(map(str.isalpha, text)) else "other"


def harm(run: Experiment, setting: str, text_of: Callable[[int], str]) -> list[dict]:
    """One row per kind of fuzzy token among the answers that are right losslessly.

    Returns:
        kind; tokens: how many were accepted; regret: their mean, nats; answers: those with at least one; lost: those of
        them that became wrong; alone: answers whose fuzzy tokens are all of this kind; alone_lost: those of them that
        became wrong, which only this kind can have done.
    """
    answers = [record["fuzzy_tokens"] for record, _ in _with_fuzzy(run, setting)]
    wrong = [lost for _, lost in _with_fuzzy(run, setting)]
    kinds = [[kind_of(text_of(token)) for token, _ in tokens] for tokens in answers]
    rows = []
    for kind in KINDS:
        regrets = [regret for tokens, found in zip(answers, kinds, strict=True)
                   for (_, regret), this in zip(tokens, found, strict=True) if this == kind]
        inside = [lost for lost, found in zip(wrong, kinds, strict=True) if kind in found]
        alone = [lost for lost, found in zip(wrong, kinds, strict=True) if {kind} == set(found)]
        rows.append({"setting": setting, "kind": kind, "tokens": len(regrets),
                     "regret": sum(regrets) / len(regrets) if regrets else None,
                     "answers": len(inside), "lost": sum(inside), "alone": len(alone), "alone_lost": sum(alone)})
    return rows


def _with_fuzzy(run: Experiment, setting: str) -> Iterable[tuple[dict, bool]]:
    """Records with fuzzy tokens of answers that are right losslessly, and whether they became wrong."""
    for ours, exact in zip(run.results(setting), run.results(EXACT), strict=True):
        if ours["fuzzy_tokens"] and exact["correct"]:
            yield ours, not ours["correct"]


def merged(tables: list[list[dict]]) -> list[dict]:
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
    lines = ["| setting | fuzzy tokens | number | mean regret (nats) | answers with such | of these lost "
             "| answers with no others | of these lost |", "|---" * 8 + "|"]
    for row in rows:
        if row["tokens"]:
            lines.append(
                f"| {row['setting']} | {row['kind']} | {row['tokens']} | {row['regret']:.2f} | {row['answers']} | "
                f"{row['lost']} ({_share(row['lost'], row['answers'])}) | {row['alone']} | "
                f"{row['alone_lost']} ({_share(row['alone_lost'], row['alone'])}) |")
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"
