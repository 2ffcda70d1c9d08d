"""Put the stored results into the README, between its two result marks.

    python -m eval.report
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from eval.benchmark import table
from eval.report.plots import short_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
SWEEPS = ("sweep-greedy", "sweep-sampled")
MT_BENCH = ("mt-bench-exact", "mt-bench-fsd")
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"


def row_of(rows: list[dict], method: str) -> dict:
    return next(row for row in rows if row["method"] == method)


def by_family(accuracy: dict[str, float]) -> str:
    return ", ".join(f"{family} {100 * share:.0f}%" for family, share in accuracy.items() if family != "all")


def section(record: dict) -> str:
    """The README's results, all figures from the record."""
    about, cycle = record["environment"], record["profile"]
    exact, python = row_of(record["tasks"], "exact"), row_of(record["python"], "exact")
    parts = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in cycle["ms_per_cycle"].items())
    return f"""`{about['command']}` on {about['threads']} threads of an {about['processor']}, {record['dtype']}, torch
{about['torch']}, transformers {about['transformers']}, greedy, {record['tree']}, commit {about['commit']}; stored
in `eval/results/`. Tables are of several commits ("+changes": with uncommitted edits) and machines of different
speed, which they name: compare within a table only. Methods are interleaved; each time is the median of
{record['repeats']} runs. tau counts tokens per target forward; "= greedy" is the share of answers that
are the target's own, token for token.

{record['task_count']} held-out tasks, so that one task is {100 / record['task_count']:.1f} points of accuracy:

{table(record['tasks'])}

{record['python_count']} Python prefixes, {record['python_tokens']} tokens each, nothing to be correct:

{table(record['python'])}

- `exact` is {exact['speedup']:.2f}x `model.generate` on tasks and {python['speedup']:.2f}x on Python source.
- Greedy accuracy on {record['accuracy_tasks']} other held-out tasks is {100 * record['accuracy']['all']:.1f}%:
  {by_family(record['accuracy'])}. In wordings never trained on ({record['unseen_tasks']} tasks):
  {100 * record['accuracy_unseen_wordings']['all']:.1f}%.
- A cycle of `exact` takes {cycle['total_ms']:.1f} ms, {cycle['outside_forwards_ms']:.2f} ms
  ({100 * cycle['outside_forwards_share']:.1f}%) of it outside the models' forwards. In ms: {parts}."""


def command_of(about: dict) -> str:
    """What makes all of a sweep, not only the report of a work folder."""
    return re.sub(r" --stage \w+", "", about["command"])


def sweep_section(name: str, record: dict) -> str:
    """What a sweep has shown, its picture and its front."""
    about = record["environment"]
    what = "Greedy" if record["temperature"] == 0 else f"Temperature {record['temperature']:g}"
    seeds = f", {len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else ""
    timed = next(row["timed"] for row in record["rows"] if "timed" in row)
    least = 100 * next(row for row in record["rows"] if row["setting"] == "exact")["family_bound"]
    return f"""**{what}, {record['questions']} tasks{seeds}** (`{command_of(about)}`, {about['processor']},
commit {about['commit']}, {timed} of the tasks timed, interleaved). {record['headline']} Such a sentence goes
by bounds that are corrected for the choice among settings, the table shows each setting's own;
{record['questions']} tasks are too few for one point: `exact` against itself has {least:.1f}.

![Accuracy against time per answer](eval/results/{name}-frontier.png)

{short_table(record)}

All settings: [eval/results/{name}.md](eval/results/{name}.md)."""


def batches_section(record: dict) -> str:
    """Lossless decoding by batch size."""
    about, rows = record["environment"], record["rows"]
    sizes = sorted({row["batch_size"] for row in rows})
    lines = ["| batch | model.generate, tokens/s | plain | exact | exact vs model.generate | vs plain | tau |",
             "|---" * 7 + "|"]
    for size in sizes:
        stock, plain, exact = (row_of([row for row in rows if row["batch_size"] == size], name)
                               for name in ("model.generate", "plain", "exact"))
        lines.append(f"| {size} | {stock['tokens_per_second']:.0f} | {plain['tokens_per_second']:.0f} | "
                     f"{exact['tokens_per_second']:.0f} | {exact['speedup']:.2f}x | "
                     f"{exact['speedup_over_plain']:.2f}x | {exact['tau']:.2f} |")
    table_text = "\n".join(lines)
    same = min(row["same_as_plain"] for row in rows if row["method"] in ("model.generate", "exact"))
    return f"""**Batches** of ragged prompts (`{about['command']}`, {about['processor']}, commit {about['commit']},
{record['prompts']} tasks at every size, {record['repeats']} runs each, `model.generate` padded on the left;
{100 * same:.0f}% of the rows are those of plain decoding):

{table_text}"""


def mt_bench_section(records: list[dict]) -> str:
    """Speed on MT-Bench's questions."""
    baseline, rows = records[0]["baseline"], [record["rows"][-1] for record in records]
    given, about = baseline["settings"], baseline["environment"]
    lines = ["| method | questions | tokens/s | vs model.generate (95%) | tau | s/question | tokens/question "
             "| = model.generate |", "|---" * 8 + "|",
             f"| model.generate | {rows[0]['questions']} | {rows[0]['baseline_tokens_per_second']:.0f} | | 1 | "
             f"{rows[0]['baseline_seconds_per_question']:.2f} | {rows[0]['baseline_tokens_per_question']:.0f} | |"]
    for record, row in zip(records, rows, strict=True):
        used = record["method"]["settings"]
        name = used["acceptance"] + ("" if used["threshold"] is None else f" {used['threshold']:g}")
        interval = f"{row['low']:.2f} to {row['high']:.2f}"
        lines.append(f"| {name} | {row['questions']} | {row['tokens_per_second']:.0f} | {row['speedup']:.2f}x "
                     f"({interval}) | {row['tau']:.2f} | {row['seconds_per_question']:.2f} | "
                     f"{row['tokens_per_question']:.0f} | {100 * row['same']:.0f}% |")
    table_text = "\n".join(lines)
    return f"""**MT-Bench's questions**, both turns, greedy, at most {given['max_new_tokens']} tokens a turn
(`eval.mt_bench`, {about['processor']}, commit {about['commit']}). The demo target cannot answer them, so this is
speed on text that it was not made for, and says nothing about what the fuzzy rule costs:

{table_text}"""


def results() -> str:
    """All stored results, as they stand in the README."""
    parts = [section(json.loads((RESULTS / "benchmark.json").read_text(encoding="utf-8")))]
    batches = RESULTS / "batches.json"
    if batches.exists():
        parts.append(batches_section(json.loads(batches.read_text(encoding="utf-8"))))
    stored = [RESULTS / f"{name}.json" for name in MT_BENCH]
    if all(path.exists() for path in stored):
        parts.append(mt_bench_section([json.loads(path.read_text(encoding="utf-8")) for path in stored]))
    for name in SWEEPS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(sweep_section(name, json.loads(path.read_text(encoding="utf-8"))))
    return "\n\n".join(parts)


def insert(readme: str, text: str) -> str:
    """The README with the text between its marks.

    Raises:
        ValueError: the marks are missing.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(insert(readme.read_text(encoding="utf-8"), results()), encoding="utf-8")


if __name__ == "__main__":
    main()
