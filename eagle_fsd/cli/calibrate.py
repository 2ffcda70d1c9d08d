"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..measure.settings import ComparisonOptions, read_settings
from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(ComparisonOptions):
    """What rules and thresholds buy and cost on your prompts, beside exact.

    Answers every prompt exactly and under each setting, in turn, and says speed, time per answer, acceptance length and
    how much of the text stays the same; of prompts with answers (or HumanEval, MBPP, GSM8K, IFEval) also accuracy, and
    the fastest setting that is shown to lose no more than --points of it, if there is one. Nothing is set: give the
    threshold to generate yourself. The same command goes on where it was stopped.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval, MBPP, IFEval.
        points: of accuracy, that a recommended setting may lose at most.
        limit: use only the first prompts.
    """

    prompts: Path
    points: float = 1.0
    limit: int | None = None
    tree: Tree = None
    out: Path = Path("calibration")
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.questions import read_questions
        from ..measure.comparison import compare_settings
        from ..measure.grading import check_gradable

        check_counts(self, "limit", "max_new_tokens", "repeats")
        read_settings(self.settings)
        questions = read_questions(self.prompts)[: self.limit]
        check_gradable(questions, self.run_code)
        print(compare_settings(self.pair.load(), questions, self, points=self.points))
