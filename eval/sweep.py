"""The frontier: what every rule costs and buys at several thresholds, on tasks whose answers can be checked.

    python -m eval.sweep --tasks 300 --work runs/sweep --out eval/results/sweep-greedy
    torchrun --nproc_per_node 2 -m eval.sweep ... --stage answers                   # any number of processes
    python -m eval.sweep ... --stage times                                          # alone on the machine

Stage `answers` answers all questions losslessly, and again under every setting that changes the answer (see
`eagle_fsd.experiment`); it may run beside other work. Stage `times` times all settings and the baselines on the first
`--timed` questions, interleaved. Stage `report` writes OUT.json, OUT.md and the plots. An interrupted stage goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import eagle_fsd
from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.app import load_pair, model_options, parse_tree
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.data.files import append_lines, read_lines, save_atomically
from eagle_fsd.data.questions import converse
from eagle_fsd.experiments.experiment import EXACT, Experiment, paired, settings_of, spread, summarise
from eagle_fsd.experiments.methods import Answer, Method, bare_generate, engine, hf_generate, interleaved
from eagle_fsd.experiments.records import environment, processes, record_path, shown_settings
from eagle_fsd.experiments.search import BASELINE, DIALS, family_confidence
from eagle_fsd.models.loading import load_target
from eagle_fsd.pair import demo_directory
from eagle_fsd.quality.statistics import drop_bound
from eagle_fsd.quality.traces import predict
from eagle_fsd.trees.config import Confidence, TreeConfig
from eval.questions import load_questions
from eval.report.harm import harm, harm_table, merged
from eval.report.intervals import interval
from eval.report.plots import by_rule, headline, pareto, plot, table
from eval.report.predictions import prediction_errors, prediction_text

LOOKUP, ASSISTED, PLAIN = "prompt lookup", "assisted", "plain"
BARE = {BASELINE: "model.generate, bare call", LOOKUP: "prompt lookup, bare call"}  # greedy only
STAGES = ("answers", "times", "report")


def cooler(temperature: float) -> str:
    """Name of lossless decoding at a lower temperature."""
    return f"{EXACT} at temperature {temperature:g}"


def chosen_settings(args: argparse.Namespace) -> dict[str, dict]:
    """The settings of the sweep: those asked for, else every rule with its thresholds."""
    if args.settings:
        pairs = [name.rsplit(" ", 1) for name in args.settings]
        return {f"{rule} {float(t):g}": {"rule": rule, "threshold": float(t)} for rule, t in pairs}
    settings = settings_of({rule: DIALS[rule] for rule in args.rules})
    if args.head_guard is not None:
        guarded = settings_of({"fsd": DIALS["fsd"]}, head_guard=args.head_guard)
        settings |= {f"{name} guarded": options for name, options in guarded.items()}
    greedy = args.temperature == 0  # a rule that is exact throughout has nothing to show
    losses = {rule for rule in args.rules if not all(
        make_rule(**options).is_lossless(greedy) for options in settings.values() if options["rule"] == rule)}
    return {name: options for name, options in settings.items() if options["rule"] in losses}


def kept_tree(args: argparse.Namespace, model: eagle_fsd.EagleModel) -> TreeConfig:
    """The tree of all stages and processes: one that was chosen for this machine is kept in the work folder."""
    path = args.work / "tree.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["confidence"]:
            stored["confidence"] = Confidence(**{name: tuple(values) for name, values in stored["confidence"].items()})
        return TreeConfig(**stored)
    chosen = model.trees.of(make_rule(EXACT), args.temperature).tree if model.trees else None
    tree = chosen or model.default_tree
    args.work.mkdir(parents=True, exist_ok=True)
    save_atomically(path, lambda part: part.write_text(json.dumps(asdict(tree)), encoding="utf-8"))
    return tree


def experiments(args: argparse.Namespace, model: eagle_fsd.EagleModel, questions: list) -> dict[tuple, Experiment]:
    """By (temperature, seed): the sweep's own, and lossless ones at lower temperatures."""
    state = processes(model.target.device)
    share = (state.process_index, state.num_processes)
    found = {}
    for temperature in (args.temperature, *args.cooler):
        for seed in args.seeds if temperature else [0]:
            log = args.work / f"answers-{temperature:g}-{seed}.jsonl"
            with state.main_process_first():  # which begins the file
                found[temperature, seed] = Experiment(
                    model, questions, chosen_settings(args) if temperature == args.temperature else {}, log,
                    temperature=temperature, max_new_tokens=args.max_new_tokens, seed=seed, tree=args.tree,
                    run_code=args.run_code, share=share,
                )
    state.wait_for_everyone()
    return found


def answer(runs: dict[tuple, Experiment]) -> None:
    for run in runs.values():
        run.observe()
        for name in run.rules:
            run.answer(name)


def timed_methods(args: argparse.Namespace, model: eagle_fsd.EagleModel) -> dict[str, Method]:
    sampling = {"temperature": args.temperature, "seed": args.seeds[0]}
    methods = {
        BASELINE: hf_generate(model, **sampling),
        LOOKUP: hf_generate(model, **sampling, prompt_lookup_num_tokens=10),
        PLAIN: engine(model, plain=True, acceptance=EXACT, **sampling),
        EXACT: engine(model, acceptance=EXACT, tree=args.tree, **sampling),
    }
    if args.temperature == 0:
        place = (args.target or demo_directory("demo-target"), model.target.dtype, model.target.device)
        methods[BARE[BASELINE]] = bare_generate(*place)
        methods[BARE[LOOKUP]] = bare_generate(*place, prompt_lookup_num_tokens=10)
    if args.assistant:
        assistant, _ = load_target(args.assistant, dtype=model.target.dtype, device=model.target.device)
        methods[ASSISTED] = hf_generate(model, **sampling, assistant=assistant)
    for temperature in args.cooler:
        methods[cooler(temperature)] = engine(
            model, acceptance=EXACT, tree=args.tree, temperature=temperature, seed=args.seeds[0])
    for name, options in chosen_settings(args).items():
        methods[name] = engine(model, acceptance=make_rule(**options), tree=args.tree, **sampling)
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


def times_about(args: argparse.Namespace, own: Experiment) -> dict:
    """What all times of a file depend on, beside what its answers do; its first line."""
    names = ("device_map", "attn_implementation", "compile", "assistant", "repeats")
    return {"device": str(own.model.target.device), **{name: getattr(args, name) for name in names}}


def read_times(args: argparse.Namespace, own: Experiment) -> list[dict]:
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


def time_methods(args: argparse.Namespace, own: Experiment) -> None:
    """Add a line per question: seconds and tokens of each method, with the seeds of the first experiment's answers."""
    path = times_path(own)
    methods = {name: conversation(method) for name, method in timed_methods(args, own.model).items()}
    done = timed_questions(args, own, list(methods))
    rules = {name: repr(rule) for name, rule in own.rules.items()}
    if not read_lines(path):
        append_lines(path, [times_about(args, own)])
    warm_up = 2
    for number, question in enumerate(spread(own.questions, args.timed)):
        if question.id not in done:
            answers = interleaved(methods, [question.turns], args.max_new_tokens, args.repeats, warm_up=warm_up,
                                  start=number)
            warm_up = 0
            append_lines(path, [{"question": question.id, "rules": rules, "methods": {
                name: {"seconds": a.seconds, "tokens": len(a.token_ids)} for name, (a,) in answers.items()}}])


def timed_questions(args: argparse.Namespace, own: Experiment, names: Sequence[str]) -> dict[int | str, dict]:
    """By question, the seconds and tokens of each method; of a question that was timed twice the last.

    A line does not count where a name meant another rule, as "fsd 0.1 guarded" does with another guard.
    """
    known = {question.id for question in own.questions}
    meant = {name: repr(own.rules[name]) for name in names if name in own.rules}
    return {line["question"]: line["methods"] for line in read_times(args, own)
            if line["methods"].keys() >= set(names) and line["rules"].items() >= meant.items()
            and line["question"] in known}


def times(lines: Sequence[dict], names: Sequence[str]) -> dict[str, dict]:
    """Speed of each method over the timed questions, with 95% bootstrap intervals of its ratios."""
    if not lines:
        return {}
    seconds = {name: np.array([line[name]["seconds"] for line in lines]) for name in names}
    tokens = {name: np.array([line[name]["tokens"] for line in lines]) for name in names}
    rows = {}
    for name in names:
        def time_of_exact(picks: np.ndarray | slice, ours: np.ndarray = seconds[name]) -> np.ndarray:
            return ours[picks].sum(-1) / seconds[EXACT][picks].sum(-1)

        rate = tokens[name].sum() / seconds[name].sum()
        rows[name] = {
            "seconds_per_answer": seconds[name].mean(), "tokens_per_second": rate, "timed": len(lines),
            "time_of_exact": time_of_exact(slice(None)),
            "time_of_exact_interval": interval(len(lines), time_of_exact),
            "timed_tokens": tokens[name].mean(),
            "speedup": rate / (tokens[BASELINE].sum() / seconds[BASELINE].sum()),
        }
    return rows


def accuracy_interval(drops: np.ndarray, questions: int) -> list[float]:
    """95% bootstrap interval of a mean of paired differences [seeds, questions], over questions."""
    return interval(questions, lambda picks: drops.mean(0)[picks].mean(1))


def rows_of(args: argparse.Namespace, runs: dict[tuple, Experiment], speeds: dict[str, dict]) -> list[dict]:
    """One row per setting, over all seeds; accuracy is compared with `exact`'s, answer by answer."""
    own = [run for (temperature, _), run in runs.items() if temperature == args.temperature]
    exact = [run.results(EXACT) for run in own]
    groups = {EXACT: exact, **{name: [run.results(name) for run in own] for name in own[0].rules}}
    for temperature in args.cooler:
        found = [run.results(EXACT) for (t, _), run in runs.items() if t == temperature]
        groups[cooler(temperature)] = found * (len(own) // len(found))
    tested = by_rule([{"setting": name, "threshold": rule.threshold} for name, rule in own[0].rules.items()])
    confidence = family_confidence(len(tested))
    rows = []
    for name, given in groups.items():
        pairs = [paired(ours, theirs) for ours, theirs in zip(given, exact, strict=True)]
        lost, gained, count = (sum(column) for column in zip(*pairs, strict=True))
        drops = np.array([[theirs["correct"] - ours["correct"] for ours, theirs in zip(a, b, strict=True)]
                          for a, b in zip(given, exact, strict=True)], float)
        temperature = next((t for t in args.cooler if name == cooler(t)), args.temperature)
        rows.append({
            "setting": name, "temperature": temperature,
            **(own[0].rules[name].__dict__ if name in own[0].rules else {}),
            **summarise([record for records in given for record in records]), "lost": lost, "gained": gained,
            "drop": (lost - gained) / count, "drop_interval": accuracy_interval(drops, drops.shape[1]),
            # Seeds of one question are not independent: the bound counts every question once.
            "drop_bound": drop_bound(lost / len(own), gained / len(own), count // len(own)),
            "family_bound": drop_bound(lost / len(own), gained / len(own), count // len(own), confidence),
            "predicted": None, **speeds.get(name, {}),
        })
        if name in own[0].rules:
            rows[-1]["predicted"] = predict([trace for run in own for trace in run.traces(name)])
    return rows


def match_temperatures(rows: list[dict]) -> None:
    """Beside each fuzzy setting, lossless decoding at the temperature with its log-probability per token.

    Interpolated between the temperatures that were run; outside of them the nearest.
    """
    lossless = sorted((row for row in rows if row["setting"].startswith(EXACT)), key=lambda r: r["logprob_per_token"])
    if len(lossless) < 2:
        return
    known = [row["logprob_per_token"] for row in lossless]
    for row in rows:
        if "threshold" in row:
            row["matched"] = {value: float(np.interp(row["logprob_per_token"], known, [r[value] for r in lossless]))
                              for value in ("temperature", "accuracy", "time_of_exact") if value in lossless[0]}


def harm_rows(args: argparse.Namespace, runs: dict[tuple, Experiment]) -> list[dict]:
    """What each setting's fuzzy tokens did to right answers, over all seeds."""
    own = [run for (temperature, _), run in runs.items() if temperature == args.temperature]
    tokenizer = own[0].model.tokenizer
    return [row for name in own[0].rules
            for row in merged([harm(run, name, lambda token: tokenizer.decode([token])) for run in own])]


def report(args: argparse.Namespace, runs: dict[tuple, Experiment]) -> None:
    own = next(iter(runs.values()))
    bare = list(BARE.values()) if args.temperature == 0 else []
    baselines = [BASELINE, LOOKUP, *bare, *([ASSISTED] if args.assistant else []), PLAIN]
    names = [*baselines, EXACT, *map(cooler, args.cooler), *own.rules]
    timed = timed_questions(args, own, names)
    speeds = times(list(timed.values()), names)
    rows = rows_of(args, runs, speeds)
    baselines = [{"setting": name, **speeds[name]} for name in baselines if name in speeds]
    slower = {name: speeds[name]["seconds_per_answer"] / speeds[other]["seconds_per_answer"]
              for name, other in BARE.items() if other in speeds}
    match_temperatures(rows)
    front = pareto(rows)
    for row in rows:
        row["front"] = row["setting"] in front
    record = {
        "environment": environment(), "arguments": shown_settings(vars(args)),
        "prediction_errors": prediction_errors(rows),
        "questions": len(own.questions), "seeds": args.seeds, "temperature": args.temperature,
        "tree": own.model.describe_tree(args.tree, args.temperature),
        "dtype": str(own.model.target.dtype), "headline": headline(rows),
        "baselines_over_bare_calls": slower, "rows": rows, "baselines": baselines, "harm": harm_rows(args, runs),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record_path(args.out, ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    out, about = record_path(args.out, ""), record["environment"]
    record_path(args.out, ".md").write_text(
        f"# {out.name}\n\n`{about['command']}` at {about['commit']}\n\n"
        f"{record['headline']}\n\n{table(rows, baselines)}\n\n"
        f"## Right answers that fuzzy tokens cost\n\n{harm_table(record['harm'])}\n\n"
        f"## Predictions\n\n{prediction_text(record['prediction_errors'])}\n", encoding="utf-8")
    plot(record, out)
    print(record["headline"])
    for name, ratio in slower.items():
        print(f"{name} takes {ratio:.3f} of a bare call's time" + (": NOT A FAIR BASELINE" if ratio > 1.05 else ""))
    print(table(rows, baselines))


def check(args: argparse.Namespace) -> argparse.Namespace:
    check_counts(args, "tasks", "timed", "repeats", "max_new_tokens")
    if args.cooler is None:
        args.cooler = [args.temperature * share for share in (0.75, 0.5, 0.25, 0)] if args.temperature else []
    if args.temperature < 0 or any(not 0 <= t < args.temperature for t in args.cooler):
        raise ValueError(f"--temperature must be at least 0 and --cooler below it, got {args.temperature} and "
                         f"{args.cooler}")
    if args.temperature == 0 and len(args.seeds) > 1:
        raise ValueError(f"greedy decoding has no seeds, got {args.seeds}")
    if processes(args.device).num_processes > 1 and args.stage != ["answers"]:
        raise ValueError("several processes can only share --stage answers; times and report are for one process")
    for name in args.settings or []:
        if len(name.rsplit(" ", 1)) != 2:
            raise ValueError(f'--settings takes a rule and a threshold, such as "fsd 0.1", got {name!r}')
    for options in chosen_settings(args).values():
        make_rule(**options)
    return args


def run(args: argparse.Namespace) -> None:
    questions = load_questions(args.questions, args.tasks, args.task_seed, args.tasks)
    if any(question.answer is None and question.tests is None for question in questions):
        raise ValueError("a sweep needs questions with answers to compare with")
    model = load_pair(args)
    with processes(args.device).main_process_first():
        args.tree = args.tree or kept_tree(args, model)
    runs = experiments(args, model, questions)
    if "answers" in args.stage:
        answer(runs)
    if "times" in args.stage:
        time_methods(args, next(iter(runs.values())))
    if "report" in args.stage:
        report(args, experiments(args, model, questions))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[model_options()])
    parser.add_argument("--assistant", help="a smaller model of the same tokenizer, for assisted decoding")
    parser.add_argument("--questions", type=Path, help="JSON lines with answers (default: tasks of the generator)")
    parser.add_argument("--tasks", type=int, default=300, help="how many questions")
    parser.add_argument("--task-seed", type=int, default=21, help="of the generated tasks")
    parser.add_argument("--rules", nargs="+", choices=DIALS, default=list(DIALS))
    parser.add_argument("--settings", nargs="+", help='only these, such as "fsd 0.1" "tilt 0.5"')
    parser.add_argument("--head-guard", type=float, help="try fsd with this head guard as well")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cooler", type=float, nargs="*", help="lossless at these as well (default: four lower ones)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--tree", type=parse_tree, metavar="N,DEPTH,K[,T]")
    parser.add_argument("--timed", type=int, default=40, help="questions that are timed")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs per question, of which the median counts")
    parser.add_argument("--run-code", action="store_true", help="allow programs of HumanEval answers to be run")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--work", type=Path, default=Path("runs/sweep"), help="folder of answers and times")
    parser.add_argument("--out", type=Path, default=Path("eval/results/sweep"))
    return parser


def main() -> int:
    args = build_parser().parse_args()
    return exit_status("eval.sweep", lambda: run(check(args)), (ValueError, TypeError, OSError, ImportError),
                       stopped="stopped; the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
