"""Put the stored results into the README, between its two result marks.

    python -m eval.report
"""

from __future__ import annotations

import json
from pathlib import Path

from eval.benchmark import table
from eval.plots import short_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "eval" / "results"
SWEEPS = ("sweep-greedy", "sweep-sampled")
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
{about['torch']}, transformers {about['transformers']}, greedy, {record['tree']}, commit {about['commit']}; stored in
`eval/results/`. Methods are interleaved; each time is the median of {record['repeats']} runs. tau counts tokens per
target forward; "= greedy" is the share of answers that are the target's own, token for token.

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


def sweep_section(name: str, record: dict) -> str:
    """What a sweep has shown, its picture and its front."""
    about = record["environment"]
    what = "Greedy" if record["temperature"] == 0 else f"Temperature {record['temperature']:g}"
    seeds = f", {len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else ""
    timed = next(row["timed"] for row in record["rows"] if "timed" in row)
    return f"""**{what}, {record['questions']} tasks{seeds}** (`{about['command']}`, commit {about['commit']},
{timed} of the tasks timed, interleaved). {record['headline']}

![Accuracy against time per answer](eval/results/{name}-frontier.png)

{short_table(record)}

All settings: [eval/results/{name}.md](eval/results/{name}.md)."""


def results() -> str:
    """All stored results, as they stand in the README."""
    parts = [section(json.loads((RESULTS / "benchmark.json").read_text(encoding="utf-8")))]
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
