"""Speed-up of one answers file over another, with bootstrap intervals.

    python -m eval.speed fsd.jsonl plain.jsonl [--out eval/results/mt-bench-fsd]

Speed is new tokens over wall time, summed over the questions that both files answer; intervals are 95% percentiles over
resampled questions. tau = tokens per target forward; "same" is the share of questions whose answers are the baseline's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_fsd.cli.exits import exit_status
from eagle_fsd.experiments.records import record_path
from eval.mt_bench import read_answers
from eval.report.intervals import interval


@dataclass(frozen=True)
class Totals:
    """Per question: new tokens, seconds, answers, emitted tokens of verify forwards and their number."""

    tokens: np.ndarray
    seconds: np.ndarray
    emitted: np.ndarray
    forwards: np.ndarray

    @classmethod
    def of(cls, records: list[dict]) -> Totals:
        def total(name: str) -> np.ndarray:
            return np.array([sum(sum(choice[name]) for choice in record["choices"]) for record in records], float)

        lengths = [[n for choice in r["choices"] for n in choice.get("accept_lengths", [])] for r in records]
        return cls(total("new_tokens"), total("wall_time"), np.array([sum(n) for n in lengths], float),
                   np.array([len(n) for n in lengths], float))

    def speed(self, chosen: np.ndarray | slice) -> np.ndarray:
        """Tokens per second of the chosen questions [..., n]."""
        return self.tokens[chosen].sum(-1) / self.seconds[chosen].sum(-1)

    def tau(self) -> float:
        forwards = self.forwards.sum()
        return self.emitted.sum() / forwards if forwards else 1.0


def speed_rows(method: dict, baseline: dict, seed: int = 0) -> list[dict]:
    """One row per category and one for all, over questions in both files.

    Raises:
        ValueError: no question in common.
    """
    common = [i for i in method if i in baseline]
    if not common:
        raise ValueError("the two files have no question in common")
    categories: dict[str, list] = {}
    for i in common:
        categories.setdefault(method[i].get("category", "all questions"), []).append(i)
    groups = {**categories, "all": common} if len(categories) > 1 else {"all": common}
    rows = []
    for name, ids in groups.items():
        ours, theirs = Totals.of([method[i] for i in ids]), Totals.of([baseline[i] for i in ids])
        everything = slice(None)

        def speedup(chosen: np.ndarray | slice, ours: Totals = ours, theirs: Totals = theirs) -> np.ndarray:
            return ours.speed(chosen) / theirs.speed(chosen)

        low, high = interval(len(ids), speedup, seed)
        same = [[choice["turns"] for choice in method[i]["choices"]] ==
                [choice["turns"] for choice in baseline[i]["choices"]] for i in ids]
        rows.append({
            "category": name, "questions": len(ids), "tokens_per_second": float(ours.speed(everything)),
            "baseline_tokens_per_second": float(theirs.speed(everything)), "tau": float(ours.tau()),
            "speedup": float(speedup(everything)), "low": low, "high": high,
            "seconds_per_question": float(ours.seconds.mean()), "tokens_per_question": float(ours.tokens.mean()),
            "baseline_seconds_per_question": float(theirs.seconds.mean()),
            "baseline_tokens_per_question": float(theirs.tokens.mean()), "same": sum(same) / len(same),
        })
    return rows


def table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    lines = ["| category | questions | tokens/s | baseline | speed-up (95%) | tau | s/question | baseline | "
             "tokens/question | baseline | same |", "|---" * 11 + "|"]
    for row in rows:
        ends = f"{row['low']:.2f} to {row['high']:.2f}"
        lines.append(
            f"| {row['category']} | {row['questions']} | {row['tokens_per_second']:.1f} | "
            f"{row['baseline_tokens_per_second']:.1f} | {row['speedup']:.2f}x ({ends}) | "
            f"{row['tau']:.2f} | {row['seconds_per_question']:.2f} | {row['baseline_seconds_per_question']:.2f} | "
            f"{row['tokens_per_question']:.0f} | {row['baseline_tokens_per_question']:.0f} | {100 * row['same']:.0f}% |"
        )
    return "\n".join(lines)


def store(args: argparse.Namespace, rows: list[dict]) -> None:
    """The rows, and the environments and settings that `eval.mt_bench` noted beside both files."""
    notes = {"method": record_path(args.method, ".meta.json"), "baseline": record_path(args.baseline, ".meta.json")}
    about = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in notes.items() if path.is_file()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "rows": rows}, indent=1) + "\n"
    record_path(args.out, ".json").write_text(text, encoding="utf-8")
    made = "\n".join(f"- {name}: `{found['environment']['command']}` at {found['environment']['commit']}"
                     for name, found in about.items())
    page = f"# {record_path(args.out, '').name}\n\n{made}\n\n{table(rows)}\n"
    record_path(args.out, ".md").write_text(page, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", type=Path, help="answers of eval.mt_bench")
    parser.add_argument("baseline", type=Path, help="answers to compare with")
    parser.add_argument("--out", type=Path, help="write this .json and .md, with how the answers were made")
    args = parser.parse_args()

    def work() -> None:
        for path in (args.method, args.baseline):
            if not path.is_file():
                raise ValueError(f"{path} does not exist")
        rows = speed_rows(read_answers(args.method), read_answers(args.baseline))
        print(table(rows))
        if args.out is not None:
            store(args, rows)

    return exit_status("eval.speed", work, (ValueError,))


if __name__ == "__main__":
    sys.exit(main())
