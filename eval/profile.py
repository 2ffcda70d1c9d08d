"""Where a decode cycle's time goes: target, draft, both output layers, tree building, acceptance, commit.

    python -m eval.profile --target model.gguf --draft HEAD --prompts questions.jsonl --tree 16,5,3 --threads 2

The parts are timed by wrapping the functions of the library, so the library itself carries no timers. On CUDA the
wrappers wait for the device, which makes the parts add up and the whole slower than in use. The rules answer each
prompt in turn, so that what else the machine does hits them alike.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import eagle_fsd
from eagle_fsd.cli.arguments import Loading, RuleName, Tree
from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.progress import Progress
from eagle_fsd.drafting.measuring import now
from eagle_fsd.engine import forwards
from eagle_fsd.engine.decoder import Decoder
from eagle_fsd.engine.graphs import StaticCycle
from eagle_fsd.measure.records import write_record
from eagle_fsd.models.cache import TreeCache
from eagle_fsd.models.target import TargetModel
from eval.command import run_command
from eval.questions import load_questions
from eval.report.tables import markdown, percent

FORWARDS = ("target_forward", "target_output", "draft_forward", "draft_output")  # the models' own work
CYCLE = "other"  # what is left of a cycle
# The rows of the table, and the parts that each adds up.
ROWS = {
    "target forward": ("target_forward",), "target's output layer": ("target_output",),
    "draft layer": ("draft_forward",), "draft's output layer": ("draft_output",), "accept": ("accept",),
    "tree": ("tree_building",), "rest": ("verify_inputs", "commit", CYCLE),
}


class Clock:
    """Exclusive seconds per part: time inside a nested part counts for that one only, but forwards are whole.

    Args:
        device: of the models.
        nested: whether parts within a part are timed; without, all but the target's output layer counts for the outer
            one.
    """

    def __init__(self, device: torch.device, nested: bool = True) -> None:
        self.device, self.nested = device, nested
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[list] = []
        self._parts: list[str] = []  # those that are running

    def wrap(self, part: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            if not self._stack and part != CYCLE:  # the prefill's forwards belong to no cycle
                return function(*args, **kwargs)
            # The target's output layer is asked within `accept`, and is no part of it.
            if not self.nested and len(self._stack) > 1 and (part, self._parts[-1]) != ("target_output", "accept"):
                return function(*args, **kwargs)
            if part in FORWARDS and self._parts[-1] in FORWARDS:  # the draft's logits from the target's layer
                return function(*args, **kwargs)
            self._parts.append(part)
            self._stack.append([0.0])
            started = now(self.device)
            try:
                return function(*args, **kwargs)
            finally:
                spent = now(self.device) - started
                self._parts.pop()
                inner = self._stack.pop()[0]
                self.seconds[part] += spent - inner
                if self._stack:
                    self._stack[-1][0] += spent

        return timed


@contextmanager
def timed_parts(model: eagle_fsd.EagleModel, *, nested: bool = True) -> Iterator[Clock]:
    """Within this context every decode cycle's parts are added up in the returned clock; `nested`: see `Clock`."""
    clock = Clock(model.target.output_device, nested)
    parts = [
        (Decoder, "step", CYCLE),
        (forwards, "draft_tree", "tree_building"),
        (StaticCycle, "draft", "draft_forward"),  # as one graph: its output layer and tree building too
        (StaticCycle, "verify", "target_forward"),
        (model.draft, "forward", "draft_forward"),  # the instance: a compiled head has a forward of its own
        (type(model.draft), "own_logits", "draft_output"),
        (TargetModel, "verify", "verify_inputs"),
        (type(model.target.decoder), "forward", "target_forward"),
        (TargetModel, "logits", "target_output"),
        (Decoder, "_accept", "accept"),
        (TreeCache, "commit", "commit"),
    ]
    with ExitStack() as patches:
        for owner, name, part in parts:
            patches.enter_context(patch.object(owner, name, clock.wrap(part, getattr(owner, name))))
        yield clock


def profile_cycles(model: eagle_fsd.EagleModel, prompts: list, max_new_tokens: int, **options: object) -> dict:
    """Mean milliseconds per cycle of each part, over the prompts, and the share outside the models' forwards."""
    return profile_rules(model, prompts, max_new_tokens, {"": options})[""]


def profile_rules(
    model: eagle_fsd.EagleModel, prompts: list, max_new_tokens: int, rules: Mapping[str, Mapping[str, object]]
) -> dict[str, dict]:
    """`profile_cycles` of several rules, given by their options, which answer each prompt in turn."""
    seconds: dict[str, dict[str, float]] = {name: defaultdict(float) for name in rules}
    cycles, tokens = dict.fromkeys(rules, 0), dict.fromkeys(rules, 0)
    for prompt in Progress(prompts, desc="profile", unit="prompt"):
        for name, options in rules.items():
            with timed_parts(model) as clock:
                output = eagle_fsd.generate(prompt, model, max_new_tokens=max_new_tokens, **options)
            cycles[name] += output.stats.target_forwards
            tokens[name] += sum(output.stats.accepted_lengths) + output.stats.target_forwards
            for part, spent in clock.seconds.items():
                seconds[name][part] += spent
    return {name: {"tau": tokens[name] / cycles[name], **_per_cycle(seconds[name], cycles[name])} for name in rules}


def _per_cycle(seconds: Mapping[str, float], cycles: int) -> dict:
    milliseconds = {part: 1000 * spent / cycles for part, spent in sorted(seconds.items())}
    total = sum(milliseconds.values())
    outside = total - sum(milliseconds.get(part, 0.0) for part in FORWARDS)
    return {"cycles": cycles, "ms_per_cycle": milliseconds, "total_ms": total, "outside_forwards_ms": outside,
            "outside_forwards_share": outside / total}


def share_table(found: Mapping[str, dict]) -> str:
    """Milliseconds and shares of a cycle of each rule, in Markdown."""
    def shown(rule: str, milliseconds: float) -> str:
        return f"{milliseconds:.1f} ({percent(milliseconds / found[rule]['total_ms'], 1)})"

    def total(rule: str, *parts: str) -> float:
        return sum(found[rule]["ms_per_cycle"].get(part, 0.0) for part in parts)

    sums = {row: {rule: total(rule, *parts) for rule in found} for row, parts in ROWS.items()}
    sums["both output layers"] = {rule: total(rule, "target_output", "draft_output") for rule in found}
    sums["outside the forwards"] = {rule: profile["outside_forwards_ms"] for rule, profile in found.items()}
    sums["whole"] = {rule: profile["total_ms"] for rule, profile in found.items()}
    rows = ({"ms of a cycle": row, **{rule: shown(rule, ms) for rule, ms in of.items()}} for row, of in sums.items())
    return markdown(rows)


@dataclass(frozen=True)
class ProfileArguments:
    """What `eval.profile` measures.

    Args:
        prompts: JSON lines, as `eval.mt_bench` takes them; without it held-out tasks of the bundled generator.
        limit: prompts; one more is answered before, unmeasured.
        tree: of every cycle; without it the fastest that is known here.
        rules: profiled in turn.
        threshold: of those that have one.
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: of each answer.
        threads: of torch; without it what OMP_NUM_THREADS says, or torch.
        out: JSON file.
    """

    pair: Loading = Loading()
    prompts: Path | None = None
    limit: int = 8
    tree: Tree = None
    rules: tuple[RuleName, ...] = ("exact", "fsd")
    threshold: float = 0.3
    temperature: float = 0.0
    max_new_tokens: int = 64
    threads: int | None = None
    out: Path = Path("eval/results/profile.json")


def run(args: ProfileArguments) -> None:
    check_counts(args, "limit", "max_new_tokens", "threads")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompts = [[{"role": "user", "content": question.turns[0]}]
               for question in load_questions(args.prompts, args.limit + 1, seed=1, limit=args.limit + 1)]
    model = args.pair.load()
    rules = {name: {"acceptance": eagle_fsd.make_rule(name, None if name == "exact" else args.threshold),
                    "tree": args.tree, "temperature": args.temperature, "seed": 0} for name in args.rules}
    profile_rules(model, prompts[:1], args.max_new_tokens, rules)
    found = profile_rules(model, prompts[1:] or prompts, args.max_new_tokens, rules)
    about = {"tree": model.describe_tree(args.tree), "dtype": str(model.target.dtype),
             "vocabulary": model.target.vocab_size, "draft_vocabulary": model.draft.draft_vocab_size,
             "threshold": args.threshold, "temperature": args.temperature, "prompts": len(prompts[1:] or prompts)}
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
    print(write_record(args.out, {**about, "rules": found}, f"{said}\n\n{share_table(found)}"))


main = partial(run_command, "eval.profile", ProfileArguments, run)

if __name__ == "__main__":
    sys.exit(main())
