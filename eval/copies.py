"""Acceptance rates of text drafts by the number of matched tokens, for the table in `eagle_fsd/drafting/copies.py`.

    python -m eval.copies --questions spec_bench.jsonl --last 6 --categories qa rag --out eval/results/smollm2-copies

The target answers the questions losslessly. Then, at every token of each answer, drafts are copied from the text so far
and compared with the tokens that follow. A child counts if its parent was right and its better siblings were wrong.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.questions import converse
from eagle_fsd.drafting.copies import BOUNDS, Rates, TextDrafts, TextSource
from eagle_fsd.inputs.prompts import encode_prompt
from eagle_fsd.measure.methods import Answer, engine, pair_text
from eagle_fsd.measure.records import markdown, write_record
from eagle_fsd.measure.settings import QuestionOptions
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command


@dataclass(frozen=True, kw_only=True)
class CopiesArguments(QuestionOptions):
    """Options of `eval.copies`.

    Args:
        last: use only the last LAST questions of each category.
        then: additional last turn of every question.
        max_new_tokens: most tokens in the answer to a turn.
        out: write OUT.json and OUT.md.
    """

    out: Path
    pair: Loading = Loading()
    last: int | None = None
    then: str | None = None
    max_new_tokens: int = 128


def count_copies(prompt: list[int], answer: list[int]) -> Rates:
    """Count proposed and accepted copies in one answer."""
    source = TextSource(prompt, TextDrafts())
    for at in range(len(answer)):
        source.propose()
        source.learn(answer[at:])
        source.index.extend(answer[at : at + 1])
    return source.rates


def run(args: CopiesArguments) -> None:
    check_counts(args, "per_category", "limit", "last", "max_new_tokens")
    groups: dict[str, list] = {}
    for question in args.chosen_questions():
        groups.setdefault(question.category, []).append(question)
    chosen = [question for group in groups.values() for question in (group[-args.last :] if args.last else group)]
    model = args.pair.load()
    answer = engine(model, acceptance="exact")
    counts: list[Rates] = []

    def answered(chat: list[dict[str, str]]) -> Answer:
        result = answer(chat, args.max_new_tokens)
        counts.append(count_copies(encode_prompt(chat, model), result.token_ids))
        return result

    for question in Progress(chosen, desc="answering", unit="question"):
        converse(answered, [*question.turns, *filter(None, [args.then])])
    rows = []
    for number, bound in enumerate(BOUNDS):
        row = {"matched": bound}
        for kind, name in enumerate(("first", "others")):
            seen = sum(rates.seen[kind][number] for rates in counts)
            taken = sum(rates.taken[kind][number] for rates in counts)
            row |= {name: round((taken + 0.5) / (seen + 1), 3), f"{name}, seen": int(seen)}
        rows.append(row)
    table = markdown({name: f"{value:g}" for name, value in row.items()} for row in rows)
    print(write_record(args.out, {"settings": option_record(args), "rows": rows}, f"{pair_text(model)}\n\n{table}"))


main = partial(run_command, "eval.copies", CopiesArguments, run)

if __name__ == "__main__":
    sys.exit(main())
