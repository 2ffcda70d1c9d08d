"""What a cycle emits: tokens with their receipts, read from the walk in one copy to the host.

B batch, N tree nodes, A accepted draft tokens of a cycle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..acceptance import Decision, Verification, Walk
from ..models.parallel import tensor_of_first
from .receipts import Receipt


class Emission(NamedTuple):
    """What one forward of the target emitted for a request; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False


def read_walk(
    verification: Verification,
    decision: Decision,
    walked: Walk,
    group: dist.ProcessGroup | None = None,  # processes that all go by the first one's walk
) -> tuple[list[list[int]], list[Emission]]:
    """Of each row the accepted path as node indices (A + 1) and what it emits: the cycle's one host copy."""
    divergence = decision.divergence  # [B, N]
    tree, logits = verification.tree, verification.target_logits
    last = walked.last[:, None]
    final = walked.choice.gather(1, last)  # [B, 1]
    # Column i is the step into node i; the last one is the step out of the path's end.
    step_from = torch.cat([tree.parents, last], 1)  # [B, N + 1]
    step_to = torch.cat([tree.tokens, final], 1)
    step = step_from * logits.shape[-1] + step_to
    taken = logits.flatten(1).gather(1, step)
    nothing = torch.full_like(taken, torch.nan)
    columns = tensor_of_first(group, torch.stack([
        torch.nn.functional.pad(walked.accepted, (0, 1), value=True).double(),
        step_to.double(),
        torch.nn.functional.pad(verification.is_exact, (0, 1)).double(),
        (nothing if divergence is None else divergence.gather(1, step_from)).double(),
        (taken - logits.logsumexp(-1).gather(1, step_from)).double(),  # log-probability
        (logits.amax(-1).gather(1, step_from) - taken).double(),  # regret
        verification.warped_logits.flatten(1).gather(1, step).double(),
    ], 1)).tolist()  # [B, 7, N + 1]
    paths, emissions = [], []
    for on_path, tokens, exact, gates, logprobs, regrets, drawn in columns:
        path = [i for i, kept in enumerate(on_path[:-1]) if kept]  # by level: from the root down
        steps = [*path[1:], len(on_path) - 1]
        receipts = [
            Receipt(
                "target" if i == steps[-1] else "exact" if exact[i] else "fuzzy",
                None if gates[i] != gates[i] else gates[i],
                logprobs[i],
                regrets[i],
            )
            for i in steps
        ]
        paths.append(path)
        said = [int(tokens[i]) for i in steps]
        emissions.append(Emission(said, receipts, [drawn[i] for i in steps], tree.max_depth > 0))
    return paths, emissions
