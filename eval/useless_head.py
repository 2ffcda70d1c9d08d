"""What drafting costs where it cannot pay: `tree="auto"` against plain decoding with heads that know nothing.

    python -m eval.useless_head --out eval/results/useless-head

- `random tokens`: the pair's own head on prompts that nobody can continue.
- `random head`: a head of the same shape with random weights on ordinary prompts, loaded as a user would load it, with
  the tree chosen from the real head's log (a log that promises too much), from a log of its own, and without any log.

Both methods answer every prompt in turn (interleaved), to the same length. Alone on the machine.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from eagle_fsd.acceptance import make_rule
from eagle_fsd.cli.arguments import Loading
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.drafting.logs import FILE, store_log
from eagle_fsd.heads.catalogue import find_pair
from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.measure.cycles import log_cycles
from eagle_fsd.measure.methods import engine, interleaved
from eagle_fsd.measure.records import write_record
from eagle_fsd.pair import EagleModel
from eval.command import run_command
from eval.trees import prompts_of, timing_row, timing_table

LOGS = {"the real head's log": "real", "a log of its own": "own", "no log": None}


@dataclass(frozen=True)
class UselessHeadArguments:
    """What `eval.useless_head` compares.

    Args:
        prompts: of each comparison.
        logged: prompts of the random head's own log.
        max_new_tokens: of an answer; all are as long.
        repeats: timed runs of each answer, of which the median counts.
        threads: of torch; without it as many as it takes.
        out: files for what is found, without suffix.
    """

    pair: Loading = Loading()
    prompts: int = 16
    logged: int = 12
    max_new_tokens: int = 128
    repeats: int = 3
    threads: int | None = None
    out: Path = Path("eval/results/useless-head")


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


def compare_with_plain(model: EagleModel, prompts: list, args: UselessHeadArguments) -> dict:
    """The pair's tree, and both methods on the same prompts."""
    methods = {"auto": engine(model, acceptance="exact", ignore_eos=True),
               "plain": engine(model, plain=True, acceptance="exact", ignore_eos=True)}
    answers = interleaved(methods, prompts, args.max_new_tokens, args.repeats)
    return {"tree": model.describe_tree(None),
            "rows": [timing_row(name, given, answers["plain"]) for name, given in answers.items()]}


def compare_random_heads(args: UselessHeadArguments, real: Path) -> dict[str, dict]:
    """A random head of the real one's shape on ordinary prompts, by the log that it is loaded with."""
    results, ordinary = {}, prompts_of("tasks", args.prompts, 9)
    with TemporaryDirectory() as folder:
        head = Path(folder)
        randomise(head, real)
        loading = replace(args.pair, target=find_pair(args.pair.target, args.pair.draft)[0], draft=head)
        for name, kind in LOGS.items():
            (head / FILE).unlink(missing_ok=True)
            if kind == "real":
                shutil.copy(real / FILE, head)
            elif kind == "own":
                store_log(head, log_cycles(loading.load(), prompts_of("tasks", args.logged, 8), make_rule("exact"),
                                           max_new_tokens=args.max_new_tokens))
            results[f"random head, {name}"] = compare_with_plain(loading.load(), ordinary, args)
    return results


def run(args: UselessHeadArguments) -> None:
    check_counts(args, "prompts", "logged", "repeats")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.pair.load()
    real = Path(find_pair(args.pair.target, args.pair.draft)[1])
    if not (real / FILE).is_file():
        raise ValueError(f"{real} is no directory with a log to choose a tree by: run eagle-fsd tune first")
    results = {"random tokens": compare_with_plain(
        model, random_prompts(model.target.vocab_size, args.prompts), args)} | compare_random_heads(args, real)
    sections = []
    for name, result in results.items():
        sections += [f"## {name}", f"Tree: {result['tree']}", timing_table(result["rows"], "plain")]
    print(write_record(args.out, {"results": results}, "\n\n".join(sections)))


main = partial(run_command, "eval.useless_head", UselessHeadArguments, run)

if __name__ == "__main__":
    sys.exit(main())
