"""Peak memory of an answer behind a long prompt, against weights and caches.

    python -m eval.memory --context 4096
    python -m eval.memory --shape llama-3.1-8b --context 4096       # random weights, see eval.step

On CUDA torch's own peak counts. On a CPU every allocation of torch's is noted by its profiler, and the peak of their
sum comes on top of the weights; the interpreter, libraries and what they keep for themselves are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from eagle_fsd.api import generate
from eagle_fsd.cli.arguments import Loading, Tree
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.engine.decoder import Session
from eagle_fsd.measure.records import write_record
from eagle_fsd.models.loading import check_device
from eagle_fsd.pair import EagleModel
from eval.command import run_command
from eval.report.tables import markdown, percent
from eval.shapes import SHAPES, ShapeName, build_pair

ALLOWED = 0.15  # over weights and caches


@dataclass(frozen=True)
class MemoryArguments:
    """What `eval.memory` measures.

    Args:
        shape: random weights of this shape in place of a pair.
        context: tokens that the answer ends at.
        new_tokens: of the answer.
        tree: of the answer's draft; without it the pair's.
        out: files for what is found, without suffix.
    """

    pair: Loading = Loading()
    shape: ShapeName | None = None
    context: int = 4096
    new_tokens: int = 32
    tree: Tree = None
    out: Path = Path("eval/results/memory")


@dataclass(frozen=True)
class Peak:
    """Bytes. `allocated`: the size of every single allocation, where it is known (on a CPU)."""

    weights: int
    caches: tuple[int, ...]  # the target's and the head's
    peak: int
    allocated: tuple[int, ...] = ()

    @property
    def over(self) -> float:
        """The peak over weights and caches, as a share of them."""
        return self.peak / (self.weights + sum(self.caches)) - 1

    @property
    def cache_allocations(self) -> list[int] | None:
        """How often a block of each cache's size was allocated."""
        return [self.allocated.count(size) for size in self.caches] if self.allocated else None


def bytes_of(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers; those that several modules share count once."""
    held = {tensor.data_ptr(): tensor.nbytes for module in modules
            for tensor in (*module.parameters(), *module.buffers())}
    return sum(held.values())


def peak_of(work: Callable[[], object], device: torch.device) -> tuple[int, tuple[int, ...]]:
    """The most bytes that were allocated at once beyond what was before, and on a CPU every allocation's bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, ()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        work()
    events = [event for event in noted.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0), tuple(change for change in changes if change > 0)


def measure_peak(model: EagleModel, context: int, new_tokens: int, tree: TreeConfig | None) -> Peak:
    """One answer of `new_tokens` that ends at `context` tokens.

    Raises:
        ValueError: no room for a prompt.
    """
    length = context - new_tokens
    if length < 2 or new_tokens < 2:
        raise ValueError(f"a context of {context} tokens has no room for a prompt and {new_tokens} new ones")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.target.vocab_size, (length,), generator=generator).tolist()
    options = {"acceptance": "exact", "tree": tree, "ignore_eos": True}
    generate(prompt[:16], model, max_new_tokens=4, **options)  # what is made once and kept
    session = Session()
    peak, allocated = peak_of(
        lambda: generate(prompt, model, max_new_tokens=new_tokens, session=session, **options),
        model.target.output_device)
    weights = bytes_of([model.target.model, model.draft])
    caches = (session.decoder.forwards.cache.nbytes, session.decoder.forwards.draft_cache.nbytes)
    return Peak(weights, caches, weights + peak, allocated)


def run(args: MemoryArguments) -> None:
    model = random_pair(args) if args.shape else args.pair.load()
    tree = args.tree or (model.default_tree if model.trees is None else None)
    found = measure_peak(model, args.context, args.new_tokens, tree)
    megabytes = {"weights": found.weights, "target's cache": found.caches[0], "head's cache": found.caches[1],
                 "peak": found.peak}
    times = found.cache_allocations
    once = "" if times is None else f" Blocks of the caches' sizes were allocated {times[0]} and {times[1]} times."
    text = (f"{args.shape or 'pair'}, {model.target.dtype}, {model.target.config._attn_implementation}, an answer of "
            f"{args.new_tokens} tokens that ends at {args.context}: {percent(found.over, 1)} over weights and caches "
            f"(allowed: {percent(ALLOWED)}).{once}\n\n"
            + markdown({"what": name, "MB": f"{size / 1e6:.1f}"} for name, size in megabytes.items()))
    record = {"shape": args.shape, "context": args.context, "new_tokens": args.new_tokens, "tree": repr(tree),
              "bytes": megabytes, "over": found.over, "allowed": ALLOWED, "cache_allocations": times}
    print(write_record(args.out, record, text))
    if found.over > ALLOWED:
        raise ValueError(f"the peak is {percent(found.over, 1)} over weights and caches")


def random_pair(args: MemoryArguments) -> EagleModel:
    """A pair of the asked shape with random weights."""
    device = check_device(args.pair.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = build_pair(SHAPES[args.shape], dtype, device, attn_implementation=args.pair.attn_implementation)
    if args.pair.compile:
        model.compile()
    return model


main = partial(run_command, "eval.memory", MemoryArguments, run)

if __name__ == "__main__":
    sys.exit(main())
