"""What docs/results.md says of the stored results, between its two marks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from eagle_fsd.measure.experiment import EXACT
from eagle_fsd.measure.search import BASELINE
from eval.benchmark import ALL, category_table, method_table
from eval.report.sweeps import front_table
from eval.report.tables import markdown, percent

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "eval" / "results", ROOT / "docs" / "results.md"
QUESTIONS = {  # stored records of eval.benchmark, in this order
    "smollm2-mt-bench": "MT-Bench, SmolLM2-135M-Instruct",
    "smollm2-spec-bench": "Spec-Bench, SmolLM2-135M-Instruct",
    "smollm2-sampled": "MT-Bench, SmolLM2-135M-Instruct, sampled",
    "qwen-humaneval": "HumanEval, Qwen2.5-Coder-0.5B-Instruct",
    "qwen-gsm8k": "GSM8K, Qwen2.5-Coder-0.5B-Instruct",
}
SWEEPS = {  # stored records of eval.sweep: of real pairs, then of the toy
    "sweep-code": "HumanEval and MBPP, Qwen2.5-Coder-0.5B-Instruct",
    "sweep-code-afterword": "HumanEval and MBPP, more problems, Qwen2.5-Coder-0.5B-Instruct",
    "sweep-code-sampled": "HumanEval and MBPP, Qwen2.5-Coder-0.5B-Instruct",
    "sweep-ifeval": "IFEval, SmolLM2-135M-Instruct",
}
TOY_SWEEPS = {"sweep-greedy": "Generated tasks", "sweep-sampled": "Generated tasks"}
INTRODUCTION = f"""Tables are of several commits ("+changes": with uncommitted edits), which they name: compare within a
table only. Methods are interleaved question by question. tau counts tokens per target forward; intervals are 95%
bootstraps over questions; "= {BASELINE}" and "= plain" are shares of answers that are the same tokens. `{BASELINE}` and
prompt lookup run on the weights as `transformers` lays them out, plain decoding and the rest on prepacked ones."""
MECHANISMS = """## Mechanism tests

What follows was measured on a toy pair (a 24-layer target of 10 M parameters on generated tasks, and a head that knows
them by heart; the bundled small pair is folded from it). It shows how batches and dials behave; its speeds say nothing
about other models."""
BEGIN, END = "<!-- results: python -m eval.report -->", "<!-- end of results -->"


def named_row(rows: list[dict], method: str) -> dict:
    return next(row for row in rows if row["method"] == method)


def questions_section(name: str, title: str, record: dict) -> str:
    """A question set on a real pair: speed, quality, and a cycle's parts."""
    about, rows = record["environment"], record["rows"]
    sampling = "greedy" if record["temperature"] == 0 else f"temperature {record['temperature']:g}"
    tables = method_table(rows[ALL])
    if len(rows) > 2:
        tables += f"\n\nTimes the speed of `{BASELINE}`, tau in brackets:\n\n" \
                  f"{category_table(rows, record['counts'])}\n\n![Speed by category](../eval/results/{name}.png)"
    cycles = " ".join(cycle_of(rule, record[f"profile_{rule}"]) for rule in ("exact", "fsd")
                      if f"profile_{rule}" in record)
    return f"""**{title}**, {record['counts'][ALL]} questions, {sampling}, at most {record['max_new_tokens']} tokens a
turn, {record['dtype'].removeprefix('torch.')}, {about['threads']} threads of an {about['processor']}, torch
{about['torch']}, transformers {about['transformers']}, tree {record['tree']}, commit {about['commit']}
(`{about['command']}`):

{tables}

{cycles}"""


def cycle_of(rule: str, profile: dict) -> str:
    parts = ", ".join(f"{part.replace('_', ' ')} {ms:.1f}" for part, ms in profile["ms_per_cycle"].items())
    return f"A cycle of `{rule}` takes {profile['total_ms']:.1f} ms, {percent(profile['outside_forwards_share'], 1)} " \
           f"of it outside the models' forwards (in ms: {parts})."


def command_of(about: dict) -> str:
    """What makes all of a sweep, not only the report of a work folder."""
    return re.sub(r" --stage \w+", "", about["command"])


def sweep_section(name: str, title: str, record: dict) -> str:
    """What a sweep has shown, its picture and its front."""
    about = record["environment"]
    what = "greedy" if record["temperature"] == 0 else f"temperature {record['temperature']:g}"
    seeds = f", {len(record['seeds'])} seeds" if len(record["seeds"]) > 1 else ""
    timed = next(row["timed"] for row in record["rows"] if "timed" in row)
    least = 100 * next(row for row in record["rows"] if row["setting"] == "exact")["family_bound"]
    return f"""**{title}**, {what}, {record['questions']} tasks{seeds} (`{command_of(about)}`, {about['processor']},
commit {about['commit']}, {timed} of the tasks timed, interleaved). {record['headline']} Such a sentence goes
by bounds that are corrected for the choice among settings, the table shows each setting's own;
{record['questions']} tasks are too few for one point: `exact` against itself has {least:.1f}. Forwards are
of all answers, times of the timed ones, whose lengths differ by chance as well.

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


def results() -> str:
    """All stored results, as they stand in the page."""
    def stored(name: str) -> dict | None:
        path = RESULTS / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    parts = [INTRODUCTION]
    parts += [questions_section(name, title, record) for name, title in QUESTIONS.items() if (record := stored(name))]
    parts += [sweep_section(name, title, record) for name, title in SWEEPS.items() if (record := stored(name))]
    parts.append(MECHANISMS)
    if batches := stored("batches"):
        parts.append(batches_section(batches))
    parts += [sweep_section(name, title, record) for name, title in TOY_SWEEPS.items() if (record := stored(name))]
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
