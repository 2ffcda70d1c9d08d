"""What a sweep's rows say: the front, the headline and its tables."""

from __future__ import annotations

from eagle_fsd.measure.experiment import EXACT
from eagle_fsd.measure.statistics import fixed_sequence
from eval.report.tables import markdown, percent, span

FEW = 8  # settings that all go into the short table
MARGIN = 0.01  # accuracy that counts as equal: the one-sided 95% bound of the drop is at most this


def family_of(setting: str) -> str:
    """The rule whose thresholds a setting is among; a guard, and each dial of a gate, makes a rule of its own."""
    rule, _, *more = setting.split(" ")
    return " ".join([rule, *more])


def by_rule(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows with a threshold by `family_of` their setting."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if "threshold" in row:
            groups.setdefault(family_of(row["setting"]), []).append(row)
    return {name: sorted(found, key=lambda row: row["threshold"]) for name, found in groups.items()}


def pareto(rows: list[dict]) -> list[str]:
    """Settings that no other is both at least as accurate and faster than."""
    timed = [row for row in rows if "time_of_exact" in row]
    return [row["setting"] for row in timed if not any(
        other["accuracy"] >= row["accuracy"] and other["time_of_exact"] <= row["time_of_exact"]
        and (other["accuracy"], -other["time_of_exact"]) != (row["accuracy"], -row["time_of_exact"]) for other in timed
    )]


def harmless(rows: list[dict]) -> list[dict]:
    """Settings that are shown to lose at most MARGIN: each rule's thresholds from the smallest on, up to the first that
    fails, so that the choice among many costs no error (see `eagle_fsd.measure.statistics.fixed_sequence`)."""
    found = []
    for family in by_rule(rows).values():
        bounds = {row["setting"]: row["family_bound"] for row in family}
        passed = fixed_sequence(list(bounds), lambda name, bounds=bounds: bounds[name] <= MARGIN)
        found += [row for row in family if row["setting"] in passed]
    return found


def headline(rows: list[dict]) -> str:
    """Speed at equal accuracy, in a few sentences."""
    fuzzy = [row for row in rows if "threshold" in row and "time_of_exact" in row]
    if not fuzzy:
        return "Nothing was timed."
    equal = [row for row in harmless(rows) if "time_of_exact" in row]
    chosen = min(equal or fuzzy, key=lambda row: row["time_of_exact"])
    low, high = chosen["time_of_exact_interval"]
    time = (f"`{chosen['setting']}` takes {chosen['time_of_exact']:.2f} of `exact`'s time per finished answer "
            f"(95% interval {low:.2f} to {high:.2f}, not corrected for the choice)")
    told = f"its accuracy differs by {0 - 100 * chosen['drop']:+.1f} points, with a loss of at most " \
           f"{100 * chosen['family_bound']:.1f} (one-sided 95% bound)"
    forwards = f"over all answers it takes {forwards_of_exact(chosen, rows):.3f} of `exact`'s forwards of the target"
    start = "At equal accuracy (a loss of at most one point) the fastest setting," if equal else \
        "No setting is shown to lose at most one point of accuracy. The fastest one,"
    text = f"{start} {time}; {forwards}; {told}."
    for key, by in (("matched", "temperature"), ("matched_top_p", "top_p")):
        if key in chosen:
            found = chosen[key]
            name = by.replace("_", "-")
            text += (f" Lossless decoding of the same log-probability per token ({name} {found[by]:.2f}) "
                     f"takes {found['time_of_exact']:.2f} at {100 * found['accuracy']:.1f}% accuracy, against "
                     f"{100 * chosen['accuracy']:.1f}%.")
    return text


def forwards_of_exact(row: dict, rows: list[dict]) -> float:
    """Forwards of the target per answer over lossless decoding's, on all answers: what a few timings cannot blur."""
    exact = next(each for each in rows if each["setting"] == EXACT)
    return row["cycles_per_answer"] / exact["cycles_per_answer"]


def sweep_table(rows: list[dict], baselines: list[dict]) -> str:
    """All settings in Markdown. tau = tokens per target forward."""
    return markdown([*(_sweep_cells(row, rows) for row in rows), *(
        {"setting": row["setting"], **_speed_cells(row), "tokens/answer": f"{row['timed_tokens']:.0f}"}
        for row in baselines)])


def _sweep_cells(row: dict, rows: list[dict]) -> dict[str, str]:
    mark = "**" if row.get("front") else ""
    drops = span([100 * end for end in row["drop_interval"]], 1)
    return {
        "setting": f"{mark}{row['setting']}{mark}", "accuracy": percent(row["accuracy"], 1),
        "drop (95%)": f"{100 * row['drop']:.1f} ({drops})", "bound": f"{100 * row['drop_bound']:.1f}",
        "forwards of exact": f"{forwards_of_exact(row, rows):.3f}", **_speed_cells(row), "tau": f"{row['tau']:.2f}",
        "tokens/answer": f"{row['tokens_per_answer']:.0f}", "= lossless": percent(1 - row["differing"]),
        "fuzzy": percent(row["fuzzy_share"], 1), "p < 0.2 max p, per 1000": f"{row['low_per_thousand']:.1f}",
        "log p/token": f"{row['logprob_per_token']:.3f}",
        "KL/token": "" if row["kl_per_token"] is None else f"{row['kl_per_token']:.4f}",
        "repeated 4-grams": percent(row["repetition"], 1), "cut off": percent(row["cut_off"], 1),
    }


def _speed_cells(row: dict) -> dict[str, str]:
    """Empty where the setting was not timed."""
    if "time_of_exact" not in row:
        return dict.fromkeys(("time of exact (95%)", "s/answer", "tokens/s", "vs HF"), "")
    return {"time of exact (95%)": f"{row['time_of_exact']:.2f} ({span(row['time_of_exact_interval'])})",
            "s/answer": f"{row['seconds_per_answer']:.3f}", "tokens/s": f"{row['tokens_per_second']:.0f}",
            "vs HF": f"{row['speedup']:.2f}x" if "speedup" in row else ""}


def front_table(record: dict) -> str:
    """Baselines, lossless decoding and the settings on the Pareto front; of few settings all."""
    timed = [row for row in record["rows"] if "time_of_exact" in row]
    shown = [row for row in timed if len(timed) <= FEW or row["front"] or "threshold" not in row]
    return markdown({
        "setting": row["setting"], "accuracy": percent(row["accuracy"], 1) if "accuracy" in row else "",
        "bound of the loss": f"{100 * row['drop_bound']:.1f}" if "drop_bound" in row else "",
        "forwards of exact": f"{forwards_of_exact(row, record['rows']):.2f}" if "cycles_per_answer" in row else "",
        "s/answer": f"{row['seconds_per_answer']:.3f}", "time of exact": f"{row['time_of_exact']:.2f}",
        "tokens/s": f"{row['tokens_per_second']:.0f}",
        **({"vs model.generate": f"{row['speedup']:.2f}x"} if "speedup" in row else {}),
        "tau": f"{row['tau']:.2f}" if "tau" in row else "",
        "tokens/answer": f"{row.get('tokens_per_answer', row['timed_tokens']):.0f}",
        "fuzzy tokens": percent(row["fuzzy_share"], 1) if "fuzzy_share" in row else "",
    } for row in [*record["baselines"], *shown])
