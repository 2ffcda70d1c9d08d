"""Random draft trees with logits and noise, for tests. B batch, N nodes, V vocabulary."""

import math
from dataclasses import fields

import torch

from eagle_fsd.acceptance import Verification
from eagle_fsd.drafting.tree import DraftTree


def tree_from_parents(parents, tokens, scores=None, draft_rows=None) -> DraftTree:
    """A batch of trees from nested lists [B][N]; parents come before their children."""
    parents = torch.tensor(parents)
    batch, nodes = parents.shape
    depths = torch.zeros_like(parents)
    ancestors = torch.eye(nodes, dtype=torch.bool).expand(batch, -1, -1).clone()
    for row in range(batch):
        for node in range(1, nodes):
            parent = parents[row, node]
            depths[row, node] = depths[row, parent] + 1
            ancestors[row, node] |= ancestors[row, parent]
    if draft_rows is None:
        draft_rows = torch.arange(nodes).expand(batch, -1)
    if scores is None:
        scores = -torch.arange(nodes).float().expand(batch, -1)
    return DraftTree(
        torch.tensor(tokens),
        parents,
        depths,
        ancestors,
        torch.as_tensor(draft_rows),
        torch.as_tensor(scores),
        int(depths.max()),
    )


def random_parents(generator, nodes: int, max_children: int) -> list[int]:
    """Parents of a random tree whose nodes are ordered by level."""
    parents, depths, counts = [0], [0], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(len(parents), (), generator=generator))
        if counts[parent] < max_children:
            counts[parent] += 1
            parents.append(parent)
            depths.append(depths[parent] + 1)
            counts.append(0)
    order = sorted(range(nodes), key=lambda node: depths[node])
    place = {node: index for index, node in enumerate(order)}
    return [place[parents[node]] for node in order]


def random_verification(
    seed: int,
    greedy: bool,
    batch: int = 3,
    nodes: int = 12,
    vocab_size: int = 11,
    max_children: int = 4,
    gap: float = 1.0,
    temperature: float = 1.0,
    banned: float = 0.0,
    coarse: bool = False,
) -> Verification:
    """Trees whose siblings are the draft's best tokens, best first.

    Args:
        gap: scale of the difference between target and draft logits; 0 makes them equal.
        banned: share of tokens that a processor sets to -inf in the warped logits (never all of a node).
        coarse: round logits to integers, so that ties abound.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    draft_logits = 2 * normal(batch, nodes + 2, vocab_size)
    all_parents = [random_parents(generator, nodes, max_children) for _ in range(batch)]
    rows = torch.stack([torch.randperm(nodes + 2, generator=generator)[:nodes] for _ in range(batch)])
    target_logits = gap * normal(batch, nodes, vocab_size)
    target_logits += draft_logits.gather(1, rows[..., None].expand_as(target_logits))
    if coarse:
        draft_logits, target_logits = draft_logits.round(), target_logits.round()

    draft_log_probs = draft_logits.log_softmax(-1)
    tokens = [[int(torch.randint(vocab_size, (), generator=generator))] for _ in range(batch)]
    scores = [[0.0] for _ in range(batch)]
    for row, parents in enumerate(all_parents):
        for node in range(1, nodes):
            parent = parents[node]
            rank = sum(parents[other] == parent for other in range(1, node))
            best = draft_log_probs[row, rows[row, parent]].sort(descending=True, stable=True)
            tokens[row].append(int(best.indices[rank]))
            scores[row].append(scores[row][parent] + float(best.values[rank]))
    tree = tree_from_parents(all_parents, tokens, scores, rows)
    has_children = torch.zeros(batch, nodes, dtype=torch.bool).scatter(1, tree.parents[:, 1:], True)
    tree.draft_rows[~has_children] = 0

    warped_logits = target_logits / (1.0 if greedy else temperature)
    refused = torch.rand(batch, nodes, vocab_size, generator=generator) < banned
    spared = torch.randint(vocab_size, (batch, nodes, 1), generator=generator)
    refused.scatter_(-1, spared, False)
    warped_logits = warped_logits.masked_fill(refused, -math.inf)
    uniform = torch.rand(batch, nodes, vocab_size, generator=generator, dtype=torch.float64)
    by_depth = -(-(uniform.clamp_min(1e-12)).log()).log().float()
    noise = by_depth.gather(1, tree.depths[..., None].expand_as(by_depth))
    features = normal(batch, nodes, 5)
    regret = torch.rand(batch, generator=generator, dtype=torch.float64)
    said = torch.randint(1, 250, (batch,), generator=generator)
    answers = torch.randint(-1, vocab_size, (batch, 7), generator=generator)
    return Verification(
        tree, target_logits, warped_logits, draft_logits, None if greedy else noise, None, features, regret, said,
        answers)


def mapped(verification: Verification, change) -> Verification:
    """The same verification with every tensor changed."""

    def parts(record):
        values = [getattr(record, field.name) for field in fields(record)]
        return [change(value) if isinstance(value, torch.Tensor) else value for value in values]

    return Verification(DraftTree(*parts(verification.tree)), *parts(verification)[1:])


def rows_of(verification: Verification, rows: slice | torch.Tensor) -> Verification:
    """Only those rows of the batch, or rows repeated."""
    return mapped(verification, lambda tensor: tensor[rows])


def moved(verification: Verification, device: str) -> Verification:
    return mapped(verification, lambda tensor: tensor.to(device))


def emitted(verification: Verification, walked, row: int = 0) -> list[int]:
    """Tokens a row emits: those of its accepted nodes below the root, then one more."""
    nodes = walked.accepted[row].nonzero()[1:, 0]  # ordered by level, so along the path
    return [*verification.tree.tokens[row, nodes].tolist(), int(walked.choice[row, walked.last[row]])]


def fuzzy_nodes(verification, walked):
    """[B, N] bool: accepted nodes whose token the target itself would not have drawn there."""
    return walked.accepted & verification.is_child & ~verification.is_exact
