"""The frontier: what every rule costs and buys at several thresholds, on tasks whose answers can be checked.

    python -m eval.sweep --tasks 300 --work runs/sweep --out eval/results/sweep-greedy
    torchrun --nproc_per_node 2 -m eval.sweep ... --stage answers                   # any number of processes
    python -m eval.sweep ... --stage times                                          # alone on the machine

Stage `screen`, which has to be asked for, answers all questions losslessly and predicts from the logged cycles what
each setting would do, to choose a few. Stage `answers` answers all questions losslessly, and again under every setting
that changes the answer (see `eagle_fsd.measure`); it may run beside other work. Stage `times` times all settings
and the baselines on the first `--timed` questions, interleaved. Stage `report` writes OUT.json, OUT.md and the plots.
An interrupted stage goes on.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.files import only_writer, save_atomically
from eagle_fsd.data.questions import Question
from eagle_fsd.drafting.config import Confidence, TreeConfig
from eagle_fsd.measure.experiment import EXACT, Experiment, settings_of
from eagle_fsd.measure.records import processes
from eagle_fsd.measure.search import DIALS
from eagle_fsd.serve.engine import steady_tree
from eval.command import run_command
from eval.questions import load_questions
from eval.sweep_report import own_runs, write_report, write_screen
from eval.sweep_times import Sampling, lossless_samplings, time_methods

STAGES = ("screen", "answers", "times", "report")
COOLER = (0.75, 0.5, 0.25, 0)  # shares of the temperature


@dataclass(frozen=True)
class SweepArguments:
    """What `eval.sweep` tries.

    Args:
        assistant: a smaller model of the same tokenizer, for assisted decoding.
        questions: JSON lines with answers; without them tasks of the generator.
        tasks: how many questions.
        task_seed: of the generated tasks.
        rules: with all their thresholds.
        settings: only these, such as "fsd 0.1" "tilt 0.5"; with the dials of gates behind: "fsd+judge 0.3 0.1".
        head_guard: try fsd with this head guard as well.
        temperature: of all settings.
        cooler: lossless at these as well; without it at four lower ones.
        top_p: lossless from these nuclei as well.
        seeds: of the sampled answers.
        max_new_tokens: of a turn.
        tree: of all settings; without it the fastest for exact, which is then kept.
        batch: questions that are answered together; in half precision what differs includes ties then. What is timed
            is answered alone.
        timed: questions that are timed.
        repeats: timed runs per question, of which the median counts.
        baselines: time model.generate, prompt lookup and plain decoding as well.
        run_code: allow programs of HumanEval and MBPP answers to be run.
        stage: what to do.
        work: folder of answers and times.
        out: files for what is found, without suffix.
    """

    pair: Loading = Loading()
    assistant: str | None = None
    questions: Path | None = None
    tasks: int = 300
    task_seed: int = 21
    # A judge stands beside few heads.
    rules: tuple[Literal[tuple(DIALS)], ...] = tuple(rule for rule in DIALS if rule != "judge")
    settings: tuple[str, ...] = ()
    head_guard: float | None = None
    temperature: float = 0.0
    cooler: tuple[float, ...] | None = None
    top_p: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    max_new_tokens: int = 256
    tree: Tree = None
    batch: int = 1
    timed: int = 40
    repeats: int = 1
    baselines: bool = True
    run_code: bool = False
    stage: tuple[Literal[STAGES], ...] = STAGES[1:]
    work: Path = Path("runs/sweep")
    out: Path = Path("eval/results/sweep")


def checked(args: SweepArguments) -> SweepArguments:
    """With the lower temperatures.

    Raises:
        ValueError: an option that would only fail after the models are loaded.
    """
    check_counts(args, "tasks", "batch", "timed", "repeats", "max_new_tokens")
    if args.cooler is None:
        args = replace(args, cooler=tuple(args.temperature * share for share in COOLER) if args.temperature else ())
    if args.temperature < 0 or any(not 0 <= t < args.temperature for t in args.cooler):
        raise ValueError(f"--temperature must be at least 0 and --cooler below it, got {args.temperature} and "
                         f"{list(args.cooler)}")
    if any(not 0 < p < 1 for p in args.top_p) or args.top_p and args.temperature == 0:
        raise ValueError(f"--top-p must be between 0 and 1, and takes a --temperature, got {list(args.top_p)} and "
                         f"{args.temperature}")
    if args.temperature == 0 and len(args.seeds) > 1:
        raise ValueError(f"greedy decoding has no seeds, got {list(args.seeds)}")
    for name in ("rules", "seeds", "stage"):
        if not getattr(args, name):
            raise ValueError(f"--{name} takes at least one value")
    if processes(args.pair.device).num_processes > 1 and args.stage != ("answers",):
        raise ValueError("several processes can only share --stage answers; the others are for one process")
    for options in chosen_settings(args).values():
        make_rule(**options)
    return args


def parse_setting(text: str) -> tuple[str, dict]:
    """Name and `make_rule`'s arguments of a setting such as "fsd 0.1" or "fsd+judge 0.3 0.1".

    Raises:
        ValueError: no name, or other than one dial for the rule and one for each gate.
    """
    name, *words = text.split() or [""]
    try:
        dials = [float(word) for word in words]
    except ValueError:
        dials = []
    if len(dials) != 1 + name.count("+"):
        raise ValueError('--settings takes a rule and a threshold, and one for each gate, such as "fsd 0.1" or '
                         f'"fsd+judge 0.3 0.1", got {text!r}')
    options = {"rule": name, "threshold": dials[0], "gate_threshold": dials[1:] or None}
    return " ".join([name, *(f"{dial:g}" for dial in dials)]), options


def chosen_settings(args: SweepArguments) -> dict[str, dict]:
    """The settings of the sweep: those asked for, else every rule with its thresholds."""
    if args.settings:
        return dict(map(parse_setting, args.settings))
    settings = settings_of({rule: DIALS[rule] for rule in args.rules})
    if args.head_guard is not None:
        guarded = settings_of({"fsd": DIALS["fsd"]}, head_guard=args.head_guard)
        settings |= {f"{name} guarded": options for name, options in guarded.items()}
    greedy = args.temperature == 0  # a rule that is exact throughout has nothing to show
    losses = {rule for rule in args.rules if not all(
        make_rule(**options).is_lossless(greedy) for options in settings.values() if options["rule"] == rule)}
    return {name: options for name, options in settings.items() if options["rule"] in losses}


def kept_tree(args: SweepArguments, model: eagle_fsd.EagleModel) -> TreeConfig:
    """The tree of all stages and processes: one that was chosen for this machine is kept in the work folder."""
    path = args.work / "tree.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["confidence"]:
            stored["confidence"] = Confidence(**{name: tuple(values) for name, values in stored["confidence"].items()})
        return TreeConfig(**stored)
    chosen = model.trees.of(make_rule(EXACT), args.temperature).tree if model.trees else None
    tree = steady_tree(model, args.batch) if args.batch > 1 else chosen or model.default_tree
    args.work.mkdir(parents=True, exist_ok=True)
    save_atomically(path, lambda part: part.write_text(json.dumps(asdict(tree)), encoding="utf-8"))
    return tree


def experiments(args: SweepArguments, model: eagle_fsd.EagleModel, questions: list) -> dict[tuple, Experiment]:
    """By (`Sampling`, seed): the sweep's own, and lossless ones that sample less freely."""
    state = processes(model.target.device)
    share = (state.process_index, state.num_processes)
    found = {}
    for sampling in (Sampling(args.temperature), *lossless_samplings(args)):
        for seed in args.seeds if sampling.temperature else [0]:
            log = args.work / f"answers-{sampling.short}-{seed}.jsonl"
            with state.main_process_first():  # which begins the file
                found[sampling, seed] = Experiment(
                    model, questions, chosen_settings(args) if sampling == Sampling(args.temperature) else {}, log,
                    **asdict(sampling), max_new_tokens=args.max_new_tokens, seed=seed, tree=args.tree,
                    run_code=args.run_code, share=share, batch=args.batch,
                )
    state.wait_for_everyone()
    return found


def answer_all(runs: dict[tuple, Experiment]) -> None:
    for run in runs.values():
        run.observe(again=False)
        for name in run.rules:
            run.answer(name)


def run(args: SweepArguments) -> None:
    """Take the stages that are asked for.

    Raises:
        ValueError: a bad option, questions without answers, or a work folder that another process is writing.
    """
    args = checked(args)
    questions = load_questions(args.questions, args.tasks, args.task_seed, args.tasks)
    if any(question.answer is None and question.tests is None for question in questions):
        raise ValueError("a sweep needs questions with answers to compare with")
    args.work.mkdir(parents=True, exist_ok=True)
    writes = args.stage != ("report",) and processes(args.pair.device).is_main_process
    with only_writer(args.work) if writes else nullcontext():
        take_stages(args, questions)


def take_stages(args: SweepArguments, questions: list[Question]) -> None:
    model = args.pair.load()
    with processes(args.pair.device).main_process_first():
        args = replace(args, tree=args.tree or kept_tree(args, model))
    runs = experiments(args, model, questions)
    if "screen" in args.stage:
        for each in own_runs(args, runs):
            each.observe()
        write_screen(args, runs)
    if "answers" in args.stage:
        answer_all(runs)
    if "times" in args.stage:
        time_methods(args, next(iter(runs.values())))
    if "report" in args.stage:
        write_report(args, experiments(args, model, questions))


main = partial(run_command, "eval.sweep", SweepArguments, run, stopped="stopped; the same command goes on")

if __name__ == "__main__":
    sys.exit(main())
