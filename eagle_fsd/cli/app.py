"""Command line: `eagle-fsd generate|chat|demo|heads|calibrate|tune|inspect|export|vocab`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoTokenizer

from .. import __version__
from ..acceptance import RULES, make_rule
from ..api import generate
from ..data.questions import read_questions
from ..experiments.cycles import log_cycles
from ..experiments.experiment import fingerprint
from ..experiments.grading import extract_result
from ..experiments.methods import Answer, engine, hf_generate, interleaved
from ..experiments.search import DIALS, calibrate, check_promise
from ..heads.catalogue import find_head, known_heads
from ..heads.checkpoint import copy_head, load_head
from ..heads.eagle3 import Eagle3Head
from ..heads.export import LAYOUTS, export_head
from ..heads.inspection import inspect_head
from ..heads.token_map import TOKEN_MAP, save_token_map
from ..heads.vocabulary import count_tokens
from ..models.implementations import IMPLEMENTATIONS
from ..models.parallel import RANK, command, of_first
from ..pair import EagleModel, demo_directory, load
from ..quality.calibrations import read_calibrations, store_calibration
from ..quality.promises import parse_promise
from ..trees.config import TreeConfig
from ..tuning.choice import choose, describe_tree
from ..tuning.logs import read_logs, store_log
from ..tuning.machine import known_latency
from .chat import talk
from .exits import check_counts, exit_status
from .terminal import BOLD, COLOURS, DIM, RESET, SourceStreamer, describe_output, use_colour

DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.json")
DEMO_THRESHOLD = 0.3


def parse_tree(text: str) -> TreeConfig:
    """A `TreeConfig` from "total_tokens,depth,top_k[,draft_temperature]"."""
    parts = text.split(",")
    try:
        return TreeConfig(*map(int, parts[:3]), *map(float, parts[3:]))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no tree; it takes total_tokens,depth,top_k[,draft_temperature], such as 16,5,4 ({error})"
        ) from error


MODEL_OPTIONS = ("target", "draft", "dtype", "device", "device_map", "attn_implementation", "trust_remote_code",
                 "compile")


def model_options() -> argparse.ArgumentParser:
    """The options of every command that loads a pair; a parent for its parser."""
    models = argparse.ArgumentParser(add_help=False)
    models.add_argument("--target", help="directory or hub id (default: the bundled pair)")
    models.add_argument("--draft", help="directory or hub id of its draft head (default: the known one, see heads)")
    models.add_argument("--dtype", default="auto")
    models.add_argument("--device")
    models.add_argument("--device-map")
    models.add_argument("--attn-implementation", choices=("auto", *IMPLEMENTATIONS))
    models.add_argument("--trust-remote-code", action="store_true")
    models.add_argument("--compile", action="store_true", help="compile the models' forwards first")
    return models


def add_tp_plan(parser: argparse.ArgumentParser) -> None:
    """For commands whose processes decide nothing by time and write nothing twice."""
    parser.add_argument("--tp-plan", choices=("auto",), help="shard the target over the processes of torchrun")


def decoding_options(max_new_tokens: int) -> argparse.ArgumentParser:
    """The options of every command that answers what is typed; a parent for its parser."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--max-new-tokens", type=int, default=max_new_tokens,
                         help="of each answer (default: %(default)s)")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--top-p", type=float, default=1.0)
    options.add_argument("--top-k", type=int, default=0)
    options.add_argument("--min-p", type=float, default=0.0)
    options.add_argument("--repetition-penalty", type=float, default=1.0)
    options.add_argument("--seed", type=int)
    options.add_argument("--acceptance", choices=RULES, default="fsd")
    options.add_argument("--threshold", type=float)
    options.add_argument("--divergence", help="that fsd and fsd_paper gate on (default: js)")
    options.add_argument("--tree", type=parse_tree, metavar="N,DEPTH,K[,T]")
    return options


def measuring_options() -> argparse.ArgumentParser:
    """The options of every command that answers a file of prompts; a parent for its parser."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--prompts", type=Path, required=True,
                         help="JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval")
    options.add_argument("--divergence", help="that fsd gates on")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--max-new-tokens", type=int, default=256)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, help="directory for what is found (default: the head's)")
    return options


def load_pair(args: argparse.Namespace) -> EagleModel:
    """The pair that `model_options` ask for."""
    return load(**{name: getattr(args, name) for name in MODEL_OPTIONS}, tp_plan=getattr(args, "tp_plan", None))


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="eagle-fsd", description="EAGLE-2 decoding with fuzzy acceptance.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    models, measuring = model_options(), measuring_options()

    one = commands.add_parser(
        "generate", parents=[models, decoding_options(max_new_tokens=256)], help="answer one prompt")
    add_tp_plan(one)
    one.add_argument("prompt", help="text, or - to read it from standard input")
    one.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    one.add_argument("--min-new-tokens", type=int, default=0)
    one.add_argument("--ignore-eos", action="store_true")
    one.add_argument("--stop", action="append", help="may be given several times")
    one.add_argument("--stop-token-ids", type=int, nargs="*")
    one.add_argument("--quality", metavar="PROMISE", help='a calibrated one, such as "accuracy_drop<=1%%"')
    one.add_argument("--budget", type=float, metavar="NATS", help="what fuzzy acceptance may cost in this answer")
    one.add_argument("--stats", action="store_true", help="print tau, tokens/s and token sources to standard error")

    chat = commands.add_parser(
        "chat", parents=[models, decoding_options(max_new_tokens=512)],
        help="talk in the terminal; only new tokens are processed")
    chat.add_argument("--system", help="text of a system message")

    calibration = commands.add_parser(
        "calibrate", parents=[models, measuring], help="find the fastest setting that keeps a promise on your prompts",
        description="Promises: accuracy_drop<=1%% (prompts with answers), diverging<=1%% (answers that differ from the "
        "lossless ones), kl<=0.02 (nats per token, sampling), speedup>=2.5 (over model.generate). The result is stored "
        'beside the head; generate(quality="accuracy_drop<=1%%") uses it.')
    calibration.add_argument("--budget", required=True, metavar="PROMISE")
    calibration.add_argument("--acceptance", choices=DIALS, nargs="+", default=["fsd"], help="rules to choose from")
    calibration.add_argument("--thresholds", type=float, nargs="+", help="to try (default: some for each rule)")
    calibration.add_argument("--tree", type=parse_tree, metavar="N,DEPTH,K[,T]")
    calibration.add_argument("--limit", type=int, help="use only the first prompts")
    calibration.add_argument("--timed", type=int, default=24, help="prompts that speed is measured on")
    calibration.add_argument("--run-code", action="store_true", help="allow programs of HumanEval answers to be run")
    calibration.add_argument("--log", type=Path, help="file of the answers; the same command goes on with it")

    tuning = commands.add_parser(
        "tune", parents=[models, measuring], help='log cycles on your prompts, for tree="auto" to choose by',
        description="Answers the prompts' first turns with a wide draft tree and notes which nodes were accepted. From "
        "this log, stored beside the head, and the machine's latency the fastest tree is chosen whenever the pair is "
        "loaded. One log per rule, threshold and temperature; a request takes the nearest.")
    add_tp_plan(tuning)
    tuning.add_argument("--acceptance", choices=RULES, default="exact")
    tuning.add_argument("--threshold", type=float)
    tuning.add_argument("--limit", type=int, default=48, help="use only the first prompts (default: %(default)s)")

    inspect = commands.add_parser("inspect", help="say what a draft head is, what it fits, and who can serve it")
    inspect.add_argument("head", help="directory or hub id")
    inspect.add_argument("--target", help="directory or hub id to check the head against")
    inspect.add_argument("--trust-remote-code", action="store_true")

    export = commands.add_parser("export", help="write a draft head as another program loads it")
    export.add_argument("head", help="directory or hub id")
    export.add_argument("--to", choices=LAYOUTS, required=True)
    export.add_argument("--out", required=True, help="directory to write")
    export.add_argument("--target", help="where embeddings come from, for formats that want them in the file")
    export.add_argument("--trust-remote-code", action="store_true")

    vocab = commands.add_parser(
        "vocab", help="let an EAGLE-1/2 head draft only the tokens that are frequent in your text",
        description="Counts the tokens of answers, says which share of them the most frequent ones make up (measured "
        "on every tenth block of text, which is not counted for that), and writes token_map.pt beside the head. The "
        "draft's output layer then costs as many rows; what is generated losslessly stays the same. Delete the file to "
        "draft all tokens again.")
    vocab.add_argument("head", help="directory or hub id")
    vocab.add_argument("--data", nargs="+", required=True,
                       help="ShareGPT, messages or text files, or datasets of train.prepare_data")
    vocab.add_argument("--target", help="directory or hub id, for its tokenizer; not needed for such datasets")
    size = vocab.add_mutually_exclusive_group()
    size.add_argument("--size", type=int, help="tokens to draft (default: only say what sizes would cover)")
    size.add_argument("--coverage", type=float, help="as many tokens as make up this share of the text, such as 0.99")
    vocab.add_argument("--out", type=Path, help="directory for a copy of the head with the file (default: the head's)")
    vocab.add_argument("--trust-remote-code", action="store_true")

    heads = commands.add_parser("heads", help="list the published heads that are known, with kind, licence and source")
    heads.add_argument("--target", help="only those of targets whose id contains this")

    demo = commands.add_parser("demo", parents=[models], help="compare plain, exact and fuzzy decoding")
    demo.add_argument("--threshold", type=float, default=DEMO_THRESHOLD, help="of fsd (default: %(default)s)")
    demo.add_argument("--max-new-tokens", type=int, default=200)
    demo.add_argument("--repeats", type=int, default=2, help="timed runs per prompt and method (their median counts)")
    return parser


DECODING_OPTIONS = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "acceptance", "threshold",
    "divergence", "tree",
)
GENERATE_OPTIONS = (*DECODING_OPTIONS, "min_new_tokens", "ignore_eos", "stop", "stop_token_ids", "quality", "budget")


def run_generate(args: argparse.Namespace) -> None:
    model = load_pair(args)
    text = of_first(model.target.group, sys.stdin.read) if args.prompt == "-" else args.prompt
    prompt = [{"role": "user", "content": text}] if args.chat else text
    options = {name: getattr(args, name) for name in GENERATE_OPTIONS}
    if args.stop:  # the stop string is not part of the answer, so nothing is shown before the end
        output = generate(prompt, model, **options)
        print(output.text)
    else:
        output = generate(prompt, model, **options, streamer=SourceStreamer(model.tokenizer, use_colour()))
    if args.stats:
        print(describe_output(output), file=sys.stderr)


def run_chat(args: argparse.Namespace) -> None:
    talk(load_pair(args), args.system, **{name: getattr(args, name) for name in DECODING_OPTIONS})


def run_calibrate(args: argparse.Namespace) -> None:
    if (args.thresholds or args.divergence) and len(args.acceptance) > 1:
        raise ValueError("--thresholds and --divergence are those of one rule: give one --acceptance")
    promise = parse_promise(args.budget)
    check_counts(args, "limit")
    questions = read_questions(args.prompts)[: args.limit]
    dials = {rule: args.thresholds or DIALS[rule] for rule in args.acceptance}
    options = {"divergence": args.divergence} if args.divergence else {}
    rules = {rule: [make_rule(rule, t, **options) for t in thresholds] for rule, thresholds in dials.items()}
    check_promise(promise, questions, args.temperature, rules)
    out = head_directory(args, "calibration.json")
    read_calibrations(out)
    record = args.log or out / f"calibration-{fingerprint(questions)}-{args.temperature:g}.log.jsonl"
    model = load_pair(args)
    found = calibrate(
        model, questions, promise, record, dials=dials, options=options,
        temperature=args.temperature, max_new_tokens=args.max_new_tokens, seed=args.seed, tree=args.tree,
        timed=args.timed, prompts=str(args.prompts), run_code=args.run_code, report=print,
    )
    path = store_calibration(out, found)
    chosen = ", ".join(f"{name} {value}" for name, value in found.options.items())
    print(f"{found.promise}: {chosen}; {found.measured['speedup']:.2f}x model.generate, "
          f"{found.measured['time_of_exact']:.3f} of exact's time per answer; stored in {path}{where_to_load(args)}")


def run_tune(args: argparse.Namespace) -> None:
    rule = make_rule(args.acceptance, args.threshold, args.divergence)
    check_counts(args, "limit")
    prompts = [[{"role": "user", "content": question.turns[0]}]
               for question in read_questions(args.prompts)[: args.limit]]
    out = head_directory(args, "tree.json")
    read_logs(out)
    model = load_pair(args)
    found = log_cycles(model, prompts, rule, args.temperature, max_new_tokens=args.max_new_tokens, seed=args.seed)
    path = of_first(model.target.group, lambda: store_log(out, found))
    assert model.draft is not None
    choice = choose(found.cycles, known_latency(model.target, model.draft),
                    stopping=model.target.output_device.type == "cpu")
    what = "no draft tree" if choice.tree is None else describe_tree(choice.tree)
    print(f"{len(found.cycles)} cycles stored in {path}{where_to_load(args)}. On this machine: {what}; "
          f"{choice.rate:.1f} tokens/s expected")


def where_to_load(args: argparse.Namespace) -> str:
    return f" (load with calibration={str(args.out)!r})" if args.out else ""


def head_directory(args: argparse.Namespace, file: str) -> Path:
    """Where a file about the head goes: --out, else beside the head."""
    head = args.draft or (find_head(args.target).head if args.target else demo_directory("demo-draft"))
    out = args.out or Path(head)
    if not out.is_dir():
        raise ValueError(f"{out} is no directory to store {file} in: give --out")
    if not os.access(out, os.W_OK):
        raise ValueError(f"{out} cannot be written, where {file} would go: give --out")
    return out


def run_inspect(args: argparse.Namespace) -> None:
    found = inspect_head(args.head, args.target, trust_remote_code=args.trust_remote_code)
    for name, value in found.facts.items():
        print(f"{name + ':':<20}{value}")
    if found.target_problems is not None:
        print(f"{'target:':<20}{'; '.join(found.target_problems) or 'the head fits'} ({args.target})")
    for server, problems in found.server_problems.items():
        verdict = "; ".join(problems) + f" (eagle-fsd export --to {server})" if problems else "as it is"
        print(f"{server + ':':<20}{verdict}")


def run_export(args: argparse.Namespace) -> None:
    path = export_head(args.head, args.to, args.out, target=args.target, trust_remote_code=args.trust_remote_code)
    print(f"{path} and config.json written for {args.to}")
    if path.with_name(TOKEN_MAP).is_file():
        print(f"its draft vocabulary: --speculative-token-map {path.with_name(TOKEN_MAP)}")


def run_vocab(args: argparse.Namespace) -> None:
    head = load_head(args.head)
    if isinstance(head, Eagle3Head):
        raise ValueError(f"{args.head} is an EAGLE-3 head, whose output layer has a draft vocabulary already")
    if args.out is None and not Path(args.head).is_dir():
        raise ValueError(f"{args.head} is no directory to store {TOKEN_MAP} in: give --out")
    if args.out is not None and args.out.resolve() == Path(args.head).resolve():
        raise ValueError(f"--out {args.out} is the head's own directory: leave it out to store {TOKEN_MAP} there")
    tokenizer = None if args.target is None else AutoTokenizer.from_pretrained(
        args.target, trust_remote_code=args.trust_remote_code)
    counts = count_tokens(args.data, head.config.vocab_size, tokenizer)
    size = counts.size_for(args.coverage) if args.coverage is not None else args.size
    tokens = None if size is None else torch.from_numpy(counts.commonest(size))
    coverage, total = counts.coverage(), len(counts.counted)
    shown = {total >> power for power in range(7)} | {size or total}
    print(f"{counts.counted.sum() + counts.kept_back.sum()} tokens of text, "
          f"{((counts.counted + counts.kept_back) > 0).sum()} different ones, {len(counts.special)} special ones\n\n"
          f"{'size':>8}{'coverage':>11}")
    for each in sorted(shown, reverse=True):
        print(f"{each:>8}{coverage[each - 1]:>11.3%}{'  <' if each == size else ''}")
    if tokens is not None:
        if args.out is not None:
            copy_head(args.head, args.out)
        print(f"\n{save_token_map(args.out or args.head, tokens)}: {size} of {total} tokens are drafted. "
              "Run eagle-fsd tune and calibrate again where you have")


def run_heads(args: argparse.Namespace) -> None:
    wanted = (args.target or "").casefold()
    found = [head for head in known_heads() if wanted in head.target.casefold()]
    if not found:
        raise ValueError(f"no head is known for a target whose id contains {args.target!r}")
    for target, heads in itertools.groupby(found, key=lambda head: head.target):
        print(target)
        for head in heads:
            print(f"  {head.head}: {head.kind}, licence {head.licence}{', preferred' if head.preferred else ''}; "
                  f"{head.source} ({head.looked_up})")


def run_demo(args: argparse.Namespace) -> None:
    check_counts(args, "repeats")
    model = load_pair(args)
    entries = json.loads(DEMO_PROMPTS.read_text(encoding="utf-8"))
    threads = torch.get_num_threads()
    print(f"{type(model.target.model).__name__} on {model.target.device}, {model.target.dtype}, {threads} threads; "
          f"greedy decoding. Tree: {model.describe_tree(None)}\n")
    colour = use_colour()
    legend = {source: f"{COLOURS[source]}{source}{RESET}" if colour else source for source in COLOURS}
    print(f"Token sources: {legend['exact']} = drafted, and the target's own choice; {legend['fuzzy']} = drafted and "
          f"accepted by the rule only; {legend['target']} = drawn by the target.\n")
    ours = {"exact": {"acceptance": "exact"},
            f"fsd {args.threshold:g}": {"acceptance": "fsd", "threshold": args.threshold}}
    for entry in entries:
        prompt = entry["prompt"]
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        print(f"{BOLD if colour else ''}[{entry['kind']}] {shown}{RESET if colour else ''}")
        for name, options in ours.items():
            sys.stdout.write(f"{DIM if colour else ''}{name}:{RESET if colour else ''} ")
            generate(prompt, model, max_new_tokens=args.max_new_tokens, **options,
                     streamer=SourceStreamer(model.tokenizer, colour))
        print()
    print("The same again against the clock, one after the other on each prompt:", flush=True)
    methods = {"model.generate": hf_generate(model), **{name: engine(model, **given) for name, given in ours.items()}}
    answers = interleaved(methods, [entry["prompt"] for entry in entries], args.max_new_tokens, args.repeats)
    print_table(answers, [entry["result"] for entry in entries])


def print_table(answers: dict[str, list[Answer]], results: list[str | None]) -> None:
    """Speed, tau and correctness of each method's answers to the demo's prompts."""
    def rate(given: list[Answer]) -> float:
        return sum(len(answer.token_ids) for answer in given) / sum(answer.seconds for answer in given)

    baseline = rate(answers["model.generate"])
    print(f"\n{'method':<16}{'tokens/s':>10}{'speed-up':>10}{'tau':>7}{'s/answer':>10}{'tokens/answer':>15}"
          f"{'correct':>9}")
    for name, given in answers.items():
        lengths = [length for answer in given if answer.output for length in answer.output.stats.accepted_lengths]
        tau = f"{sum(lengths) / len(lengths) + 1:.2f}" if lengths else "1"
        correct = [extract_result(a.text) == wanted for a, wanted in zip(given, results, strict=True) if wanted]
        seconds = statistics.fmean(answer.seconds for answer in given)
        length = statistics.fmean(len(answer.token_ids) for answer in given)
        print(f"{name:<16}{rate(given):>10.1f}{rate(given) / baseline:>9.2f}x{tau:>7}{seconds:>10.3f}{length:>15.1f}"
              f"{f'{sum(correct)}/{len(correct)}':>9}")
    print("\ntau = tokens per target forward. Speed-up is in tokens/s; s/answer includes the prompt.")


COMMANDS = {
    "generate": run_generate, "chat": run_chat, "demo": run_demo, "heads": run_heads, "calibrate": run_calibrate,
    "tune": run_tune, "inspect": run_inspect, "export": run_export, "vocab": run_vocab,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    program = "eagle-fsd" if RANK == 0 else f"eagle-fsd, process {RANK}"

    def work() -> None:
        with command() if getattr(args, "tp_plan", None) else nullcontext():
            COMMANDS[args.command](args)

    return exit_status(program, work, (ValueError, TypeError, OSError))


if __name__ == "__main__":
    sys.exit(main())
