"""Where a decode cycle's time goes: draft forward, tree building, verify, accept, commit.

The parts are timed by wrapping the functions of the library, so the library itself carries no timers. On CUDA the
wrappers wait for the device, which makes the parts add up and the whole slower than in use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

import eagle_fsd
from eagle_fsd.acceptance import Rule
from eagle_fsd.data.progress import Progress
from eagle_fsd.engine import decoder, forwards
from eagle_fsd.engine.decoder import Decoder
from eagle_fsd.engine.graphs import StaticCycle
from eagle_fsd.models.cache import TreeCache
from eagle_fsd.models.target import TargetModel
from eagle_fsd.tuning.measuring import now

FORWARDS = ("draft_forward", "target_forward", "head")  # the models' own work: draft layer, target, lm_head

CYCLE = "other"  # what is left of a cycle


class Clock:
    """Exclusive seconds per part: time inside a nested part counts for that one only.

    Args:
        device: of the models.
        nested: whether parts within a part are timed; without, all of it counts for the outer one.
    """

    def __init__(self, device: torch.device, nested: bool = True) -> None:
        self.device, self.nested = device, nested
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[list] = []

    def wrap(self, part: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            if not self._stack and part != CYCLE:  # the prefill's forwards belong to no cycle
                return function(*args, **kwargs)
            if not self.nested and len(self._stack) > 1:
                return function(*args, **kwargs)
            self._stack.append([0.0])
            started = now(self.device)
            try:
                return function(*args, **kwargs)
            finally:
                spent = now(self.device) - started
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
        (StaticCycle, "draft", "draft_forward"),  # as one graph: tree building too
        (StaticCycle, "verify", "target_forward"),  # with lm_head
        (model.draft, "forward", "draft_forward"),  # the instance: a compiled head has a forward of its own
        (type(model.draft), "own_logits", "head"),
        (TargetModel, "verify", "verify_inputs"),
        (type(model.target.decoder), "forward", "target_forward"),
        (TargetModel, "logits", "head"),
        (decoder, "warp_trees", "accept"),
        (Rule, "__call__", "accept"),
        (decoder, "walk", "accept"),
        (decoder, "read_walk", "accept"),
        (TreeCache, "commit", "commit"),
    ]
    with ExitStack() as patches:
        for owner, name, part in parts:
            patches.enter_context(patch.object(owner, name, clock.wrap(part, getattr(owner, name))))
        yield clock


def profile_cycles(model: eagle_fsd.EagleModel, prompts: list, max_new_tokens: int, **options: object) -> dict:
    """Mean milliseconds per cycle of each part, over the prompts, and the share outside the models' forwards."""
    cycles = 0
    with timed_parts(model) as clock:
        for prompt in Progress(prompts, desc="profiling", unit="prompt"):
            output = eagle_fsd.generate(prompt, model, max_new_tokens=max_new_tokens, **options)
            cycles += output.stats.target_forwards
    milliseconds = {part: 1000 * seconds / cycles for part, seconds in sorted(clock.seconds.items())}
    total = sum(milliseconds.values())
    outside = total - sum(milliseconds[part] for part in FORWARDS)
    return {"cycles": cycles, "ms_per_cycle": milliseconds, "total_ms": total, "outside_forwards_ms": outside,
            "outside_forwards_share": outside / total}
