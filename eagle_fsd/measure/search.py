"""Find the fastest setting of acceptance that keeps a promise on the user's prompts."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..acceptance import Rule, make_rule
from ..checks import require_integer
from ..data.questions import Question
from ..drafting.config import TreeConfig
from ..measure.calibrations import Calibration
from ..measure.promises import Promise, parse_promise
from ..measure.statistics import CONFIDENCE, drop_bound, drop_is_within, fewest_answers, fixed_sequence, mean_bound
from ..measure.traces import predict
from ..models.placement import weights_digest
from ..pair import EagleModel
from .experiment import EXACT, Experiment, settings_of, spread
from .methods import Method, engine, hf_generate, interleaved
from .summaries import paired, summarise

log = logging.getLogger(__name__)
BASELINE = "model.generate"
FEWEST_FOR_A_MEAN = 30  # answers: means of fewer are too far from normal
LOW_ACCURACY = 0.2
# Thresholds that are tried for a rule, from the safest on.
DIALS: dict[str, tuple[float, ...]] = {
    "fsd": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "tilt": (0.1, 0.25, 0.5, 1.0, 1.5, 2.0),
    "lenience": (0.1, 0.25, 0.5, 1.0, 2.0),
    "fly": (0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
    "regret": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "judge": (0.05, 0.1, 0.2, 0.3, 0.5),
    "relaxed": (0.1, 0.25, 0.5, 1.0, 2.0),
    "prose": (0.5, 1.0, 2.0, 4.6),
    "afterword": (0.5, 1.0, 2.0, 4.6),
    "typical": (0.0, 0.25, 0.5, 0.75, 0.9),
    "fsd_paper": (0.02, 0.05, 0.1, 0.2, 0.3),
}


def check_promise(
    promise: Promise, questions: Sequence[Question], temperature: float, rules: Mapping[str, Sequence[Rule]]
) -> None:
    """Refuse what cannot be found out with these prompts, before anything is generated.

    Raises:
        ValueError: too few prompts, prompts without answers, or a promise that has no meaning here.
    """
    count, needed = len(questions), 2
    if promise.kind == "accuracy_drop":
        count = sum(question.answer is not None or question.tests is not None for question in questions)
        if not count:
            raise ValueError(f"{promise} needs prompts with answers to compare with, and there are none")
    if promise.kind in ("accuracy_drop", "diverging"):
        needed = fewest_answers(promise.limit, family_confidence(len(rules)))
    if promise.kind == "kl":
        needed = FEWEST_FOR_A_MEAN
        if temperature == 0:
            raise ValueError(f"{promise} is a promise about sampling; at temperature 0 take accuracy_drop or diverging")
        unknown = [rule for family in rules.values() for rule in family if not rule.knows_kl]
        if unknown:
            raise ValueError(f"{promise} needs rules whose KL is known; that of {unknown[0]!r} is not")
    if count < needed:
        raise ValueError(f"{count} prompts are too few to tell {promise}: at least {needed} are needed")


def family_confidence(rules: int) -> float:
    """Of each rule's sequence of tests, so that all together are wrong no more often than CONFIDENCE says."""
    return 1 - (1 - CONFIDENCE) / max(1, rules)


def check_exact(experiment: Experiment, promise: Promise) -> float:
    """The accuracy of lossless decoding.

    Raises:
        ValueError: it is so low that there is nothing to lose.
    """
    accuracy = summarise(experiment.results(EXACT))["accuracy"]
    if accuracy <= promise.limit:
        raise ValueError(f"lossless decoding answers {100 * accuracy:.1f}% of the prompts rightly: there is nothing to "
                         f"lose, and {promise} would say nothing; look at the answers and at how they are compared")
    if accuracy < LOW_ACCURACY:
        log.warning("lossless decoding answers only %.0f%% rightly: a drop in points says little", 100 * accuracy)
    return accuracy


def check_setting(experiment: Experiment, promise: Promise, name: str, confidence: float) -> dict[str, Any]:
    """Whether a setting keeps a promise about quality, and by what."""
    experiment.answer(name)
    records = experiment.results(name)
    row = {"setting": name, "predicted": predict(experiment.traces(name)), "measured": summarise(records)}
    if promise.kind == "kl":
        over = [record["kl"] - promise.limit * (record["cycles"] + record["accepted"]) for record in records]
        emitted = statistics.fmean(record["cycles"] + record["accepted"] for record in records)
        bound = mean_bound(over, confidence)
        return {**row, "bound": promise.limit + bound / emitted, "passes": bound <= 0}
    if promise.kind == "diverging":
        lost, gained, count = sum(record["differs_at"] is not None for record in records), 0, len(records)
    else:
        lost, gained, count = paired(records, experiment.results(EXACT))
    return {**row, "lost": lost, "gained": gained, "bound": drop_bound(lost, gained, count, confidence),
            "passes": drop_is_within(lost, gained, count, promise.limit, confidence)}


def check_families(
    experiment: Experiment, promise: Promise, families: Mapping[str, Mapping], report: Callable[[str], object]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The row of every setting that was tested, and those that keep a promise about quality."""
    curve: dict[str, dict[str, Any]] = {}
    confidence = family_confidence(len(families))

    def passes(name: str) -> bool:
        curve[name] = check_setting(experiment, promise, name, confidence)
        report(f"{name}: {'keeps' if curve[name]['passes'] else 'does not keep'} {promise} "
               f"(bound {curve[name]['bound']:.4g})")
        return curve[name]["passes"]

    return curve, [name for family in families.values() for name in fixed_sequence(list(family), passes)]


def time_settings(experiment: Experiment, names: Sequence[str], prompts: int, repeats: int) -> dict[str, dict]:
    """tokens/s, seconds per answer and speed-ups of settings, interleaved with exact and `model.generate`.

    The prompts are spread over the questions, and only their first turns are timed. `surely_faster`: the one-sided 95%
    bound of the time that a setting takes more than exact, prompt by prompt, lies below 0.
    """
    model, sampling = experiment.model, {"temperature": experiment.temperature, "seed": experiment.seed}
    methods: dict[str, Method] = {BASELINE: hf_generate(model, **sampling)}
    for name in (EXACT, *names):
        rule = EXACT if name == EXACT else experiment.rules[name]
        methods[name] = engine(model, acceptance=rule, tree=experiment.tree, **sampling)
    chats = [[{"role": "user", "content": question.turns[0]}] for question in spread(experiment.questions, prompts)]
    answers = interleaved(methods, chats, experiment.max_new_tokens, repeats)
    rows = {}
    for name, given in answers.items():
        seconds, tokens = sum(a.seconds for a in given), sum(len(a.token_ids) for a in given)
        more = [ours.seconds - exact.seconds for ours, exact in zip(given, answers[EXACT], strict=True)]
        rows[name] = {"tokens_per_second": tokens / seconds, "seconds_per_answer": seconds / len(given),
                      "surely_faster": mean_bound(more) < 0}
    for row in rows.values():
        row["speedup"] = row["tokens_per_second"] / rows[BASELINE]["tokens_per_second"]
        row["time_of_exact"] = row["seconds_per_answer"] / rows[EXACT]["seconds_per_answer"]
    return rows


def calibrate(
    model: EagleModel, questions: Sequence[Question], promise: str | Promise, record: Path, *,
    dials: Mapping[str, Sequence[float]] | None = None, options: Mapping[str, Any] | None = None,
    temperature: float = 0.0, max_new_tokens: int = 256, seed: int = 0, tree: TreeConfig | None = None,
    timed: int = 24, repeats: int = 2, prompts: str = "", run_code: bool = False,
    report: Callable[[str], object] = lambda line: None,
) -> Calibration:
    """The fastest setting that keeps a promise; lossless decoding where none is surely faster.

    For a promise about quality every rule's thresholds are tested from the safest on (`fixed_sequence`), on answers
    that were really generated; the ones that passed are then timed. For a speed-up the smallest threshold that reaches
    it is taken, of all rules the one that changes the fewest answers.

    Args:
        record: file of the answers; the same call goes on with it.
        dials: thresholds by rule. options: further arguments of `make_rule` for all.
        timed, repeats: prompts and runs of each for the timing. report: gets a line per setting.

    Raises:
        ValueError: see `check_promise`; or a speed-up that no setting reaches.
    """
    promise = parse_promise(promise) if isinstance(promise, str) else promise
    dials = dict(dials or {"fsd": DIALS["fsd"]})
    for name, value in (("timed", timed), ("repeats", repeats)):
        require_integer(name, value, 1)
    families = {rule: settings_of({rule: sorted(thresholds)}, **(options or {})) for rule, thresholds in dials.items()}
    settings = {name: given for family in families.values() for name, given in family.items()}
    check_promise(promise, questions, temperature, {
        rule: [make_rule(**given) for given in family.values()] for rule, family in families.items()})
    experiment = Experiment(model, questions, settings, record, temperature=temperature, max_new_tokens=max_new_tokens,
                            seed=seed, tree=tree, run_code=run_code)
    experiment.observe()
    accuracy = check_exact(experiment, promise) if promise.kind == "accuracy_drop" else None
    if promise.kind == "speedup":
        curve = {name: {"setting": name, "predicted": predict(experiment.traces(name))} for name in settings}
        candidates = list(settings)
    else:
        curve, candidates = check_families(experiment, promise, families, report)
    times = time_settings(experiment, candidates, timed, repeats)
    for name in candidates:
        curve[name]["time"] = times[name]
        report(f"{name}: {times[name]['speedup']:.2f}x {BASELINE}, {times[name]['time_of_exact']:.3f} of exact's time")
    if promise.kind == "speedup":
        chosen = _reaching(promise, families, curve, times)
    else:
        faster = [name for name in candidates if times[name]["surely_faster"]]
        chosen = min(faster, key=lambda name: times[name]["seconds_per_answer"], default=EXACT)
    measured = {**times[chosen], **{k: curve.get(chosen, {}).get(k) for k in ("bound", "lost", "gained")},
                "exact_accuracy": accuracy}
    assert model.draft is not None
    return Calibration(
        promise=str(promise), options=settings.get(chosen, {"rule": EXACT}), temperature=float(temperature),
        target=model.target.digest(), head=weights_digest(model.draft), dtype=str(model.target.dtype),
        tree=model.tree_name(tree), prompts=prompts, answers=len(questions),
        measured={name: value for name, value in measured.items() if value is not None}, curve=list(curve.values()),
    )


def _reaching(promise: Promise, families: Mapping, curve: Mapping, times: Mapping) -> str:
    """The setting that reaches a speed-up and changes the fewest answers."""
    if times[EXACT]["speedup"] >= promise.limit:
        return EXACT
    first = [next((name for name in family if times[name]["speedup"] >= promise.limit), None)
             for family in families.values()]
    reached = [name for name in first if name is not None]
    if not reached:
        best = max(times, key=lambda name: times[name]["speedup"])
        raise ValueError(f"no setting reaches {promise}; the fastest is {best} at {times[best]['speedup']:.2f}x")
    return min(reached, key=lambda name: curve[name]["predicted"]["diverging"])
