"""How often copies from the text are accepted, by how many tokens matched: the table in `eagle_fsd/drafting/text.py`.

    python -m eval.copies --questions spec_bench.jsonl --last 6 --categories qa rag --out eval/results/smollm2-copies

The target answers the questions, exactly. Then at every token of each answer copies are proposed from the text so far,
and compared with what came; a child counts where its parent was right, and where its better siblings were not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import converse
from eagle_fsd.drafting.text import BOUNDS, Rates, TextDrafts, TextSource
from eagle_fsd.measure.methods import Answer, engine, pair_text
from eagle_fsd.measure.records import markdown, write_record
from eagle_fsd.measure.settings import EXACT, QuestionOptions
from eagle_fsd.prompts import encode_prompt
from eval.command import option_record, run_command


@dataclass(frozen=True, kw_only=True)
class CopiesArguments(QuestionOptions):
    """What `eval.copies` counts.

    Args:
        last: so many of each category, from its end.
        then: a further turn of every question.
        out: where the record goes, without .json and .md.
    """

    out: Path
    pair: Loading = Loading()
    last: int | None = None
    then: str | None = None
    max_new_tokens: int = 128


def count_copies(prompt: list[int], answer: list[int]) -> Rates:
    """What copies met along one answer."""
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
    answer = engine(model, acceptance=EXACT)
    found: list[Rates] = []

    def answered(chat: list[dict[str, str]]) -> Answer:
        made = answer(chat, args.max_new_tokens)
        found.append(count_copies(encode_prompt(chat, model), made.token_ids))
        return made

    for question in Progress(chosen, desc="answering", unit="question"):
        converse(answered, [*question.turns, *filter(None, [args.then])])
    rows = []
    for number, bound in enumerate(BOUNDS):
        row = {"matched": bound}
        for kind, name in enumerate(("first", "others")):
            seen = sum(rates.seen[kind][number] for rates in found)
            taken = sum(rates.taken[kind][number] for rates in found)
            row |= {name: round((taken + 0.5) / (seen + 1), 3), f"{name}, seen": int(seen)}
        rows.append(row)
    table = markdown({name: f"{value:g}" for name, value in row.items()} for row in rows)
    print(write_record(args.out, {"settings": option_record(args), "rows": rows}, f"{pair_text(model)}\n\n{table}"))


main = partial(run_command, "eval.copies", CopiesArguments, run)

if __name__ == "__main__":
    sys.exit(main())
