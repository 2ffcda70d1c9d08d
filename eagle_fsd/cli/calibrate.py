"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..measure.settings import REFERENCE, CalibrationOptions, QuestionOptions, read_settings
from ..utils.checks import require_number
from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(CalibrationOptions, QuestionOptions):
    """Compare the speed and accuracy of rules and thresholds with exact decoding on your prompts.

    Answers every prompt exactly and with each setting, and reports speed, time per answer, acceptance length, and the
    share of unchanged text. For prompts with answers (or HumanEval, MBPP, GSM8K, IFEval) it also reports accuracy, and
    recommends the fastest setting that loses at most --points of it, if there is one. It changes no default: pass the
    threshold to generate yourself. --batch saves time on many questions: all of them count for accuracy, --timed ones
    for speed. After an interruption, the same command resumes.
    """

    questions: Annotated[tuple[Path, ...], tyro.conf.arg(aliases=["--prompts"])]
    tree: Tree = None
    out: Path = Path("calibration")
    pair: Loading = Loading()

    def run(self) -> None:
        from ..measure.comparison import compare_settings
        from ..measure.grading import check_gradable

        check_counts(self, "per_category", "limit", "max_new_tokens", "batch", "timed", "repeats", "seeds")
        require_number("--seeds", self.seeds, "1 at temperature 0, where all seeds give the same answers",
                       lambda seeds: seeds == 1 or self.temperature > 0)
        if not self.settings:
            raise ValueError(f"--settings needs at least one besides {REFERENCE}, with which it is compared")
        read_settings(self.settings)
        require_number("--batch", self.batch, "1 with --drafter-alone, which answers alone",
                       lambda batch: batch == 1 or not self.drafter_alone)
        questions = self.chosen_questions()
        check_gradable(questions, self.run_code)
        print(compare_settings(self.pair.load(self.tree), questions, self))
