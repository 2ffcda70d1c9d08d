"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True)
class CalibrateCommand:
    """What rules and thresholds buy and cost on your prompts, beside exact.

    Answers every prompt exactly and under each setting, in turn, and says speed, time per answer, acceptance length and
    how much of the text stays the same; of prompts with answers (or HumanEval, MBPP, GSM8K, IFEval) also accuracy, and
    the fastest setting that is shown to lose no more than --points of it, if there is one. Nothing is set: give the
    threshold to generate yourself. The same command goes on where it was stopped.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval, MBPP, IFEval.
        settings: rules with their thresholds, and other options: "fsd 0.3" "fsd 0.5 head_guard=none" "tilt 1".
        points: of accuracy, that a recommended setting may lose at most.
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: of a turn.
        seed: of the sampling noise.
        tree: size of the draft tree; without it the fastest that is known here.
        limit: use only the first prompts.
        repeats: timed runs of each prompt, of which the median counts.
        run_code: allow programs of HumanEval and MBPP answers to be run.
        out: OUT.json, OUT.md and OUT.png are written, and OUT.answers.jsonl, which a stopped run goes on with.
    """

    prompts: Path
    settings: tuple[str, ...] = ("fsd 0.1", "fsd 0.3", "fsd 0.5")
    points: float = 1.0
    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0
    tree: Tree = None
    limit: int | None = None
    repeats: int = 1
    run_code: bool = False
    out: Path = Path("calibration")
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.questions import read_questions
        from ..measure.comparison import compare_settings, read_settings

        check_counts(self, "limit", "max_new_tokens", "repeats")
        settings = read_settings(self.settings)
        questions = read_questions(self.prompts)[: self.limit]
        print(compare_settings(
            self.pair.load(), questions, settings, self.out, points=self.points, temperature=self.temperature,
            max_new_tokens=self.max_new_tokens, seed=self.seed, tree=self.tree, repeats=self.repeats,
            run_code=self.run_code))
