"""What rules and thresholds cost and buy on tasks whose answers can be graded, paired against exact.

    python -m eval.quality --questions mbpp.jsonl gsm8k_test.jsonl --run-code --batch 16 --timed 24 \\
        --settings "fsd 0.3" "fsd 0.5" "fsd 0.5 head_guard=none" "relaxed 1.2" --out eval/results/quality

The comparison of `eagle-fsd calibrate`, for more questions: accuracy of all of them, answered in batches (--batch),
lossless settings without drafting; speed of --timed ones, answered alone and interleaved. A setting may also be
lossless with other sampling, such as "exact top_p=0.6". An interrupted run goes on. IFEval is graded by
lm-evaluation-harness, where it is installed.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_fsd.checks import require_number
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.measure.comparison import compare_settings
from eagle_fsd.measure.grading import CODE_END
from eagle_fsd.measure.settings import ComparisonOptions, read_settings
from eval.command import chosen_questions, run_command


@dataclass(frozen=True, kw_only=True)
class QualityArguments(ComparisonOptions):
    """What `eval.quality` tries.

    Args:
        questions: JSON lines with answers: HumanEval, MBPP, GSM8K, IFEval, or prompts.
        per_category: only the first questions of each category.
        points: of accuracy, that a recommended setting may lose at most.
        batch: questions that are answered together, all but the timed ones; 1: all are timed.
        timed: questions that are answered alone, interleaved, to time them.
        stop_after_code: answers end where their first fenced block does: what is timed is the program alone.
        seeds: answers to each question, of which accuracy is the mean; with --temperature above 0.
        tree: size of the draft tree; without it the fastest that is known here; in batches that for one.
    """

    questions: tuple[Path, ...]
    pair: Loading = Loading()
    per_category: int | None = None
    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5", "relaxed 1.2")
    points: float = 1.0
    max_new_tokens: int = 512
    tree: Tree = None
    batch: int = 1
    timed: int = 24
    stop_after_code: bool = False
    seeds: int = 1


def run(args: QualityArguments) -> None:
    check_counts(args, "per_category", "max_new_tokens", "batch", "timed", "repeats", "seeds")
    require_number("--seeds", args.seeds, "1 at temperature 0, where all would be the same",
                   lambda seeds: seeds == 1 or args.temperature > 0)
    read_settings(args.settings)
    questions = chosen_questions(args.questions, args.per_category, args.run_code)
    model, engine = args.pair.load(), nullcontext()
    if args.batch > 1:
        from eagle_fsd.batching.engine import Engine

        engine = Engine(model, max_rows=args.batch, max_waiting=args.batch, prefixes=0,
                        tree=args.tree or model.default_tree)
    with engine as joined:
        print(compare_settings(model, questions, args, points=args.points, timed=args.timed, joined=joined,
                               shared={"stop": CODE_END} if args.stop_after_code else {}, workers=args.batch,
                               seeds=args.seeds))


main = partial(run_command, "eval.quality", QualityArguments, run, stopped="stopped; the same command goes on")

if __name__ == "__main__":
    sys.exit(main())
