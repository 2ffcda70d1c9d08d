"""What a cycle emits: tokens with their receipts, read from the walk in one copy to the host, or node by node.

B batch, N tree nodes, M of them with logits, A accepted draft tokens of a cycle, P nodes of a path, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..acceptance import Decision, Rule, Verification, Walk, draw
from ..drafting.tree import DraftTree
from ..models.parallel import tensor_of_first
from .receipts import Receipt


class Emission(NamedTuple):
    """What one forward of the target emitted for a request; the first one is the prefill's single token."""

    tokens: list[int]
    receipts: list[Receipt]
    logits: list[float]  # of the tokens, after processors
    drafted: bool = False
    error: Exception | None = None  # what the rule or a processor raised: nothing was emitted


class Step(NamedTuple):
    """What was drawn at a node of the path, and what is known of it there."""

    node: int
    token: int
    exact: bool  # whether the target itself draws it
    divergence: float  # NaN: none was computed
    logprob: float
    regret: float
    drawn: float  # its logit after processors
    given_up: float  # by how much that is below the best one


def read_walk(
    verification: Verification,
    decision: Decision,
    walked: Walk,
    group: dist.ProcessGroup | None = None,  # processes that all go by the first one's walk
) -> tuple[list[list[int]], list[Emission]]:
    """Of each row the accepted path as node indices (A + 1) and what it emits: the cycle's one host copy."""
    tree = verification.tree
    depths = torch.where(walked.accepted, tree.depths, tree.max_depth + 1)  # what is not accepted: a column to drop
    nodes = torch.arange(depths.shape[1], device=depths.device).expand_as(depths)
    path = walked.last[:, None].repeat(1, tree.max_depth + 2).scatter_(1, depths, nodes)[:, :-1]  # [B, P]
    if path.is_cpu and group is None:  # elsewhere it would be to wait for the device, and other processes' may differ
        path = path[:, : int(walked.length.max()) + 1]
    walks = read_steps(verification, decision, walked.choice, path, group)
    walks = [steps[: 1 + [step.node for step in steps].index(steps[-1].node)] for steps in walks]
    return emitted(walks, tree)


def emitted(walks: Sequence[Sequence[Step]], tree: DraftTree) -> tuple[list[list[int]], list[Emission]]:
    """Of each row the path and what it emits, whose last token is the target's own."""
    return [[step.node for step in steps] for steps in walks], [_emission(steps, tree) for steps in walks]


def walk_stepwise(
    rule: Rule,
    tree: DraftTree,  # of one row
    at: Callable[[Sequence[int], Sequence[int]], Verification],
) -> list[Step]:
    """The walk of `read_walk` by a rule that does not look ahead, which is asked about the nodes of the path only.

    For a host that may look at each choice, where time goes with the numbers touched: a CPU and a large vocabulary.

    Args:
        at: a node alone, from it with its children (`DraftTree.family`) and the tokens from the root to it.
    """
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    families = [[node] for node in range(len(tokens))]
    for node, parent in enumerate(parents[1:], 1):
        families[parent].append(node)
    steps: list[Step] = []
    node: int | None = 0
    while node is not None:
        here = at(families[node], [tokens[0], *(step.token for step in steps)])
        decision = rule(here)
        steps.append(_step_alone(node, here, decision))
        stops = decision.stop is not None and bool(decision.stop)
        children = {} if stops else {tokens[child]: child for child in families[node][1:]}
        node = children.get(steps[-1].token)
    return steps


def _step_alone(node: int, here: Verification, decision: Decision) -> Step:
    """`read_steps` of a node that has been verified alone, without copies."""
    raw, warped = here.target_logits[0, 0], here.warped_logits[0, 0]
    token = draw(here, decision).item()
    drawn = warped[token].item()
    return Step(
        node, token, token == here.exact_choice.item(),
        math.nan if decision.divergence is None else decision.divergence.item(),
        (raw[token] - raw.logsumexp(-1)).item(), raw.amax().item() - raw[token].item(), drawn,
        warped.amax().item() - drawn,
    )


def read_steps(
    verification: Verification,
    decision: Decision,
    choice: Tensor,  # [B, M], what is drawn at each node
    path: Tensor,  # [B, P] nodes
    group: dist.ProcessGroup | None = None,
) -> list[list[Step]]:
    """What is known of the steps out of these nodes, in one host copy."""
    rows = torch.arange(len(path), device=path.device)[:, None]
    alone = path.shape == choice.shape == (len(path), 1)  # each root, of which nothing need be copied
    raw = verification.target_logits if alone else verification.target_logits[rows, path]  # [B, P, V]
    token = choice.gather(1, path)
    taken, best = raw.gather(-1, token[..., None])[..., 0], raw.amax(-1)
    drawn, highest = taken, best
    if verification.warped_logits is not verification.target_logits:
        warped = verification.warped_logits[rows, path]
        drawn, highest = warped.gather(-1, token[..., None])[..., 0], warped.amax(-1)
    divergence = decision.divergence
    columns = tensor_of_first(group, torch.stack([
        path.double(),
        token.double(),
        (token == verification.exact_choice.gather(1, path)).double(),
        (torch.full_like(taken, torch.nan) if divergence is None else divergence.gather(1, path)).double(),
        (taken - raw.logsumexp(-1)).double(),
        (best - taken).double(),
        drawn.double(),
        (highest - drawn).double(),
    ], 1)).tolist()  # [B, 8, P]
    return [
        [Step(int(node), int(token), bool(exact), *numbers) for node, token, exact, *numbers in zip(*row, strict=True)]
        for row in columns
    ]


def _emission(steps: Sequence[Step], tree: DraftTree) -> Emission:
    sources = ["exact" if step.exact else "fuzzy" for step in steps[:-1]] + ["target"]
    receipts = [
        Receipt(source, None if math.isnan(step.divergence) else step.divergence, step.logprob, step.regret)
        for source, step in zip(sources, steps, strict=True)
    ]
    return Emission([step.token for step in steps], receipts, [step.drawn for step in steps], tree.max_depth > 0)
