"""The stage `times` of a sweep: all settings and baselines on some questions, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle_fsd.data.files import append_lines, read_lines
from eagle_fsd.data.gguf import target_source
from eagle_fsd.data.progress import Progress
from eagle_fsd.data.questions import converse
from eagle_fsd.heads.catalogue import find_pair
from eagle_fsd.measure.experiment import EXACT, Experiment, fingerprint, meaning, spread
from eagle_fsd.measure.methods import Answer, Method, bare_generate, engine, hf_generate, interleaved
from eagle_fsd.measure.search import BASELINE
from eagle_fsd.models.loading import load_target
from eval.benchmark import LOOKUP
from eval.report.intervals import ratio_interval

if TYPE_CHECKING:
    from eval.sweep import SweepArguments

ASSISTED, PLAIN = "assisted", "plain"
BARE = {BASELINE: "model.generate, bare call", LOOKUP: "prompt lookup, bare call"}  # greedy only


@dataclass(frozen=True)
class Sampling:
    """How freely lossless decoding samples; top_p 1 is the whole distribution."""

    temperature: float
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """Of a baseline."""
        way = f"temperature {self.temperature:g}" if self.top_p == 1 else f"top-p {self.top_p:g}"
        return f"{EXACT} at {way}"

    @property
    def short(self) -> str:
        """In names of files."""
        return f"{self.temperature:g}" + ("" if self.top_p == 1 else f"-top{self.top_p:g}")


def lossless_samplings(args: SweepArguments) -> list[Sampling]:
    """The lossless baselines when sampling: lower temperatures, and truncation."""
    return [*map(Sampling, args.cooler), *(Sampling(args.temperature, top_p) for top_p in args.top_p)]


def baseline_names(args: SweepArguments) -> list[str]:
    """Of what is timed beside the settings."""
    if not args.baselines:
        return []
    bare = list(BARE.values()) if args.temperature == 0 else []
    return [BASELINE, LOOKUP, *bare, *([ASSISTED] if args.assistant else []), PLAIN]


def timed_methods(args: SweepArguments, own: Experiment) -> dict[str, Method]:
    """All settings and baselines."""
    model = own.model
    sampling = {"temperature": args.temperature, "seed": args.seeds[0]}
    methods = {EXACT: engine(model, acceptance=EXACT, tree=args.tree, **sampling)}
    if args.baselines:
        methods |= {BASELINE: hf_generate(model, **sampling),
                    LOOKUP: hf_generate(model, **sampling, prompt_lookup_num_tokens=10),
                    PLAIN: engine(model, plain=True, acceptance=EXACT, **sampling)}
    if args.baselines and args.temperature == 0:
        named = find_pair(args.pair.target, args.pair.draft)[0]
        place = (target_source(named), model.target.dtype, model.target.device)
        methods[BARE[BASELINE]] = bare_generate(*place)
        methods[BARE[LOOKUP]] = bare_generate(*place, prompt_lookup_num_tokens=10)
    if args.baselines and args.assistant:
        assistant, _ = load_target(args.assistant, dtype=model.target.dtype, device=model.target.device)
        methods[ASSISTED] = hf_generate(model, **sampling, assistant=assistant)
    for less in lossless_samplings(args):
        methods[less.name] = engine(model, acceptance=EXACT, tree=args.tree, **asdict(less), seed=args.seeds[0])
    for name, rule in own.rules.items():
        methods[name] = engine(model, acceptance=rule, tree=args.tree, **sampling)
    return methods


def conversation(method: Method) -> Method:
    """The method on all turns of a question, as one answer."""
    def answer(turns: object, max_new_tokens: int) -> Answer:
        answers = converse(lambda chat: method(chat, max_new_tokens), turns)
        tokens = [token for each in answers for token in each.token_ids]
        return Answer(sum(each.seconds for each in answers), tokens, answers[-1].text)

    return answer


def times_path(own: Experiment) -> Path:
    """The file of an experiment's times, beside its answers."""
    return own.log.with_name(f"times-{own.log.stem}.jsonl")


def times_about(args: SweepArguments, own: Experiment) -> dict:
    """What all times of a file depend on, beside what its answers do; its first line."""
    loaded = {name: getattr(args.pair, name) for name in ("device_map", "attn_implementation", "compile")}
    return {"device": str(own.model.target.device), **loaded, "assistant": args.assistant, "repeats": args.repeats}


def read_times(args: SweepArguments, own: Experiment) -> list[dict]:
    """The other lines of an experiment's times.

    Raises:
        ValueError: they were timed with the models loaded otherwise, or with other repeats.
    """
    about = times_about(args, own)
    begun, *lines = read_lines(times_path(own)) or [about]
    changed = [name for name, value in about.items() if name not in begun or begun[name] != value]
    if changed:
        raise ValueError(f"{times_path(own)} was begun with other {', '.join(changed)}; delete it or choose another "
                         "--work")
    return lines


def time_methods(args: SweepArguments, own: Experiment) -> None:
    """Add a line per question: seconds and tokens of each method, with the seeds of the first experiment's answers."""
    path = times_path(own)
    methods = {name: conversation(method) for name, method in timed_methods(args, own).items()}
    done = timed_questions(args, own, list(methods))
    rules = {name: meaning(rule) for name, rule in own.rules.items()}
    if not read_lines(path):
        append_lines(path, [times_about(args, own)])
    warm_up = 2
    for number, question in enumerate(Progress(spread(own.questions, args.timed), desc="timed", unit="question")):
        if question.id not in done:
            answers = interleaved(methods, [question.turns], args.max_new_tokens, args.repeats, warm_up=warm_up,
                                  start=number)
            warm_up = 0
            append_lines(path, [{"question": question.id, "asked": fingerprint([question]), "rules": rules, "methods": {
                name: {"seconds": a.seconds, "tokens": len(a.token_ids)} for name, (a,) in answers.items()}}])


def timed_questions(args: SweepArguments, own: Experiment, names: Sequence[str]) -> dict[int | str, dict]:
    """By question, the seconds and tokens of each method; of a question that was timed twice the last.

    A line does not count where a name meant another rule, as "fsd 0.1 guarded" does with another guard.
    """
    known = {(question.id, fingerprint([question])) for question in own.questions}
    meant = {name: meaning(own.rules[name]) for name in names if name in own.rules}
    return {line["question"]: line["methods"] for line in read_times(args, own)
            if line["methods"].keys() >= set(names) and line["rules"].items() >= meant.items()
            and (line["question"], line.get("asked")) in known}


def time_rows(lines: Sequence[dict], names: Sequence[str]) -> dict[str, dict]:
    """Speed of each method over the timed questions, with 95% bootstrap intervals of its ratios."""
    if not lines:
        return {}
    seconds = {name: np.array([line[name]["seconds"] for line in lines]) for name in names}
    tokens = {name: np.array([line[name]["tokens"] for line in lines]) for name in names}
    rows = {}
    for name in names:
        rate = tokens[name].sum() / seconds[name].sum()
        rows[name] = {
            "seconds_per_answer": seconds[name].mean(), "tokens_per_second": rate, "timed": len(lines),
            "time_of_exact": seconds[name].sum() / seconds[EXACT].sum(),
            "time_of_exact_interval": ratio_interval(seconds[name], seconds[EXACT]),
            "timed_tokens": tokens[name].mean(),
        }
        if BASELINE in names:
            rows[name]["speedup"] = rate / (tokens[BASELINE].sum() / seconds[BASELINE].sum())
    return rows
