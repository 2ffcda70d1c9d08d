"""What docs/results.md says of the stored results, between its two marks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from eagle_fsd.experiments.experiment import EXACT
from eagle_fsd.experiments.search import BASELINE
from eval.benchmark import method_table
from eval.report.sweeps import front_table
from eval.report.tables import markdown, percent, span

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "eval" / "results", ROOT / "docs" / "results.md"
SWEEPS = ("sweep-greedy", "sweep-sampled")
MT_BENCH = ("mt-bench-exact", "mt-bench-fsd")
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"


def named_row(rows: list[dict], method: str) -> dict:
    return next(row for row in rows if row["method"] == method)


def by_family(accuracy: dict[str, float]) -> str:
    return ", ".join(f"{family} {100 * share:.0f}%" for family, share in accuracy.items() if family != "all")


def methods_section(record: dict) -> str:
    """Single prompts: speed, accuracy and a cycle's parts."""
    about, cycle = record["environment"], record["profile"]
    exact, python = named_row(record["tasks"], "exact"), named_row(record["python"], "exact")
    parts = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in cycle["ms_per_cycle"].items())
    return f"""`{about['command']}` on {about['threads']} threads of an {about['processor']}, {record['dtype']}, torch
{about['torch']}, transformers {about['transformers']}, greedy, {record['tree']}, commit {about['commit']}; stored
in `eval/results/`. Tables are of several commits ("+changes": with uncommitted edits) and machines of different
speed, which they name: compare within a table only. Methods are interleaved; each time is the median of
{record['repeats']} runs. tau counts tokens per target forward; "= greedy" is the share of answers that
are the target's own, token for token.

{record['task_count']} held-out tasks, so that one task is {100 / record['task_count']:.1f} points of accuracy:

{method_table(record['tasks'])}

{record['python_count']} Python prefixes, {record['python_tokens']} tokens each, nothing to be correct:

{method_table(record['python'])}

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

![Accuracy against time per answer](../eval/results/{name}-frontier.png)

{front_table(record)}

All settings: [eval/results/{name}.md](../eval/results/{name}.md)."""


def batches_section(record: dict) -> str:
    """Lossless decoding by batch size."""
    about, rows = record["environment"], record["rows"]
    cells = []
    for size in sorted({row["batch_size"] for row in rows}):
        stock, plain, exact = (named_row([row for row in rows if row["batch_size"] == size], name)
                               for name in (BASELINE, "plain", EXACT))
        cells.append({
            "batch": size, "model.generate, tokens/s": f"{stock['tokens_per_second']:.0f}",
            "plain": f"{plain['tokens_per_second']:.0f}", "exact": f"{exact['tokens_per_second']:.0f}",
            "exact vs model.generate": f"{exact['speedup']:.2f}x", "vs plain": f"{exact['speedup_over_plain']:.2f}x",
            "tau": f"{exact['tau']:.2f}"})
    same = min(row["same_as_plain"] for row in rows if row["method"] in (BASELINE, EXACT))
    return f"""**Batches** of ragged prompts (`{about['command']}`, {about['processor']}, commit {about['commit']},
{record['prompts']} tasks at every size, {record['repeats']} runs each, `model.generate` padded on the left;
{percent(same)} of the rows are those of plain decoding):

{markdown(cells)}"""


def mt_bench_section(records: list[dict]) -> str:
    """Speed on MT-Bench's questions."""
    baseline, rows = records[0]["baseline"], [record["rows"][-1] for record in records]
    given, about = baseline["settings"], baseline["environment"]
    cells = [{"method": BASELINE, "questions": rows[0]["questions"],
              "tokens/s": f"{rows[0]['baseline_tokens_per_second']:.0f}", "vs model.generate (95%)": "", "tau": "1",
              "s/question": f"{rows[0]['baseline_seconds_per_question']:.2f}",
              "tokens/question": f"{rows[0]['baseline_tokens_per_question']:.0f}", "= model.generate": ""}]
    for record, row in zip(records, rows, strict=True):
        used = record["method"]["settings"]
        cells.append({
            "method": used["acceptance"] + ("" if used["threshold"] is None else f" {used['threshold']:g}"),
            "questions": row["questions"], "tokens/s": f"{row['tokens_per_second']:.0f}",
            "vs model.generate (95%)": f"{row['speedup']:.2f}x ({span((row['low'], row['high']))})",
            "tau": f"{row['tau']:.2f}", "s/question": f"{row['seconds_per_question']:.2f}",
            "tokens/question": f"{row['tokens_per_question']:.0f}", "= model.generate": percent(row["same"])})
    return f"""**MT-Bench's questions**, both turns, greedy, at most {given['max_new_tokens']} tokens a turn
(`eval.mt_bench`, {about['processor']}, commit {about['commit']}). The demo target cannot answer them, so this is
speed on text that it was not made for, and says nothing about what the fuzzy rule costs:

{markdown(cells)}"""


def results() -> str:
    """All stored results, as they stand in the page."""
    def stored(name: str) -> dict | None:
        path = RESULTS / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    parts = [methods_section(json.loads((RESULTS / "benchmark.json").read_text(encoding="utf-8")))]
    if batches := stored("batches"):
        parts.append(batches_section(batches))
    if all(mt_bench := [stored(name) for name in MT_BENCH]):
        parts.append(mt_bench_section(mt_bench))
    parts += [sweep_section(name, record) for name in SWEEPS if (record := stored(name))]
    return "\n\n".join(parts)


def insert(page: str, text: str) -> str:
    """The page with the text between its marks.

    Raises:
        ValueError: the marks are missing.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE.name} must hold {BEGIN} and {END} once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"
