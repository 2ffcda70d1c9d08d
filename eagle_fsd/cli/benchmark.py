"""`eagle-fsd benchmark`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import UseAppendAction

from ..measure.settings import BenchmarkOptions, QuestionOptions, read_forms, read_settings
from .arguments import Loading, Tree
from .exits import check_counts


@dataclass(frozen=True, kw_only=True)
class BenchmarkCommand(BenchmarkOptions, QuestionOptions):
    """Compare speed, length and quality of answers with model.generate, prompt lookup, plain decoding, other engines.

    Answers MT-Bench, Spec-Bench, HumanEval, GSM8K, MBPP or your prompts with all methods in turn, and reports what
    Spec-Bench's leaderboard has, with intervals. After an interruption, the same command resumes.
    """

    tree: Tree = None
    endpoints: UseAppendAction[tuple[str, ...]] = ()
    out: Path = Path("benchmark")
    pair: Loading = Loading()

    def run(self) -> None:
        check_counts(self, "max_new_tokens", "per_category", "limit", "runs", "rows")
        check_counts(self, "warm_up", least=0)
        read_settings(self.settings)
        forms = read_forms(self.also)
        if self.rows > 1 and self.endpoints:
            raise ValueError(f"--rows {self.rows} is for batches in this process: leave out --endpoints (eval.clients "
                             "asks several at a time)")
        questions = self.chosen_questions()

        from ..measure.benchmark import benchmark
        from ..measure.endpoints import read_endpoints
        from ..measure.grading import check_gradable

        check_gradable(questions, self.run_code)
        endpoints = read_endpoints(self.endpoints)
        model = self.pair.load(self.tree)
        others = {form: replace(self.pair, **changed).load(self.tree) for form, changed in forms.items()}
        print(benchmark(model, others, endpoints, questions, self))
