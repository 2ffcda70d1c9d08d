"""The stages `screen` and `report` of a sweep: a row per setting, the tables and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from eagle_fsd.acceptance import Rule
from eagle_fsd.measure.experiment import EXACT, Experiment
from eagle_fsd.measure.records import record_path, write_record
from eagle_fsd.measure.search import family_confidence
from eagle_fsd.measure.statistics import drop_bound
from eagle_fsd.measure.summaries import paired, summarise
from eagle_fsd.measure.traces import predict
from eval.command import noted
from eval.report.harm import added_up, harm_rows, harm_table
from eval.report.intervals import interval
from eval.report.plots import plot_sweep
from eval.report.predictions import prediction_errors, prediction_text
from eval.report.sweeps import by_rule, headline, pareto, sweep_table
from eval.report.tables import markdown, percent
from eval.sweep_times import BARE, Sampling, baseline_names, lossless_samplings, time_rows, timed_questions

if TYPE_CHECKING:
    from eval.sweep import SweepArguments


def own_runs(args: SweepArguments, runs: dict[tuple, Experiment]) -> list[Experiment]:
    """Those at the sweep's own temperature, one per seed."""
    return [run for (sampling, _), run in runs.items() if sampling == Sampling(args.temperature)]


def setting_rows(args: SweepArguments, runs: dict[tuple, Experiment], speeds: dict[str, dict]) -> list[dict]:
    """One row per setting, over all seeds; accuracy is compared with `exact`'s, answer by answer."""
    own = own_runs(args, runs)
    exact = [run.results(EXACT) for run in own]
    groups = {EXACT: exact, **{name: [run.results(name) for run in own] for name in own[0].rules}}
    samplings = {sampling.name: sampling for sampling in lossless_samplings(args)}
    for name, sampling in samplings.items():
        found = [run.results(EXACT) for (other, _), run in runs.items() if other == sampling]
        groups[name] = found * (len(own) // len(found))
    tested = by_rule([{"setting": name, "threshold": rule.threshold} for name, rule in own[0].rules.items()])
    confidence = family_confidence(len(tested))
    rows = []
    for name, given in groups.items():
        pairs = [paired(ours, theirs) for ours, theirs in zip(given, exact, strict=True)]
        lost, gained, count = (sum(column) for column in zip(*pairs, strict=True))
        drops = np.array([[theirs["correct"] - ours["correct"] for ours, theirs in zip(a, b, strict=True)]
                          for a, b in zip(given, exact, strict=True)], float)
        rows.append({
            "setting": name, **asdict(samplings.get(name, Sampling(args.temperature))),
            **(plain_options(own[0].rules[name]) if name in own[0].rules else {}),
            **summarise([record for records in given for record in records]), "lost": lost, "gained": gained,
            "drop": (lost - gained) / count, "drop_interval": interval(np.mean, drops.mean(0)),
            # Seeds of one question are not independent: the bound counts every question once.
            "drop_bound": drop_bound(lost / len(own), gained / len(own), count // len(own)),
            "family_bound": drop_bound(lost / len(own), gained / len(own), count // len(own), confidence),
            "predicted": None, **speeds.get(name, {}),
        })
        if name in own[0].rules and all(run.traces(name) for run in own):
            rows[-1]["predicted"] = predict([trace for run in own for trace in run.traces(name)])
    return rows


def plain_options(rule: Rule) -> dict:
    """Of a rule what a record can hold: its dial and other numbers and names, no gates and no judge."""
    return {name: value for name, value in vars(rule).items() if isinstance(value, str | float | int | None)}


def match_baselines(rows: list[dict]) -> None:
    """Beside each fuzzy setting, lossless decoding with its log-probability per token: at the `temperature` that has
    it, and, where such were run, truncated at the `top_p` that has it.

    Interpolated between those that were run; outside of them the nearest.
    """
    lossless = [row for row in rows if row["setting"].startswith(EXACT)]
    for key, by in (("matched", "temperature"), ("matched_top_p", "top_p")):
        others = ("top_p" if by == "temperature" else "temperature")
        known = sorted((row for row in lossless if row[others] == lossless[0][others]),
                       key=lambda row: row["logprob_per_token"])
        if len(known) < 2:
            continue
        for row in rows:
            if "threshold" in row:
                row[key] = {value: float(np.interp(row["logprob_per_token"], [r["logprob_per_token"] for r in known],
                                                   [r[value] for r in known]))
                            for value in (by, "accuracy", "time_of_exact") if value in known[0]}


def all_harm_rows(runs: Sequence[Experiment]) -> list[dict]:
    """What each setting's fuzzy tokens did to right answers, over the runs of all seeds."""
    tokenizer = runs[0].model.tokenizer
    return [row for name in runs[0].rules
            for row in added_up([harm_rows(run, name, lambda token: tokenizer.decode([token])) for run in runs])]


def write_screen(args: SweepArguments, runs: dict[tuple, Experiment]) -> None:
    """OUT-screen.json and OUT-screen.md: what each setting would have done in the cycles of the lossless answers."""
    own = own_runs(args, runs)
    exact = summarise([record for run in own for record in run.results(EXACT)])
    found = {name: predict([trace for run in own for trace in run.traces(name)]) for name in own[0].rules}
    rows = [{"setting": name, **each, "tau_of_exact": each["tau"] / exact["tau"]} for name, each in found.items()]
    record = {"arguments": noted(args), "questions": len(own[0].questions), "exact": exact, "rows": rows}
    table = markdown({
        "setting": row["setting"], "tau": f"{row['tau']:.3f}", "of exact's": f"{row['tau_of_exact']:.3f}",
        "nats/token": "" if row["cost"] is None else f"{row['cost']:.4f}",
        "answers that change, at most": percent(row["diverging"])} for row in rows)
    print(write_record(record_path(args.out, "-screen"), record, f"`exact`: tau {exact['tau']:.3f}\n\n{table}"))


def write_report(args: SweepArguments, runs: dict[tuple, Experiment]) -> None:
    """OUT.json, OUT.md and the pictures."""
    own = own_runs(args, runs)
    names = [*baseline_names(args), EXACT, *(each.name for each in lossless_samplings(args)), *own[0].rules]
    speeds = time_rows(list(timed_questions(args, own[0], names).values()), names)
    rows = setting_rows(args, runs, speeds)
    baselines = [{"setting": name, **speeds[name]} for name in baseline_names(args) if name in speeds]
    slower = {name: speeds[name]["seconds_per_answer"] / speeds[other]["seconds_per_answer"]
              for name, other in BARE.items() if other in speeds}
    match_baselines(rows)
    front = pareto(rows)
    for row in rows:
        row["front"] = row["setting"] in front
    record = {
        "arguments": noted(args), "prediction_errors": prediction_errors(rows),
        "questions": len(own[0].questions), "seeds": args.seeds, "temperature": args.temperature,
        "tree": own[0].model.describe_tree(args.tree, args.temperature),
        "dtype": str(own[0].model.target.dtype), "headline": headline(rows),
        "baselines_over_bare_calls": slower, "rows": rows, "baselines": baselines, "harm": all_harm_rows(own),
    }
    write_record(args.out, record, f"""\
{record['headline']}

{sweep_table(rows, baselines)}

## Right answers that fuzzy tokens cost

{harm_table(record['harm'])}

## Predictions

{prediction_text(record['prediction_errors'])}""")
    plot_sweep(record, record_path(args.out, ""))
    print(record["headline"])
    for name, ratio in slower.items():
        print(f"{name} takes {ratio:.3f} of a bare call's time" + (": NOT A FAIR BASELINE" if ratio > 1.05 else ""))
    print(sweep_table(rows, baselines))
