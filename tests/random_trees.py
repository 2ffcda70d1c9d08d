"""Random draft trees with logits and noise. B batch, N nodes, V vocabulary, R draft vocabulary."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eagle_fsd.acceptance import Rule
from eagle_fsd.acceptance.walk import Step, walk
from eagle_fsd.drafting.noise import gumbel_noise
from eagle_fsd.drafting.tree import DraftTree, ancestors_of


@dataclass
class Case:
    """The input of a walk; see `acceptance.walk.Verified`."""

    tree: DraftTree
    draft_logits: list[Tensor]  # of each level [B, K, R]
    raw: Tensor  # [B, N, V]
    warped: Tensor  # [B, N, V]
    gumbel: Tensor | None = None  # [B, depth + 1, V]
    draft_tokens: Tensor | None = None  # [R]
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.gumbel is None

    def warp(self, raw, node, path, going) -> Tensor:
        return self.warped[torch.arange(len(node), device=node.device), node]

    def noise(self, depth: int) -> Tensor | None:
        return None if self.gumbel is None else self.gumbel[:, depth]

    def walk(self, rule: Rule, threshold=None, left=None, within=None) -> list[list[Step]]:
        """The steps of each row. Threshold and budget are shared, or one per row."""
        threshold, left = (
            None if each is None
            else torch.as_tensor(each, dtype=torch.float64, device=self.raw.device).expand(len(self.raw))
            for each in (rule.threshold if threshold is None else threshold, left))
        return walk(rule, self, threshold, left, within)

    def paths(self, rule: Rule, *arguments) -> list[list[int]]:
        """The accepted nodes of each row, starting with the root."""
        return [[step.node for step in steps] for steps in self.walk(rule, *arguments)]

    def take(self, rows: list[int]) -> "Case":
        """A case of these rows, which may repeat."""
        gumbel = None if self.gumbel is None else self.gumbel[rows]
        return replace(self, tree=self.tree.each(lambda part: part[rows]), raw=self.raw[rows], errors={},
                       draft_logits=[level[rows] for level in self.draft_logits], warped=self.warped[rows],
                       gumbel=gumbel)

    def to(self, device: str) -> "Case":
        tree = {name: part.to(device) for name, part in vars(self.tree).items() if isinstance(part, Tensor)}
        parts = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        logits = [level.to(device) for level in self.draft_logits]
        return replace(self, tree=replace(self.tree, **tree), draft_logits=logits, **parts)


def tree_from_parents(parents, tokens, scores=None, draft_rows=None) -> DraftTree:
    """A batch of trees from nested lists [B][N], parents before children."""
    parents = torch.tensor(parents)
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    deepest = int(depths.max())
    nodes = torch.arange(parents.shape[1]).expand_as(parents)
    draft_rows = nodes if draft_rows is None else draft_rows
    scores = -nodes.float() if scores is None else torch.tensor(scores)
    return DraftTree(torch.tensor(tokens), parents, depths, ancestors_of(parents, deepest), draft_rows, scores, deepest)


def random_parents(generator: torch.Generator, nodes: int, most: int) -> list[int]:
    """Parents of a random tree with at most `most` children per node, ordered by level."""
    parents, depths = [0], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(len(parents), (), generator=generator))
        if parents[1:].count(parent) < most:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    order = sorted(range(nodes), key=depths.__getitem__)
    return [order.index(parents[node]) for node in order]


def random_case(
    seed: int, greedy: bool, batch: int = 4, nodes: int = 12, vocab_size: int = 11, gap: float = 0.7,
    temperature: float = 0.8, banned: float = 0.0, coarse: bool = False, named: int | None = None,
) -> Case:
    """Trees in which siblings are the draft's best tokens, best first.

    Args:
        gap: scale of the difference between target and draft logits; 0 makes them equal.
        banned: share of tokens with -inf in the warped logits, as from a processor (never all of a node).
        coarse: round logits to integers, for many ties.
        named: size of the draft vocabulary; None: all tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return values.round() if coarse else values

    parents = [random_parents(generator, nodes, most=min(4, named or 4)) for _ in range(batch)]
    shape = tree_from_parents(parents, parents)
    draft_rows = torch.stack([torch.randperm(nodes, generator=generator) for _ in range(batch)])
    leaves = ~torch.zeros_like(draft_rows).scatter(1, shape.parents, 1).bool()
    draft_rows = torch.where(leaves, torch.arange(nodes) % 2 - 1, draft_rows)  # half of them expanded
    names = torch.randperm(vocab_size, generator=generator)[:named].sort().values
    levels = 2 * normal(batch, shape.max_depth + 1, nodes, vocab_size)
    own = levels[torch.arange(batch)[:, None], shape.depths, draft_rows]  # [B, N, V]
    raw = own + gap * normal(batch, nodes, vocab_size)

    best = own[..., names].log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    tokens, scores = [[0] * nodes for _ in range(batch)], [[0.0] * nodes for _ in range(batch)]
    for row in range(batch):
        for node in range(1, nodes):
            parent = parents[row][node]
            rank = parents[row][1:node].count(parent)
            tokens[row][node] = int(names[best.indices[row, parent, rank]])
            scores[row][node] = scores[row][parent] + float(best.values[row, parent, rank])
    refused = torch.rand(raw.shape, generator=generator) < banned
    refused.scatter_(-1, torch.randint(vocab_size, (batch, nodes, 1), generator=generator), False)
    warped = (raw / (1.0 if greedy else temperature)).masked_fill(refused, -math.inf)
    positions = torch.arange(shape.max_depth + 1).expand(batch, -1)
    return Case(
        tree_from_parents(parents, tokens, scores, draft_rows), list(levels[:, :-1, :, names].unbind(1)), raw, warped,
        None if greedy else gumbel_noise(seed * batch + torch.arange(batch), positions, vocab_size),
        None if named is None else names)
