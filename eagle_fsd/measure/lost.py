"""Answers that a rule lost: right in the reference and wrong with the rule, and the first token that only the rule
accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from .records import markdown
from .statistics import first_difference

BEFORE = 12  # tokens of context


def lost_answers(
    records: Sequence[Mapping], reference: str, decode: Callable[[Sequence[int]], str], drafter: str
) -> list[dict]:
    """One record for each lost answer of a method with fuzzy tokens.

    Args:
        decode: from token ids to text.
        drafter: name of the method that decodes with the draft model alone, which may be missing.

    Returns:
        method, id, category; tokens and fuzzy: their numbers; at: index of the first fuzzy token, or of the first that
        differs if there is none; before, token, instead: texts before it, of it, and of the reference's token there;
        drafter_right: whether the drafter alone is right (None: unknown).
    """
    fuzzy = {name for line in records for name, record in line["methods"].items() if record["fuzzy"]}
    lost = []
    for line in records:
        theirs, alone = line["methods"][reference], line["methods"].get(drafter)
        for name in line["methods"]:
            ours = line["methods"][name]
            if name not in fuzzy or not (theirs["right"] == 1 and ours["right"] == 0):
                continue
            at = ours.get("first_fuzzy")
            at = first_difference(ours["ids"], theirs["ids"]) if at is None else at
            lost.append({
                "method": name, "id": line["id"], "category": line["category"], "tokens": ours["tokens"],
                "fuzzy": ours["fuzzy"], "at": at, "before": "" if at is None else decode(ours["ids"][:at][-BEFORE:]),
                **{key: "" if at is None else decode(ids[at : at + 1])
                   for key, ids in (("token", ours["ids"]), ("instead", theirs["ids"]))},
                "drafter_right": None if alone is None or alone["right"] is None else alone["right"] == 1,
            })
    return lost


def lost_table(lost: Sequence[Mapping]) -> str:
    """The records as a Markdown table, method by method."""
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False).replace("|", "\\|")

    return markdown({
        "method": row["method"], "lost": row["id"],
        "first fuzzy token": ("none: " if not row["fuzzy"] else "") + f"{row['at']} of {row['tokens']}",
        "after": quoted(row["before"]), "token": quoted(row["token"]), "instead of": quoted(row["instead"]),
        "drafter alone": {None: "", True: "right", False: "wrong"}[row["drafter_right"]],
    } for row in sorted(lost, key=lambda row: row["method"]))
