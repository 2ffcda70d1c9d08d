"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..checks import require_number
from ..measure.settings import CalibrationOptions, QuestionOptions, read_settings
from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(CalibrationOptions, QuestionOptions):
    """What rules and thresholds buy and cost on your prompts, beside exact.

    Answers every prompt exactly and under each setting, in turn, and reports speed, time per answer, acceptance length
    and how much of the text stays the same; of prompts with answers (or HumanEval, MBPP, GSM8K, IFEval) also accuracy,
    and the fastest setting that is shown to lose no more than --points of it, if there is one. Nothing is set: give the
    threshold to generate yourself. Many questions take less time with --batch: all count for accuracy, --timed ones for
    speed. The same command goes on where it was stopped.
    """

    questions: Annotated[tuple[Path, ...], tyro.conf.arg(aliases=["--prompts"])]
    tree: Tree = None
    out: Path = Path("calibration")
    pair: Loading = Loading()

    def run(self) -> None:
        from ..measure.comparison import compare_settings
        from ..measure.grading import check_gradable

        check_counts(self, "per_category", "limit", "max_new_tokens", "batch", "timed", "repeats", "seeds")
        require_number("--seeds", self.seeds, "1 at temperature 0, where all would be the same",
                       lambda seeds: seeds == 1 or self.temperature > 0)
        read_settings(self.settings)
        questions = self.chosen_questions()
        check_gradable(questions, self.run_code)
        print(compare_settings(self.pair.load(), questions, self))
