"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from ..measure.settings import REFERENCE, CalibrationOptions, QuestionOptions, read_forms, read_settings
from ..options.generate import GenerateOptions
from ..utils.checks import require_number
from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(CalibrationOptions, QuestionOptions):
    """Choose a rule and a threshold: compare their speed and accuracy with exact decoding on your prompts.

    Answers every prompt exactly and with each setting, and reports what `benchmark` does. For prompts with answers (or
    HumanEval, MBPP, GSM8K, IFEval) it also recommends the fastest setting that loses at most --points of accuracy, if
    there is one. It changes no default: pass the threshold to generate yourself. --batch saves time on many questions:
    all of them count for accuracy, --timed ones for speed. After an interruption, the same command resumes.
    """

    questions: Annotated[tuple[Path, ...], tyro.conf.arg(aliases=["--prompts"])]
    tree: Tree = None
    out: Path = Path("calibration")
    pair: Loading = Loading()

    def run(self) -> None:
        from ..measure.comparison import compare_settings
        from ..measure.grading import check_gradable

        check_counts(self, "per_category", "limit", "max_new_tokens", "batch", "timed", "runs")
        if not (self.settings or self.also):
            raise ValueError(f"--settings needs at least one besides {REFERENCE}, with which it is compared")
        for name, setting in read_settings(self.settings).items():
            if self.batch > 1 and "tree" in setting and not GenerateOptions(**setting).lossless:
                raise ValueError("--batch: a batch has one tree for all fuzzy settings: set --tree, and leave it out "
                                 f"of {name!r}, or answer alone (--batch 1)")
        require_number("--batch", self.batch, "1 with --drafter-alone, which answers alone",
                       lambda batch: batch == 1 or not self.drafter_alone)
        questions, forms = self.chosen_questions(), read_forms(self.also)
        check_gradable(questions, self.run_code)
        model = self.pair.load(self.tree)
        others = {form: replace(self.pair, **changed).load(self.tree) for form, changed in forms.items()}
        print(compare_settings(model, others, questions, self))
