"""`eagle-fsd calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checks import check_choice
from ..measure.promises import parse_promise
from .arguments import Loading, Measuring, RuleName, Tree
from .exits import check_counts


@dataclass(frozen=True)
class CalibrateCommand:
    """Find the fastest setting that keeps a promise on your prompts.

    Promises: accuracy_drop<=1% (prompts with answers), diverging<=1% (answers that differ from the lossless ones),
    kl<=0.02 (nats per token, sampling), speedup>=2.5 (over model.generate). The result is stored beside the head;
    generate(quality="accuracy_drop<=1%") uses it.

    Args:
        budget: the promise, such as "accuracy_drop<=1%".
        acceptance: rules to choose from.
        thresholds: to try; without them some for each rule.
        tree: size of the draft tree; without it the fastest that is known here.
        limit: use only the first prompts.
        timed: prompts that speed is measured on.
        run_code: allow programs of HumanEval and MBPP answers to be run.
        log: file of the answers; the same command goes on with it.
    """

    measuring: Measuring
    budget: str
    acceptance: tuple[RuleName, ...] = ("fsd",)
    thresholds: tuple[float, ...] | None = None
    tree: Tree = None
    limit: int | None = None
    timed: int = 24
    run_code: bool = False
    log: Path | None = None
    pair: Loading = Loading()

    def run(self) -> None:
        from ..acceptance import make_rule
        from ..data.files import only_writer
        from ..data.questions import read_questions
        from ..measure.calibrations import read_calibrations, store_calibration
        from ..measure.experiment import fingerprint
        from ..measure.search import DIALS, calibrate, check_promise

        given = self.measuring
        if not self.acceptance:
            raise ValueError(f"--acceptance needs a rule: {', '.join(DIALS)}")
        options = {name: value for name in ("divergence", "gate_threshold")
                   if (value := getattr(given, name)) is not None}
        if (self.thresholds or options) and len(self.acceptance) > 1:
            raise ValueError("--thresholds, --divergence and --gate-threshold are those of one rule: give one "
                             "--acceptance")
        first = {rule: rule.split("+")[0] for rule in self.acceptance}  # has the dial that is tried
        for rule in first.values():
            check_choice("--acceptance", rule, tuple(DIALS))
        promise = parse_promise(self.budget)
        check_counts(self, "limit")
        questions = read_questions(given.prompts)[: self.limit]
        dials = {rule: self.thresholds or DIALS[first[rule]] for rule in self.acceptance}
        rules = {rule: [make_rule(rule, t, **options) for t in thresholds] for rule, thresholds in dials.items()}
        check_promise(promise, questions, given.temperature, rules)
        out = given.directory(self.pair, "calibration.json")
        read_calibrations(out)
        record = self.log or out / f"calibration-{fingerprint(questions)}-{given.temperature:g}.log.jsonl"
        with only_writer(record):
            found = calibrate(
                self.pair.load(), questions, promise, record, dials=dials, options=options,
                temperature=given.temperature, max_new_tokens=given.max_new_tokens, seed=given.seed, tree=self.tree,
                timed=self.timed, prompts=str(given.prompts), run_code=self.run_code, report=print,
            )
            path = store_calibration(out, found)
        chosen = ", ".join(f"{name} {value}" for name, value in found.options.items())
        print(f"{found.promise}: {chosen}; {found.measured['speedup']:.2f}x model.generate, "
              f"{found.measured['time_of_exact']:.3f} of exact's time per answer; stored in {path}"
              f"{given.where_to_load()}")
