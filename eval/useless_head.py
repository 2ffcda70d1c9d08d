"""What drafting costs where it cannot pay: `tree="auto"` against plain decoding with heads that know nothing.

    python -m eval.useless_head --out eval/results/useless-head

- `random tokens`: the pair's own head on prompts that nobody can continue.
- `random head`: a head of the same shape with random weights on ordinary prompts, loaded as a user would load it, with
  the tree chosen from the real head's log (a log that promises too much), from a log of its own, and without any log.

Both methods answer every prompt in turn (interleaved), to the same length. Alone on the machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.app import load_pair, model_options
from eagle_fsd.cli.exits import check_counts, exit_status
from eagle_fsd.experiments.cycles import log_cycles
from eagle_fsd.experiments.methods import engine, interleaved
from eagle_fsd.experiments.records import write_record
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.pair import EagleModel, demo_directory
from eagle_fsd.tuning.logs import FILE, store_log
from eval.trees import prompts_of, row_of, table

LOGS = {"the real head's log": "real", "a log of its own": "own", "no log": None}


def random_prompts(vocabulary: int, count: int, *, length: int = 64, seed: int = 7) -> list[list[int]]:
    """Prompts of random tokens."""
    return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def randomise(directory: Path, head: str | Path) -> None:
    """A head of the same shape with random weights, in `directory`."""
    made = load_head(head)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=made.config.initializer_range) if weight.dim() > 1 else weight.fill_(1)
    save_head(made, directory)


def compare(model: EagleModel, prompts: list, args: argparse.Namespace) -> list[dict]:
    """Both methods on the same prompts."""
    methods = {"auto": engine(model, acceptance="exact", ignore_eos=True),
               "plain": engine(model, plain=True, acceptance="exact", ignore_eos=True)}
    answers = interleaved(methods, prompts, args.max_new_tokens, args.repeats)
    return [row_of(name, given, answers["plain"]) for name, given in answers.items()]


def run(args: argparse.Namespace) -> None:
    check_counts(args, "prompts", "logged", "repeats")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_pair(args)
    real = Path(args.draft or demo_directory("demo-draft"))
    if not (real / FILE).is_file():
        raise ValueError(f"{real} is no directory with a log to choose a tree by: run eagle-fsd tune first")
    results = {"random tokens": {
        "tree": model.describe_tree(None),
        "rows": compare(model, random_prompts(model.target.vocab_size, args.prompts), args)}}
    ordinary = prompts_of("tasks", args.prompts, 9)
    target = args.target or demo_directory("demo-target")
    with TemporaryDirectory() as folder:
        head = Path(folder)
        randomise(head, real)
        options = {**vars(args), "target": target, "draft": head}
        for name, kind in LOGS.items():
            (head / FILE).unlink(missing_ok=True)
            if kind == "real":
                shutil.copy(real / FILE, head)
            elif kind == "own":
                loaded = load_pair(argparse.Namespace(**options))
                store_log(head, log_cycles(loaded, prompts_of("tasks", args.logged, 8), make_rule("exact"),
                                           max_new_tokens=args.max_new_tokens))
            loaded = load_pair(argparse.Namespace(**options))
            results[f"random head, {name}"] = {
                "tree": loaded.describe_tree(None), "rows": compare(loaded, ordinary, args)}
    sections = []
    for name, result in results.items():
        sections += [f"## {name}", f"Tree: {result['tree']}", table(result["rows"], "plain")]
    print(write_record(args.out, {"results": results}, "\n\n".join(sections)))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[model_options()])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--logged", type=int, default=12, help="prompts of the random head's own log")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch (default: as it comes)")
    parser.add_argument("--out", type=Path, default=Path("eval/results/useless-head"))
    return parser


def main() -> int:
    args = build_parser().parse_args()
    return exit_status("eval.useless_head", lambda: run(args), (ValueError, TypeError, OSError))


if __name__ == "__main__":
    sys.exit(main())
